"""The report as a file: self-contained, complete, and inert whatever the episodes hold."""

import base64
import hashlib
import json
import re

from report_samples import EVIL, RUN, sample_episodes, sample_rows, sample_steps

from sage_jax.report import tables
from sage_jax.report.curves import curves_png, series
from sage_jax.report.html import embed, library_of, report_html, write_report


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def test_everything_is_in_one_inert_file(tmp_path):
    episodes = sample_episodes(evil=True)
    write_report(
        tmp_path / "report.html", title=f"t {EVIL}", rows=sample_rows(episodes), episodes=episodes, curves=curves_png(sample_steps()),
        differences=[(EVIL, tables.paired_difference([episodes["SFT"]], [episodes["SAGE"]], "tgc", seed=0))], config=EVIL,
    )
    html = (tmp_path / "report.html").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    scripts = re.findall(r"<script[^>]*>", html)
    assert scripts == ['<script type="application/json" id="data">', "<script>"]
    assert html.count("</script") == 2 and "<!--" not in html and "<img src=x" not in html
    own = html.rsplit("<script>", 1)[1].rsplit("</script>", 1)[0]
    assert f"'sha256-{base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()}'" in html
    assert not re.search(r'(?:src|href)="(?!data:|#)', html) and "url(" not in html and "@import" not in html
    data = data_of(html)
    assert len(data["episodes"]) == sum(map(len, episodes.values()))
    assert data["episodes"][0]["instruction"] == episodes["base"][0].instruction
    assert any(EVIL in t["observation"] for e in data["episodes"] for t in e["turns"])


def test_code_is_marked_inside_the_response():
    episodes = {"a": sample_episodes()["SAGE"][:1]}
    episodes["a"][0].turns[0].response = "\U0001f600 think\n```python\nx = 1\n```"
    episodes["a"][0].turns[0].code = "x = 1\n"
    turn = data_of(report_html("t", [], episodes))["episodes"][0]["turns"][0]
    units = turn["response"].encode("utf-16-le")
    assert units[2 * turn["code"][0] : 2 * turn["code"][1]].decode("utf-16-le") == "x = 1\n"


def test_the_opening_holds_demonstrations_but_no_turn():
    episode = sample_episodes()["SAGE"][0]
    demo = [{"role": "user", "content": "demo"}, {"role": "assistant", "content": "demo answer"}]
    episode.messages[1:1] = demo
    opening = data_of(report_html("t", [], {"a": [episode]}))["episodes"][0]["opening"]
    assert [role for role, _ in opening] == ["system", "user", "assistant", "user"]


def test_library_counts_episodes_not_calls():
    skills = library_of(sample_episodes()["SAGE"])
    assert skills and skills[0].uses == 2 * RUN and skills[0].successes <= skills[0].uses
    assert len({s.id for s in skills}) == len(skills)


def test_embed_survives_hostile_text():
    text = "</script><!-- & \u2028 \ud800 <script>"
    out = embed([text])
    assert not set("<>&") & set(out) and out.isascii() and json.loads(out) == [text]


def test_a_report_without_anything_still_opens():
    html = report_html("empty", [], {})
    assert "No results yet" in html and data_of(html)["episodes"] == []


def test_incomplete_rows_say_so_before_the_table():
    episodes = sample_episodes()["base"]
    html = report_html("t", [tables.score([episodes], "base", asked=len(episodes) + 5)], {})
    assert html.index("INCOMPLETE") < html.index("<table")


def test_curves_with_all_some_and_no_keys(tmp_path):
    (tmp_path / "curves.png").write_bytes(curves_png(sample_steps(), "Run"))
    for rows in ([], [{"step": 1, "reward/mean": float("nan"), "update/gap_max_nats": 0.0, "turns/mean": 2}]):
        assert curves_png(rows).startswith(b"\x89PNG")
    assert (tmp_path / "curves.png").stat().st_size > 30_000


def test_series_skips_what_is_no_number_and_takes_the_last_row_of_a_step():
    rows = [{"step": 2, "a": 5.0}, {"step": 1, "a": float("inf")}, {"step": 0, "a": None}, {"step": 2, "a": 6}, {"step": 3}]
    steps, values = series(rows, "a")
    assert steps.tolist() == [2] and values.tolist() == [6]
