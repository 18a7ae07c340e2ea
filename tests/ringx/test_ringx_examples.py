"""The examples run, and their losses are those of one process."""

from __future__ import annotations

import dataclasses
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from launch import launched
from torch import Tensor
from world import Rank, World

from fserver.ringx import layout_of, ringx_attention

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


@pytest.mark.parametrize(
    ("name", "algorithm"), [("gpt", "auto"), ("gpt", "X2"), ("gpt", "X2o"), ("vit", "auto")]
)
def test_losses_are_equal(name: str, algorithm: str, tmp_path: Path):
    if name == "vit":
        pytest.importorskip("sklearn", reason="no scikit-learn: pip install 'fserver[ringx]'")
    plot = tmp_path / "losses.png"
    program = EXAMPLES / f"{name}.py"
    options = "--algorithm", algorithm, "--steps", "2", "--plot", str(plot)
    if (name, algorithm) == ("gpt", "auto"):  # as a user starts it
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        text = run(*launch, str(program), *options)
    else:
        text = launched(program, *options)
    assert "losses equal" in text
    assert plot.read_bytes().startswith(b"\x89PNG")


def trained(me: Rank, algorithm: str) -> tuple[list[float], list[float]]:
    """Losses of the ranks of the world with the large models' weights in parts and blocks computed
    again, and of each alone with whole ones."""
    sys.path.insert(0, str(EXAMPLES))
    import common
    import gpt

    layout = layout_of(algorithm, causal=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ringx_attention(q, k, v, causal=True, algorithm=algorithm, layout=layout)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(
            *heads_first, is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    small = dataclasses.replace(gpt.CONFIGS["small"], tokens=64, batch=1, steps=3)
    large = dataclasses.replace(small, large=True)

    def model(config: Any) -> Any:
        made = gpt.model(small)  # with its vocabulary
        made.config = config
        return made

    example = common.Example("GPT", {}, model, gpt.batches, gpt.loss, True)
    given = layout, torch.device("cpu"), torch.float32
    in_parts, *_ = common.train(example, large, me.rank, me.size, attend, *given)
    return in_parts, common.train(example, small, 0, 1, whole, *given)[0]


@pytest.mark.parametrize("algorithm", ["auto", "X2", "X2o"])
def test_weights_in_parts(world: World, algorithm: str):
    for in_parts, alone in world.run((0, 1, 2, 3), trained, algorithm):
        assert in_parts == pytest.approx(alone, rel=1e-5) and alone[2] < alone[0]


def test_algorithm_with_another_mask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["gpt", "--algorithm", "X1"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "gpt.py"), run_name="__main__")
    assert "algorithm X1 with causal=True: its mask is full" in capsys.readouterr().err


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
