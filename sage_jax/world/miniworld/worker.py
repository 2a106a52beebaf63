"""A process of the build: takes jobs as JSON lines on stdin, answers each with one JSON line on stdout.

Started as `python -m sage_jax.world.miniworld.worker`, so that the engine is never imported into the caller's process
and nothing is forked from a process with jax in it. It ends when stdin closes.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path

from sage_jax.world.miniworld import check, content, database, tasks
from sage_jax.world.miniworld.generate import make_plan

JOBS_PER_COLLECTION = 16


@functools.lru_cache(maxsize=1)
def _plan(seed: int, people: int) -> content.Plan:
    return make_plan(seed, people)


@functools.lru_cache(maxsize=1)
def _scenarios(seed: int, people: int, scenarios: int) -> dict[str, list[tasks.TaskPlan]]:
    groups: dict[str, list[tasks.TaskPlan]] = {}
    for task in tasks.plan_tasks(_plan(seed, people), scenarios):
        groups.setdefault(task.scenario_id, []).append(task)
    return groups


@functools.lru_cache(maxsize=1)
def _questions(seed: int, people: int, scenarios: int) -> list[tasks.TaskPlan]:
    return check.short_questions(_scenarios(seed, people, scenarios))


def _app(root: Path, job: dict) -> None:
    docs = None
    if job["app"] == "api_docs":
        docs = database.api_documents()
        database.write_api_documents(docs, root)
    database.write_app(job["app"], _plan(job["seed"], job["people"]), root / "data" / "base_dbs", docs)


def _scenario(root: Path, job: dict) -> None:
    groups = _scenarios(job["seed"], job["people"], job["scenarios"])
    for task in groups[job["scenario"]]:
        tasks.write_task(task, root)
    if job["check"]:
        group = groups[job["scenario"]]
        questions = _questions(job["seed"], job["people"], job["scenarios"])
        check.check_scenario(group, check.wrong_reference(questions, group[0]))


def main() -> None:
    # The engine prints; keep the answers apart from that.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    gc.disable()  # collections took two fifths of a build: the engine's caches are large, and every world allocates a lot
    for number, line in enumerate(sys.stdin, 1):
        if number % JOBS_PER_COLLECTION == 0:
            gc.collect()
        job = json.loads(line)
        root, start = Path(job["root"]), time.monotonic()
        try:
            from appworld.common.path_store import path_store

            path_store.update_root(str(root))
            (_app if "app" in job else _scenario)(root, job)
            answer = {"error": ""}
        except Exception:  # the parent raises it with the job's name
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps({**answer, "seconds": time.monotonic() - start}) + "\n")
    # Every world that was opened left a shell that would clean up at exit, with a full garbage collection each: minutes.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
