"""Trains a vision transformer, whose tokens are pixels, to remove noise from photographs.

    torchrun --nproc-per-node 2 examples/ringx/vit.py --plot vit.png
    torchrun --nproc-per-node 4 examples/ringx/vit.py --config 360x720   # GPUs
    python examples/ringx/vit.py --config 360x720 --ranks 8              # the estimate only

The photographs come with scikit-learn: pip install 'fserver[ringx]'.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from common import Batch, Config, Example, Transformer, main
from torch import Tensor, nn

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


def model(config: Config) -> Transformer:
    embed, head = nn.Linear(3, config.dim), nn.Linear(config.dim, 3)
    return Transformer(config, embed, head, rotary=False)


def batches(config: Config) -> Iterator[Batch]:
    """Yields quarters of the photographs from random places, with noise. The target has none."""
    from sklearn.datasets import load_sample_images

    if config.tokens not in SIZES:
        raise SystemExit(f"vit: {config.tokens} tokens: want one of {[*SIZES]}")
    height, width = SIZES[config.tokens]
    images = load_sample_images().images  # [427, 640, 3], bytes
    photographs = [torch.from_numpy(image.copy()).permute(2, 0, 1)[None] for image in images]
    generator = torch.Generator().manual_seed(1)
    while True:
        pieces = []
        for _ in range(config.batch):
            places = torch.rand(3, generator=generator) * torch.tensor([len(images), 214, 320])
            which, top, left = places.int().tolist()
            piece = photographs[which][:, :, top : top + 213, left : left + 320].double() / 255
            piece = F.interpolate(piece, (height, width), mode="bilinear", antialias=True)
            pieces.append(piece.flatten(2).transpose(1, 2) - 0.5)
        clean = torch.cat(pieces)
        noise = torch.randn(clean.shape, dtype=clean.dtype, generator=generator)
        yield clean + 0.3 * noise, clean


def loss(out: Tensor, target: Tensor) -> Tensor:
    wide = torch.promote_types(out.dtype, torch.float32)
    return F.mse_loss(out.to(wide), target.to(wide), reduction="sum") / 3


if __name__ == "__main__":
    main(Example("ViT", CONFIGS, model, batches, loss, causal=False))
