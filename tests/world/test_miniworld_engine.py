"""The mini world in the running engine: what the evaluator accepts, and what it must refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sage_jax.world.miniworld.references import load_reference

# Runs in a process of its own: the engine freezes time and keeps one world a process.
_PROBE = '''
import json, os, sys
os.environ["APPWORLD_ROOT"] = sys.argv[1]
from appworld import AppWorld
from appworld.evaluator import evaluate_task
out = {}
for name, task_id, steps in json.load(sys.stdin):
    with AppWorld(task_id=task_id, experiment_name="probe") as world:
        texts = [world.execute(s) for s in steps]
        report = evaluate_task(task_id, "probe", save_report=False)
        out[name] = {"success": report.success, "failures": [f["requirement"] for f in report.failures], "texts": texts}
sys.stdout.write("\\nRESULT" + json.dumps(out))
'''


@pytest.fixture(scope="module")
def probe(mini_root, tmp_path_factory):
    """(question's reference, change's reference, outcome of every probe)."""
    root = tmp_path_factory.mktemp("probe")
    (root / "data").symlink_to(mini_root.path / "data")
    references = [load_reference(mini_root.path, t) for s in mini_root.splits for t in mini_root.task_ids(s)]
    question = next(r for r in references if r.kind == "question")
    change = next(r for r in references if r.kind == "change")
    login = "\n".join(line.strip() for line in change.inline.splitlines()[:2])
    spoil = (f'{login}\ntoken = apis.simple_note.login(username=me["email"], password=passwords["simple_note"])["access_token"]\n'
             'apis.simple_note.create_note(access_token=token, title="x", content="y")')
    jobs = [
        ("question", question.task_id, [question.function_solution]),
        ("question, in steps", question.task_id, [question.function, question.call_solution]),
        ("question, no completion", question.task_id, [question.inline]),
        ("question, wrong answer", question.task_id, ['apis.supervisor.complete_task(answer="nobody knows")']),
        ("question, fail", question.task_id, [question.inline, 'apis.supervisor.complete_task(answer=answer, status="fail")']),
        ("question, collateral", question.task_id, [spoil, question.inline_solution]),
        ("change", change.task_id, [change.inline_solution]),
        ("change, no completion", change.task_id, [change.inline]),
        ("change, collateral", change.task_id, [spoil, change.inline_solution]),
        ("change, only completed", change.task_id, ["apis.supervisor.complete_task()"]),
        ("change, with an answer", change.task_id, [change.inline, 'apis.supervisor.complete_task(answer="done")']),
    ]
    done = subprocess.run([sys.executable, "-c", _PROBE, str(root)], input=json.dumps(jobs), text=True, capture_output=True,
                          timeout=300, cwd=root, env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])})
    assert done.returncode == 0, done.stderr[-3000:]
    return question, change, json.loads(done.stdout.rpartition("RESULT")[2])


@pytest.mark.parametrize("name", ["question", "question, in steps", "change"])
def test_references_pass(probe, name):
    assert probe[2][name]["success"], probe[2][name]


@pytest.mark.parametrize("name, failing", [
    ("question, no completion", ["expected one", "completed"]),
    ("question, wrong answer", ["expected one"]),
    ("question, fail", ["completed"]),
    ("question, collateral", ["nothing else"]),
    ("change, no completion", ["completed"]),
    ("change, collateral", ["nothing else"]),
    ("change, with an answer", ["no answer"]),
])
def test_each_fault_fails_its_own_test(probe, name, failing):
    failures = probe[2][name]["failures"]
    assert len(failures) == len(failing), probe[2][name]
    assert all(any(text in f for f in failures) for text in failing)


def test_completing_alone_lacks_the_changes(probe):
    failures = probe[2]["change, only completed"]["failures"]
    assert failures and all("wanted changes" in f for f in failures)


def test_answers_stay_out_of_what_the_agent_sees(probe, mini_root):
    task_id = probe[0].task_id
    answer = json.loads((mini_root.path / "data" / "tasks" / task_id / "ground_truth" / "answer.json").read_text())
    specs = (mini_root.path / "data" / "tasks" / task_id / "specs.json").read_text()
    assert isinstance(answer, int) or str(answer) not in specs
