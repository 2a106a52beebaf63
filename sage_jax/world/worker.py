"""The engine's side of a world: holds the databases, answers API calls, has the process that runs the agent's code watched (`agent_side`).

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
import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import socket
import urllib.parse
from typing import Any

from appworld.common.path_store import path_store
from appworld.environment import AppWorld
from fastapi.testclient import TestClient

from sage_jax.world import isolation, judge, protocol, shell
from sage_jax.world.agent_side import BROKEN, REASON_CHARS, Agent, Call, Ended, Late, clock
from sage_jax.world.watch import memory, parent_of

_libc = ctypes.CDLL(None, use_errno=True)
_IDLE_S = 0.5  # between looks at what was left running, while no step is
_BODY_BYTES = 1 << 20  # of a request
_exit = os._exit


def run(channel: socket.socket, spec: dict[str, Any]) -> None:
    """Opens the world of `spec` = {root, experiment, task_id, keep, output_chars, folder, plan, disk_bytes, max_requests} and serves it."""
    try:
        world = World(channel, spec)
    except Exception as error:
        protocol.send(channel, {"error": f"{type(error).__name__}: {error}"})
        return
    _serve(channel, world)


def _serve(channel: socket.socket, world: World) -> None:
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


class World:
    """One open world: its engine, its databases, and the process of the agent's code."""

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
        self.agent = Agent(self)
        self.agent.start()

    def count_folders(self, more: int = 0) -> int:
        count = int.from_bytes(self.folders[:8], "little") + more
        self.folders[:8] = count.to_bytes(8, "little")
        return count

    def look(self) -> None:
        """At what the code left running when its step was over."""
        with contextlib.suppress(Ended):
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
                    return {"refused": str(said["refused"])[:REASON_CHARS]}
                pid = int(said["pid"])
                handle = os.pidfd_open(pid)
            except Ended as end:
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
                self.agent.add_copy(pid, os.dup(handle))
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
        self.agent = Agent(self)
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
        except Ended as end:
            if end.limit is None:
                reply["outside"] = end.text
            reply |= {"limit": end.limit, "text": f"{shell.FAILED}{end.text} The environment is lost.", "lost": True}
        reply["completed"] = judge.is_completed(self.database)
        self.world.environment_io.append({"input": shell.clean(code), "output": reply["text"]})
        return reply

    def _step(self, said: dict[str, Any]) -> dict[str, Any]:
        """The agent's side's account of a step, in its types and within its limits; raises Ended for what is none."""
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
            self.agent.end("protocol", BROKEN)

    def do_install(self, skills: list[dict[str, str]], seconds: float, grace: float) -> dict[str, Any]:
        try:
            said = self._ask({"op": "install", "skills": skills, "seconds": seconds}, seconds * len(skills), grace)
            reasons = [shell.clean(reason)[:REASON_CHARS] for reason in said["reasons"]]
            if len(reasons) != len(skills):
                raise ValueError("not one verdict a skill")
        except Ended as end:
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

    def serve(self, call: Call, deadline: float) -> dict[str, Any]:
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


_MARKER_CHARS = 64  # what `shell.cut` writes in place of what it drops


class _alarm:
    """Raises Late in the main thread at the deadline: an app can be made to compute for ever (a pattern, a huge page)."""

    def __init__(self, deadline: float):
        self.seconds = max(0.001, deadline - clock())

    def __enter__(self) -> None:
        def late(number: int, frame: Any) -> None:
            raise Late

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *error: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _logged(call: Call) -> dict[str, Any]:
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
