"""The reference solution that each mini world task carries beside its ground truth, in both forms.

Only the scripted policy, the build-time checks and tests read it; agents and their worker processes do not.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from sage_jax.errors import DataRootError
from sage_jax.world.miniworld.family import Value


@dataclasses.dataclass(frozen=True)
class Reference:
    """How to solve one task.

    `call` is an expression over the function: its value is the answer of a question and is ignored for a change.
    `inline` is the same logic as statements without a function; a question's result is left in the variable `answer`.
    A task is finished by `completion("...")`, where the argument is the expression of the answer.
    """

    task_id: str
    family: str
    kind: str  # "question" | "change"
    function: str  # source text
    function_name: str
    call: str
    inline: str
    lookup: str  # one short read-only statement that prints something useful, under 150 characters
    values: dict[str, Value]

    def completion(self, answer: str = "answer") -> str:
        """The statement that completes the task."""
        if self.kind == "question":
            return f"apis.supervisor.complete_task(answer={answer})"
        return "apis.supervisor.complete_task()"

    @property
    def call_solution(self) -> str:
        """Call and completion, for a world in which the function is defined."""
        if self.kind == "question":
            return self.completion(self.call)
        return f"{self.call}\n{self.completion()}"

    @property
    def function_solution(self) -> str:
        """Function, call and completion: solves the task in a fresh world."""
        return f"{self.function}\n{self.call_solution}"

    @property
    def inline_solution(self) -> str:
        """Direct code and completion: solves the task in a fresh world."""
        return f"{self.inline.rstrip()}\n{self.completion()}"


def reference_path(root: Path | str, task_id: str) -> Path:
    return Path(root) / "data" / "tasks" / task_id / "ground_truth" / "references.json"


def load_reference(root: Path | str, task_id: str) -> Reference:
    """Raises DataRootError if the root holds no reference for the task (an official root holds none)."""
    path = reference_path(root, task_id)
    if not path.exists():
        raise DataRootError(f"{path} does not exist: only tasks of a mini world carry reference solutions in this form")
    return Reference(**json.loads(path.read_text()))
