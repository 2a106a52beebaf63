"""What a scenario family is: one reusable function, phrasings of the request, and how a task of it is drawn.

A family states its function once. The other forms come from it: the call, and the direct code (the function's body with the
arguments' literals in place of its parameters). The expected answer and the expected changes come from `draw`, which reads
the `Plan` only and never runs the function.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import random
import textwrap
from collections.abc import Callable

from sage_jax.world.miniworld.content import Person, Plan

Value = str | int
Answer = str | int | float | None


@dataclasses.dataclass(frozen=True)
class Change:
    """The exact change of one table. What is not listed must stay as it was.

    added: for each new row the fields (JSON values) that it must have; its other fields are free.
    removed: ids of rows that must be gone.
    updated: row id -> field -> new value; no other field of the row may change but those in `free`.
    """

    model: str  # "spotify.SongLike"
    added: tuple[dict, ...] = ()
    removed: tuple[int, ...] = ()
    updated: dict[int, dict] = dataclasses.field(default_factory=dict)
    free: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Draw:
    """One task of a family for one person."""

    values: dict[str, Value]  # parameter -> argument, in the order of the function's signature
    answer: Answer = None  # of a question; None for a change
    changes: tuple[Change, ...] = ()  # of a change; () for a question


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of scenario. Its name is that of its function; a function annotated `-> None` makes it a change of state."""

    function: str  # source of the reusable function: see `skill_source`
    phrasings: tuple[str, ...]  # format strings over the parameters, e.g. "... in my playlist '{playlist}'?"
    draw: Callable[[random.Random, Plan, Person], Draw | None]  # None: nothing suitable for this person
    apps: tuple[str, ...]  # apps it uses beside supervisor, the main one first
    difficulty: int  # 1 one app, one step; 2 filter, aggregate or change; 3 two apps or several steps
    api: str  # "app.name" of the API whose document is worth a look, for episodes that look something up first
    role: str = "normal"  # "normal" (train, dev, test_normal) or "challenge" (test_challenge only)

    def __post_init__(self):
        if self.role not in ("normal", "challenge") or self.difficulty not in (1, 2, 3):
            raise ValueError(f"family {self.name}: role {self.role!r}, difficulty {self.difficulty!r}")
        if self.kind == "question" and not isinstance(self._tree.body[-1], ast.Return):
            raise ValueError(f"family {self.name}: a question's function must end with its only return")
        returns = [n for n in ast.walk(self._tree) if isinstance(n, ast.Return)]
        if len(returns) != (self.kind == "question"):
            raise ValueError(f"family {self.name}: {len(returns)} return statements")

    @functools.cached_property
    def _tree(self) -> ast.FunctionDef:
        (node,) = ast.parse(self.function).body
        return node

    @property
    def name(self) -> str:
        return self._tree.name

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(a.arg for a in self._tree.args.args)

    @property
    def kind(self) -> str:
        """"question" or "change"."""
        returns = self._tree.returns
        return "change" if isinstance(returns, ast.Constant) and returns.value is None else "question"

    @property
    def lookup(self) -> str:
        """A short read-only statement that prints the parameters of the main API."""
        app, api = self.api.split(".")
        return f'print([p["name"] for p in apis.api_docs.show_api_doc(app_name="{app}", api_name="{api}")["parameters"]])'

    def call(self, values: dict[str, Value]) -> str:
        """An expression; its value is the answer of a question and is ignored for a change."""
        return f"{self.name}({', '.join(repr(values[p]) for p in self.parameters)})"

    def inline(self, values: dict[str, Value]) -> str:
        """The function's body as statements with literals for the parameters; a question's result is left in `answer`."""
        lines = self.function.splitlines()
        # Replace from the end, so that the columns of what is still to be replaced stay right.
        names = [n for n in ast.walk(self._tree) if isinstance(n, ast.Name) and n.id in values]
        for n in sorted(names, key=lambda n: (n.lineno, n.col_offset), reverse=True):
            line = lines[n.lineno - 1]
            lines[n.lineno - 1] = line[: n.col_offset] + repr(values[n.id]) + line[n.end_col_offset :]
        body = textwrap.dedent("\n".join(lines[self._tree.body[1].lineno - 1 :]))
        head, _, tail = body.rpartition("return ")
        return f"{head}answer = {tail}" if self.kind == "question" else body

    def instruction(self, phrasing: int, values: dict[str, Value]) -> str:
        return self.phrasings[phrasing % len(self.phrasings)].format(**values)


def skill_source(signature: str, docstring: str, apps: tuple[str, ...] | str, body: str) -> str:
    """A function with the log-in lines that all families share, then `body`.

    `token` is the access token of the first app; further apps get `<app>_token`.
    """
    apps = (apps,) if isinstance(apps, str) else apps
    lines = [
        'me = apis.supervisor.show_profile()',
        'passwords = {p["account_name"]: p["password"] for p in apis.supervisor.show_account_passwords()}',
    ]
    for k, app in enumerate(apps):
        username = "phone_number" if app == "phone" else "email"
        variable = "token" if k == 0 else f"{app}_token"
        lines.append(f'{variable} = apis.{app}.login(username=me["{username}"], password=passwords["{app}"])["access_token"]')
    text = "\n".join([f'"""{docstring}"""', *lines, textwrap.dedent(body).strip("\n")])
    return f"def {signature}:\n{textwrap.indent(text, '    ')}\n"
