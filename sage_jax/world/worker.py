"""The engine's side of a world: holds the databases, answers API calls, watches the process that runs the agent's code.

Runs in a child of the fork server. It opens the world with the unchanged engine, forks the agent's side (`shell`), which takes
on the isolation, and from then on takes requests of the trainer, one at a time. During a step it answers the API
calls of the agent's side over their channel and enforces what the code cannot enforce on itself: time, memory and disk of all
its processes, number and kind of requests. Nothing that decides a score is read from the agent's side.

Whose doing an end of the agent's side is: it cannot send itself a signal that kills without being caught (seccomp), so SIGKILL from nobody here
came from outside and is an infrastructure error, unless it had used up its processor time; every other end is the agent's doing. Without
seccomp, SIGKILL counts as its doing.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import socket
import time
import urllib.parse
from typing import Any, NoReturn

from appworld.common.path_store import path_store
from appworld.environment import AppWorld
from fastapi.testclient import TestClient

from sage_jax.world import isolation, judge, protocol, shell
from sage_jax.world.watch import (
    deleted_bytes,
    descendants,
    describe_status,
    folder_bytes,
    memory,
    parent_of,
    tree_memory,
)

_libc = ctypes.CDLL(None, use_errno=True)
_WATCH_S = 0.1  # between looks at memory and disk of a running step
_IDLE_S = 0.5  # between looks at what was left running, while no step is
_START_S = 30.0  # for the agent's side to take on its isolation
_BODY_BYTES = 1 << 20  # of a request
_LOG_BYTES = 1 << 24  # of all requests of a world: they are kept for the log
_REASON_CHARS = 2000  # of a verdict on a skill, and of an error of an app
_BROKEN = "The code broke the channel of its own process."
_exit = os._exit


def run(channel: socket.socket, spec: dict[str, Any]) -> None:
    """Opens the world of `spec` = {root, experiment, task_id, keep, output_chars, folder, plan, disk_bytes, max_requests} and serves it."""
    try:
        world = _World(channel, spec)
    except Exception as error:
        protocol.send(channel, {"error": f"{type(error).__name__}: {error}"})
        return
    _serve(channel, world)


def _serve(channel: socket.socket, world: _World) -> None:
    protocol.send(channel, {})
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        while not poll.poll(1000 * _IDLE_S):
            world.look()
        if (request := protocol.receive(channel)) is None:
            return
        operation = request.pop("op")
        protocol.send(channel, getattr(world, "do_" + operation)(**request))
        _reap_forks()


def _reap_forks() -> None:
    """Forgets copies of this process that have ended; the agent's side is waited for where it ends."""
    for pid in list(_copies):
        if os.waitpid(pid, os.WNOHANG)[0]:
            _copies.remove(pid)


_copies: list[int] = []  # processes that `do_fork` made


def _now() -> float:
    """Seconds; the clocks that Python reads stand still here."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class _Ended(Exception):
    """The agent's side is gone or was ended. `limit` names what it hit; None: ended from outside."""

    def __init__(self, limit: str | None, text: str):
        self.limit, self.text = limit, text
        super().__init__(text)


class _World:
    def __init__(self, channel: socket.socket, spec: dict[str, Any]):
        path_store.update_root(spec["root"])
        self.spec, self.trainer = spec, channel
        self.plan = isolation.Plan(**{k: tuple(v) if isinstance(v, list) else v for k, v in spec["plan"].items()})
        self.world = AppWorld(
            spec["task_id"],
            experiment_name=spec["experiment"],
            load_ground_truth=False,
            timeout_seconds=None,  # its alarm knows whole seconds only; the agent's side sets a finer one
        )
        self.database = self.world.models.supervisor.SQLModel.db.connection
        self.apps = {*self.world.task.allowed_apps, "supervisor", "api_docs"} - {"admin"}
        self.requests: list[dict[str, Any]] = []
        self.logged = 0  # bytes of them
        self.installed: set[str] = set()  # ids of skills
        self.at_start = memory(os.getpid())
        self.folders = mmap.mmap(-1, 8)  # how many folders of the agent were handed out, seen by all copies
        self.count_folders(1)
        for folder in (self.plan.writable, spec["folder"]):  # nothing of the agent's runs yet
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if self.plan.uid is not None:
                os.chown(folder, self.plan.uid, self.plan.uid)
        self.agent = _Agent(self)
        self.agent.start()

    def count_folders(self, more: int = 0) -> int:
        count = int.from_bytes(self.folders[:8], "little") + more
        self.folders[:8] = count.to_bytes(8, "little")
        return count

    def look(self) -> None:
        """At what the code left running when its step was over."""
        with contextlib.suppress(_Ended):
            if self.agent.ended is None:
                self.agent.watch()

    # Operations; each returns the reply.

    def do_fork(self, spec: dict[str, Any], grace: float) -> dict[str, Any]:
        """Makes a copy of this world: of this process and of the one on the agent's side. The copy answers on the channel whose
        descriptor follows the request. `spec` holds the copy's experiment and folder."""
        _, (descriptor,), _, _ = socket.recv_fds(self.trainer, 1, 1)
        channel = socket.socket(fileno=descriptor)
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as closing:
            for one in (channel, ours, theirs):
                closing.callback(one.close)
            try:
                self.count_folders(1)
                said = self._ask({"op": "fork", "folder": spec["folder"]}, grace, grace, theirs.fileno())
                if "refused" in said:
                    return {"refused": str(said["refused"])[:_REASON_CHARS]}
                pid = int(said["pid"])
                handle = os.pidfd_open(pid)
            except _Ended as end:
                return {"ended": end.text}
            except Exception as error:  # whatever was said
                return {"refused": f"the process of the agent's code could not be copied: {error}"}
            closing.callback(os.close, handle)
            me = os.getpid()
            try:
                if parent_of(pid) != self.agent.pid:
                    return {"refused": "the agent's side named a process that is not its child"}
                copy = os.fork()
            except OSError as error:  # no process or memory for it; the agent's copy ends when its channel closes
                return {"refused": str(error)}
            if copy:
                _copies.append(copy)
                return {"pid": copy}
            try:
                _libc.prctl(isolation.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != me:
                    _exit(1)
                theirs.close()
                self._become_copy(channel, spec, ours, pid, handle)
                try:
                    self.agent.expect_ready()
                except RuntimeError as error:
                    protocol.send(channel, {"error": str(error)})
                else:
                    _serve(channel, self)
            finally:
                _exit(0)

    def _become_copy(self, channel: socket.socket, spec: dict[str, Any], agent: socket.socket, pid: int, handle: int) -> None:
        self.trainer.close()
        self.agent.forget()
        _copies.clear()
        self.trainer, self.spec = channel, {**self.spec, **spec}
        self.agent = _Agent(self)
        self.agent.adopt(agent, pid, handle)
        world = self.world
        # The threads of the test client did not come along.
        client = TestClient(world.requester.client.app).__enter__()
        world.requester.client = client
        type(world.requester).clients[world.requester.apps] = client
        before, after = os.path.join("outputs", world.experiment_name) + os.sep, os.path.join("outputs", spec["experiment"]) + os.sep
        world.experiment_name = spec["experiment"]
        for name, value in list(vars(world).items()):
            if name.startswith(("output_", "base_output_")) and isinstance(value, str) and not value.startswith(":memory:"):
                setattr(world, name, (value + os.sep).replace(before, after, 1).rstrip(os.sep))
        for folder in (world.output_db_home_path_on_disk, world.output_logs_directory, world.output_misc_directory):
            os.makedirs(folder, exist_ok=True)
        world.environment_io, self.requests = list(world.environment_io), list(self.requests)
        self.installed = set(self.installed)

    def do_execute(self, code: str, seconds: float, grace: float) -> dict[str, Any]:
        reply: dict[str, Any] = {"text": "", "dropped": 0, "failed": True, "limit": None, "skill_calls": [], "lost": False, "outside": ""}
        try:
            said = self._ask({"op": "execute", "code": code, "seconds": seconds}, seconds, grace)
            reply |= self._step(said)
        except _Ended as end:
            if end.limit is None:
                reply["outside"] = end.text
            reply |= {"limit": end.limit, "text": f"{_FAILED}{end.text} The environment is lost.", "lost": True}
        reply["completed"] = judge.is_completed(self.database)
        self.world.environment_io.append({"input": shell.clean(code), "output": reply["text"]})
        return reply

    def _step(self, said: dict[str, Any]) -> dict[str, Any]:
        """The agent's side's account of a step, in its types and within its limits; raises _Ended for what is none."""
        try:
            text, dropped = shell.clean(said["text"]), int(said["dropped"])
            longest = self.spec["output_chars"]
            if len(text) > longest + _MARKER_CHARS:
                text, more = shell.cut(text, longest)
                dropped += more
            return {
                "text": text,
                "dropped": dropped,
                "failed": bool(said["failed"]),
                "limit": said["limit"] if said["limit"] in ("time", "memory") else None,
                "skill_calls": [id for id in dict.fromkeys(map(str, said["skill_calls"])) if id in self.installed],
            }
        except Exception:
            self.agent.end("protocol", _BROKEN)

    def do_install(self, skills: list[dict[str, str]], seconds: float, grace: float) -> dict[str, Any]:
        try:
            said = self._ask({"op": "install", "skills": skills, "seconds": seconds}, seconds * len(skills), grace)
            reasons = [shell.clean(reason)[:_REASON_CHARS] for reason in said["reasons"]]
            if len(reasons) != len(skills):
                raise ValueError("not one verdict a skill")
        except _Ended as end:
            return {"ended": end.text}
        except Exception as error:  # whatever was said
            self.agent.kill()
            return {"ended": f"its answer was no list of verdicts ({error})"}
        self.installed |= {skill["id"] for skill, reason in zip(skills, reasons) if not reason}
        return {"reasons": reasons}

    def do_completed(self) -> dict[str, Any]:
        return {"completed": judge.is_completed(self.database)}

    def do_save(self) -> dict[str, Any]:
        world = self.world
        world.requester.request_tracker.requests = self.requests
        world._save_state(world.output_db_home_path_on_disk)
        world.save_logs()
        return {}

    def _ask(self, request: dict[str, Any], limit_s: float, grace_s: float, descriptor: int | None = None) -> dict[str, Any]:
        if self.agent.ended is not None:
            raise self.agent.ended
        return self.agent.ask(request, limit_s, grace_s, descriptor)

    # API calls of the agent's side.

    def serve(self, call: _Call, deadline: float) -> dict[str, Any]:
        """One request; what does not belong to the apps of this task is refused like an unknown address. Raises what an app raises."""
        app = urllib.parse.unquote(call.url.path).lstrip("/").partition("/")[0]
        if call.url.netloc != "testserver" or app not in self.apps or ".." in call.url.path:
            return {"status": 404, "headers": [], "body": base64.b64encode(b'{"detail":"Not Found"}').decode()}
        if call.size > _BODY_BYTES:
            return {"status": 413, "headers": [], "body": base64.b64encode(b'{"message":"The request is too large."}').decode()}
        self.logged += call.size
        self.requests.append(_logged(call))
        with _alarm(deadline):
            response = self.world.requester.client.request(call.method, urllib.parse.urlunsplit(call.url), headers=call.headers, content=call.body)
        return {
            "status": response.status_code,
            "headers": [[k, v] for k, v in response.headers.items()],
            "body": base64.b64encode(response.content).decode("ascii"),
        }


class _Call:
    """A request of the agent's side; raises whatever for a frame that is none."""

    def __init__(self, frame: dict[str, Any]):
        request = frame["api"]
        self.number = int(frame["n"])
        self.method, self.url = str(request["method"]), urllib.parse.urlsplit(str(request["url"]))
        self.headers = [(str(k), str(v)) for k, v in request["headers"]]
        self.body = base64.b64decode(request["body"])
        self.size = len(self.body) + len(str(request["url"])) + sum(len(k) + len(v) for k, v in self.headers)


_MARKER_CHARS = 64  # what `shell.cut` writes in place of what it drops
_FAILED = "Execution failed. Traceback:\n"


class _Agent:
    """The process on the agent's side, as its parent sees it. Once it is gone, `ended` says how."""

    def __init__(self, world: _World):
        self._world = world
        self.pid = 0
        self.ended: _Ended | None = None
        self._at_start = 1 << 62  # memory; unknown until it has started
        self._frames = protocol.Frames(12 * world.spec["output_chars"] + (1 << 25))
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()  # frames that were not looked at yet

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
            said = self._converse(_START_S, _now() + _START_S)
        except _Ended as end:
            raise RuntimeError(f"the process for the agent's code did not start: {end.text}") from None
        if "refused" in said:
            raise RuntimeError(f"the process for the agent's code did not start: {str(said['refused'])[:_REASON_CHARS]}")
        self._at_start = tree_memory(self.pid)

    def forget(self) -> None:
        """In a copy of this process: lets go of the original's agent."""
        if self.ended is None:
            self.channel.close()
            os.close(self._handle)

    def ask(self, request: dict[str, Any], limit_s: float, grace_s: float, descriptor: int | None = None) -> dict[str, Any]:
        """Sends a request (and a descriptor) and serves API calls until the reply.

        Args:
          limit_s: what the code is told; grace_s: how much later it is ended.

        Raises:
          _Ended: the process is gone, for whatever reason.
        """
        deadline = _now() + limit_s + grace_s
        self._send(request, deadline)
        said = self._converse(limit_s, deadline)
        if descriptor is not None and "ready" in said:
            self._send_descriptor(descriptor, deadline)
            said = self._converse(limit_s, deadline)
        return said

    def _converse(self, limit_s: float, deadline: float) -> dict[str, Any]:
        served, look = 0, _now() + _WATCH_S
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
            ready = {number for number, _ in poll.poll(1000 * max(0.0, min(deadline, look) - _now()) + 1)}
            if self._world.trainer.fileno() in ready:
                self.kill()
                _exit(0)
            if self.channel.fileno() in ready:
                self._receive()
            elif self._handle in ready:
                self._reap()
            now = _now()
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
            self.end("protocol", _BROKEN)

    def _answer(self, frame: dict[str, Any], deadline: float) -> None:
        try:
            call = _Call(frame)
        except Exception:  # whatever it holds
            self.end("protocol", _BROKEN)
        try:
            answer = self._world.serve(call, deadline)
        except _Late:
            self.end("time", "A request was not answered within the time of the step.")
        except Exception as error:  # the stock engine raises it inside the code that called the app
            text = error.args[0] if isinstance(error, KeyError) and error.args else error
            answer = {"error": [type(error).__name__, shell.clean(text)[:_REASON_CHARS]]}
        if self._world.logged > _LOG_BYTES:
            self.end("requests", f"The code sent more than {_LOG_BYTES >> 20} MiB of requests.")
        self._send({**answer, "n": call.number}, deadline)

    def _send(self, message: dict[str, Any], deadline: float) -> None:
        data = memoryview(protocol.encode(message))
        while data:
            try:
                data = data[self.channel.send(data) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.channel, select.POLLOUT)
                if not poll.poll(1000 * max(0.0, deadline - _now())):
                    self.end("time", "The code did not read what it had asked for.")
            except OSError:
                self._reap()

    def _send_descriptor(self, descriptor: int, deadline: float) -> None:
        while True:
            try:
                socket.send_fds(self.channel, [b"d"], [descriptor])
                return
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.channel, select.POLLOUT)
                if not poll.poll(1000 * max(0.0, deadline - _now())):
                    self.end("time", "The code did not read what it was sent.")
            except OSError:
                self._reap()

    def watch(self) -> None:
        """Raises _Ended if it or the world it works in has grown too large."""
        plan, spec = self._world.plan, self._world.spec
        if tree_memory(self.pid, self._at_start) > plan.memory_bytes:
            self.end("memory", f"The code and its processes took more than {plan.memory_bytes >> 20} MiB of memory.")
        if memory(os.getpid()) - self._world.at_start > plan.memory_bytes // 2:
            self.end("memory", f"The data of the world took more than {plan.memory_bytes >> 21} MiB of memory.")
        deleted, disk = deleted_bytes(self.pid), spec["disk_bytes"]
        if folder_bytes(spec["folder"]) + deleted > disk or folder_bytes(plan.writable) + deleted > disk * self._world.count_folders():
            self.end("disk", f"The code wrote more than {disk >> 20} MiB of files.")
        if "uid" in plan.off and len(descendants(self.pid)) > plan.processes:  # with a user of its own, a limit bounds them
            self.end("processes", f"The code started more than {plan.processes} processes.")

    def kill(self) -> None:
        """Ends it and all of its session."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGSTOP)  # while it is there, its number is its own
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def end(self, limit: str, text: str) -> NoReturn:
        """Ends it; raises _Ended."""
        self.kill()
        self._wait()
        self._gone(limit, text)

    def _gone(self, limit: str | None, text: str) -> NoReturn:
        self.ended = _Ended(limit, text)
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
            self.end("protocol", _BROKEN)
        self.kill()  # what it left in its session
        status, seconds = self._wait()
        text = f"The code ended its own process{f': {describe_status(status)}' if self._own_child else ''}."
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number in (signal.SIGXCPU, signal.SIGKILL) and seconds >= isolation.CPU_S:
            self._gone("cpu", f"The code took more than {isolation.CPU_S} seconds of processor time.")
        if number == signal.SIGKILL and "seccomp" not in self._world.plan.off:
            self._gone(None, "the process of the agent's code was killed from outside")
        self._gone("signal" if number else "exit", text)


class _Late(BaseException):
    """An API call took longer than the step had left."""


class _alarm:
    """Raises _Late in the main thread at the deadline: an app can be made to compute for ever (a pattern, a huge page)."""

    def __init__(self, deadline: float):
        self.seconds = max(0.001, deadline - _now())

    def __enter__(self) -> None:
        def late(number: int, frame: Any) -> None:
            raise _Late

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *error: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _logged(call: _Call) -> dict[str, Any]:
    """A request as the engine logs it: method, path, and what was passed."""
    data: Any = dict(urllib.parse.parse_qsl(call.url.query, keep_blank_values=True))
    if call.body:
        try:
            data |= json.loads(call.body)
        except (ValueError, TypeError, RecursionError):
            data |= dict(urllib.parse.parse_qsl(call.body.decode("utf-8", "replace"), keep_blank_values=True))
    for name, value in call.headers:
        if name.lower() == "authorization":
            data["access_token"] = value.removeprefix("Bearer ")
    return {"method": call.method.lower(), "url": call.url.path, "data": data}
