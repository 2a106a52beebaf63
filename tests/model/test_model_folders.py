"""Folders whole or not at all: failures, kills and full disks leave the old one."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sage_jax.errors import CheckpointError
from sage_jax.model import folders
from sage_jax.model.folders import whole_folder


def put(folder: Path, text: str) -> None:
    with whole_folder(folder, 0, "mark") as part:
        (part / "mark").write_text(text)


def run(code: str, *args: object) -> subprocess.CompletedProcess:
    """In a process of its own, that may kill itself; jax is not imported."""
    path = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)], env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_replaced_and_a_failure_leaves_the_old_one(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(folders, "_exchange", lambda a, b: False)
    m = tmp_path / "deep" / "m"
    for text in ("first", "second"):
        put(m, text)
        assert (m / "mark").read_text() == text
    with pytest.raises(RuntimeError, match="in between"):
        with whole_folder(m, 0, "mark") as part:
            (part / "mark").write_text("third")
            raise RuntimeError("in between")
    assert (m / "mark").read_text() == "second"
    assert [p.name for p in m.parent.iterdir()] == ["m"]


def test_what_is_no_such_folder_is_not_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    for name in ("home", "file"):
        with pytest.raises(CheckpointError, match="is not a folder with mark: it is not replaced"):
            put(tmp_path / name, "x")
    (tmp_path / "empty").mkdir()
    put(tmp_path / "empty", "x")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    put(tmp_path / "link", "through the link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty/mark").read_text() == "through the link"


@pytest.mark.parametrize("where, text", [("(part / 'mark').write_text('half'); die()", "old"), ("folders.shutil.rmtree = die", "new")])
def test_a_killed_write_leaves_a_whole_folder_and_the_next_one_tidies_up(tmp_path, where, text):
    code = f"""
    import os, sys
    from pathlib import Path
    from sage_jax.model import folders
    def die(*a, **k): os.kill(os.getpid(), 9)
    with folders.whole_folder(Path(sys.argv[1]) / "m", 0, "mark") as part:
        (part / "mark").write_text("new")
        {where}
    """
    put(tmp_path / "m", "old")
    assert run(code, tmp_path).returncode == -9
    assert (tmp_path / "m/mark").read_text() == text
    assert len(list(tmp_path.iterdir())) == 2  # what the kill left
    living = tmp_path / f".m.{folders._host()}-{os.getppid()}.part"
    living.mkdir()
    put(tmp_path / "m", "newer")
    assert sorted(p.name for p in tmp_path.iterdir()) == [living.name, "m"] and (tmp_path / "m/mark").read_text() == "newer"


def test_a_kill_between_two_renames_is_mended_by_the_next_write(tmp_path):
    code = """
    import os, sys
    from pathlib import Path
    from sage_jax.model import folders
    folders._exchange = lambda a, b: False
    rename = os.rename
    def once(a, b):
        rename(a, b)
        os.kill(os.getpid(), 9)
    with folders.whole_folder(Path(sys.argv[1]) / "m", 0, "mark") as part:
        (part / "mark").write_text("new")
        folders.os.rename = once
    """
    put(tmp_path / "m", "old")
    assert run(code, tmp_path).returncode == -9
    assert not (tmp_path / "m").exists()
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "m", 0, "mark"):
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["m"] and (tmp_path / "m/mark").read_text() == "old"


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    put(tmp_path / "m", "old")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 999, 999))
    with pytest.raises(CheckpointError, match=r"m needs 1,000 bytes and .* has 999 free"):
        with whole_folder(tmp_path / "m", 1_000, "mark"):
            raise AssertionError("reached")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_full_disk_in_the_middle_leaves_the_old_folder(tmp_path):
    code = """
    import resource, sys
    from pathlib import Path
    import numpy as np
    from sage_jax.errors import CheckpointError
    from sage_jax.model.folders import whole_folder
    from sage_jax.model.safetensors_io import DTYPES, Writer
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # no file may be larger: the system's error is like that of a full disk
    try:
        with whole_folder(Path(sys.argv[1]) / "m", 0, "mark") as part:
            with Writer(part, [("a", (1_000,)), ("b", (3_000,))], DTYPES["float32"], 1 << 30) as writer:
                writer.write("a", np.zeros(1_000, np.float32))
                writer.write("b", np.zeros(3_000, np.float32))
    except CheckpointError as error:
        print(error)
    """
    put(tmp_path / "m", "old")
    done = run(code, tmp_path)
    assert "m was not written, the old one stays: [Errno 27]" in done.stdout, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["m"] and (tmp_path / "m/mark").read_text() == "old"
