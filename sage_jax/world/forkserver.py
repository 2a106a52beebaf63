"""The warm parent of all worlds: a process that imported the engine once and forks one child a world or evaluation.

Started as a fresh interpreter (`python -m sage_jax.world.forkserver FD NAME`; by the name, which all that descends from it carries in its
command line, the trainer finds what a killed server left), never forked from the trainer: no jax, one
thread, no credentials. The process of a world forks a second one for the agent's code (`worker`, `shell`). The trainer speaks to it over a socket of whole messages (JSON); a request to spawn carries
the child's end of that child's own channel. Each child is the leader of its own session, is killed with the server
(parent-death signal) and with the trainer (the server sees the socket close, or its parent change), and whatever it
leaves behind is adopted and killed by the server, also what left the child's process group.

Trainer -> server: {op: start, root, task_id, scratch, off} {op: spawn, id, role, spec, memory_bytes} + descriptor,
{op: kill, id}, {op: quit}. Server -> trainer: {event: ready, layers} with the layers of isolation, {event: failed, error},
{event: spawned, id, pid}, {event: exit, id, status} with the status as `waitpid` gives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import traceback
from pathlib import Path

from sage_jax.world import isolation, protocol
from sage_jax.world.leftovers import first_uid
from sage_jax.world.watch import limited_memory, parent_of

_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)
_exit = os._exit  # while agent code runs, the engine replaces the one in `os` by a function that does nothing


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    first = json.loads(control.recv(_MESSAGE_BYTES))
    try:
        os.environ["APPWORLD_ROOT"] = first["root"]
        os.chdir(first["root"])
        from sage_jax.world import engine, judge, worker  # noqa: F401  (children inherit the imports)

        engine.warm(first["task_id"])
    except BaseException:
        control.send(json.dumps({"event": "failed", "error": traceback.format_exc()[-4000:]}).encode())
        return
    shutil.rmtree(os.path.join(first["root"], "experiments", "outputs", "warming"), ignore_errors=True)
    _Server(control, first["scratch"], first["off"]).serve()


class _Server:
    def __init__(self, control: socket.socket, scratch: str, off: list[str]):
        self.control = control
        self.scratch = scratch
        self._plan, self.layers = _plan(scratch, off)
        self.children: dict[int, int] = {}  # pid -> id
        self.trainer = os.getppid()
        self.wake, wake = socket.socketpair()
        self.wake.setblocking(False)
        wake.setblocking(False)
        self._wake_writer = wake
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def serve(self) -> None:
        """Serves until the trainer is gone or says quit; leaves no process and, on a trainer's death, no file."""
        self._tell(event="ready", layers={name: [layer.on, layer.reason] for name, layer in self.layers.items()})
        try:
            while self._serve_once():
                pass
        finally:
            self._end_all()

    def _serve_once(self) -> bool:
        ready, _, _ = select.select([self.control, self.wake], [], [], 1.0)
        if self.wake in ready:
            self.wake.recv(4096)
        self._reap()
        if self.control not in ready:
            if os.getppid() == self.trainer:
                return True
            self._end_all()
            shutil.rmtree(self.scratch, ignore_errors=True)
            return False
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, _MESSAGE_BYTES, 1)
        except ConnectionError:
            data = b""
        if not data:  # the trainer died, or it closed without a word
            self._end_all()
            shutil.rmtree(self.scratch, ignore_errors=True)
            return False
        message = json.loads(data)
        if message["op"] == "quit":
            return False
        if message["op"] == "kill":
            for pid, id in self.children.items():
                if id == message["id"]:
                    _kill_group(pid)
        elif message["op"] == "spawn":
            self._spawn(message, descriptors[0])
        return True

    def _tell(self, **message) -> None:
        with contextlib.suppress(OSError):  # the trainer is gone: the next receive says so and ends the loop
            self.control.send(json.dumps(message).encode())

    def _spawn(self, message: dict, descriptor: int) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # no process or no memory for it now: an opening that failed, and is tried again
            with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as channel:
                protocol.send(channel, {"error": f"no process could be forked: {error}"})
            self._tell(event="exit", id=message["id"], status=1 << 8)
            return
        if pid == 0:
            status = 1
            try:
                self._become_child(server, descriptor, message["memory_bytes"])
                _live(message["role"], message["spec"], descriptor, self._plan)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                _exit(status)
        os.close(descriptor)
        self.children[pid] = message["id"]
        self._tell(event="spawned", id=message["id"], pid=pid)

    def _become_child(self, server: int, descriptor: int, memory_bytes: int) -> None:
        os.setsid()
        _libc.prctl(isolation.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server:
            _exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.control.close()
        self.wake.close()
        self._wake_writer.close()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, 1 << 16)
        data = limited_memory()[0] + memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def _reap(self) -> None:
        """Waits for what has ended, kills what it left behind, and only then tells of the ends."""
        ended = []
        with contextlib.suppress(ChildProcessError):  # no children at all
            while True:
                while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                    pid, status = reaped
                    id = self.children.pop(pid, None)
                    if id is not None:
                        _kill_leftovers(pid)
                        ended.append((id, status))
                # Descendants of dead children are ours now. A living child's own children are not listed here.
                orphans = [pid for pid in _own_children() if pid not in self.children]
                for pid in orphans:
                    _kill(pid)
                if not orphans:
                    break
                select.select([], [], [], 0.001)  # they are dying; their own children arrive next
        for id, status in ended:
            self._tell(event="exit", id=id, status=status)

    def _end_all(self) -> None:
        while self.children:
            for pid in self.children:
                _kill_group(pid)
            select.select([], [], [], 0.002)
            self._reap()


def _plan(scratch: str, off: list[str]) -> tuple[isolation.Plan, dict[str, isolation.Layer]]:
    """What the agent's side of every world takes on here; the world's own figures are filled in when it is spawned."""
    probe = os.path.join(scratch, "agents", "probe")
    os.makedirs(probe, exist_ok=True)
    readable = isolation.readable_paths(Path(__file__).resolve().parents[1])
    uid, without = first_uid(os.getpid()), {name: "switched off" for name in off}
    if os.geteuid() != 0:
        without.setdefault("uid", "needs root; files and processes of this user are guarded by landlock and seccomp alone")
    else:
        try:
            os.chown(probe, uid, uid)
        except OSError as error:  # a container that has no such user ids
            without.setdefault("uid", f"no unused user ids: {error}")
    plan = isolation.Plan(
        off=(), uid=None if "uid" in without else uid, keep_read_search="uid" not in without and not isolation.can_be_read_by(uid, readable),
        readable=readable, writable=probe, memory_bytes=1 << 28, file_bytes=1 << 24, processes=16,
    )  # fmt: skip
    layers = isolation.survey(plan, without)
    shutil.rmtree(probe)
    missing = tuple(name for name, layer in layers.items() if not layer.on)
    return dataclasses.replace(plan, off=missing, uid=None if "uid" in missing else uid), layers


def _live(role: str, spec: dict, descriptor: int, plan: isolation.Plan) -> None:
    from sage_jax.world import judge, protocol, worker

    channel = socket.socket(fileno=descriptor)
    if role == "world":
        spec["plan"] = dataclasses.asdict(
            dataclasses.replace(
                plan, uid=None if plan.uid is None else plan.uid + 1 + spec["slot"], writable=spec["agent"],
                memory_bytes=spec["memory_bytes"], file_bytes=spec["disk_bytes"], processes=spec["processes"],
            )
        )
        worker.run(channel, spec)
        return
    try:
        reply = judge.run(spec)
    except Exception:
        reply = {"error": traceback.format_exc()[-4000:]}
    protocol.send(channel, reply)


def _own_children() -> list[int]:
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            return [int(word) for word in children.read().split()]
    except FileNotFoundError:  # a kernel without that list: look at every process
        return [other for other in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_child(other, pid)]


def _is_child(pid: int, parent: int) -> bool:
    try:
        return parent_of(pid) == parent
    except OSError:
        return False  # it ended in between


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself in between
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    """For a child that was not reaped, so that its number is still its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        _kill(pid)  # it does not lead a group yet


def _kill_leftovers(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it left nothing behind in its group
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
