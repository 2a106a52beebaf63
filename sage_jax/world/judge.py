"""Scoring one finished world, in a process of its own, from the files that the world saved.

The process is forked from the warm server for one evaluation and ends after it: it loads the ground truth, which
neither the server nor any world ever holds, and a crash of it harms nothing else. `completed` is read from the saved
supervisor state. The states are written by the engine's side of a world (`worker`), never by the process that ran the agent's code.
"""

from __future__ import annotations

import sys
from typing import Any


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Evaluates `spec` = {root, experiment, task_id, keep}; with keep the engine's report is written too.

    Returns:
      The fields of a Judgement, as JSON.
    """
    from appworld.common.path_store import path_store
    from appworld.common.utils import import_models_module
    from appworld.evaluator import evaluate_task

    sys.dont_write_bytecode = True  # the evaluation's source lies in the data root, which stays as it was built
    path_store.update_root(spec["root"])
    tracker = evaluate_task(spec["task_id"], experiment_name=spec["experiment"], save_report=spec["keep"])
    if tracker.total_count != tracker.num_tests:
        raise ValueError(f"{tracker.num_tests} tests are stated, {tracker.total_count} were run")
    supervisor = import_models_module("supervisor")
    supervisor.SQLModel.set_db(to_db_home_path=f":memory:task_output-{spec['task_id']}")
    return {
        "passed": tracker.pass_count,
        "total": tracker.num_tests,
        "success": bool(tracker.success and tracker.num_tests > 0),
        "completed": is_completed(supervisor.SQLModel.db.connection),
        "passes": [item["requirement"] for item in tracker.passes],
        "failures": [item["requirement"] for item in tracker.failures],
    }


def is_completed(supervisor_database) -> bool:
    """Whether the active task's status is set; `supervisor_database` is the app's SQLite connection."""
    row = supervisor_database.execute("SELECT status FROM tasks ORDER BY id LIMIT 1").fetchone()
    return row is not None and row[0] in ("success", "fail")
