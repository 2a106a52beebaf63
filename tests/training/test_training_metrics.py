"""metrics.jsonl and TensorBoard events of broken, resumed and unbroken runs."""

import json
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sage_jax.errors import ConfigError
from sage_jax.sampling.stats import Stats
from sage_jax.training.metrics import MetricsWriter, is_time_metric, read_metrics


def run(workdir, first, last, resume):
    with MetricsWriter(workdir, resume_step=resume) as w:
        for step in range(first, last):
            w.write(step, {"update/loss": step * 0.5, "time/step_s": 1.0, "tokens": step})


def without_times(workdir):
    return [{k: v for k, v in r.items() if not is_time_metric(k)} for r in read_metrics(workdir)]


def test_resumed_file_equals_unbroken_one(tmp_path):
    run(tmp_path / "a", 0, 6, 0)
    run(tmp_path / "b", 0, 5, 0)  # died after step 4, whose checkpoint was that of step 2
    with (tmp_path / "b" / "metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "update/lo')
    run(tmp_path / "b", 3, 6, 3)
    assert without_times(tmp_path / "a") == without_times(tmp_path / "b")
    events = EventAccumulator(str(tmp_path / "b" / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert [e.step for e in events.Scalars("update/loss")] == [0, 1, 2, 3, 4, 5]


def test_writing_needs_no_thread(tmp_path):
    """Closing would wait for it, and after Ctrl-C in the wrong moment for long."""
    before = threading.active_count()
    with MetricsWriter(tmp_path) as w:
        w.write(0, {"a": 1})
        assert threading.active_count() == before
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert [e.value for e in events.Scalars("a")] == [1], "what is written is there before the file is closed"


def test_new_run_in_an_old_folder_starts_empty(tmp_path):
    run(tmp_path, 0, 3, 0)
    run(tmp_path, 0, 1, 0)
    assert len(read_metrics(tmp_path)) == 1


def test_numbers_of_all_kinds_and_non_finite_ones(tmp_path):
    with MetricsWriter(tmp_path) as w:
        w.write(0, {"a": np.float32(0.5), "b": jnp.asarray(2), "c": True, "d": float("nan"), "e": -np.inf})
    line = read_metrics(tmp_path)[0]
    assert (line["a"], line["b"], line["c"]) == (0.5, 2, 1) and line["d"] is None and line["nonfinite"] == ["d", "e"]
    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))


def test_the_samplers_figures_are_metrics_with_a_meaning(tmp_path):
    figures = Stats(slots=4, sampled_tokens=3).metrics() | {"sampler/retraces": 0}
    with MetricsWriter(tmp_path) as w:
        w.write(0, figures)
    documented = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    assert not [k for k in figures if f"`{k}`" not in documented] and all(map(is_time_metric, figures))


def test_wrong_names_values_and_steps_are_refused(tmp_path):
    with MetricsWriter(tmp_path) as w:
        for name in ("Loss", "a b", "step", "/x", ""):
            with pytest.raises(ValueError, match="metric name"):
                w.write(0, {name: 1.0})
        for value in ("1", None, [1.0, 2.0], np.zeros(2)):
            with pytest.raises(TypeError, match="one number"):
                w.write(0, {"x": value})
        w.write(4, {"x": 1})
        w.write(4, {"y": 1})
        with pytest.raises(ValueError, match="after those of step 4"):
            w.write(3, {"x": 1})
    assert [r["step"] for r in read_metrics(tmp_path)] == [4, 4]


def test_damage_inside_the_file_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for damaged in ("xx", '{"a": 1}', "[1]", '{"step": null}'):
        path.write_text(f'{{"step": 0}}\n{damaged}\n{{"step": 2}}\n')
        with pytest.raises(ConfigError, match="line 2"):
            read_metrics(tmp_path)
    path.write_text('{"step": 0, "a": NaN}\n{"step": 1}\n{"step": 2, "a"')
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1]
