"""`fserver.command`: what starts this package again, whatever package the current directory has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fserver.command import command

ROOT = Path(__file__).resolve().parents[2]
JOINT = """
import os
os.environ["FSERVER_LOG"] = "error"
import fserver_lib as f, torch

f.init()
if os.environ["DMLC_ROLE"] == "worker":
    f.wait(f.push_pull([torch.ones(3)], [1], [out := torch.zeros(3)], [2]))
    print("got", out.tolist(), flush=True)
else:
    for handler, [x], _ in f.get_batch():
        f.respond([x + 1], handler)
f.stop()
"""


@pytest.fixture
def elsewhere(tmp_path):
    """A directory with another package of this name, which cannot be imported."""
    (tmp_path / "fserver").mkdir()
    (tmp_path / "fserver/__init__.py").write_text("raise ImportError('the wrong package')")
    return tmp_path


def run(line, directory, input="", **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "PYTHON"))}
    return subprocess.run(
        line, cwd=directory, env={**env, **variables}, input=input, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip


def test_the_package_of_the_current_directory_is_not_taken(elsewhere):
    assert "the wrong package" in run([sys.executable, "-m", "fserver", "env"], elsewhere).stderr
    for variables in ({}, {"PYTHONSAFEPATH": "1"}, {"PYTHONPATH": str(elsewhere)}):
        done = run(command("config", "--cflags"), elsewhere, **variables)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert done.stdout == f"-I{ROOT / 'fserver/include'}\n"


def test_its_folder_is_no_place_for_modules(elsewhere):
    """Modules of the package have names like `errors`, which programs may have too."""
    python, *words = command("--version")
    done = run([python, "-i", *words], elsewhere, input="import sys; print(sys.path)")
    assert f"'{ROOT / 'fserver'}'" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("['")


def test_a_launcher_and_its_scheduler(elsewhere, tmp_path_factory):
    script = tmp_path_factory.mktemp("program") / "joint.py"
    script.write_text(JOINT)
    done = run(
        [sys.executable, str(script)],
        elsewhere,
        PYTHONPATH=str(ROOT),
        DMLC_ROLE="joint",
        STEPMESH_BACKEND="CPU",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[worker 0] got [2.0, 2.0, 2.0]\n"
