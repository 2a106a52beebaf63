"""Progress in the terminal: a bar with a rate and the time left; plain lines where the output is no terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

EVERY_S = 20.0  # between plain lines


def terminal() -> Console:
    """Where tables are printed; wide enough for them when the output goes to a file."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def step_bar(name: str, total: int) -> contextlib.AbstractContextManager[Callable[..., None]]:
    """A bar that leaves no line behind, for what is done again and again; the step's own line says how it went."""
    return bar(name, total, transient=True)


@contextlib.contextmanager
def bar(name: str, total: int, before: int = 0, transient: bool = False) -> Iterator[Callable[..., None]]:
    """Yields `advance(n=1, **facts)`: facts that are bool are shown as shares, others as their last value.

    `before` of the total were done by an earlier run: they count as done, and not for the rate.
    """
    state: dict[str, list[float]] = {}
    started = time.monotonic()
    done = 0

    def facts_text() -> str:
        return "  ".join(f"{k} {sum(v) / len(v):.0%}" if v and all(x in (0.0, 1.0) for x in v) else f"{k} {v[-1]:.3g}" for k, v in state.items())

    def note(facts: dict) -> None:
        for k, v in facts.items():
            values = state.setdefault(k, [])
            values.append(float(v))
            if not isinstance(v, bool):
                del values[:-1]

    if sys.stderr.isatty():
        columns = (TextColumn(f"{name:<18}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}/s"), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[facts]}"))
        with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=transient) as progress:
            task = progress.add_task(name, total=total, completed=before, facts="", rate="-")

            def advance(n: int = 1, **facts) -> None:
                nonlocal done
                done += n
                note(facts)
                rate = done / max(time.monotonic() - started, 1e-6)
                progress.update(task, advance=n, facts=facts_text(), rate=f"{rate:.1f}")

            yield advance
        return

    last = started

    def advance_plain(n: int = 1, **facts) -> None:
        nonlocal done, last
        done += n
        note(facts)
        now = time.monotonic()
        left = total - before - done
        if now - last >= EVERY_S or (left <= 0 and not transient):
            last = now
            rate = done / max(now - started, 1e-6)
            left = left / rate if rate > 0 else float("nan")
            print(f"{name}: {before + done}/{total}  {rate:.1f}/s  {left:.0f} s left  {facts_text()}", file=sys.stderr, flush=True)

    yield advance_plain
