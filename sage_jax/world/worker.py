"""The engine's side of a world: holds the databases, answers API calls, watches the process that runs the agent's code.

Runs in a child of the fork server. It opens the world with the unchanged engine, forks the agent's side (`shell`), which takes
on the isolation, and from then on takes requests of the trainer, one at a time. During a step it answers the API
calls of the agent's side over their channel and enforces what the code cannot enforce on itself: time, memory and disk of all
its processes, number and kind of requests. Nothing that decides a score is read from the agent's side.

Whose doing an end of the agent's side is: it cannot send itself a signal that kills without being caught (seccomp), so SIGKILL from nobody here
came from outside and is an infrastructure error; every other end is the agent's doing. Without seccomp, SIGKILL counts as its doing.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import time
import urllib.parse
from pathlib import Path
from typing import Any

from appworld.common.path_store import path_store
from appworld.environment import AppWorld
from fastapi.testclient import TestClient

from sage_jax.world import isolation, judge, protocol, shell
from sage_jax.world.watch import folder_bytes, parent_of, tree_memory

_libc = ctypes.CDLL(None, use_errno=True)
_WATCH_S = 0.1  # between looks at memory and disk of a running step
_START_S = 30.0  # for the agent's side to take on its isolation
_PR_SET_PDEATHSIG = 1
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
    while (request := protocol.receive(channel)) is not None:
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
        self._own_folder(spec["folder"])
        self._own_folder(self.plan.writable)
        self.agent = _Agent(self)
        self.agent.start()

    def _own_folder(self, folder: str) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if self.plan.uid is not None:
            for name in [folder, *(str(p) for p in Path(folder).rglob("*"))]:
                os.chown(name, self.plan.uid, self.plan.uid, follow_symlinks=False)

    # Operations; each returns the reply.

    def do_fork(self, spec: dict[str, Any], grace: float) -> dict[str, Any]:
        """Makes a copy of this world: of this process and of the one on the agent's side. The copy answers on the channel whose
        descriptor follows the request. `spec` holds the copy's experiment and folder."""
        _, (descriptor,), _, _ = socket.recv_fds(self.trainer, 1, 1)
        channel = socket.socket(fileno=descriptor)
        ours, theirs = socket.socketpair()
        try:
            shutil.copytree(self.spec["folder"], spec["folder"], symlinks=True)
            self._own_folder(spec["folder"])
            said = self._ask({"op": "fork", "folder": spec["folder"]}, grace, grace, theirs.fileno())
            pid = int(said["pid"])
            handle = os.pidfd_open(pid)
            if parent_of(pid) != self.agent.pid:
                raise ValueError("it named a process that is not its child")
        except _Ended as end:
            return {"ended": end.text}
        except (KeyError, TypeError, ValueError, OSError) as error:
            ours.close()
            return {"ended": f"the process of the agent's code could not be copied: {error}"}
        finally:
            theirs.close()
        me = os.getpid()
        copy = os.fork()
        if copy == 0:
            try:
                _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != me:
                    _exit(1)
                self._become_copy(channel, spec, ours, pid, handle)
                _serve(channel, self)
            finally:
                _exit(0)
        _copies.append(copy)
        for closing in (channel, ours):
            closing.close()
        os.close(handle)
        return {"pid": copy}

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

    def do_execute(self, code: str, seconds: float, grace: float) -> dict[str, Any]:
        reply: dict[str, Any] = {"text": "", "dropped": 0, "failed": True, "limit": None, "skill_calls": [], "lost": False, "outside": ""}
        try:
            said = self._ask({"op": "execute", "code": code, "seconds": seconds}, seconds, grace)
            reply |= _step(said)
        except _Ended as end:
            if end.limit is None:
                reply["outside"] = end.text
            reply |= {"limit": end.limit, "text": f"{_FAILED}{end.text} The environment is lost.", "lost": True}
        reply["completed"] = judge.is_completed(self.database)
        self.world.environment_io.append({"input": shell.clean(code), "output": reply["text"]})
        return reply

    def do_install(self, skills: list[dict[str, str]], seconds: float, grace: float) -> dict[str, Any]:
        try:
            said = self._ask({"op": "install", "skills": skills, "seconds": seconds}, seconds * len(skills), grace)
            reasons = [str(reason) for reason in said["reasons"]]
            if len(reasons) != len(skills):
                raise ValueError("not one verdict a skill")
        except _Ended as end:
            return {"ended": end.text}
        except (KeyError, TypeError, ValueError) as error:
            self.agent.kill()
            return {"ended": f"its answer was no list of verdicts ({error})"}
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
            raise _Ended("ended", "The process that runs the code has ended.")
        return self.agent.ask(request, limit_s, grace_s, descriptor)

    # API calls of the agent's side.

    def serve(self, frame: Any, deadline: float) -> dict[str, Any]:
        """One request; what does not belong to the apps of this task is refused like an unknown address."""
        method, url = str(frame["method"]), urllib.parse.urlsplit(str(frame["url"]))
        headers = [(str(k), str(v)) for k, v in frame["headers"]]
        body = base64.b64decode(frame["body"])
        app = urllib.parse.unquote(url.path).lstrip("/").partition("/")[0]
        if url.netloc != "testserver" or app not in self.apps or ".." in url.path:
            return {"status": 404, "headers": [], "body": base64.b64encode(b'{"detail":"Not Found"}').decode()}
        self.requests.append(_logged(method, url, headers, body))
        with _alarm(deadline):
            response = self.world.requester.client.request(method, urllib.parse.urlunsplit(url), headers=headers, content=body)
        return {
            "status": response.status_code,
            "headers": [[k, v] for k, v in response.headers.items()],
            "body": base64.b64encode(response.content).decode("ascii"),
        }


_FAILED = "Execution failed. Traceback:\n"


def _step(said: dict[str, Any]) -> dict[str, Any]:
    """The agent's side's account of a step, in its types; raises _Ended for what is none."""
    try:
        return {
            "text": str(said["text"]),
            "dropped": int(said["dropped"]),
            "failed": bool(said["failed"]),
            "limit": said["limit"] if said["limit"] in ("time", "memory") else None,
            "skill_calls": [str(id) for id in said["skill_calls"]],
        }
    except (KeyError, TypeError, ValueError):
        raise _Ended("protocol", "The code broke the channel of its own process.") from None


class _Agent:
    """The process on the agent's side, as its parent sees it."""

    def __init__(self, world: _World):
        self._world = world
        self.pid = 0
        self.ended: str | None = None

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
                isolation.take_on(plan, parent, [theirs.fileno()])
                shell.run(theirs, self._world.world, spec["folder"], spec["output_chars"])
            except BaseException as error:
                with contextlib.suppress(OSError):
                    protocol.send(theirs, {"done": {"error": f"{type(error).__name__}: {error}"}})
            finally:
                _exit(0)
        theirs.close()
        self.channel.setblocking(False)
        self._frames = protocol.Frames(12 * spec["output_chars"] + (1 << 25))
        self._handle = os.pidfd_open(self.pid)
        self._own_child = True
        try:
            said = self._converse(_START_S, _now() + _START_S)
        except _Ended as end:
            raise RuntimeError(f"the process for the agent's code did not start: {end.text}") from None
        if "error" in said:
            raise RuntimeError(f"the process for the agent's code did not start: {said['error']}")
        self._at_start = tree_memory(self.pid)

    def adopt(self, channel: socket.socket, pid: int, handle: int) -> None:
        """Takes over a process that the agent's side forked: a child of that one, not of this."""
        channel.setblocking(False)
        self.channel, self.pid, self._handle, self._own_child = channel, pid, handle, False
        self._frames = protocol.Frames(12 * self._world.spec["output_chars"] + (1 << 25))
        self._at_start = tree_memory(pid)

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
        if descriptor is not None:
            self._send_descriptor(descriptor, deadline)
        return self._converse(limit_s, deadline)

    def _converse(self, limit_s: float, deadline: float) -> dict[str, Any]:
        served, look = 0, _now() + _WATCH_S
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self._handle, select.POLLIN)
        poll.register(self._world.trainer, 0)  # only whether it is still there
        while True:
            ready = {number for number, _ in poll.poll(1000 * max(0.0, min(deadline, look) - _now()) + 1)}
            if self._world.trainer.fileno() in ready:
                self.kill()
                _exit(0)
            if self.channel.fileno() in ready:
                for frame in self._receive():
                    if isinstance(frame.get("done"), dict):
                        return frame["done"]
                    served += 1
                    if served > self._world.spec["max_requests"]:
                        self._end("requests", f"The code made more than {self._world.spec['max_requests']} requests in one step.")
                    self._answer(frame, deadline)
            elif self._handle in ready:
                self._reap()
            now = _now()
            if now >= deadline:
                self._end("time", f"Execution timed out after {limit_s:g} seconds, and could not be interrupted.")
            if now >= look:
                look = now + _WATCH_S
                self._watch()

    def _receive(self) -> list[dict[str, Any]]:
        try:
            data = self.channel.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._reap()
        try:
            return self._frames.feed(data)
        except protocol.FrameError:
            self._end("protocol", "The code broke the channel of its own process.")

    def _answer(self, frame: dict[str, Any], deadline: float) -> None:
        try:
            answer = self._world.serve(frame["api"], deadline)
        except _Late:
            self._end("time", "A request was not answered within the time of the step.")
        except (KeyError, TypeError, ValueError):
            self._end("protocol", "The code broke the channel of its own process.")
        self._send(answer, deadline)

    def _send(self, message: dict[str, Any], deadline: float) -> None:
        data = memoryview(protocol.encode(message))
        while data:
            try:
                data = data[self.channel.send(data) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.channel, select.POLLOUT)
                if not poll.poll(1000 * max(0.0, deadline - _now())):
                    self._end("time", "The code did not read what it had asked for.")
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
                    self._end("time", "The code did not read what it was sent.")
            except OSError:
                self._reap()

    def _watch(self) -> None:
        plan, spec = self._world.plan, self._world.spec
        if tree_memory(self.pid, self._at_start) > plan.memory_bytes:
            self._end("memory", f"The code and its processes took more than {plan.memory_bytes >> 20} MiB of memory.")
        if folder_bytes(spec["folder"]) > spec["disk_bytes"]:
            self._end("disk", f"The code wrote more than {spec['disk_bytes'] >> 20} MiB of files.")

    def kill(self) -> None:
        """Ends it and all of its session."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGSTOP)  # while it is there, its number is its own
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _end(self, limit: str, text: str) -> Any:
        self.kill()
        self._wait()
        self.ended = text
        raise _Ended(limit, text)

    def _wait(self) -> int:
        """Its status; 0 for one that is no child of this process."""
        status = 0
        if self._own_child:
            _, status = os.waitpid(self.pid, 0)
        else:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            poll.poll()
        os.close(self._handle)
        self.channel.close()
        return status

    def _reap(self) -> Any:
        """Its channel closed, or it ended: says how."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        if not poll.poll(200):  # it closed its channel and lives on
            self._end("protocol", "The code broke the channel of its own process.")
        self.kill()  # what it left in its session
        status = self._wait()
        text = f"The code ended its own process{f': {_describe(status)}' if self._own_child else ''}."
        self.ended = text
        by_kill = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if by_kill and "seccomp" not in self._world.plan.off:
            raise _Ended(None, "the process of the agent's code was killed from outside")
        raise _Ended("signal" if os.WIFSIGNALED(status) else "exit", text)


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"ended by signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with code {os.WEXITSTATUS(status)}"


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


def _logged(method: str, url: urllib.parse.SplitResult, headers: list[tuple[str, str]], body: bytes) -> dict[str, Any]:
    """A request as the engine logs it: method, path, and what was passed."""
    data: Any = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    if body:
        try:
            data |= json.loads(body)
        except (ValueError, TypeError):
            data |= dict(urllib.parse.parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
    for name, value in headers:
        if name.lower() == "authorization":
            data["access_token"] = value.removeprefix("Bearer ")
    return {"method": method.lower(), "url": url.path, "data": data}
