"""The calculated memory and time of a step of training."""

from __future__ import annotations

import argparse

import torch
from transformer import Config, Example

from fserver.ringx.algorithms import GATHER_LIMIT


def estimate(
    example: Example, config: Config, options: argparse.Namespace, counts: dict[str, int]
) -> None:
    """Prints what a GPU needs. docs/ringx.md has the formulas. Tensor ranks divide the blocks; all
    have the embedding and the head."""
    cp, tp, dp = counts["cp"], counts["tp"], counts["dp"]
    with torch.device("meta"):
        model = example.model(config)
    weights = sum(p.numel() for p in model.parameters())
    in_blocks = sum(p.numel() for p in model.blocks.parameters())
    held = weights - in_blocks + in_blocks / tp
    rows = config.batch / dp * config.tokens
    mine, width = rows / cp, config.heads * config.head_dim / tp
    keys, hidden = 2 * config.kv_heads * config.head_dim / tp, config.hidden / tp
    bounded = example.causal and rows * keys * (2 + 4) > GATHER_LIMIT
    memory = {
        "inputs of blocks, kept (bf16)": 2 * mine * config.dim * config.layers,
        "one block at work (bf16)": 2 * mine * (6 * config.dim + 2 * width + 4 * hidden),
        "sums of out and dq (fp32)": 2 * 4 * mine * width,
    }
    if cp * dp == 1:
        memory["weights, gradients, AdamW (bf16)"] = 8 * held
    else:
        memory["weights, gradients, AdamW (fp32, sharded)"] = 16 * held / (cp * dp)
        memory["two blocks gathered (bf16)"] = 4 * in_blocks / tp / config.layers
    if cp > 1:
        how = "X4" if bounded else "X3" if example.causal else "X3b"
        exchanged = mine * keys * (4 * 2 + 2 * 4) if bounded else rows * keys * (2 * 2 + 4)
        memory[f"keys of others and their gradients ({how})"] = exchanged
    split = f"{cp} context x {tp} tensor x {dp} data"
    what = f"{config.tokens:,} tokens, world size {cp * tp * dp} ({split})"
    print(f"{example.name}, {what}: {weights / 1e9:.2f}e9 weights")
    _table(memory, "memory of a GPU", 1e9, "GB")

    # cost of forward, recomputed forward and backward: products 1 + 1 + 2, attention 1 + 1 + 2.5
    products = 2 * (held - (model.place.weight.numel() if model.place else 0)) * mine * 4
    scores = 4 * mine * config.tokens * width * (0.5 if example.causal else 1)
    rate, link = options.tflops * 1e12, options.gbs * 1e9
    times = {
        f"products at {options.tflops:g} TFLOP/s": products / rate,
        f"attention at {options.tflops:g} TFLOP/s": config.layers * scores * 4.5 / rate,
    }
    if tp > 1:  # two sums in forward, one recomputed, two in backward
        sums = config.layers * 5 * 2 * mine * config.dim * 2 * (tp - 1) / tp
        times[f"sums of tensor ranks at {options.gbs:g} GB/s"] = sums / link
    _table(times, "time of a step", 1, "s")
    moved = config.layers * rows * keys * (3 * 2 + 4)  # keys three times, gradients once
    beside = f"beside it, keys at {options.gbs:g} GB/s (partly overlapped)"
    print(f"  {beside:<52}{moved * (cp - 1) / cp / link:10.2f} s")


def _table(values: dict[str, float], total: str, scale: float, unit: str) -> None:
    for name, value in (*values.items(), (total, sum(values.values()))):
        print(f"  {name:<52}{value / scale:10.2f} {unit}")
