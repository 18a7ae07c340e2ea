"""The examples run, and their losses are those of one process."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples/ringx"


def run(*command: str) -> str:
    """What the command prints. It has to end well within two minutes."""
    search = os.pathsep.join(filter(None, (str(EXAMPLES.parents[1]), os.getenv("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_losses_are_equal(name: str, tmp_path: Path):
    if name == "vit":
        pytest.importorskip("sklearn", reason="no scikit-learn: pip install 'fserver[ringx]'")
    plot = tmp_path / "losses.png"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    text = run(*launch, str(EXAMPLES / f"{name}.py"), "--steps", "2", "--plot", str(plot))
    assert "losses equal" in text
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "config", "rows"),
    [("gpt", "llama3-8b-1m", "1,048,576 tokens"), ("vit", "360x720", "259,200 tokens")],
)
def test_estimates(
    name: str,
    config: str,
    rows: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, "--config", config, "--ranks", "8"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert rows in text
    assert "memory of a GPU" in text
    assert "time of a step" in text
