"""The agent's side of a world: the one process in which model-written code runs.

It is forked from the engine's side (`worker`) after the world was opened, and inherits the interactive shell, the frozen clock and
the `apis` objects; then it takes on the isolation. What it has no longer is the world: every API call goes over the
channel to the engine's side, which holds the databases. Its own copies of them are dead weight, and changing them changes
nothing that is scored.

The code lives in the same interpreter as this module, so it can forge what this side says of its own step: the text,
`failed`, which skills were called. Completion, scores, limits and how the process ended are never taken from here.
"""

from __future__ import annotations

import ast
import base64
import builtins
import functools
import inspect
import linecache
import os
import random
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import httpx
from appworld.common.utils import TimeoutError as EngineTimeout
from IPython.utils.capture import capture_output

from sage_jax.world import isolation
from sage_jax.world.channel import Channel

FAILED = "Execution failed. Traceback:\n"  # how the engine begins the observation of a failed step
_exec = exec  # while agent code runs, the engine may replace builtins
_AGAIN = 0.5  # seconds until code that swallowed the interrupt is interrupted again


def run(channel: socket.socket, world: Any, folder: str, output_chars: int) -> None:
    """Serves the engine's side until that closes. `world` is an open AppWorld; `folder` is the agent's own."""
    for name in ("APPWORLD_ROOT", "APPWORLD_CACHE", "PYTHONPATH", "IPYTHONDIR"):
        os.environ.pop(name, None)
    _serve(Shell(Channel(channel), world, folder, output_chars))


def _serve(shell: Shell) -> None:
    os.chdir(shell.folder)
    os.environ.update(HOME=shell.folder, TMPDIR=shell.folder)
    tempfile.tempdir = None
    shell.channel.done({"ready": True})
    while (request := shell.channel.operation()) is not None:
        operation = request.pop("op")
        shell.channel.done(getattr(shell, "do_" + operation)(**request))


def _copy_files(source: str, target: str) -> None:
    """Files, folders and links, as far as this process may read them."""
    os.mkdir(target, 0o700)
    with os.scandir(source) as entries:
        for entry in entries:
            path = os.path.join(target, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), path)
            elif entry.is_dir():
                _copy_files(entry.path, path)
            elif entry.is_file():
                shutil.copyfile(entry.path, path)


class _Client:
    """Stands for the engine's test client: the same requests, answered by the engine's side."""

    def __init__(self, shell: Shell, client: Any):
        self._shell, self._client = shell, client

    def request(self, method: str, url: str, **arguments: Any) -> httpx.Response:
        request = self._client.build_request(method, url, **arguments)  # as the engine would; nothing is sent by this
        frame = {
            "method": request.method,
            "url": str(request.url),
            "headers": [[k.decode("latin-1"), v.decode("latin-1")] for k, v in request.headers.raw],
            "body": base64.b64encode(request.content).decode("ascii"),
        }
        answer = self._shell.channel.request(frame)
        if "error" in answer:
            raise _as_raised(*answer["error"])
        return httpx.Response(answer["status"], headers=answer["headers"], content=base64.b64decode(answer["body"]), request=request)

    def get(self, url: str, **arguments: Any) -> httpx.Response:
        return self.request("GET", url, **arguments)

    def post(self, url: str, **arguments: Any) -> httpx.Response:
        return self.request("POST", url, **arguments)

    def put(self, url: str, **arguments: Any) -> httpx.Response:
        return self.request("PUT", url, **arguments)

    def patch(self, url: str, **arguments: Any) -> httpx.Response:
        return self.request("PATCH", url, **arguments)

    def delete(self, url: str, **arguments: Any) -> httpx.Response:
        return self.request("DELETE", url, **arguments)


def _as_raised(name: str, text: str) -> Exception:
    """What an app raised on the engine's side, where the stock engine would raise it: inside the call."""
    kind = getattr(builtins, name, None)
    try:
        if issubclass(kind, Exception):
            return kind(text)
    except TypeError:  # a type of a library, or one that takes other arguments
        pass
    return RuntimeError(f"{name}: {text}")


class Shell:
    """Runs blocks of code and installs skills in the world's interactive shell."""

    def __init__(self, channel: Channel, world: Any, folder: str, output_chars: int):
        # Unseeded draws of the agent's code are a function of the task, not of when the server started.
        random.seed(world.task_id)
        self.channel = channel
        self.folder = folder
        self.output_chars = output_chars
        self.world = world
        self.namespace = world.shell.user_ns
        self.skills: dict[str, _Installed] = {}  # by name
        self.seconds = 0.0
        self.recording = False
        self.calls: dict[str, None] = {}  # ids in the order of their first return in this step
        self.refused = False
        self.outcome: Any = None  # the shell's result of the step
        self.timed_out = False
        self._hook_engine()

    def _hook_engine(self) -> None:
        guard, world = self.world.safety_guard, self.world
        is_syntax_safe, run_cell = guard.is_syntax_safe, world.shell.run_cell

        def recorded_guard(code: str) -> tuple[bool, str]:
            safe, message = is_syntax_safe(code)
            self.refused = not safe
            return safe, message

        def recorded_run(code: str) -> Any:
            self.recording = True
            try:
                with _interrupting(self, self.seconds):
                    self.outcome = run_cell(code)
            finally:
                self.recording = False
            return self.outcome

        guard.is_syntax_safe = recorded_guard
        world._shell_run_cell = recorded_run
        world._save_state = lambda directory: None  # states and logs are the engine's side's
        world.save_logs = lambda: None
        world.requester.client = _Client(self, world.requester.client)

    # Operations; each returns the reply.

    def do_execute(self, code: str, seconds: float) -> dict[str, Any]:
        self.seconds, self.refused, self.outcome, self.timed_out = seconds, False, None, False
        self.calls.clear()
        raised = None
        try:
            text = self.world.execute(code)
        except BaseException as error:
            # What the engine lets through: exits, interrupts, and source that Python cannot even take as text.
            self.world.safety_guard.disable()
            raised = error
            text = f"{FAILED}{type(error).__name__}: {error}"
        outcome = self.outcome
        if raised is None and outcome is not None:
            raised = outcome.error_before_exec or outcome.error_in_exec
        never_ran = outcome is None and bool(code.strip())
        text, dropped = cut(text, self.output_chars)  # first: of a huge text there is no room for a copy
        text = clean(text)
        return {
            "text": text,
            "dropped": dropped,
            "failed": bool(self.refused or raised is not None or never_ran or self.timed_out),
            "limit": "time" if self.timed_out else "memory" if isinstance(raised, MemoryError) else None,
            "skill_calls": list(self.calls),
        }

    def do_fork(self, folder: str) -> dict[str, Any]:
        """Makes a copy of this process, with files of its own in `folder`, which is served on the channel whose descriptor
        the engine's side sends when this one is ready."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for copies here
        me = os.getpid()
        try:
            pid, channel = self.channel.fork()
        except OSError as error:
            return {"refused": str(error)}
        if pid:
            return {"pid": pid}
        try:
            isolation.narrow(me)
            self.channel = Channel(channel)
            try:
                _copy_files(self.folder, folder)
            except (OSError, RecursionError) as error:
                self.channel.done({"refused": f"its files could not be copied: {error}"})
            else:
                self.folder = folder
                _serve(self)
        finally:
            os._exit(0)

    def do_install(self, skills: list[dict[str, str]], seconds: float) -> dict[str, Any]:
        reasons = [self._install(seconds=seconds, **skill) for skill in skills]
        self._link()
        return {"reasons": reasons}

    # Skills.

    def _install(self, id: str, name: str, code: str, seconds: float) -> str:
        """Defines one skill; returns why not, or "" when it is there. A failing one leaves no trace."""
        try:
            texts = _functions(code)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        # Each skill has globals of its own: its helpers are those that it was written with, whatever else is installed
        # under their names or is defined later.
        private = _Globals(self.namespace)
        reason = self._define(name, code, seconds, private)
        if reason:
            return reason
        skill = _Installed(texts, private, self._recorded(private[name], id))
        self.skills[name] = skill
        self.namespace[name] = skill.entered
        for other, value in private.items():  # a prompt shows helpers too, so they can be called
            self.namespace.setdefault(other, value)
        return ""

    def _link(self) -> None:
        """Helpers that are installed as skills themselves, with the same text, are entered as such also when nested."""
        for skill in self.skills.values():
            for helper, text in skill.texts.items():
                other = self.skills.get(helper)
                if other is not None and other is not skill and other.texts[helper] == text:
                    skill.globals[helper] = other.entered

    def _define(self, name: str, code: str, seconds: float, private: _Globals) -> str:
        world = self.world
        try:
            safe, message = world.safety_guard.is_syntax_safe(code)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if not safe:
            return message
        tracker = world.requester.request_tracker
        allowed, tracker.max_num_requests = tracker.max_num_requests, 0  # a definition calls no API
        self.timed_out, error = False, None
        file = f"<python-input, skill {name}>"  # the engine shows frames of files with such names
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        world.safety_guard.enable()
        try:
            with capture_output(stdout=True, stderr=True, display=True):
                with _interrupting(self, seconds):
                    _exec(compile(code, file, "exec", dont_inherit=True), private)
        except BaseException as raised:
            error = raised
        finally:
            world.safety_guard.disable()
            tracker.max_num_requests = allowed
        if self.timed_out:
            return f"defining it took longer than {seconds:g} s"
        if error is not None:
            return f"{type(error).__name__}: {error}"
        if not callable(private.get(name)):
            return f"the code defines no function {name}"
        return ""

    def _recorded(self, function: Callable, id: str) -> Callable:
        def note() -> None:
            if self.recording:
                self.calls.setdefault(id)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def skill(*arguments: Any, **named: Any) -> Any:
                result = await function(*arguments, **named)
                note()
                return result
        else:

            @functools.wraps(function)
            def skill(*arguments: Any, **named: Any) -> Any:
                result = function(*arguments, **named)
                note()
                return result

        return skill


class _Globals(dict):
    """Globals of one skill: what it does not define itself is looked up in the shell's namespace, at each use."""

    def __init__(self, namespace: dict[str, Any]):
        super().__init__(__name__="__main__")
        self.namespace = namespace

    def __missing__(self, name: str) -> Any:
        return self.namespace[name]


class _Installed:
    """An installed skill: the texts of its top-level functions, its globals, and what a call of its name enters."""

    def __init__(self, texts: dict[str, str], globals: _Globals, entered: Callable):
        self.texts, self.globals, self.entered = texts, globals, entered


def _functions(code: str) -> dict[str, str]:
    """Normalised text of each top-level function of a skill's code, by name."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: ast.dump(node) for node in ast.parse(code).body if isinstance(node, kinds)}


class _interrupting:
    """Raises the engine's own timeout in the main thread after `seconds` of real time, and again until left.

    The timer of the kernel runs on although the clocks that Python reads stand still.
    """

    def __init__(self, shell: Shell, seconds: float):
        self.shell, self.seconds = shell, seconds

    def __enter__(self) -> None:
        def interrupt(number: int, frame: Any) -> None:
            self.shell.timed_out = True
            self.shell.channel.interrupt(EngineTimeout(f"Function run_cell execution timed out after {self.seconds:g} seconds."))

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, self.seconds, _AGAIN)

    def __exit__(self, *error: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def clean(text: Any) -> str:
    """A str that encodes to UTF-8: lone surrogates become their escapes."""
    if not isinstance(text, str):
        text = str(text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def cut(text: str, limit: int) -> tuple[str, int]:
    """Head and tail of a text that is longer than `limit` characters, and how many are missing between them."""
    if len(text) <= limit:
        return text, 0
    head = limit // 2
    tail = limit - head
    dropped = len(text) - limit
    return f"{text[:head]}\n[{dropped} characters dropped here]\n{text[-tail:] if tail else ''}", dropped
