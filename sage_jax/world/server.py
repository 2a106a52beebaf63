"""The trainer's side of the fork server: starting it, asking for children, hearing of their ends.

Everything is driven by one event loop, in whatever thread that runs; no signal handler is installed in the trainer.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sage_jax.errors import WorldOpenError
from sage_jax.world import leftovers, protocol
from sage_jax.world.isolation import Layer
from sage_jax.world.outputs import Outputs
from sage_jax.world.watch import describe_status

_MESSAGE_BYTES = 1 << 18
_LATE_S = 0.05  # how long the loop gets to take in what arrived before a limit
_DEATH_S = 10.0  # how long a server may take to report the end of a child whose channel has closed
_LAST_WORDS_S = 0.5  # how long a reply that a dead child had already sent may take to arrive


class ChildDied(Exception):
    """The process ended before it replied. `status` as `waitpid` gives it; None when the server went with it."""

    def __init__(self, status: int | None):
        self.status = status
        super().__init__(describe_status(status))


class ChildTimeout(Exception):
    """No reply within the limit."""


class Child:
    """One forked process and the channel to it. One call at a time."""

    def __init__(self, server: ForkServer, id: int, max_frame_bytes: int):
        self._server = server
        self.id = id
        self.pid: int | None = None
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.frame_bytes = max_frame_bytes
        self._channel: socket.socket | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self, channel: socket.socket) -> None:
        self._channel = channel
        self._reader, self._writer = await asyncio.open_connection(sock=channel)

    async def call(self, request: dict | None, seconds: float, descriptor: int | None = None) -> dict:
        """Sends `request` (None: only waits for what the child says by itself), and a descriptor after it; returns the reply.

        Raises:
          ChildDied, ChildTimeout, protocol.FrameError: after any of these the child must be ended. A cancelled call
            ends it, because its reply would be taken for the next one's.
        """
        if request is not None:
            self._writer.write(protocol.encode(request))
        if descriptor is not None:
            while self._writer.transport.get_write_buffer_size():  # it must not overtake the request
                await asyncio.sleep(0.001)
            socket.send_fds(self._channel, [b"d"], [descriptor])
        reading = asyncio.ensure_future(protocol.read_frame(self._reader, self.frame_bytes))
        try:
            await asyncio.wait({reading, self.ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                # A reply may be there already: sent just before the end, or while the trainer's loop stood still.
                ended = self.ended.done()
                await asyncio.wait({reading}, timeout=_LAST_WORDS_S if ended else _LATE_S)
                if not reading.done() and not ended:
                    raise ChildTimeout(f"no reply within {seconds:g} s")
            if reading.done():
                try:
                    return reading.result()
                except (asyncio.IncompleteReadError, ConnectionError):
                    # The channel closed: the process is ending, or its code closed the descriptor.
                    self.kill()
            if not self.ended.done():
                await asyncio.wait({self.ended}, timeout=_DEATH_S)
            if not self.ended.done():
                self._server.abandon()  # it hangs; that ends this child too
            raise ChildDied(self.ended.result())
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            reading.cancel()

    def kill(self) -> None:
        """Asks the server to kill the process, its group and its orphans; `ended` tells when it happened."""
        if not self.ended.done():
            self._server.tell(op="kill", id=self.id)

    async def end(self, seconds: float) -> None:
        """Kills the process and waits until it is reaped; a server that does not manage that is ended too."""
        self.kill()
        if not self.ended.done():
            await asyncio.wait({self.ended}, timeout=seconds)
        if not self.ended.done():
            self._server.abandon()
        if self._writer is not None:
            self._writer.close()


class Copy(Child):
    """A copy of a world's process, made by that process: it is known by its channel alone, and ends when that closes."""

    def __init__(self, pid: int, max_frame_bytes: int):
        self.pid = pid
        self.ended = asyncio.get_running_loop().create_future()
        self.frame_bytes = max_frame_bytes
        self._channel = self._reader = self._writer = None

    def kill(self) -> None:
        """Closes the channel."""
        if self._writer is not None:
            self._writer.close()
        if not self.ended.done():
            self.ended.set_result(None)

    async def end(self, seconds: float) -> None:
        """Closes the channel and waits until the process is gone, or `seconds` have passed: the original still holds it then."""
        self.kill()
        deadline = asyncio.get_running_loop().time() + seconds
        while _runs(self.pid) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.002)


def _runs(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


_serials = itertools.count(1)


class ForkServer:
    """One running fork server. It is never restarted: a lost one is replaced by a new object."""

    def __init__(self, outputs: Outputs, layers_off: Sequence[str] = ()):
        self._outputs = outputs
        self._layers_off = list(layers_off)
        self.layers: dict[str, Layer] = {}  # of isolation, once it is ready
        self._children: dict[int, Child] = {}
        self._next_id = 0
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._outbox: collections.deque[bytes] = collections.deque()
        self._name = f"{outputs.scratch.name}.{next(_serials)}."  # in the command line of all its processes
        self._clearing: asyncio.Future[None] | None = None
        self.lost = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def spawned(self) -> int:
        """Children so far."""
        return self._next_id

    @property
    def idle(self) -> bool:
        """No child is alive."""
        return not self._children

    async def start(self, seconds: float) -> None:
        """Starts and warms it.

        Raises:
          WorldOpenError: it did not come up; the message ends with what it last printed.
        """
        loop = asyncio.get_running_loop()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._ready = loop.create_future()
        self._log = self._outputs.scratch / "server.log"
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sage_jax.world.forkserver", str(theirs.fileno()), self._name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=_environment(self._outputs),
                cwd=self._outputs.view,
                start_new_session=True,  # an interrupt typed at the trainer's terminal is the trainer's to handle
            )
        theirs.close()
        loop.add_reader(self._control.fileno(), self._on_readable)
        self.tell(
            op="start",
            root=str(self._outputs.view),
            task_id=self._outputs.first_task(),
            scratch=str(self._outputs.scratch),
            off=self._layers_off,
        )
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), seconds)
        except TimeoutError as error:
            self.abandon()
            raise WorldOpenError(f"the fork server was not ready within {seconds:g} s{self._last_words()}") from error

    async def spawn(self, role: str, spec: dict, memory_bytes: int, max_frame_bytes: int) -> Child:
        """Forks a child; its first frame tells how its start went."""
        self._next_id += 1
        child = Child(self, self._next_id, max_frame_bytes)
        ours, theirs = socket.socketpair()
        try:
            self._children[child.id] = child
            message = {"op": "spawn", "id": child.id, "role": role, "spec": spec, "memory_bytes": memory_bytes}
            if self.lost:
                self._end(child, None)
            else:
                await self._send(json.dumps(message).encode(), [theirs.fileno()])
            await child.connect(ours)
        finally:
            theirs.close()
        return child

    def tell(self, **message) -> None:
        if not self.lost:
            self._outbox.append(json.dumps(message).encode())
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._outbox and not self.lost:
            try:
                self._control.send(self._outbox[0])
            except BlockingIOError:
                loop.add_writer(self._control.fileno(), self._flush)
                return
            except OSError:
                self._lose()
                return
            self._outbox.popleft()
        if not self.lost:
            loop.remove_writer(self._control.fileno())

    async def _send(self, data: bytes, descriptors: list[int]) -> None:
        while not self.lost:
            try:
                socket.send_fds(self._control, [data], descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(0.005)  # a burst of openings: the server reads them one by one
            except OSError:
                self._lose()

    def abandon(self) -> None:
        """Ends a server that hangs, and with it its children."""
        self._lose()

    async def close(self, seconds: float) -> None:
        """Ends the server and all children; returns when they are gone."""
        self.tell(op="quit")
        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._lose()
        if self._clearing is not None:
            await self._clearing

    def _on_readable(self) -> None:
        while True:
            try:
                data = self._control.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            message = json.loads(data)
            if message["event"] == "ready":
                self.layers = {name: Layer(*value) for name, value in message["layers"].items()}
                self._ready.set_result(None)
            elif message["event"] == "failed":
                self._ready.set_exception(WorldOpenError(f"the fork server could not warm up:\n{message['error']}"))
            elif message["event"] == "spawned":
                self._children[message["id"]].pid = message["pid"]
            elif message["event"] == "exit":
                self._end(self._children[message["id"]], message["status"])

    def _end(self, child: Child, status: int | None) -> None:
        self._children.pop(child.id, None)
        if not child.ended.done():
            child.ended.set_result(status)

    def _lose(self) -> None:
        if self.lost:
            return
        self.lost = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control.fileno())
        loop.remove_writer(self._control.fileno())
        self._control.close()
        if self._process is not None:
            self._process.kill()
            # What agents forked is not killed with it by the kernel.
            self._clearing = loop.run_in_executor(None, self._clear)
        if not self._ready.done():
            self._ready.set_exception(WorldOpenError(f"the fork server ended while starting{self._last_words()}"))
            self._ready.exception()  # whoever waited may have given up; it is reported by that
        for child in list(self._children.values()):
            self._end(child, None)

    def _clear(self) -> None:
        self._process.wait()
        leftovers.end_processes(self._name, self._process.pid)

    def _last_words(self) -> str:
        text = self._log.read_text(errors="replace").strip()
        return f"; it printed last:\n{text[-2000:]}" if text else ""


def _environment(outputs: Outputs) -> dict[str, str]:
    """All that a world's process gets to see of the environment: no credentials, no accelerator."""
    package_parent = str(Path(__file__).resolve().parents[2])
    return {
        "PATH": os.defpath,
        "HOME": str(outputs.home),
        "TMPDIR": str(outputs.home),
        "IPYTHONDIR": str(outputs.home / "ipython"),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONPATH": package_parent,
        "PYTHONHASHSEED": "0",  # the order of a printed set must not change from server to server
        "APPWORLD_ROOT": str(outputs.view),
        "APPWORLD_CACHE": str(outputs.home / "appworld"),
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
    }
