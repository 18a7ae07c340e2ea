"""The examples run, and their losses and outputs are those of one process."""

from __future__ import annotations

import dataclasses
import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launched
from torch import Tensor
from world import Rank, World, keep_groups

from fserver.ringx import layout_of

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
    ("name", "algorithm", "split"),
    [
        pytest.param("gpt", "auto", "", marks=pytest.mark.long),
        pytest.param("gpt", "X2", "", marks=pytest.mark.long),
        pytest.param("gpt", "X2o", "", marks=pytest.mark.long),
        pytest.param("gpt", "auto", "--tensor-parallel 2", marks=pytest.mark.long),
        pytest.param(
            "vit", "auto", "", marks=pytest.mark.long
        ),  # test_ringx_slurm.py starts it too
        pytest.param("vit", "auto", "--context-parallel 1", marks=pytest.mark.long),
    ],
)
def test_losses_are_equal(name: str, algorithm: str, split: str, tmp_path: Path):
    if name == "vit":
        pytest.importorskip("sklearn", reason="no scikit-learn: pip install scikit-learn")
    plot = tmp_path / "losses.png"
    program = EXAMPLES / f"{name}.py"
    options = "--algorithm", algorithm, "--steps", "2", "--plot", str(plot), *split.split()
    if (name, algorithm, split) == ("gpt", "auto", ""):  # as a user starts it
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        text = run(*launch, str(program), *options)
    else:
        text = launched(program, *options)
    assert "losses equal" in text
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_a_split_llama_is_itself(dtype: str):
    pytest.importorskip("transformers", reason="needs transformers (make setup)")
    text = launched(EXAMPLES / "llama.py", "--dtype", dtype, "--tokens", "64")
    assert f"64 tokens over 2 ranks, {dtype}" in text and "of gradients " in text


@pytest.mark.long
def test_weights_of_a_folder(tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="needs transformers (make setup)")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    text = launched(EXAMPLES / "llama.py", "--model", str(tmp_path), "--tokens", "12")
    assert "12 tokens over 2 ranks, float32" in text


def trained(
    me: Rank, name: str, counts: dict[str, int], order: str, algorithm: str = "auto",
    large: bool = False,
) -> tuple[list[float], list[float], float]:  # fmt: skip
    """Losses of the ranks together, and of each alone, and how far the weights are apart at rank 0,
    relative to the largest one. `large`: as the large models are trained, in float32, with blocks
    computed again and weights in parts; else in float64."""
    sys.path.insert(0, str(EXAMPLES))
    import common
    import parallel

    program = importlib.import_module(name)
    layout = layout_of(algorithm, causal=name == "gpt")
    tokens = {} if name == "vit" else {"tokens": 64}  # vit needs those of its pictures
    small = dataclasses.replace(
        program.CONFIGS["small"], batch=counts["dp"] if large else 4, steps=3, **tokens
    )

    def model(config: Any) -> Any:
        made = program.model(small)  # with its vocabulary
        made.config = config
        return made

    example = common.Example(name, {}, model, program.batches, program.loss, name == "gpt")
    ranks = parallel.ranks_of(counts, order, "cpu")
    if large:
        keep_groups()  # torch looks the groups of equal meshes up once
    attend = common.sharded(example, algorithm, layout, ranks)
    given = layout, torch.device("cpu"), torch.float32 if large else torch.float64
    config = dataclasses.replace(small, large=large)
    together = common.train(example, config, ranks, attend, *given)
    found = together.model.whole_weights(ranks.mesh["tp"])
    alone = common.train(example, small, None, common.whole(example), *given)
    want = alone.model.state_dict()
    assert {*found} == ({*want} if dist.get_rank() == 0 else set())
    apart = [(found[key] - want[key]).abs().max() / want[key].abs().max() for key in found]
    return together.losses, alone.losses, float(max(apart, default=0.0))


@pytest.mark.parametrize("algorithm", ["auto", "X2", "X2o"])
def test_weights_in_parts(world: World, algorithm: str):
    counts = {"cp": 4, "tp": 1, "dp": 1}
    found = world.run((0, 1, 2, 3), trained, "gpt", counts, "cp-tp-dp", algorithm, large=True)
    for in_parts, alone, _ in found:
        assert in_parts == pytest.approx(alone, rel=1e-5) and alone[2] < alone[0]


@pytest.mark.parametrize(
    ("cp", "tp", "dp", "order"),
    [(2, 2, 1, "cp-tp-dp"), (2, 1, 2, "tp-dp-cp"), (1, 2, 2, "dp-tp-cp")],
)
def test_weights_in_parts_of_some_ranks(world: World, cp: int, tp: int, dp: int, order: str):
    counts = {"cp": cp, "tp": tp, "dp": dp}
    for in_parts, alone, apart in world.run(
        (0, 1, 2, 3), trained, "gpt", counts, order, large=True
    ):
        assert in_parts == pytest.approx(alone, rel=1e-5) and alone[2] < alone[0]
        assert apart < 1e-3


@pytest.mark.parametrize(
    ("name", "cp", "tp", "dp", "order"),
    [
        ("gpt", 2, 2, 1, "cp-tp-dp"),
        ("gpt", 2, 2, 1, "tp-cp-dp"),
        ("gpt", 2, 1, 2, "dp-cp-tp"),
        ("gpt", 1, 2, 2, "cp-tp-dp"),
        pytest.param("vit", 2, 2, 1, "dp-tp-cp", marks=pytest.mark.long),
        ("vit", 2, 1, 2, "cp-dp-tp"),
        ("vit", 1, 2, 2, "tp-dp-cp"),
    ],
)
def test_context_tensor_and_data_ranks(
    world: World, name: str, cp: int, tp: int, dp: int, order: str
):
    """In float64 a wrong factor of the gradients shows, as AdamW adds 1e-8 to their size."""
    if name == "vit":
        pytest.importorskip("sklearn", reason="no scikit-learn: pip install scikit-learn")
    counts = {"cp": cp, "tp": tp, "dp": dp}
    for together, alone, apart in world.run((0, 1, 2, 3), trained, name, counts, order):
        assert together == pytest.approx(alone, rel=1e-12)
        assert apart < 1e-9


def neighbours(me: Rank, counts: dict[str, int], order: str) -> dict[str, list[int]]:
    """The ranks of each group of this process."""
    sys.path.insert(0, str(EXAMPLES))
    import parallel

    ranks = parallel.ranks_of(counts, order, "cpu")
    groups = {name: ranks.mesh[name].get_group() for name in counts}
    groups["same"] = ranks.same.get_group()
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def test_neighbours_are_those_of_the_first_name(world: World):
    counts = {"cp": 2, "tp": 2, "dp": 1}
    ranks = world.run((0, 1, 2, 3), neighbours, counts, "cp-tp-dp")
    assert ranks[1] == {"cp": [0, 1], "tp": [1, 3], "dp": [1], "same": [0, 1]}
    ranks = world.run((0, 1, 2, 3), neighbours, counts, "dp-tp-cp")
    assert ranks[1] == {"cp": [1, 3], "tp": [0, 1], "dp": [1], "same": [1, 3]}
    counts = {"cp": 2, "tp": 1, "dp": 2}
    ranks = world.run((0, 1, 2, 3), neighbours, counts, "tp-dp-cp")
    assert ranks[2] == {"cp": [0, 2], "tp": [2], "dp": [2, 3], "same": [0, 1, 2, 3]}


def test_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two ranks train, with weights in parts. Two predict, as one process does."""
    pytest.importorskip("sklearn", reason="no scikit-learn: pip install scikit-learn")
    from PIL import Image

    monkeypatch.syspath_prepend(str(EXAMPLES))
    weights, out, mine = (str(tmp_path / name) for name in ("vit.pt", "out", "mine.png"))
    Image.effect_noise((40, 20), 50).save(mine)
    program = EXAMPLES / "vit.py"
    split = "--tensor-parallel", "2"
    text = launched(program, *split, "--steps", "2", "--save", weights)
    assert "(1 context x 2 tensor x 1 data)" in text and "losses equal" in text
    given = "--weights", weights, "--images", "china.jpg", mine, "--out", out
    text = launched(program, "predict", *given, "--compare")
    assert "2 pictures" in text and "outputs equal" in text
    assert sorted(os.listdir(out)) == ["china-clean.png", "mine-clean.png"]
    for name in ("china.jpg", mine):
        with Image.open(Path(out, f"{Path(name).stem}-clean.png")) as image:
            found = torch.tensor([*image.convert("RGB").tobytes()])
        assert (found - predicted(weights, name)).abs().max() <= 1


def predicted(weights: str, name: str) -> Tensor:
    """The output for a picture, as bytes of its pixels, of the model in this process."""
    import common
    import vit

    config, kept = vit.load(weights)
    model = vit.built(config, kept, torch.device("cpu"), torch.float64)
    x = vit.as_tokens(vit.read(name), config)
    with torch.no_grad():
        out = model.outputs(x, torch.arange(config.tokens), common.whole(vit.EXAMPLE))
    return ((out + 0.5).clamp(0, 1) * 255).round().flatten()


def test_a_picture_of_the_size_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Image = pytest.importorskip("PIL.Image", reason="no Pillow: pip install pillow")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import vit

    noise = Image.effect_noise((720, 360), 50).convert("RGB")
    noise.save(tmp_path / "noise.png")
    config = vit.CONFIGS["360x720"]
    vit.write(
        tmp_path / "out.png", vit.as_tokens(vit.read(str(tmp_path / "noise.png")), config), config
    )
    with Image.open(tmp_path / "out.png") as out:
        assert out.size == (720, 360) and out.tobytes() == noise.tobytes()


def refusal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *command: str,
    size: int = 1,
) -> str:
    """The error of an example with these options and this many ranks."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [*command])
    monkeypatch.setenv("WORLD_SIZE", str(size))
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(EXAMPLES / command[0]), run_name="__main__")
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "size", "error"),
    [
        ("--steps 0", 1, "--steps 0: want 1 or more"),
        ("--batch 0", 1, "--batch 0: want 1 or more"),
        ("--ranks 0", 1, "--ranks 0: want 1 or more"),
        ("--algorithm X1", 1, "algorithm X1 with causal=True: its mask is full"),
        ("--tensor-parallel 4", 4, "--tensor-parallel 4: the model has heads=4, kv_heads=2"),
        ("--context-parallel 3", 4, "--context-parallel 3 and --tensor-parallel 1 with 4 ranks"),
        ("--context-parallel 0", 4, "--context-parallel 0: want 1 or more"),
        ("--tensor-parallel 0", 4, "--tensor-parallel 0: want 1 or more"),
        ("--context-parallel 1 --batch 3", 2, "--batch 3 with 2 data ranks"),
        ("--parallel-order cp-tp", 2, "argument --parallel-order: invalid choice"),
        ("--save nowhere/gpt.pt", 1, "--save nowhere/gpt.pt: its folder does not exist"),
        ("--plot nowhere/gpt.png", 1, "--plot nowhere/gpt.png: its folder does not exist"),
        ("--dtype fp16", 1, "argument --dtype: invalid choice: 'fp16'"),
        ("--ranks 8 --batch 8 --tflops 0", 1, "--tflops 0: want a number above 0"),
        ("--ranks 8 --batch 8 --gbs -1", 1, "--gbs -1: want a number above 0"),
    ],
)
def test_options_that_are_refused(
    options: str,
    size: int,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    assert error in refusal(monkeypatch, capsys, "gpt.py", *options.split(), size=size)


def test_an_estimate_of_a_small_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["gpt.py", "--ranks", "8"])
    runpy.run_path(str(EXAMPLES / "gpt.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert "world size 8 (8 context x 1 tensor x 1 data)" in text and "time of a step" in text


def test_predictions_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def error(weights: str, *images: str) -> str:
        given = "--weights", weights, "--images", *images, "--out", str(tmp_path)
        return refusal(monkeypatch, capsys, "vit.py", "predict", *given)

    path = str(tmp_path / "gpt.pt")
    assert "gpt.pt" in error(path, "x.png") and "No such file" in error(path, "x.png")
    torch.save({"name": "GPT", "config": {}, "weights": {}}, path)
    assert f"--weights {path}: not weights of vit.py" in error(path, "x.png")
    Path(path).write_bytes(b"something else")
    assert f"--weights {path}: not weights of vit.py" in error(path, "x.png")
    assert "--images a/x.png b/x.png: two have one name" in error(path, "a/x.png", "b/x.png")


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
