"""Episodes to JSON lines and back."""

import dataclasses

import pytest

from sage_jax.agent.trajectory import End, Episode, TokenRecord, Turn
from sage_jax.errors import ConfigError
from sage_jax.report.episodes import (
    append_episodes,
    from_json,
    read_episodes,
    to_json,
    write_episodes,
)
from sage_jax.skills.extract import extract
from sage_jax.skills.record import Origin
from sage_jax.world.types import InstallVerdict, Judgement


def episode(n=0, **changes):
    skill = extract([(0, 'import os\nK = 1\ndef h():\n    return K\ndef f(x):\n    """D."""\n    return h(), os\n')], Origin("t", 0, "r", 1), created=1.5).skills[1]
    turn = Turn("say ```python\nf(1)\n```", "f(1)", "\ud800 \u2028 </script> \x00 é", False, True, (skill.id,), "block", 7, "time", 3, 0.25, 0.5)
    record = TokenRecord([1, 2, 3], [0, 1, 1], [0.0, -0.5, -1e-9], [1], [4])
    made = Episode(
        f"abc{n:04d}_2", f"abc{n:04d}", "dev", 2, "Do it.", "step1/chain0/rollout0", 2, [{"role": "user", "content": "Do it.\n"}], [turn],
        End.COMPLETED, Judgement(1, 2, False, True, ("a",), ("b",)), (skill,), (InstallVerdict(skill.id, True, ""),), (skill,), record, "", 2.5,
    )
    return dataclasses.replace(made, **changes)


def test_lossless_but_for_tokens(tmp_path):
    episodes = [episode(0), episode(1, judgement=None, end=End.INFRASTRUCTURE_ERROR, error="WorkerDied", tokens=None)]
    write_episodes(tmp_path / "e.jsonl", episodes)
    assert list(read_episodes(tmp_path / "e.jsonl").episodes) == [dataclasses.replace(e, tokens=None) for e in episodes]
    assert [p.name for p in tmp_path.iterdir()] == ["e.jsonl"]
    assert len((tmp_path / "e.jsonl").read_text().splitlines()) == 2


def test_half_written_last_line_is_recognised_and_repaired(tmp_path):
    path = tmp_path / "sub" / "e.jsonl"
    assert append_episodes(path, [episode(0)]) == 0
    append_episodes(path, [episode(1)])
    whole = path.read_bytes()
    for cut in (1, 50, 200):
        path.write_bytes(whole[:-cut])
        held = read_episodes(path)
        assert [e.task_id for e in held.episodes] == ["abc0000_2"] and held.half_written > 0
    assert append_episodes(path, [episode(2)]) > 0
    held = read_episodes(path)
    assert [e.task_id for e in held.episodes] == ["abc0000_2", "abc0002_2"] and held.half_written == 0


def test_a_damaged_middle_line_raises_with_its_number(tmp_path):
    path = tmp_path / "e.jsonl"
    write_episodes(path, [episode(0), episode(1)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[0][:40], lines[1]]) + "\n")
    with pytest.raises(ConfigError, match=r"e\.jsonl, line 2: not an episode.*move it away"):
        read_episodes(path)


def test_unknown_field_raises():
    with pytest.raises(TypeError):
        from_json({**to_json(episode()), "score": 1})
