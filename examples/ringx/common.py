"""The parts that both examples share: transformer, training, comparison and estimate."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fserver import ConfigError
from fserver.ringx import layout_of, positions, ringx_attention, shard
from fserver.ringx.api import GATHER_LIMIT

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]  # input and target, [B, S, ...]


@dataclass(frozen=True)
class Config:
    """A model and its training. ``tokens`` is the length of the whole sequence."""

    tokens: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int  # width of the feed-forward part
    batch: int = 1
    steps: int = 1
    rate: float = 3e-4
    large: bool = False  # needs GPUs: weights are sharded, and blocks are recomputed in backward

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def rotate(x: Tensor, where: Tensor, base: float = 500000.0) -> Tensor:
    """Applies the rotary embedding to [B, S, H, D], whose rows have the positions `where`, [S]."""
    half = x.shape[-1] // 2
    speed = base ** -(torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (where[:, None] * speed)[:, None]  # [S, 1, D/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    """A block of Llama: attention and a gated feed-forward part."""

    def __init__(self, config: Config, rotary: bool):
        super().__init__()
        self.config, self.rotary = config, rotary
        wide = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.qkv = nn.Linear(config.dim, wide, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor, where: Tensor, attend: Attend) -> Tensor:
        config = self.config
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, config.head_dim))
        q, k, v = qkv.split((config.heads, config.kv_heads, config.kv_heads), 2)
        if self.rotary:
            q, k = rotate(q, where), rotate(k, where)
        x = x + self.out(attend(q, k, v).flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    """Blocks between an embedding and a head. Everything except attention works row by row."""

    def __init__(self, config: Config, embed: nn.Module, head: nn.Module, rotary: bool):
        super().__init__()
        self.config, self.embed, self.head = config, embed, head
        self.place = None if rotary else nn.Embedding(config.tokens, config.dim)
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)

    def forward(
        self, x: Tensor, target: Tensor, where: Tensor, attend: Attend, loss: Callable[..., Tensor]
    ) -> Tensor:
        """Returns the sum of the loss over these rows, which have the positions `where`."""
        x = self.embed(x)
        if self.place is not None:
            x = x + self.place(where)
        for block in self.blocks:
            if self.config.large:
                x = checkpoint(block, x, where, attend, use_reentrant=False)
            else:
                x = block(x, where, attend)
        x = self.norm(x)
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        for rows, wanted in zip(x.split(8192, 1), target.split(8192, 1), strict=True):
            if self.config.large:  # the outputs of a million rows do not fit into memory
                total = total + checkpoint(self._loss, rows, wanted, loss, use_reentrant=False)
            else:
                total = total + self._loss(rows, wanted, loss)
        return total

    def _loss(self, rows: Tensor, wanted: Tensor, loss: Callable[..., Tensor]) -> Tensor:
        return loss(self.head(rows), wanted)


@dataclass
class Example:
    """One of the two examples: its model, data and mask."""

    name: str
    configs: dict[str, Config]  # the first is the default
    model: Callable[[Config], Transformer]
    batches: Callable[[Config], Iterator[Batch]]  # the same on all ranks
    loss: Callable[[Tensor, Tensor], Tensor]  # summed over rows
    causal: bool


def train(
    example: Example, config: Config, rank: int, size: int, attend: Attend, layout: str,
    device: torch.device, dtype: torch.dtype,
) -> tuple[list[float], float, float]:  # fmt: skip
    """Returns the loss of each step, the seconds per step (without the first), and the peak of GPU
    memory in GB.

    Each rank has its rows of each sequence, in the layout that `attend` needs. The gradients of a
    rank are those of its rows, so they are added up over the ranks, as in data-parallel training.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = example.model(config)
    sharded = config.large and size > 1
    if sharded:  # FSDP takes the mean over the ranks; the loss is multiplied by N to get the sum
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mp_policy=policy)
    else:
        model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), config.rate)
    where = positions(config.tokens, layout, rank, size, device)
    losses, times = [], []
    batches = example.batches(config)
    for _ in range(config.steps):
        start = time.perf_counter()
        x, target = (shard(t.to(device), layout, rank, size) for t in next(batches))
        x, target = (t.to(dtype) if t.is_floating_point() else t for t in (x, target))
        loss = model(x, target, where, attend, example.loss) / (config.batch * config.tokens)
        (loss * size if sharded else loss).backward()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total)
            if not sharded:
                grads = [parameter.grad for parameter in model.parameters()]
                summed = torch.cat([grad.flatten() for grad in grads])  # one collective
                dist.all_reduce(summed)
                for grad, part in zip(grads, summed.split([g.numel() for g in grads]), strict=True):
                    grad.copy_(part.view_as(grad))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
        times.append(time.perf_counter() - start)
    used = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return losses, sum(times[1:]) / max(len(times) - 1, 1), used


def estimate(example: Example, config: Config, options: argparse.Namespace, size: int) -> None:
    """Prints the calculated memory and time of a step. docs/ringx.md has the formulas."""
    with torch.device("meta"):
        model = example.model(config)
    weights = sum(p.numel() for p in model.parameters())
    in_blocks = sum(p.numel() for p in model.blocks.parameters())
    rows = config.batch * config.tokens
    mine, width = rows / size, config.heads * config.head_dim
    keys = 2 * config.kv_heads * config.head_dim
    gathered = rows * keys * (2 + 4)
    bounded = example.causal and gathered > GATHER_LIMIT
    exchanged = mine * keys * (4 * 2 + 2 * 4) if bounded else rows * keys * (2 * 2 + 4)
    memory = {
        "inputs of blocks, kept (bf16)": 2 * mine * config.dim * config.layers,
        "one block at work (bf16)": 2 * mine * (6 * config.dim + 2 * width + 4 * config.hidden),
        "sums of out and dq (fp32)": 2 * 4 * mine * width,
    }
    if size == 1:
        memory["weights, gradients, AdamW (bf16)"] = 8 * weights
    else:
        how = "X4" if bounded else "X3" if example.causal else "X3b"
        memory["weights, gradients, AdamW (fp32, sharded)"] = 16 * weights / size
        memory["two blocks gathered (bf16)"] = 4 * in_blocks / config.layers
        memory[f"keys of others and their gradients ({how})"] = exchanged
    what = f"{config.tokens:,} tokens, world size {size}"
    print(f"{example.name}, {what}: {weights / 1e9:.2f}e9 weights")
    for name, count in memory.items():
        print(f"  {name:<52}{count / 1e9:10.2f} GB")
    print(f"  {'memory of a GPU':<52}{sum(memory.values()) / 1e9:10.2f} GB")
    # cost of forward, recomputed forward and backward: products 1 + 1 + 2, attention 1 + 1 + 2.5
    products = 2 * (weights - (model.place.weight.numel() if model.place else 0)) * rows * 4
    scores = 4 * config.batch * config.tokens**2 * width * (0.5 if example.causal else 1)
    attention = config.layers * scores * 4.5
    moved = config.layers * rows * keys * (3 * 2 + 4)  # keys three times, gradients once
    rate = options.tflops * 1e12 * size
    times = {
        f"products at {options.tflops:g} TFLOP/s": products / rate,
        f"attention at {options.tflops:g} TFLOP/s": attention / rate,
    }
    for name, seconds in times.items():
        print(f"  {name:<52}{seconds:10.2f} s")
    print(f"  {'time of a step':<52}{sum(times.values()):10.2f} s")
    link = moved * (size - 1) / size / (options.gbs * 1e9)
    print(f"  {f'beside it, keys at {options.gbs:g} GB/s (partly overlapped)':<52}{link:10.2f} s")


def plot(path: str, name: str, losses: list[float], alone: list[float], size: int) -> None:
    """Draws both losses and their relative difference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(alone, linewidth=4, alpha=0.4, label="one process, torch's attention")
    left.plot(losses, linewidth=1, label=f"{size} processes, ringx")
    left.set(title=name, xlabel="step", ylabel="loss")
    left.legend()
    apart = [abs(a - b) / abs(b) or 1e-17 for a, b in zip(losses, alone, strict=True)]
    right.plot(apart, ".")
    right.set(title="Relative difference", xlabel="step", yscale="log")
    figure.savefig(path, dpi=120)


def main(example: Example) -> None:
    """The command line of an example."""
    parser = argparse.ArgumentParser(description=f"Trains a {example.name} with ringx.")
    names = [*example.configs]
    parser.add_argument(
        "--config", choices=names, default=names[0], help=f"the model (default {names[0]})"
    )
    add = parser.add_argument
    add("--algorithm", default="auto", help="the algorithm of ringx_attention (default auto)")
    add("--dtype", help="dtype (default float64; bfloat16 for large configurations)")
    add("--steps", type=int, help="number of steps (default: that of the configuration)")
    add("--tokens", type=int, help="length of a sequence (default: that of the configuration)")
    add("--layers", type=int, help="number of layers (default: that of the configuration)")
    add("--plot", metavar="FILE", help="draw the losses to FILE")
    add("--ranks", type=int, metavar="N", help="print only the estimate, for N GPUs")
    add("--tflops", type=float, default=500, help="TFLOP/s of a GPU in the estimate (default 500)")
    add("--gbs", type=float, default=300, help="GB/s of a link in the estimate (default 300)")
    options = parser.parse_args()
    config = example.configs[options.config]
    for field in ("steps", "tokens", "layers"):
        if getattr(options, field):
            config = dataclasses.replace(config, **{field: getattr(options, field)})
    try:
        layout = layout_of(options.algorithm, example.causal)
    except ConfigError as error:
        parser.error(str(error))

    size = options.ranks or int(os.environ.get("WORLD_SIZE", 1))
    on_gpus = torch.cuda.is_available() and not options.ranks
    if config.large and int(os.environ.get("RANK", 0)) == 0:
        estimate(example, config, options, size)
    if options.ranks or (config.large and not on_gpus):
        print("not run: training needs GPUs, and torchrun with one process for each GPU")
        return

    device = torch.device("cpu")
    if on_gpus:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, options.dtype or ("bfloat16" if config.large else "float64"))

    def sharded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ringx_attention(
            q, k, v, causal=example.causal, algorithm=options.algorithm, layout=layout
        )

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            *heads_first, is_causal=example.causal, enable_gqa=True
        )
        return out.transpose(1, 2)

    losses, seconds, used = train(example, config, rank, size, sharded, layout, device, dtype)
    if rank == 0:
        print(f"{example.name}: {config.tokens:,} tokens, world size {size}, {config.steps} steps")
        print(f"  loss {losses[0]:.6f} -> {losses[-1]:.6f}, {seconds:.3f} s a step", end="")
        print(f", at most {used:.1f} GB" if used else "")
        if not config.large:
            alone, seconds, _ = train(example, config, 0, 1, whole, layout, device, dtype)
            apart = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))
            print(f"  one process, torch's attention: -> {alone[-1]:.6f}, {seconds:.3f} s a step")
            limit = 1e4 * torch.finfo(dtype).eps
            verdict = "equal" if apart <= limit else "DIFFERENT"
            print(f"  losses {verdict}: at most {apart:.1e} apart, relative (limit {limit:.0e})")
            if options.plot:
                plot(options.plot, example.name, losses, alone, size)
            if apart > limit:
                raise SystemExit(1)
    dist.barrier()
    dist.destroy_process_group()
