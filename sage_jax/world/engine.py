"""The engine inside the fork server: warming it once, and making a world in a forked child cheap.

Everything here changes how long the engine takes, never what it answers:

- the web application is built once instead of once a world;
- the base databases are loaded into memory once, twice over, and a child takes the copies that it inherits (shared
  pages, statements already compiled) instead of copying files, once instead of twice;
- the databases of a task's start state, which an open world never reads, are not loaded by it;
- the interactive shell exists before the fork;
- the clock is frozen before the fork, so that a child's own freezing has no module left to patch;
- code without imports in which no forbidden name occurs passes the syntax guard without its slow parsers.

No ground truth is loaded in the process that is forked. Runs only in the fork server and its children.
"""

from __future__ import annotations

import ast
import functools
import gc
import os
import sqlite3
import sys
import time
import types
from pathlib import Path
from typing import Any

import appworld.environment as environment
import appworld.requester as requester
from appworld.apps import get_all_apps, model_lib
from appworld.collections.models import ModelCollection, ModelCollectionPair
from appworld.common import safety_guard
from appworld.common.path_store import path_store
from appworld.common.utils import freeze_time, import_models_module
from appworld.evaluator import TestTracker
from sqlalchemy.engine import make_url

_START, _END = "task_input", "task_output"  # how the engine names the two states of a task in memory

# What the warming world runs: every path that an ordinary episode takes (look-up, login, printing, an error, imports,
# completion), so that children inherit the filled caches.
_WARM_CODE = (
    "import re\nfrom collections import Counter\nprint(apis.api_docs.show_app_descriptions())",
    "print(apis.api_docs.show_api_descriptions(app_name='spotify'))\n"
    "print(apis.api_docs.show_api_doc(app_name='spotify', api_name='login'))",
    "me = apis.supervisor.show_profile()\n"
    "for account in apis.supervisor.show_account_passwords():\n"
    "    for name in (me['email'], me['phone_number']):\n"
    "        try:\n"
    "            apis[account['account_name']].login(username=name, password=account['password'])\n"
    "        except Exception as error:\n"
    "            str(error)\n",
    "def f(x: int) -> int:\n    '''Doc.'''\n    return x\nf(1 / 0)",
    "apis.supervisor.complete_task(status='fail')",
)

_engine_task = environment.Task
_engine_close_all = environment.AppWorld.close_all
_made: dict[tuple[str, str], tuple[Any, Any]] = {}  # (state, app) -> (engine, tracker) of a database in memory
_spares: dict[tuple[str, str], tuple[Any, Any]] = {}  # those that hold the base and that no state has taken


def warm(task_id: str) -> None:
    """Fills every cache by living and scoring one world of `task_id`, then makes the process ready to be forked.

    Raises:
      RuntimeError: a thread of the warming world did not end.
    """
    _patch_engine()
    _fill_spares()
    world = environment.AppWorld(task_id, experiment_name="warming", load_ground_truth=False, timeout_seconds=None)
    for code in _WARM_CODE:
        world.execute(code)
    world.task_completed()
    moment = world.task.datetime
    saved = world.output_db_home_path_on_disk
    world.close()
    del world
    _start_over()
    _compare_states(task_id, saved)
    _start_over()
    environment.InteractiveShellEmbed = _handing_out(environment.InteractiveShellEmbed)
    freeze_time(moment).start()
    _wait_for_threads()
    gc.collect()
    gc.freeze()


def _patch_engine() -> None:
    guard = safety_guard.SafetyGuard
    guard.is_syntax_safe = _with_fast_path(guard.is_syntax_safe)
    guard.module_by_path = staticmethod(functools.cache(guard.module_by_path))
    requester.build_main_app = functools.cache(requester.build_main_app)
    environment.Task = _TaskWithoutStartState
    # Opening a world closes all others of the process. A child has no other, and what would be thrown away is the
    # state that was loaded a moment before and is loaded again a moment later.
    environment.AppWorld.close_all = lambda: None
    model_lib.get_db_args = _with_spares(model_lib.get_db_args)
    model_lib.Database._get_engine_to_details = staticmethod(_remembered(model_lib.Database._get_engine_to_details))


def _start_over() -> None:
    """Closes every database that a state has taken, and makes all spares new."""
    _engine_close_all()
    model_lib.ModelHashHandler.reset()
    # Dropping the last reference closes them: no open database file may cross a fork.
    model_lib.get_direct_cached_sqlite3_connection.cache_clear()
    model_lib.get_cached_db_engine.cache_clear()
    for app in get_all_apps():
        # Models skip a database that they are set to already, and would keep its closed connection.
        import_models_module(app).SQLModel.db.engine = None
    _spares.update(_made)
    _refill_spares()


def _compare_states(task_id: str, saved: str) -> None:
    """What an evaluation does before it comes to the ground truth, and the machinery of its tests."""
    import pytest  # noqa: F401  (the evaluator imports it inside a function)

    task = _engine_task.load(task_id=task_id, load_ground_truth=False)
    start = task.model_collection
    output = f":memory:{_END}-{task_id}"
    end = ModelCollection.load(to_db_home_path=output, from_db_home_path=saved, load_apps=task.allowed_apps)
    pair = ModelCollectionPair(task.models_from_db_home_path, start, output, end)
    pair.start.admin.MainUser.find_one(**task.supervisor)
    tracker = TestTracker()
    with tracker("same"):
        tracker.case(pair.changed_model_names(), "==", set())
    with tracker("other"):
        tracker.answer("1", "2")
    pair.end.supervisor.Task.all()
    tracker.report(print_it=False, colorize=False)


def _remembered(slow):
    def details(engine):
        # Parsing and quoting the address anew at every look at a state is most of an evaluation. A child lives for
        # one world, so nothing piles up here.
        known = getattr(engine, "_sage_details", None)
        if known is None:
            known = engine._sage_details = slow(engine)
        return known

    return details


class _TaskWithoutStartState:
    """Stands for the engine's Task where a world is opened: it needs the path of the start state, not the state."""

    @staticmethod
    def load(**arguments: Any) -> Any:
        task = _engine_task.load(**arguments)
        task._model_collection = types.SimpleNamespace(
            from_db_home_path=task.models_from_db_home_path,
            to_db_home_path=task.models_to_db_home_path,
            close=lambda: None,
        )
        return task


def _with_fast_path(slow):
    forbidden = {path.rsplit(".", 1)[-1] for path in safety_guard.DISALLOWED_FUNCTION_PATHS}

    def is_syntax_safe(self, code: str) -> tuple[bool, str]:
        # The guard refuses imports that are not on its list and calls whose full path is on another list. Where
        # nothing is imported and the last part of no such path occurs as a name, neither can be.
        try:
            tree = ast.parse(code)
        except Exception:
            return slow(self, code)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                return slow(self, code)
            if isinstance(node, ast.Name) and node.id in forbidden:
                return slow(self, code)
            if isinstance(node, ast.Attribute) and node.attr in forbidden:
                return slow(self, code)
        return True, ""

    return is_syntax_safe


def _fill_spares() -> None:
    for state in (_START, _END):
        for app in get_all_apps():
            if _base_file(app).is_file():
                engine = model_lib.get_db_engine(f":memory:spare-{state}/{app}.db")
                _spares[state, app] = _made[state, app] = (engine, model_lib.DBChangesTracker(engine))
    _refill_spares()


def _refill_spares() -> None:
    """Puts the base into every spare. Used ones keep what they have learnt: the compiled forms of statements."""
    for (_, app), (engine, tracker) in _spares.items():
        engine.dispose()
        engine._sage_details = None
        source = sqlite3.connect(f"file:{_base_file(app)}?mode=ro", uri=True)
        source.backup(engine.raw_connection().connection)
        source.close()  # an open file must not cross a fork; a database in memory may
        tracker.restart()


def _base_file(app: str) -> Path:
    return Path(path_store.data) / "base_dbs" / f"{app}.db"


def _with_spares(slow):
    def get_db_args(to_db_app_path: str, from_db_app_path: str | None = None):
        to_home, _, file = to_db_app_path.rpartition("/")
        state = to_home.removeprefix(":memory:").partition("-")[0]
        is_change = from_db_app_path is not None and model_lib.db_app_path_to_format(from_db_app_path) == "changes"
        spare = _spares.pop((state, file.removesuffix(".db")), None) if is_change and to_home[:1] == ":" else None
        if spare is None:
            return slow(to_db_app_path, from_db_app_path)
        engine, tracker = spare
        # The engine reads the state's name from here; the database behind it keeps the spare's.
        name = to_db_app_path.removeprefix(":memory:")
        engine.url = make_url(f"sqlite:///file:{name}?mode=memory&cache=shared&uri=true")
        applied = model_lib.apply_db_changes(engine.raw_connection().connection, from_db_app_path)
        tracker.add_changes(applied)
        return engine, tracker

    return get_db_args


def _handing_out(make_shell):
    spare = [_make_shell(make_shell)]

    def make(config):
        return spare.pop() if spare else make_shell(config=config)

    return make


def _make_shell(make_shell):
    hook = sys.excepthook
    config = environment.Config()
    config.HistoryManager.enabled = False
    shell = make_shell(config=config)
    sys.excepthook = hook
    return shell


def _wait_for_threads() -> None:
    for _ in range(500):
        if len(os.listdir("/proc/self/task")) == 1:
            return
        time.sleep(0.01)
    raise RuntimeError("threads of the warming world are still alive: this process must not be forked")
