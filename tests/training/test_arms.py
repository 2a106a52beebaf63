"""Arms without a world: greedy and sampled runs apart, several folders together, what the tables and files then say."""

import json

import pytest

from configs import quickstart, sage_demo
from sage_jax.agent.trajectory import End, Episode, Turn
from sage_jax.report.episodes import write_episodes
from sage_jax.training import arms, experiment
from sage_jax.training.comparison import compare
from sage_jax.training.evaluate_command import _plain
from sage_jax.world.roots import DataRoot
from sage_jax.world.types import Judgement


def run(*scenarios, split="test_normal"):
    """One letter a task: S solved, x not, L solved but its code ended the world, E infrastructure error."""
    made = []
    for n, letters in enumerate(scenarios):
        for k, letter in enumerate(letters, 1):
            end = {"E": End.INFRASTRUCTURE_ERROR, "L": End.WORLD_LOST, "x": End.MAX_TURNS, "S": End.COMPLETED}[letter]
            judgement = None if letter == "E" else Judgement(2, 2, letter in "SL", letter in "SL", (), ())
            turn = Turn("", "x", "", False, letter in "SL", (), "block", 10)
            made.append(Episode(f"{n:07x}_{k}", f"{n:07x}", split, 1, "", f"r/{n}", k, [], [turn], end, judgement, (), (), (), None))
    return made


def arm(name, runs, indices, asked=None, split="test_normal"):
    return arms.Arm(name, split, runs, asked or max(map(len, runs)), indices)


def test_greedy_and_sampled_runs_have_rows_of_their_own():
    both = arm("SAGE", [run("SSS"), run("xxx"), run("SxS")], (0, 1, 2))
    assert [(label, len(runs)) for label, runs in both.rows()] == [("SAGE, greedy", 1), ("SAGE, sampled (2 runs)", 2)]
    assert [label for label, _ in arm("SAGE", [run("SSS")], (0,)).rows()] == ["SAGE"]
    assert [label for label, _ in arm("SAGE", [run("SSS")] * 2, (1, 2)).rows()] == ["SAGE"]
    start = arm("SFT", [run("xxx"), run("xxx")], (0, 1))
    differences = arms.paired_by_kind(start, both, ("tgc",))
    assert [(label, d.mean) for label, d in differences] == [("SAGE - SFT, greedy", 1.0), ("SAGE - SFT, sampled", pytest.approx(1 / 3))]
    ((label, d),) = arms.paired_by_kind(arm("SFT", [run("xxx")], (0,)), both, ("tgc",))
    assert (label, d.mean) == ("SAGE - SFT", 1.0)


def test_the_report_does_not_average_over_kinds(tmp_path, capsys):
    config = quickstart.get_config()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    made = [arm("SFT", [run("xxx"), run("SSS")], (0, 1)), arm("SAGE", [run("SSS"), run("SSS")], (0, 1))]
    experiment.report(config, tmp_path, DataRoot(tmp_path, "miniworld"), made, {"train": 1.0}, "isolation")
    table = (tmp_path / "table.md").read_text()
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| S")}
    assert rows == {
        "SFT, greedy · test_normal": "0.0", "SFT, sampled (1 run) · test_normal": "100.0",
        "SAGE, greedy · test_normal": "100.0", "SAGE, sampled (1 run) · test_normal": "100.0",
    }
    assert "test_normal: SAGE - SFT, greedy: TGC % +100.0" in table and "test_normal: SAGE - SFT, sampled: TGC % +0.0" in table
    assert not list(tmp_path.glob(".*.tmp")) and "test_normal: SAGE - SFT, greedy" in capsys.readouterr().out


def test_folders_asked_for_different_tasks_are_added_up(tmp_path):
    for n, made in enumerate((run("SSS", "SSS"), run("SSS")), 1):
        folder = tmp_path / str(n) / "test_normal"
        write_episodes(folder / "run0.jsonl", made)
        (folder / "arm.json").write_text(json.dumps({"arm": "SAGE", "split": "test_normal", "asked": len(made), "runs": [0]}))
    text = compare([f"SAGE={tmp_path}/1", f"SAGE={tmp_path}/2"], "", ["test_normal"], ["sgc"])
    assert text.splitlines()[2] == "All tasks scored (SAGE, greedy: 9)."


@pytest.mark.parametrize(
    ("split", "scenarios", "said"), [("test_normal", 0, True), ("test_normal", 4, False), ("mine", 0, False), ("test_normal@1", 0, False)]
)
def test_the_engines_own_report_is_named_where_it_can_be_had(tmp_path, capsys, split, scenarios, said):
    config = sage_demo.get_config()
    config.eval.keep_outputs = True
    config.eval.scenarios = scenarios
    _plain(config, tmp_path / "a b", arm("SAGE", [run("SSL"), run("SSS")], (0, 1), split=split))
    out = capsys.readouterr().out
    line = f"cd '{tmp_path}/a b' && APPWORLD_ROOT=. appworld evaluate sage-run0_test_normal test_normal"
    assert (line in out) == said == ("appworld evaluate" in out)
    assert "1 tasks pass every test without complete_task, or their code ended its own world" in out and "0000000_3" in out
    assert f"SAGE, greedy · {split}" in out and f"SAGE, sampled (1 run) · {split}" in out
