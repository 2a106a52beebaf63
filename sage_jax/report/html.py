"""report.html: one self-contained file with the table, the curves, the skill library and a viewer of every episode.

Everything that a model or a world wrote travels as JSON inside the page and is put into it as text, never as markup.
A content security policy allows only the page's own script (by its digest) and data images, and no connection.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from sage_jax.agent.trajectory import Episode
from sage_jax.report import tables
from sage_jax.report.episodes import write_text
from sage_jax.skills.library import skill_to_json
from sage_jax.skills.record import Skill


def write_report(
    path: str | Path,
    *,
    title: str,
    rows: Sequence[tables.Summary],
    episodes: Mapping[str, Sequence[Episode]],
    differences: Sequence[tuple[str, tables.Difference]] = (),
    curves: bytes | None = None,
    library: Sequence[Skill] | None = None,
    config: str = "",
    note: str = "",
) -> None:
    """Writes the report under a temporary name and renames it.

    Args:
      rows: table rows, e.g. base, SFT, SAGE (`tables.score`).
      episodes: arm -> episodes for the viewer; all of them are in the file.
      differences: (label, paired difference) lines under the table.
      curves: PNG bytes (`curves.curves_png`), or None.
      library: skills to list; those that the episodes kept, with their uses counted, if None.
      config: the resolved config as text, shown folded.
      note: a line under the table, e.g. how the worlds were isolated.
    """
    write_text(path, report_html(title, rows, episodes, differences, curves, library, config, note).encode("utf-8", "replace"))


def report_html(
    title: str,
    rows: Sequence[tables.Summary],
    episodes: Mapping[str, Sequence[Episode]],
    differences: Sequence[tuple[str, tables.Difference]] = (),
    curves: bytes | None = None,
    library: Sequence[Skill] | None = None,
    config: str = "",
    note: str = "",
) -> str:
    """The page as text; arguments as in `write_report`."""
    files = resources.files("sage_jax.report")
    script = files.joinpath("report.js").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    every = [e for group in episodes.values() for e in group]
    library = library_of(every) if library is None else list(library)
    return environment.from_string(files.joinpath("template.html").read_text()).render(
        title=title,
        script=Markup(script),  # ours, from the package
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(files.joinpath("report.css").read_text()),
        first_line=tables.first_line(rows) if rows else "",
        note=note,
        complete=all(r.complete for r in rows),
        headings=[h for h, _ in tables.METRICS.values()],
        rows=[(tables.label(r), tables.cells(r), tables.tasks(r)) for r in rows],
        differences=[(label, tables.difference_text(d)) for label, d in differences],
        curves="data:image/png;base64," + base64.b64encode(curves).decode() if curves else "",
        episode_count=len(every),
        skill_count=len(library),
        data=Markup(embed(_data(episodes, library))),  # escaped by `embed`
        config=config,
    )


def library_of(episodes: Sequence[Episode]) -> list[Skill]:
    """Skills that the episodes kept, once an id, with uses and successes counted over these episodes.

    Most successes first, then most uses, then by id.
    """
    skills = {s.id: s for e in reversed(episodes) for s in e.kept}
    uses = dict.fromkeys(skills, 0)
    successes = dict.fromkeys(skills, 0)
    for e in episodes:
        for skill_id in e.called:
            if skill_id in skills:
                uses[skill_id] += 1
                successes[skill_id] += e.s
    counted = [dataclasses.replace(s, uses=uses[i], successes=successes[i]) for i, s in skills.items()]
    return sorted(counted, key=lambda s: (-s.successes, -s.uses, s.id))


def embed(value) -> str:
    """JSON for inside a script element: no character in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(episodes: Mapping[str, Sequence[Episode]], library: Sequence[Skill]) -> dict:
    """What the page's script reads. Texts and skills that repeat are stored once."""
    pool = _Pool()
    skills: dict[str, dict] = {}
    made = [_episode(arm, e, pool, skills) for arm, group in episodes.items() for e in group]
    shown = []
    for skill in library:
        skills[skill.id] = _skill(skill)
        shown.append({"id": skill.id, "uses": skill.uses, "successes": skill.successes})
    return {"episodes": made, "texts": pool.texts, "skills": skills, "library": shown}


class _Pool:
    """Texts by number."""

    def __init__(self):
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def add(self, text: str) -> int:
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def _skill(skill: Skill) -> dict:
    kept = ("id", "name", "signature", "docstring", "version", "parents", "verified", "origin", "withdrawn")
    value = skill_to_json(skill)
    return {**{k: value[k] for k in kept}, "code": skill.code}


def _episode(arm: str, e: Episode, pool: _Pool, skills: dict[str, dict]) -> dict:
    for skill in (*e.offered, *e.defined):
        skills.setdefault(skill.id, _skill(skill))
    judged = None
    if e.judgement is not None:
        j = e.judgement
        judged = {"passed": j.passed, "total": j.total, "completed": j.completed, "passes": list(j.passes), "failures": list(j.failures)}
    return {
        "arm": arm,
        "task": e.task_id,
        "split": e.split,
        "difficulty": e.difficulty,
        "instruction": e.instruction,
        "rollout": e.rollout,
        "position": e.position,
        "end": e.end.value,
        "valid": e.valid,
        "r": e.r,
        "s": e.s,
        "judged": judged,
        "opening": [[m["role"], pool.add(m["content"])] for m in _opening(e)],
        "turns": [_turn(t) for t in e.turns],
        "offered": [s.id for s in e.offered],
        "defined": [s.id for s in e.defined],
        "called": list(e.called),
        "refused": [[v.skill_id, v.reason] for v in e.verdicts if not v.ok],
        "generated": e.generated,
        "seconds": e.seconds,
        "error": e.error,
    }


def _turn(t) -> dict:
    value = {f.name: getattr(t, f.name) for f in dataclasses.fields(t)}
    value["skill_calls"] = list(t.skill_calls)
    place = t.response.find(t.code) if t.code else -1
    if place >= 0:
        # Characters as the page's script counts them: UTF-16 units.
        start = len(t.response[:place].encode("utf-16-le", "surrogatepass")) // 2
        value["code"] = [start, start + len(t.code.encode("utf-16-le", "surrogatepass")) // 2]
    return value


def _opening(e: Episode) -> list[dict]:
    """Messages before the first response: the last len(turns) assistant messages are the episode's own."""
    own = [i for i, m in enumerate(e.messages) if m["role"] == "assistant"]
    first = own[-len(e.turns)] if e.turns and len(own) >= len(e.turns) else len(e.messages)
    return e.messages[:first]
