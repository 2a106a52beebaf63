"""The report in a real browser: table, curves and an episode are shown, and hostile text stays text."""

import html
import re
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest
from report_samples import EVIL, sample_episodes, sample_rows, sample_steps

from sage_jax.report import tables
from sage_jax.report.curves import curves_png
from sage_jax.report.html import write_report

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome", "chrome") if (p := shutil.which(n))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this system; install the package `chromium` (issue 2, must show 5)"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    episodes = sample_episodes(evil=True)
    differences = [("SAGE over SFT", tables.paired_difference([episodes["SFT"]], [episodes["SAGE"]], "sgc", seed=0))]
    write_report(folder / "report.html", title="A report", rows=sample_rows(episodes), episodes=episodes, curves=curves_png(sample_steps()), differences=differences)
    return folder / "report.html", episodes


def browse(page, *options, anchor=""):
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={page.parent / 'profile'}",
        "--window-size=1400,3600", "--hide-scrollbars", "--virtual-time-budget=4000", *options, page.as_uri() + anchor,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def test_table_and_the_chosen_episode_are_in_the_page(page):
    path, episodes = page
    index = len(episodes["base"]) + len(episodes["SFT"]) + 4  # SAGE, second scenario, second task
    chosen = episodes["SAGE"][4]
    dom = browse(path, "--dump-dom", anchor=f"#episode-{index}").stdout
    assert "<title>A report</title>" in dom  # no script of the episodes has run
    for row in sample_rows(episodes):
        assert all(f"<td>{c}</td>" in dom for c in tables.cells(row))
    assert 'src="data:image/png;base64,' in dom
    article = dom.split('id="episode">', 1)[1].split("</article>", 1)[0]
    text = html.unescape(re.sub(r"<[^>]+>", "\n", article))
    assert chosen.task_id in text and "SAGE · test_normal" in text
    for turn in chosen.turns:
        assert turn.code.strip() in text and turn.observation.splitlines()[-1] in text
    for requirement in (*chosen.judgement.passes, *chosen.judgement.failures):
        assert requirement in text
    assert chosen.offered[0].signature in text and f"called {chosen.called[0]}" in text
    assert EVIL in text and "<script" not in article and "<img" not in article
    listed = dom.split('id="list"', 1)[1].split('id="episode"', 1)[0]
    assert listed.count("<button") == sum(map(len, episodes.values()))
    assert dom.split('id="skills">', 1)[1].split("</section>", 1)[0].count("<details") == 1


def test_the_curves_are_painted(page, tmp_path):
    path, _ = page
    shot = tmp_path / "shot.png"
    browse(path, f"--screenshot={shot}")
    pixels = np.round(matplotlib.image.imread(shot)[..., :3] * 255).astype(int)
    for colour in ((0x25, 0x63, 0xEB), (0xDB, 0x6B, 0x1A), (0x16, 0x91, 0x6A)):  # lines of the plots
        assert (np.abs(pixels - colour).max(axis=-1) < 30).sum() > 300, colour
