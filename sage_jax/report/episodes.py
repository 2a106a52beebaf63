"""Episodes as JSON lines: what the report, the tables and later readers need, in files that survive a kill.

A file is either written whole (temporary name, then renamed) or grows by one line an episode; a last line that a kill
cut in half is recognised, left out and reported. Token records are not written: they are large and only training needs them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sage_jax.agent.trajectory import End, Episode, Turn
from sage_jax.errors import ConfigError
from sage_jax.skills.library import skill_from_json, skill_to_json
from sage_jax.world.types import InstallVerdict, Judgement


@dataclasses.dataclass(frozen=True)
class EpisodeFile:
    """What a file held. `half_written` is the number of bytes of a broken last line, 0 if the file ends well."""

    episodes: tuple[Episode, ...]
    half_written: int = 0


def to_json(episode: Episode) -> dict:
    """JSON value of an episode; the token record becomes None and all else is kept."""
    value = {f.name: getattr(episode, f.name) for f in dataclasses.fields(Episode)}
    value["turns"] = [dataclasses.asdict(t) for t in episode.turns]
    value["end"] = episode.end.value
    value["judgement"] = None if episode.judgement is None else dataclasses.asdict(episode.judgement)
    value["offered"] = [skill_to_json(s) for s in episode.offered]
    value["defined"] = [skill_to_json(s) for s in episode.defined]
    value["verdicts"] = [dataclasses.asdict(v) for v in episode.verdicts]
    value["tokens"] = None
    return value


def from_json(value: dict) -> Episode:
    """The inverse of `to_json`, also after a trip through JSON text. Unknown or missing fields raise TypeError."""
    fields = dict(value)
    fields["turns"] = [Turn(**{**t, "skill_calls": tuple(t["skill_calls"])}) for t in fields["turns"]]
    fields["end"] = End(fields["end"])
    if (j := fields["judgement"]) is not None:
        fields["judgement"] = Judgement(**{**j, "passes": tuple(j["passes"]), "failures": tuple(j["failures"])})
    fields["offered"] = tuple(skill_from_json(s) for s in fields["offered"])
    fields["defined"] = tuple(skill_from_json(s) for s in fields["defined"])
    fields["verdicts"] = tuple(InstallVerdict(**v) for v in fields["verdicts"])
    return Episode(**fields)


def write_episodes(path: str | Path, episodes: Iterable[Episode]) -> None:
    """Writes the whole file under a temporary name and renames it."""
    write_text(path, "".join(map(_line, episodes)))


def append_episodes(path: str | Path, episodes: Iterable[Episode]) -> int:
    """Adds lines to a file that may not exist; for one writer at a time.

    Returns the number of bytes of a half-written last line that was cut off first, usually 0.
    """
    text = "".join(map(_line, episodes)).encode()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as f:
        broken = _tail(f)
        if broken:
            f.truncate(f.seek(0, os.SEEK_END) - broken)
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    return broken


def read_episodes(path: str | Path) -> EpisodeFile:
    """Reads a file; see `EpisodeFile.half_written`. Raises ConfigError naming a damaged line that is not the last."""
    data = Path(path).read_bytes()
    whole = data.rfind(b"\n") + 1
    episodes = []
    for n, line in enumerate(data[:whole].splitlines(), 1):
        try:
            value = json.loads(line)
            value.pop("step", None)  # files of older runs hold one
            episodes.append(from_json(value))
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise ConfigError(f"{path}, line {n}: not an episode ({type(e).__name__}: {e}); the file was damaged, move it away") from e
    return EpisodeFile(tuple(episodes), len(data) - whole)


def write_text(path: str | Path, text: str | bytes) -> None:
    """Writes a file under a temporary name beside it, then renames it, so that no reader sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(text.encode() if isinstance(text, str) else text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _line(episode: Episode) -> str:
    # ASCII only: model-written text may hold lone surrogates and line separators.
    return json.dumps(to_json(episode), ensure_ascii=True, separators=(",", ":")) + "\n"


def _tail(f) -> int:
    """Bytes after the last line break of an open binary file."""
    end = f.seek(0, os.SEEK_END)
    place, block = end, 1 << 16
    while place > 0:
        start = max(0, place - block)
        f.seek(start)
        found = f.read(place - start).rfind(b"\n")
        if found >= 0:
            return end - (start + found + 1)
        place = start
    return end
