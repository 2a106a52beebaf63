"""Which scenarios a mini world has, and the folder of each task in the official format."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import random
import re
from pathlib import Path

from sage_jax.world.miniworld import content as c
from sage_jax.world.miniworld import evaluation
from sage_jax.world.miniworld.database import APPS, supervisor_rows
from sage_jax.world.miniworld.families import families_of
from sage_jax.world.miniworld.family import Draw, Family
from sage_jax.world.miniworld.references import Reference

SPLITS = ("train", "dev", "test_normal", "test_challenge")
SHARES = {"train": 96, "dev": 12, "test_normal": 48, "test_challenge": 24}  # of 180
TASKS = 3  # per scenario
_POOLS = {"train": "train", "dev": "dev", "test_normal": "test", "test_challenge": "test"}


@dataclasses.dataclass(frozen=True)
class TaskPlan:
    """One task, ready to be written."""

    task_id: str
    split: str
    family: Family
    person: c.Person
    draw: Draw
    instruction: str

    @property
    def scenario_id(self) -> str:
        return self.task_id.partition("_")[0]

    @property
    def reference(self) -> Reference:
        f, values = self.family, self.draw.values
        return Reference(self.task_id, f.name, f.kind, f.function, f.name, f.call(values), f.inline(values), f.lookup, values)


def split_sizes(scenarios: int) -> dict[str, int]:
    """Scenarios of each split: the shares of 180 in proportion, each at least 1. Raises ValueError below 4."""
    if scenarios < len(SPLITS):
        raise ValueError(f"a mini world needs at least {len(SPLITS)} scenarios, one a split, not {scenarios}")
    sizes = {s: max(1, scenarios * SHARES[s] // 180) for s in SPLITS}
    sizes["train"] += scenarios - sum(sizes.values())
    return sizes


def plan_tasks(plan: c.Plan, scenarios: int) -> tuple[TaskPlan, ...]:
    """All tasks, split by split. The scenarios of a split go round its families; people of a scenario differ.

    Raises RuntimeError if a family finds too few suitable people.
    """
    out = []
    used: set[tuple] = set()  # (split, family, person, arguments): a task is not asked twice while others are left
    for split, size in split_sizes(scenarios).items():
        families = families_of("challenge" if split == "test_challenge" else "normal")
        # One order for all splits: however small a world is, dev and test_normal ask what its train asks.
        order = random.Random(f"{plan.seed} families").sample(families, len(families))
        for k in range(size):
            out += _scenario(plan, split, order[k % len(order)], k, used)
    return tuple(out)


def _scenario(plan: c.Plan, split: str, family: Family, k: int, used: set[tuple]) -> list[TaskPlan]:
    rng = random.Random(f"{plan.seed} {split} {k} {family.name}")
    scenario = hashlib.sha256(f"{plan.seed} {split} {k} {family.name}".encode()).hexdigest()[:7]
    out: list[TaskPlan] = []
    # Ask again what another scenario asked only when nothing else is found; equal answers and the same person are last resorts.
    for fresh, distinct, others in ((True, True, True), (False, True, True), (False, False, True), (False, False, False)):
        people = list(plan.pool(_POOLS[split]))
        rng.shuffle(people)
        for person in people * 4:
            if others and any(t.person.id == person.id for t in out):
                continue
            draw = family.draw(rng, plan, person)
            if draw is None or (fresh and (split, family.name, person.id, str(draw.values)) in used):
                continue
            if any(t.draw.values == draw.values and (draw.values or t.person.id == person.id) for t in out):
                continue
            if distinct and any(t.draw.answer is not None and t.draw.answer == draw.answer for t in out):
                continue  # equal answers would let a function with frozen arguments pass
            if (family.kind == "change") != bool(draw.changes) or tuple(draw.values) != family.parameters:
                raise ValueError(f"family {family.name}: the draw {draw} does not fit its function")
            used.add((split, family.name, person.id, str(draw.values)))
            text = family.instruction(rng.randrange(len(family.phrasings)), draw.values)
            out.append(TaskPlan(f"{scenario}_{len(out) + 1}", split, family, person, draw, text))
            if len(out) == TASKS:
                return out
    raise RuntimeError(f"family {family.name}: only {len(out)} of {TASKS} tasks could be drawn for {split}")


def write_task(task: TaskPlan, root: Path) -> None:
    """Writes `data/tasks/<id>` of one task. The base databases must be in `root`, and APPWORLD_ROOT must name it."""
    folder = root / "data" / "tasks" / task.task_id
    person = task.person
    specs = {
        "instruction": task.instruction,
        "supervisor": {"first_name": person.first, "last_name": person.last, "email": person.email,
                       "phone_number": person.phone},
        "datetime": c.NOW.isoformat(), "db_version": _db_version(),
    }
    (folder / "dbs").mkdir(parents=True)
    _write_json(folder / "specs.json", specs)
    for app in APPS:
        (folder / "dbs" / f"{app}.jsonl").write_text("")
    _save_supervisor(task, folder / "dbs" / "supervisor.jsonl")
    truth = folder / "ground_truth"
    truth.mkdir()
    (truth / "evaluation.py").write_text(evaluation.SOURCE)
    reference = task.reference
    calls = re.findall(r"apis\.(\w+)\.(\w+)\(", reference.inline)
    _write_json(truth / "answer.json", task.draw.answer)
    _write_json(truth / "public_data.json", task.draw.values)
    _write_json(truth / "private_data.json", evaluation.private_data(task.draw))
    _write_json(truth / "test_data.json", evaluation.test_data(task.draw))
    _write_json(truth / "references.json", dataclasses.asdict(reference))
    _write_json(truth / "metadata.json", {
        "mode": "minimal", "difficulty": task.family.difficulty, "num_apps": len(task.family.apps),
        "num_apis": len(set(calls)), "num_api_calls": len(calls),
        "num_solution_code_lines": len(ast.unparse(ast.parse(reference.inline_solution)).splitlines())})


def _db_version() -> str:
    from appworld.common.constants import DB_VERSION

    return DB_VERSION


def _save_supervisor(task: TaskPlan, path: Path) -> None:
    """The supervisor's rows as changes against the (empty) base database."""
    from appworld.apps.api_lib import set_local_date_and_time, unset_local_date_and_time
    from appworld.apps.model_lib import CachedDBHandler, get_db_home_path
    from appworld.collections.models import ModelCollection

    memory = get_db_home_path(storage_type="memory", type="task_input", task_id=task.task_id)
    base = get_db_home_path(storage_type="disk", type="base")
    freezer = set_local_date_and_time(c.NOW)
    try:
        models = ModelCollection.load(to_db_home_path=memory, from_db_home_path=base, load_apps=["supervisor"],
                                      skip_mandatory_apps=True)["supervisor"]
        models.SQLModel.restart_db_tracker()
        for name, rows in supervisor_rows(task.person, task.instruction).items():
            for row in rows:
                models[name].create(**row).save()
        models.SQLModel.db.save("changes", str(path))
        CachedDBHandler.reset(memory)
    finally:
        unset_local_date_and_time(freezer)


def write_splits(tasks: tuple[TaskPlan, ...], root: Path) -> None:
    """`data/datasets/<split>.txt`: one task id a line, the tasks of a scenario side by side."""
    folder = root / "data" / "datasets"
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        (folder / f"{split}.txt").write_text("".join(f"{t.task_id}\n" for t in tasks if t.split == split))


def _write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
