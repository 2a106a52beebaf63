"""The shell scripts, with stand-ins for what they start."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SAYS = '#!/usr/bin/env bash\necho "$@" >> "$LOG"\n'


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(command, cwd, log, **env):
    done = subprocess.run(command, cwd=cwd, env={**os.environ, "LOG": str(log), **env}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return log.read_text()


@pytest.mark.parametrize(("given", "where"), [("mine", "{here}/mine"), ("/abs/mine", "/abs/mine"), ("~/mine", "~/mine"), (None, "runs/smoke")])
def test_quickstart_takes_the_workdir_as_the_caller_sees_it(tmp_path, given, where):
    here, repository = tmp_path / "here", tmp_path / "repository"
    here.mkdir()
    script(repository / "launch" / "setup.sh", "")
    script(repository / ".venv" / "bin" / "python", SAYS)
    shutil.copy(ROOT / "launch" / "quickstart.sh", repository / "launch")
    arguments = ["--smoke", *([f"--workdir={given}"] if given else [])]
    said = run(["bash", str(repository / "launch" / "quickstart.sh"), *arguments], here, tmp_path / "log").splitlines()[-1]
    assert said == f"-m sage_jax.train --config=configs/quickstart.py:smoke --workdir={where.format(here=here)}"


def test_setup_makes_a_venv_without_pip_anew(tmp_path):
    """As a failed `python -m venv` leaves one: an interpreter, no pip."""
    script(tmp_path / ".venv" / "bin" / "python", "#!/usr/bin/env bash\nexit 1\n")
    made = 'if [ "$1 $2" = "-m venv" ]; then printf "#!/usr/bin/env bash\\nexit 0\\n" > .venv/bin/python; fi\n'
    script(tmp_path / "python", SAYS + made)
    for name in ("requirements.txt", "pyproject.toml"):
        (tmp_path / name).write_text("")
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "setup.sh", tmp_path / "launch")
    for _ in range(2):
        said = run(["bash", "launch/setup.sh"], tmp_path, tmp_path / "log", PYTHON=str(tmp_path / "python"))
    assert said.count("-m venv --clear .venv") == 1 and (tmp_path / ".venv" / ".sage_setup").exists()
