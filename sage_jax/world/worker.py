"""One world in one process: opens it, runs the agent's code in it, reports what happened. Runs in a forked child.

The process handles one request at a time, read from the channel to the trainer, and ends when that closes. What is a
flag here is never read from the text of an observation: whether the engine refused the code, whether it raised,
whether a limit was hit, which skills were called. What this does not yet protect against: model-written code lives in
the same interpreter, so it can forge a reply for its own step; scores never depend on one (see `judge`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import random
import signal
import socket
from collections.abc import Callable
from typing import Any

from appworld.common.path_store import path_store
from appworld.common.utils import TimeoutError as EngineTimeout
from appworld.environment import AppWorld
from IPython.utils.capture import capture_output

from sage_jax.world import judge, protocol

_FAILED = "Execution failed. Traceback:\n"  # how the engine begins the observation of a failed step
_exec = exec  # while agent code runs, the engine may replace builtins
_AGAIN = 0.5  # seconds until code that swallowed the interrupt is interrupted again


def run(channel: socket.socket, spec: dict[str, Any]) -> None:
    """Opens the world of `spec` = {root, experiment, task_id, keep, output_chars} and serves it until the end."""
    try:
        world = _World(spec)
    except Exception as error:
        protocol.send(channel, {"error": f"{type(error).__name__}: {error}"})
        return
    protocol.send(channel, {})
    while (request := protocol.receive(channel)) is not None:
        operation = request.pop("op")
        protocol.send(channel, getattr(world, "do_" + operation)(**request))


class _World:
    def __init__(self, spec: dict[str, Any]):
        path_store.update_root(spec["root"])
        # Unseeded draws of the agent's code are a function of the task, not of when the server started.
        random.seed(spec["task_id"])
        self.output_chars = spec["output_chars"]
        self.world = AppWorld(
            spec["task_id"],
            experiment_name=spec["experiment"],
            load_ground_truth=False,
            timeout_seconds=None,  # its alarm knows whole seconds only; `_interrupting` sets a finer one
        )
        self.database = self.world.models.supervisor.SQLModel.db.connection
        self.namespace = self.world.shell.user_ns
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
        self.save = functools.partial(world._save_state, world.output_db_home_path_on_disk)
        self.save_logs = world.save_logs

        def recorded_guard(code: str) -> tuple[bool, str]:
            safe, message = is_syntax_safe(code)
            self.refused = not safe
            return safe, message

        def recorded_run(code: str) -> Any:
            self.recording = True
            try:
                with _interrupting(self.seconds, self._on_time):
                    self.outcome = run_cell(code)
            finally:
                self.recording = False
            return self.outcome

        guard.is_syntax_safe = recorded_guard
        world._shell_run_cell = recorded_run
        # The engine writes state and logs after every step. The trainer asks for it when somebody will read them, so
        # that it costs nothing otherwise, and a full disk is not taken for the agent's doing.
        world._save_state = lambda directory: None
        world.save_logs = lambda: None

    def _on_time(self) -> None:
        self.timed_out = True

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
            text = f"{_FAILED}{type(error).__name__}: {error}"
            self.world.environment_io.append({"input": code, "output": text})
        outcome = self.outcome
        if raised is None and outcome is not None:
            raised = outcome.error_before_exec or outcome.error_in_exec
        never_ran = outcome is None and bool(code.strip())
        text, dropped = _cut(_clean(text), self.output_chars)
        if self.world.environment_io:
            entry = self.world.environment_io[-1]
            entry["input"], entry["output"] = _clean(entry["input"]), text
        limit = "time" if self.timed_out else "memory" if isinstance(raised, MemoryError) else None
        return {
            "text": text,
            "dropped": dropped,
            "failed": bool(self.refused or raised is not None or never_ran or self.timed_out),
            "limit": limit,
            "completed": judge.is_completed(self.database),
            "skill_calls": list(self.calls),
        }

    def do_install(self, skills: list[dict[str, str]], seconds: float) -> dict[str, Any]:
        reasons = [self._install(seconds=seconds, **skill) for skill in skills]
        self._link()
        return {"reasons": reasons}

    def do_completed(self) -> dict[str, Any]:
        return {"completed": judge.is_completed(self.database)}

    def do_save(self) -> dict[str, Any]:
        self.save()
        self.save_logs()
        return {}

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
                with _interrupting(seconds, self._on_time):
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

    def __init__(self, seconds: float, on_time: Callable[[], None]):
        self.seconds, self.on_time = seconds, on_time

    def __enter__(self) -> None:
        def interrupt(number: int, frame: Any) -> None:
            self.on_time()
            raise EngineTimeout(f"Function run_cell execution timed out after {self.seconds:g} seconds.")

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, self.seconds, _AGAIN)

    def __exit__(self, *error: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _clean(text: Any) -> str:
    """A str that encodes to UTF-8: lone surrogates become their escapes."""
    if not isinstance(text, str):
        text = str(text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _cut(text: str, limit: int) -> tuple[str, int]:
    """Head and tail of a text that is longer than `limit` characters, and how many are missing between them."""
    if len(text) <= limit:
        return text, 0
    head = limit // 2
    tail = limit - head
    dropped = len(text) - limit
    return f"{text[:head]}\n[{dropped} characters dropped here]\n{text[-tail:] if tail else ''}", dropped
