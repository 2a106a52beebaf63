"""The process of the agent's code as the engine's side of its world sees it: started, asked, watched, ended, and how it ended.

Everything that comes from it is taken for forged: a frame that is none, or an answer that does not fit, ends it.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import os
import select
import signal
import socket
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, NoReturn

from sage_jax.world import isolation, protocol, shell
from sage_jax.world.watch import (
    deleted_bytes,
    descendants,
    describe_status,
    folder_bytes,
    memory,
    tree_memory,
)

if TYPE_CHECKING:
    from sage_jax.world.worker import World

_WATCH_S = 0.1  # between looks at memory and disk of a running step
_START_S = 30.0  # for the agent's side to take on its isolation
_LOG_BYTES = 1 << 24  # of all requests of a world: they are kept for the log
REASON_CHARS = 2000  # of a verdict on a skill, and of an error of an app
BROKEN = "The code broke the channel of its own process."
_exit = os._exit


def clock() -> float:
    """Seconds; the clocks that Python reads stand still here."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Ended(Exception):
    """The agent's side is gone or was ended. `limit` names what it hit; None: ended from outside."""

    def __init__(self, limit: str | None, text: str):
        self.limit, self.text = limit, text
        super().__init__(text)


class Late(BaseException):
    """An API call took longer than the step had left."""


class Call:
    """A request of the agent's side; raises whatever for a frame that is none."""

    def __init__(self, frame: dict[str, Any]):
        request = frame["api"]
        self.number = int(frame["n"])
        self.method, self.url = str(request["method"]), urllib.parse.urlsplit(str(request["url"]))
        self.headers = [(str(k), str(v)) for k, v in request["headers"]]
        self.body = base64.b64decode(request["body"])
        self.size = len(self.body) + len(str(request["url"])) + sum(len(k) + len(v) for k, v in self.headers)


class Agent:
    """The process on the agent's side, as its parent sees it. Once it is gone, `ended` says how."""

    def __init__(self, world: World):
        self._world = world
        self.pid = 0
        self.ended: Ended | None = None
        self._at_start = 1 << 62  # memory; unknown until it has started
        self._frames = protocol.Frames(12 * world.spec["output_chars"] + (1 << 25))
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()  # frames that were not looked at yet
        self._copies: dict[int, int] = {}  # process id -> handle of copies, whose own engine's side watches them

    def start(self) -> None:
        """Forks it and waits until its isolation is on.

        Raises:
          RuntimeError: it could not be.
        """
        spec, plan = self._world.spec, self._world.plan
        self.channel, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._world.folders.close()  # the count is not the agent's to write
                isolation.take_on(plan, parent, [theirs.fileno()])
                shell.run(theirs, self._world.world, spec["folder"], spec["output_chars"])
            except BaseException as error:
                with contextlib.suppress(OSError):
                    protocol.send(theirs, {"done": {"refused": f"{type(error).__name__}: {error}"}})
            finally:
                _exit(0)
        theirs.close()
        self.channel.setblocking(False)
        self._handle = os.pidfd_open(self.pid)
        self._own_child = True
        self.expect_ready()

    def adopt(self, channel: socket.socket, pid: int, handle: int) -> None:
        """Takes over a process that the agent's side forked: a child of that one, not of this."""
        channel.setblocking(False)
        self.channel, self.pid, self._handle, self._own_child = channel, pid, handle, False

    def expect_ready(self) -> None:
        """Waits until it says that it can be asked; raises RuntimeError if it does not."""
        try:
            said = self._converse(_START_S, clock() + _START_S)
        except Ended as end:
            raise RuntimeError(f"the process for the agent's code did not start: {end.text}") from None
        if "refused" in said:
            raise RuntimeError(f"the process for the agent's code did not start: {str(said['refused'])[:REASON_CHARS]}")
        self._at_start = tree_memory(descendants(self.pid))

    def forget(self) -> None:
        """In a copy of this process: lets go of the original's agent."""
        for handle in self._copies.values():
            os.close(handle)
        if self.ended is None:
            self.channel.close()
            os.close(self._handle)

    def ask(self, request: dict[str, Any], limit_s: float, grace_s: float, descriptor: int | None = None) -> dict[str, Any]:
        """Sends a request (and a descriptor) and serves API calls until the reply.

        Args:
          limit_s: what the code is told; grace_s: how much later it is ended.

        Raises:
          Ended: the process is gone, for whatever reason.
        """
        deadline = clock() + limit_s + grace_s
        self._send(request, deadline)
        said = self._converse(limit_s, deadline)
        if descriptor is not None and "ready" in said:
            self._send_descriptor(descriptor, deadline)
            said = self._converse(limit_s, deadline)
        return said

    def _converse(self, limit_s: float, deadline: float) -> dict[str, Any]:
        served, look = 0, clock() + _WATCH_S
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self._handle, select.POLLIN)
        poll.register(self._world.trainer, 0)  # only whether it is still there
        while True:
            while self._waiting:
                frame = self._waiting.popleft()
                if isinstance(frame.get("done"), dict):
                    return frame["done"]
                served += 1
                if served > self._world.spec["max_requests"]:
                    self.end("requests", f"The code made more than {self._world.spec['max_requests']} requests in one step.")
                self._answer(frame, deadline)
            ready = {number for number, _ in poll.poll(1000 * max(0.0, min(deadline, look) - clock()) + 1)}
            if self._world.trainer.fileno() in ready:
                self.kill()
                _exit(0)
            if self.channel.fileno() in ready:
                self._receive()
            elif self._handle in ready:
                self._reap()
            now = clock()
            if now >= deadline:
                self.end("time", f"Execution timed out after {limit_s:g} seconds, and could not be interrupted.")
            if now >= look:
                look = now + _WATCH_S
                self.watch()

    def _receive(self) -> None:
        try:
            data = self.channel.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._reap()
        try:
            self._waiting += self._frames.feed(data)
        except protocol.FrameError:
            self.end("protocol", BROKEN)

    def _answer(self, frame: dict[str, Any], deadline: float) -> None:
        try:
            call = Call(frame)
        except Exception:  # whatever it holds
            self.end("protocol", BROKEN)
        try:
            answer = self._world.serve(call, deadline)
        except Late:
            self.end("time", "A request was not answered within the time of the step.")
        except Exception as error:  # the stock engine raises it inside the code that called the app
            text = error.args[0] if isinstance(error, KeyError) and error.args else error
            answer = {"error": [type(error).__name__, shell.clean(text)[:REASON_CHARS]]}
        if self._world.logged > _LOG_BYTES:
            self.end("requests", f"The code sent more than {_LOG_BYTES >> 20} MiB of requests.")
        self._send({**answer, "n": call.number}, deadline)

    def _send(self, message: dict[str, Any], deadline: float) -> None:
        data = memoryview(protocol.encode(message))
        while data:
            try:
                data = data[self.channel.send(data) :]
            except BlockingIOError:
                self._wait_for_room(deadline, "The code did not read what it had asked for.")
            except OSError:
                self._reap()

    def _send_descriptor(self, descriptor: int, deadline: float) -> None:
        while True:
            try:
                socket.send_fds(self.channel, [b"d"], [descriptor])
                return
            except BlockingIOError:
                self._wait_for_room(deadline, "The code did not read what it was sent.")
            except OSError:
                self._reap()

    def _wait_for_room(self, deadline: float, text: str) -> None:
        """Until the channel takes more; raises Ended with `text` at the deadline."""
        poll = select.poll()
        poll.register(self.channel, select.POLLOUT)
        if not poll.poll(1000 * max(0.0, deadline - clock())):
            self.end("time", text)

    def watch(self) -> None:
        """Raises Ended if it or the world it works in has grown too large."""
        plan, spec = self._world.plan, self._world.spec
        self._forget_dead_copies()
        tree = descendants(self.pid, self._copies)
        if tree_memory(tree, self._at_start) > plan.memory_bytes:
            self.end("memory", f"The code and its processes took more than {plan.memory_bytes >> 20} MiB of memory.")
        if memory(os.getpid()) - self._world.at_start > plan.memory_bytes // 2:
            self.end("memory", f"The data of the world took more than {plan.memory_bytes >> 21} MiB of memory.")
        # Each has its own folder; what is beside them is bounded with some room, for a copy ends for its files alone.
        deleted, disk = deleted_bytes(tree), spec["disk_bytes"]
        if folder_bytes(spec["folder"]) + deleted > disk or folder_bytes(plan.writable) + deleted > disk * (2 * self._world.count_folders() - 1):
            self.end("disk", f"The code wrote more than {disk >> 20} MiB of files.")
        if "uid" in plan.off and len(tree) > plan.processes:  # with a user of its own, a limit bounds them
            self.end("processes", f"The code started more than {plan.processes} processes.")

    def add_copy(self, pid: int, handle: int) -> None:
        """Takes a handle on a copy that this process forked: it is a world of its own."""
        self._copies[pid] = handle

    def _forget_dead_copies(self) -> None:
        poll = select.poll()
        for handle in self._copies.values():
            poll.register(handle, select.POLLIN)
        dead = {handle for handle, _ in poll.poll(0)}
        for pid, handle in list(self._copies.items()):
            if handle in dead:  # its number may be another's by now
                os.close(handle)
                del self._copies[pid]

    def kill(self) -> None:
        """Ends it and all of its session."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGSTOP)  # while it is there, its number is its own
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def end(self, limit: str, text: str) -> NoReturn:
        """Ends it; raises Ended."""
        self.kill()
        self._wait()
        self._gone(limit, text)

    def _gone(self, limit: str | None, text: str) -> NoReturn:
        self.ended = Ended(limit, text)
        raise self.ended

    def _wait(self) -> tuple[int, float]:
        """(status, seconds of processor time); zeros for one that is no child of this process."""
        status, seconds = 0, 0.0
        if self._own_child:
            _, status, usage = os.wait4(self.pid, 0)
            seconds = usage.ru_utime + usage.ru_stime
        else:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            poll.poll()
        os.close(self._handle)
        self.channel.close()
        return status, seconds

    def _reap(self) -> NoReturn:
        """Its channel closed, or it ended: says how."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        if not poll.poll(200):  # it closed its channel and lives on
            self.end("protocol", BROKEN)
        self.kill()  # what it left in its session
        status, seconds = self._wait()
        text = f"The code ended its own process{f': {describe_status(status)}' if self._own_child else ''}."
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number in (signal.SIGXCPU, signal.SIGKILL) and seconds >= isolation.CPU_S:
            self._gone("cpu", f"The code took more than {isolation.CPU_S} seconds of processor time.")
        if number == signal.SIGKILL and "seccomp" not in self._world.plan.off:
            self._gone(None, "the process of the agent's code was killed from outside")
        self._gone("signal" if number else "exit", text)
