"""From the code that an episode ran to skill records, by syntax tree.

Owns which functions become skills, what they carry along, and why others do not. It never runs the code. Not here:
whether a skill is really defined in a world (`verify`), and what a library does with two skills of one name (`library`).

The caller passes only the steps that did not fail. What a name means is decided by its last top-level binding in the
episode, as in the interpreter's namespace after the last step, so a corrected function replaces its draft.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import graphlib
import hashlib
import re
import symtable
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence

from sage_jax.skills.record import Origin, Skill

BUILTINS = frozenset(dir(builtins))
HANDLES = frozenset({"apis", "requester"})  # objects that a world puts into the agent's namespace
# Modules and names that a world imports before the agent's first step; a skill may use them without an import.
PRELOADED = frozenset(
    ["builtins", "calendar", "datetime", "itertools", "json", "math", "random", "re", "pendulum"]
    + ["Counter", "defaultdict", "Iterator", "deepcopy", "reduce", "Date", "DateTime", "Time"]
    + ["MONDAY", "TUESDAY", "WEDNESDAY", "THURSDAY", "FRIDAY", "SATURDAY", "SUNDAY"]
)
_MUTATORS = frozenset(
    ["append", "extend", "insert", "remove", "pop", "popitem", "clear"]
    + ["update", "setdefault", "add", "discard", "sort", "reverse"]
)
_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A function that did not become a skill, or a step that could not be read (`name` is then empty)."""

    name: str
    turn: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Extraction:
    """`skills` in the order of their definition; `rejected` says why the others are missing."""

    skills: tuple[Skill, ...]
    rejected: tuple[Rejection, ...]


def digest(code: str) -> str:
    """8 hex digits of the normalised tree of `code`: comments and spacing do not matter, everything else does."""
    return hashlib.sha256(ast.unparse(ast.parse(code)).encode("utf-8", "surrogatepass")).hexdigest()[:8]


def extract(
    code_blocks: Sequence[tuple[int, str]],
    origin: Origin,
    *,
    created: float | None = None,
    preloaded: frozenset[str] = PRELOADED,
) -> Extraction:
    """Skills that the top-level functions of an episode make.

    Args:
      code_blocks: (turn, code) of the steps that did not fail, in the order in which they ran.
      origin: of the episode; each skill gets the turn of its own block.
      created: seconds since the epoch; the present time if None.
      preloaded: names that every world offers besides builtins, `apis` and `requester`.
    """
    created = time.time() if created is None else created
    rejected: list[Rejection] = []
    space = _Namespace()
    for turn, code in code_blocks:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "\\d" in a plain string warned its author already
                tree, code = _parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            rejected.append(Rejection("", turn, f"the step's code does not parse: {e}"))
            continue
        space.run(turn, code, tree)
    skills = []
    for name, turn in space.rebound():
        rejected.append(Rejection(name, turn, "its name was bound to something else later in the episode"))
    for binding in space.functions():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                skill = _skill(binding, space, preloaded, dataclasses.replace(origin, turn=binding.turn), created)
        except (_Reject, SyntaxError, ValueError, RecursionError) as e:
            rejected.append(Rejection(binding.name, binding.turn, str(e)))
        else:
            skills.append(skill)
    return Extraction(tuple(skills), tuple(rejected))


class _Reject(Exception):
    """The reason why a function is no skill."""


@dataclasses.dataclass(frozen=True)
class _Binding:
    """The last meaning of a top-level name. `text` is the exact slice; imports of submodules may be several slices."""

    name: str
    kind: str  # "import" | "constant" | "function" | "other"
    turn: int
    order: int  # place of the statement among all statements of the episode
    text: str = ""
    node: ast.AST | None = None
    why: str = ""  # of "other"
    earlier: tuple[tuple[int, str], ...] = ()  # (order, slice) of further imports that bind the same name


class _Namespace:
    """Top-level names of an episode after its last statement, followed by syntax alone."""

    def __init__(self):
        self.names: dict[str, _Binding] = {}
        self._order = 0
        self._were_functions: dict[str, int] = {}

    def functions(self) -> list[_Binding]:
        return sorted((b for b in self.names.values() if b.kind == "function"), key=lambda b: b.order)

    def rebound(self) -> list[tuple[str, int]]:
        return [(n, t) for n, t in self._were_functions.items() if self.names[n].kind != "function"]

    def run(self, turn: int, code: str, tree: ast.Module) -> None:
        lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", code)  # the interpreter's line ends only; str.splitlines knows more
        for stmt in tree.body:
            self._order += 1
            self._statement(turn, lines, stmt)

    def _bind(self, name: str, kind: str, turn: int, text: str = "", node=None, why: str = "") -> None:
        earlier = ()
        old = self.names.get(name)
        if kind == "import" and old is not None and old.kind == "import":
            # `import a.b` and then `import a.c` both bind `a`, and both are needed.
            earlier = (*old.earlier, (old.order, old.text)) if _dotted(node, name) else ()
        self.names[name] = _Binding(name, kind, turn, self._order, text, node, why, earlier)

    def _statement(self, turn: int, lines: list[str], stmt: ast.stmt) -> None:
        if isinstance(stmt, ast.Import | ast.ImportFrom):
            text = _statement_slice(lines, stmt)
            for alias in stmt.names:
                if alias.name != "*":
                    self._bind(alias.asname or alias.name.split(".")[0], "import", turn, text, stmt)
        elif isinstance(stmt, _DEFS):
            self._were_functions[stmt.name] = turn
            self._bind(stmt.name, "function", turn, _function_slice(lines, stmt), stmt)
        elif (targets := _constant_targets(stmt)) is not None:
            text = _statement_slice(lines, stmt)
            for name in targets:
                self._bind(name, "constant", turn, text, stmt)
        else:
            kind = "class" if isinstance(stmt, ast.ClassDef) else "computed"
            for name in dict.fromkeys(_bound_names(stmt)):
                why = "a class" if kind == "class" else "not an import, a literal constant or a top-level function"
                self._bind(name, "other", turn, why=why)
            for name in _changed_names(stmt):
                if name in self.names and self.names[name].kind == "constant":
                    self._bind(name, "other", turn, why="changed after its definition")


def _skill(fn: _Binding, space: _Namespace, preloaded: frozenset[str], origin: Origin, created: float) -> Skill:
    """The record of one function, or `_Reject`."""
    node = fn.node
    if fn.name in BUILTINS or fn.name in HANDLES or fn.name in preloaded:
        raise _Reject(f"it shadows {fn.name!r}, a name that every world offers")
    _check_body(node)
    statements: dict[str, dict[int, str]] = {"import": {}, "constant": {}}
    helpers: dict[str, _Binding] = {}
    early: dict[str, set[str]] = {}  # function -> functions that must exist when it is defined
    queue = [fn]
    while queue:
        current = queue.pop()
        at_definition, at_call, assigned = _needs(current.text, current.name)
        for name in assigned & (BUILTINS | HANDLES | preloaded):
            raise _Reject(f"it rebinds {name!r}, a name that every world offers")
        early[current.name] = set()
        for name in sorted(at_definition | at_call):
            binding = space.names.get(name)
            if binding is None:
                if name in BUILTINS or name in HANDLES or name in preloaded:
                    continue
                raise _Reject(_missing(current, fn, name, "never bound at top level"))
            if name in BUILTINS or name in HANDLES or (name in preloaded and binding.kind != "import"):
                raise _Reject(_missing(current, fn, name, "rebound by the episode although every world offers it"))
            if binding.kind == "other":
                raise _Reject(_missing(current, fn, name, binding.why))
            if binding.kind == "function":
                if name in at_definition:
                    early[current.name].add(name)
                if name != fn.name and name not in helpers:
                    helpers[name] = binding
                    queue.append(binding)
                continue
            for order, text in (*binding.earlier, (binding.order, binding.text)):
                statements[binding.kind][order] = text
    # Helpers are looked up at call time, so the order of definition will do, except where a decorator or a default
    # value needs another function already.
    graph = {name: early[name] for name in sorted(early, key=lambda n: space.names[n].order)}
    graph[fn.name] = graph[fn.name] | set(helpers)  # the function itself comes last
    try:
        ordered = [n for n in graphlib.TopologicalSorter(graph).static_order() if n != fn.name]
    except graphlib.CycleError as e:
        raise _Reject("it and its helpers need each other already when they are defined") from e
    skill = Skill(
        id="",
        name=fn.name,
        source=fn.text,
        imports=tuple(dict.fromkeys(statements["import"][o] for o in sorted(statements["import"]))),
        constants=tuple(dict.fromkeys(statements["constant"][o] for o in sorted(statements["constant"]))),
        helpers=tuple(helpers[n].text for n in ordered),
        signature=_signature(node),
        docstring=ast.get_docstring(node) or "",
        origin=origin,
        created=created,
    )
    return dataclasses.replace(skill, id=f"{fn.name}@{digest(skill.code)}")


def _missing(current: _Binding, fn: _Binding, name: str, why: str) -> str:
    through = "" if current is fn else f" (through its helper {current.name!r})"
    return f"it needs {name!r}{through}: {why}"


def _check_body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    body = [s for s in node.body if not isinstance(s, ast.Pass)]
    body = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if not body:
        raise _Reject("its body does nothing")
    if isinstance(body[0], ast.Raise) and body[0].exc is not None:
        exc = body[0].exc.func if isinstance(body[0].exc, ast.Call) else body[0].exc
        if isinstance(exc, ast.Name) and exc.id in ("NotImplementedError", "NotImplemented"):
            raise _Reject("its body only raises NotImplementedError")


def _needs(text: str, name: str) -> tuple[set[str], set[str], set[str]]:
    """Global names of one function: (read when it is defined, read when it runs, assigned through `global`)."""
    table = symtable.symtable(text, "<skill>", "exec")
    at_definition = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    at_call: set[str] = set()
    assigned: set[str] = set()
    for child in table.get_children():
        inner = child.get_name() == name
        for scope in _scopes(child):
            for symbol in scope.get_symbols():
                # `is_global` alone is true for the locals of any scope called "top", which symtable takes for the module.
                is_global = symbol.is_declared_global() or (symbol.is_global() and not symbol.is_local())
                if is_global and symbol.is_referenced():
                    (at_call if inner else at_definition).add(symbol.get_name())
                if symbol.is_declared_global() and symbol.is_assigned():
                    assigned.add(symbol.get_name())
    return at_definition, at_call, assigned


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{prefix}{node.name}({ast.unparse(node.args)}){returns}"


def _parse(code: str) -> tuple[ast.Module, str]:
    """(tree, text that belongs to it). A wholly indented block runs in the engine's interpreter, so it counts here."""
    try:
        return ast.parse(code), code
    except IndentationError:
        dedented = textwrap.dedent(code)
        return ast.parse(dedented), dedented


def _statement_slice(lines: list[str], stmt: ast.stmt) -> str:
    """The statement alone, also where others share its lines."""
    held = [line.encode("utf-8", "surrogatepass") for line in lines[stmt.lineno - 1 : stmt.end_lineno]]
    held[-1] = held[-1][: stmt.end_col_offset]  # first the end: it may be the same line
    held[0] = held[0][stmt.col_offset :]
    return b"".join(held).decode("utf-8", "surrogatepass")


def _function_slice(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Whole lines from the first decorator to the end of the body, byte for byte, without the last line break."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    while node.decorator_list and not lines[first].lstrip().startswith("@"):
        first -= 1  # "@(" on a line of its own
    return "".join(lines[first : node.end_lineno]).rstrip("\r\n")


def _dotted(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Import) and any(
        a.asname is None and a.name.startswith(name + ".") for a in node.names
    )


def _constant_targets(stmt: ast.stmt) -> list[str] | None:
    """Names bound by `NAME = literal` (also typed, chained or unpacked); None for any other statement."""
    if isinstance(stmt, ast.Assign):
        targets, value = stmt.targets, stmt.value
    elif isinstance(stmt, ast.AnnAssign) and stmt.value is not None:
        targets, value = [stmt.target], stmt.value
        if any(isinstance(n, ast.Name) and n.id not in BUILTINS for n in ast.walk(stmt.annotation)):
            return None
    else:
        return None
    names = []
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        if not all(isinstance(p, ast.Name) for p in parts):
            return None
        names += [p.id for p in parts]
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return names


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds or deletes at top level, function and class bodies left out."""
    if isinstance(node, (*_DEFS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Lambda):
        return
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        # The targets of a comprehension are its own; a walrus inside it is not.
        yield from (n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
    else:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        for child in ast.iter_child_nodes(node):
            yield from _bound_names(child)


def _changed_names(stmt: ast.stmt) -> Iterator[str]:
    """Names whose object a top-level statement changes in place."""
    if isinstance(stmt, ast.ClassDef):
        return
    for node in ast.walk(stmt):
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            base = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
            base = node.func.value
        else:
            continue
        while isinstance(base, ast.Subscript | ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name):
            yield base.id
