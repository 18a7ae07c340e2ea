#!/usr/bin/env python3
"""A Llama of transformers with its tokens split over the ranks, compared with itself unsplit.

    torchrun --nproc-per-node 2 llama.py
    torchrun --nproc-per-node 2 llama.py --model PATH --dtype bfloat16 --tokens 4096

Every rank has all weights. It computes the logits and the gradients of the whole sequence with
torch's attention, then those of its own tokens with ringx. The program exits with 1 if they differ
by more than the type explains.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from fserver.ringx import positions, register_attention, shard, unshard

LAYOUT = "zigzag"  # that of a causal mask
LIMITS = {"float32": 1e-4, "bfloat16": 0.1}
"""Of the largest difference, divided by the largest number."""


def start() -> torch.device:
    """Joins the ranks. Each has a GPU of its own, or all compute on CPUs."""
    on_gpus = int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    return device


def model_of(path: str | None) -> Any:
    """Returns the model of these files, or a small one with random weights."""
    if path:
        return AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(0)  # the same weights on all ranks
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def computed(model: Any, ids: Tensor, target: Tensor, where: Tensor, tokens: int) -> Tensor:
    """Returns the logits, and adds the gradients of these tokens' share of the loss."""
    logits: Tensor = model(ids, position_ids=where[None], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="sum")
    (loss / tokens).backward()
    return logits.detach()


def difference(found: Tensor, want: Tensor) -> float:
    return float((found - want).abs().max() / want.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="PATH", help="a folder with a causal model's weights")
    parser.add_argument("--tokens", type=int, default=256, help="a multiple of twice the ranks")
    parser.add_argument("--dtype", choices=[*LIMITS], default="float32")
    options = parser.parse_args()
    device, tokens = start(), options.tokens
    model = model_of(options.model).to(device, getattr(torch, options.dtype))
    generator = torch.Generator().manual_seed(1)  # the same tokens on all ranks
    ids = torch.randint(model.config.vocab_size, (1, tokens + 1), generator=generator).to(device)
    ids, target = ids[:, :-1], ids[:, 1:]

    model.set_attn_implementation("sdpa")
    logits = computed(model, ids, target, torch.arange(tokens, device=device), tokens)
    grads = [weight.grad for weight in model.parameters()]
    model.zero_grad(set_to_none=True)

    register_attention("ringx")  # over all ranks
    model.set_attn_implementation("ringx")
    mine = (shard(t, LAYOUT) for t in (ids, target))
    found = computed(model, *mine, positions(tokens, LAYOUT, device=device), tokens)
    for weight in model.parameters():  # each rank has those of its tokens
        dist.all_reduce(weight.grad)

    of_logits = difference(unshard(found, LAYOUT), logits)
    pairs = zip(model.parameters(), grads, strict=True)
    of_grads = max(difference(weight.grad, want) for weight, want in pairs)
    if dist.get_rank() == 0:
        print(f"{tokens:,} tokens over {dist.get_world_size()} ranks, {options.dtype}, {device}")
        print(f"  largest difference of logits {of_logits:.1e}, of gradients {of_grads:.1e}")
    dist.barrier()  # no thread of gloo's may hold a tensor when Python exits
    dist.destroy_process_group()
    if not max(of_logits, of_grads) <= LIMITS[options.dtype]:
        sys.exit(f"the split model differs: want at most {LIMITS[options.dtype]}")


if __name__ == "__main__":
    main()
