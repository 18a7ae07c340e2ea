"""Trains a GPT (blocks of Llama, rotary positions) on Python's documentation, byte by byte.

torchrun --nproc-per-node 2 examples/ringx/gpt.py --plot gpt.png
torchrun --nproc-per-node 4 examples/ringx/gpt.py --context-parallel 2 --tensor-parallel 2
torchrun --nproc-per-node 4 examples/ringx/gpt.py --config llama3-8b-1m   # GPUs
python examples/ringx/gpt.py --config llama3-8b-1m --ranks 64             # the estimate only
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from common import main
from torch import Tensor, nn
from transformer import Batch, Config, Example, Transformer

CONFIGS = {
    "small": Config(
        tokens=256, layers=2, dim=64, heads=4, kv_heads=2, hidden=128, batch=4, steps=40, rate=3e-3
    ),
    "llama3-8b-1m": Config(
        tokens=1 << 20, layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, steps=3, large=True
    ),
}


def model(config: Config) -> Transformer:
    vocabulary = 128256 if config.large else 256
    embed = nn.Embedding(vocabulary, config.dim)
    return Transformer(config, embed, nn.Linear(config.dim, vocabulary, bias=False), rotary=True)


def batches(config: Config) -> Iterator[Batch]:
    """Yields pieces of the text of `help()` from random places. The target is the next byte."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    text *= 1 + config.tokens // len(text)  # a million tokens are 1.5 times this text
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(text) - config.tokens, (config.batch,), generator=generator)
        pieces = torch.stack([text[start : start + config.tokens + 1] for start in starts])
        yield pieces[:, :-1], pieces[:, 1:]


def loss(out: Tensor, target: Tensor) -> Tensor:
    out = out.to(torch.promote_types(out.dtype, torch.float32))
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum")


if __name__ == "__main__":
    main(Example("GPT", CONFIGS, model, batches, loss, causal=True))
