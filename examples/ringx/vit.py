"""Trains a vision transformer, whose tokens are pixels, to remove noise from photographs.

    torchrun --nproc-per-node 2 examples/ringx/vit.py --plot vit.png --save vit.pt
    torchrun --nproc-per-node 2 examples/ringx/vit.py predict \\
        --weights vit.pt --images china.jpg --out .
    torchrun --nproc-per-node 4 examples/ringx/vit.py --context-parallel 2 --tensor-parallel 2
    torchrun --nproc-per-node 4 examples/ringx/vit.py --config 360x720   # GPUs
    python examples/ringx/vit.py --config 360x720 --ranks 8              # the estimate only

The photographs come with scikit-learn: pip install scikit-learn pillow.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import add_options, dtype_of, judge, main, plan, sharded, start, stop, whole
from torch import Tensor, nn
from transformer import Batch, Config, Example, Transformer

from fserver import ConfigError
from fserver.ringx import positions, shard, unshard

SIZES = {256: (16, 16), 360 * 720: (360, 720)}  # height and width, by tokens
CONFIGS = {
    "small": Config(
        tokens=256, layers=2, dim=32, heads=4, kv_heads=4, hidden=64, batch=2, steps=40, rate=3e-3
    ),
    "360x720": Config(
        tokens=360 * 720, layers=12, dim=768, heads=12, kv_heads=12, hidden=2048, steps=3,
        large=True,
    ),
}  # fmt: skip
PHOTOGRAPHS = ("china.jpg", "flower.jpg")  # those of scikit-learn


def model(config: Config) -> Transformer:
    embed, head = nn.Linear(3, config.dim), nn.Linear(config.dim, 3)
    return Transformer(config, embed, head, rotary=False)


def as_tokens(picture: Tensor, config: Config) -> Tensor:
    """Returns a picture of bytes, [1, 3, height, width], in the size of the model as [1, S, 3]."""
    fitted = F.interpolate(
        picture.double() / 255, SIZES[config.tokens], mode="bilinear", antialias=True
    )
    return fitted.flatten(2).transpose(1, 2) - 0.5


def batches(config: Config) -> Iterator[Batch]:
    """Yields quarters of the photographs from random places, with noise. The target has none."""
    from sklearn.datasets import load_sample_images

    if config.tokens not in SIZES:
        raise SystemExit(f"vit: {config.tokens} tokens: want one of {[*SIZES]}")
    images = load_sample_images().images  # [427, 640, 3], bytes
    photographs = [torch.from_numpy(image.copy()).permute(2, 0, 1)[None] for image in images]
    generator = torch.Generator().manual_seed(1)
    while True:
        pieces = []
        for _ in range(config.batch):
            places = torch.rand(3, generator=generator) * torch.tensor([len(images), 214, 320])
            which, top, left = places.int().tolist()
            piece = photographs[which][:, :, top : top + 213, left : left + 320]
            pieces.append(as_tokens(piece, config))
        clean = torch.cat(pieces)
        noise = torch.randn(clean.shape, dtype=clean.dtype, generator=generator)
        yield clean + 0.3 * noise, clean


def loss(out: Tensor, target: Tensor) -> Tensor:
    wide = torch.promote_types(out.dtype, torch.float32)
    return F.mse_loss(out.to(wide), target.to(wide), reduction="sum") / 3


EXAMPLE = Example("ViT", CONFIGS, model, batches, loss, causal=False)


def read(name: str) -> Tensor:
    """Returns a picture as bytes, [1, 3, height, width].

    Raises:
        OSError: there is no such picture.
    """
    from PIL import Image

    if name in PHOTOGRAPHS and not Path(name).exists():
        from sklearn.datasets import load_sample_image

        picture = torch.from_numpy(load_sample_image(name).copy())
    else:
        with Image.open(name) as image:
            rgb = image.convert("RGB")
        picture = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
        picture = picture.view(rgb.height, rgb.width, 3)
    return picture.permute(2, 0, 1)[None]


def write(path: Path, out: Tensor, config: Config) -> None:
    """Writes the output for one picture, [1, S, 3], as PNG."""
    from PIL import Image

    pixels = ((out[0].float().cpu() + 0.5) * 255).round().clamp(0, 255).to(torch.uint8)
    Image.fromarray(pixels.view(*SIZES[config.tokens], 3).numpy()).save(path)


def load(path: str) -> tuple[Config, dict[str, Tensor]]:
    """Returns the configuration and the weights that training has kept.

    Raises:
        ConfigError: there are none in the file.
        OSError: the file cannot be read.
    """
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True)
        if kept["name"] == EXAMPLE.name:
            return Config(**kept["config"]), kept["weights"]
    except OSError:
        raise
    except Exception:  # another file: torch.load raises errors of many types
        pass
    raise ConfigError(f"--weights {path}: not weights of vit.py (make them with vit.py --save)")


def built(
    config: Config, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Transformer:
    """Returns the model with these weights."""
    made = model(config).to(device, dtype)
    made.load_state_dict(weights)
    return made


@torch.no_grad()
def predict(arguments: list[str]) -> None:
    """The command line of prediction: writes the model's output for pictures."""
    parser = argparse.ArgumentParser(
        "vit.py predict", description="Removes noise from pictures, with the weights of a training."
    )
    add_options(parser)
    add = parser.add_argument
    add("--weights", required=True, metavar="FILE", help="what training has kept (--save)")
    add(
        "--images", required=True, nargs="+", metavar="FILE",
        help=f"pictures; {' and '.join(PHOTOGRAPHS)} are photographs of scikit-learn",
    )  # fmt: skip
    add("--out", required=True, metavar="FOLDER", help="for the outputs, NAME-clean.png each")
    add("--compare", action="store_true", help="compare the outputs with those of one process")
    options = parser.parse_args(arguments)
    paths = [Path(options.out, f"{Path(name).stem}-clean.png") for name in options.images]
    if len({*paths}) < len(paths):
        parser.error(f"--images {' '.join(options.images)}: two have one name (rename one)")
    try:
        config, weights = load(options.weights)
        pictures = [as_tokens(read(name), config) for name in options.images]
        layout, counts = plan(EXAMPLE, config, options, int(os.environ.get("WORLD_SIZE", 1)))
        Path(options.out).mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        parser.error(str(error))
    ranks, device = start(counts, options.parallel_order)
    dtype = dtype_of(options, config)
    attend = sharded(EXAMPLE, options.algorithm, layout, ranks)
    cp, tp, dp = (ranks.mesh[name] for name in ("cp", "tp", "dp"))
    divided = built(config, weights, device, dtype)
    divided.divide(tp)
    alone = built(config, weights, device, dtype) if options.compare else None
    where = positions(config.tokens, layout, device=device, group=cp)
    apart = torch.zeros((), device=device)
    for at in range(dp.get_local_rank(), len(paths), dp.size()):
        x = pictures[at].to(device, dtype)
        out = unshard(divided.outputs(shard(x, layout, group=cp), where, attend), layout, group=cp)
        if cp.get_local_rank() == tp.get_local_rank() == 0:
            write(paths[at], out, config)
            if alone:
                want = alone.outputs(x, torch.arange(config.tokens, device=device), whole(EXAMPLE))
                worst = (out - want).abs().max() / want.abs().max()
                apart = torch.maximum(apart, worst.float().nan_to_num(torch.inf))
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        split = "{cp} context x {tp} tensor x {dp} data".format_map(counts)
        print(f"{EXAMPLE.name}: {len(paths)} pictures, {config.tokens:,} tokens each, ", end="")
        print(f"world size {dist.get_world_size()} ({split}), in {options.out}")
        if alone:
            judge("outputs", float(apart), dtype)
    stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["predict"]:
        predict(sys.argv[2:])
    else:
        main(EXAMPLE, "vit.py predict --help: how to use the weights that --save has kept.")
