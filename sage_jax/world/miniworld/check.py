"""Checks of built tasks in the running engine: what must solve a task solves it, what must not does not.

Every task: doing nothing fails exactly the tests that it should, a reference of another scenario fails, the function of the
scenario's first task with this task's call passes, and so does the direct code.
"""

from __future__ import annotations

from collections.abc import Sequence

from sage_jax.errors import DataRootError
from sage_jax.world.miniworld import evaluation
from sage_jax.world.miniworld.references import Reference
from sage_jax.world.miniworld.tasks import TaskPlan

EXPERIMENT = "miniworld_check"
MAX_LOOKUP = 150  # characters that a lookup may print


class CheckError(DataRootError):
    """A task of the mini world that does not hold what it promises; names the task, the check and the requirement."""


def short_questions(groups: dict[str, list[TaskPlan]]) -> list[TaskPlan]:
    """The scenarios' first tasks that are questions, those whose reference makes the fewest API calls first.

    Every task's check runs the reference of one that belongs to another family. Questions change nothing, so the world
    stays usable.
    """
    questions = [g[0] for g in groups.values() if g[0].family.kind == "question"]

    def cost(task: TaskPlan):
        code = task.reference.inline
        return code.count("apis."), "for " in code.rpartition("token = ")[2], task.task_id

    return sorted(questions, key=cost)


def wrong_reference(questions: Sequence[TaskPlan], task: TaskPlan) -> Reference:
    """The first of them of another family; one that answers with a word where `task` wants a number and the other way
    round, if there is one: two counts can be equal by chance.

    Raises CheckError if all are of the task's family.
    """
    others = [q for q in questions if q.family != task.family]
    if not others:
        raise CheckError(f"family {task.family.name}: no scenario asks a question of another family")
    unlike = (q for q in others if isinstance(q.draw.answer, str) != isinstance(task.draw.answer, str))
    return next(unlike, others[0]).reference


def check_scenario(tasks: Sequence[TaskPlan], wrong: Reference) -> None:
    """Runs all checks of one scenario's written tasks. Raises CheckError at the first that fails."""
    first = tasks[0].reference
    for task in tasks:
        _check_task(task, first, wrong)


def _check_task(task: TaskPlan, first: Reference, wrong: Reference) -> None:
    from appworld import AppWorld

    reference = task.reference
    expected = {t["requirement"] for t in evaluation.test_data(task.draw) if t["label"] == "no_op_fail"}
    with AppWorld(task_id=task.task_id, experiment_name=EXPERIMENT) as world:
        failed = _failures(world)
        if failed != expected:
            raise CheckError(f"task {task.task_id} ({task.family.name}): doing nothing fails {sorted(failed)}, "
                             f"expected {sorted(expected)}")
        world.execute(wrong.function_solution)
        if not _failures(world):
            raise CheckError(f"task {task.task_id} ({task.family.name}): the reference of {wrong.task_id} passes")
        if reference == first:  # the same statement in all tasks of a scenario
            shown = world.execute(reference.lookup)
            if "Execution failed" in shown or len(shown.strip()) >= MAX_LOOKUP:
                raise CheckError(f"task {task.task_id} ({task.family.name}): the lookup prints {shown!r}")
        _must_pass(world, task, f"{first.function}\n{reference.call_solution}", "the first task's function and a call")
        if reference.kind == "question":
            _must_pass(world, task, reference.inline_solution, "direct code")
    if reference.kind == "change":
        with AppWorld(task_id=task.task_id, experiment_name=EXPERIMENT) as world:
            _must_pass(world, task, reference.inline_solution, "direct code")


def _evaluate(world):
    """The engine's evaluation without its printed report, which takes longer than the tests themselves."""
    from appworld.evaluator import evaluate_task

    return evaluate_task(world.task_id, EXPERIMENT, save_report=False)


def _failures(world) -> set[str]:
    return {f["requirement"] for f in _evaluate(world).failures}


def _must_pass(world, task: TaskPlan, code: str, form: str) -> None:
    output = world.execute(code)
    tracker = _evaluate(world)
    if "Execution failed" in output or not tracker.success:
        failures = "\n".join(f"{f['requirement']}\n{f['trace']}" for f in tracker.failures)
        raise CheckError(f"task {task.task_id} ({task.family.name}, {task.split}): {form} does not pass.\n"
                         f"instruction: {task.instruction}\nexpected answer: {task.draw.answer!r}\n{failures}\n"
                         f"output: {output}\ncode:\n{code}")
