"""The evaluation function that every task of the mini world carries, and the requirements that it tests.

`SOURCE` is written as `ground_truth/evaluation.py`; the engine calls its `evaluate`. What is expected stands in the task's
`private_data.json`, so the source is the same for all tasks.
"""

from __future__ import annotations

from sage_jax.world.miniworld.family import Change, Draw

ANSWER = "assert that the answer is the expected one."
NO_ANSWER = "assert that no answer is given."
COMPLETED = "assert that the task was marked as completed with success."
COLLATERAL = "assert that nothing else changed."


def wanted(model: str) -> str:
    """The requirement about the wanted changes of one table."""
    return f"assert that {model} has the wanted changes."


def private_data(draw: Draw) -> dict:
    """The expectation as JSON; ids become strings, as JSON keys are."""
    return {"kind": "change" if draw.changes else "question", "changes": [_as_json(c) for c in draw.changes]}


def _as_json(change: Change) -> dict:
    return {"model": change.model, "added": list(change.added), "removed": list(change.removed),
            "updated": [[row, fields] for row, fields in sorted(change.updated.items())], "free": list(change.free)}


def test_data(draw: Draw) -> list[dict]:
    """Every requirement with its label: whether doing nothing fails or passes it."""
    first = {"requirement": NO_ANSWER, "label": "no_op_pass"} if draw.changes else {"requirement": ANSWER, "label": "no_op_fail"}
    return [
        first,
        *({"requirement": wanted(c.model), "label": "no_op_fail"} for c in draw.changes),
        {"requirement": COLLATERAL, "label": "no_op_pass"},
        {"requirement": COMPLETED, "label": "no_op_fail"},
    ]


SOURCE = f'''"""Evaluation of a mini world task: its expectation is in private_data.json."""

import json


def same(record, fields):
    return all(getattr(record, name) == value for name, value in fields.items())


def surplus(records, wanted):
    """Records that match no wanted row; each wanted row takes one. The second value counts unmatched wanted rows."""
    left, missing = list(records), 0
    for fields in wanted:
        match = [k for k, r in enumerate(left) if same(r, fields)]
        if match:
            left.pop(match[0])
        else:
            missing += 1
    return left, missing


def compare(models, change):
    """(wanted changes that are missing, changes that nobody wanted) of one table."""
    added, updated, removed = models.changed_records(change["model"])
    extra, missing = surplus(added, change["added"])
    extra = ["added " + str(r.id) for r in extra]
    gone = {{r.id for r in removed}}
    extra += ["removed " + str(i) for i in sorted(gone - set(change["removed"]))]
    missing += len(set(change["removed"]) - gone)
    expected = {{row: fields for row, fields in change["updated"]}}
    found = {{r.id: r for r in updated}}
    for row, fields in expected.items():
        missing += row not in found or not same(found[row], fields)
    for row in found:
        if row not in expected:
            extra.append("updated " + str(row))
            continue
        names = models.changed_field_names(change["model"], row) - {{"record_hash"}} - set(change["free"])
        extra += ["updated " + str(row) + " " + n for n in sorted(names - set(expected[row]))]
    return missing, extra


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    task = models.end.supervisor.Task.all()[0]
    answer = json.loads(task.answer)
    if private_data["kind"] == "question":
        with test("{ANSWER}"):
            test.answer(answer, ground_truth_answer)
    else:
        with test("{NO_ANSWER}"):
            test.case(answer, "in", [None, "<<NOT_GIVEN>>"])
    reports = [(change["model"], compare(models, change)) for change in private_data["changes"]]
    for model, (missing, _) in reports:
        with test("assert that " + model + " has the wanted changes."):
            test.case(missing, "==", 0)
    with test("{COLLATERAL}"):
        test.case(models.changed_model_names() - {{model for model, _ in reports}}, "==", set())
        test.case([e for _, (_, extra) in reports for e in extra], "==", [])
    with test("{COMPLETED}"):
        test.case(task.status, "==", "success")
'''
