"""Wrong code fails: slightly wrong functions of the question families, run in real worlds, do not pass a scenario."""

import json
import os
import subprocess
import sys

import pytest

from sage_jax.world.miniworld.build import build

MODULES = ("venmo", "phone", "notes", "todos", "mail", "files", "splitwise")
# Runs in a process of its own: the engine freezes the clock of the process it lives in.
SCRIPT = """
import importlib, json, re, sys
from pathlib import Path
from appworld import AppWorld
from sage_jax.world.miniworld import tasks
from sage_jax.world.miniworld.build import people_of
from sage_jax.world.miniworld.generate import make_plan

MUTATIONS = (
    ("max to min", r"\\bmax\\(", "min("), ("min to max", r"\\bmin\\(", "max("), ("sum to max", r"\\bsum\\(", "max("),
    ("count to total", r"len\\(amounts\\)", "sum(amounts)"),
    ("no filter", r"for (\\w) in (\\w+) if .*?\\](?=\\)|$)", r"for \\1 in \\2]"),
    ("filter inverted", r"if not t\\[", "if t["),
    ("other direction", r"direction=.sent.", 'direction="received"'),
    ("first entry", r"query=name\\)\\[0\\]", "page_limit=20)[0]"),
)
root, modules, scenarios = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
plan = make_plan(0, people_of(scenarios))
survivors, tried = [], 0
for module in modules:
    for family in importlib.import_module("sage_jax.world.miniworld.families." + module).FAMILIES:
        mutants = {n: re.sub(p, r, family.function, flags=re.M) for n, p, r in MUTATIONS}
        mutants = {n: f for n, f in mutants.items() if f != family.function}
        if family.kind != "question" or not mutants:
            continue
        alive, solved = set(mutants), 0
        for task in tasks._scenario(plan, "train", family, 10_000, set()):
            tasks.write_task(task, root)
            with AppWorld(task_id=task.task_id, experiment_name="mutants") as world:
                for name in sorted(alive):
                    world.execute(mutants[name] + "\\n" + task.reference.call_solution)
                    if not world.evaluate().success:
                        alive.discard(name)
                world.execute(task.reference.function_solution)
                solved += world.evaluate().success
        tried += len(mutants)
        survivors += [f"{family.name}: {name}" for name in sorted(alive)] + ([] if solved == 3 else [f"{family.name}: reference"])
print("RESULT " + json.dumps({"tried": tried, "survivors": survivors}))
"""


@pytest.mark.slow
def test_wrong_functions_do_not_solve_a_scenario(tmp_path):
    scenarios = 12
    root = build(scenarios, seed=0, cache=tmp_path, check=False, quiet=True)
    env = {**os.environ, "APPWORLD_ROOT": str(root), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(root), ",".join(MODULES), str(scenarios)], env=env, cwd=tmp_path,
                          capture_output=True, text=True, timeout=600, check=False)
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("RESULT ")) if done.returncode == 0 else (done.stderr[-3000:],)
    assert line.startswith("RESULT "), line
    result = json.loads(line.removeprefix("RESULT "))
    assert result["tried"] >= 20
    assert result["survivors"] == []
