"""The parts that both examples share: training, comparison and the command line."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from estimate import estimate
from parallel import ORDERS, Ranks, counts_of, ranks_of
from torch import Tensor
from transformer import Attend, Config, Example, Transformer

from fserver import ConfigError
from fserver.ringx import layout_of, positions, ringx_attention, shard

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass
class Trained:
    """The result of training."""

    model: Transformer
    losses: list[float]  # of each step
    seconds: float  # per step, without the first
    memory: float  # peak on the GPU, in GB


def train(
    example: Example, config: Config, ranks: Ranks | None, attend: Attend, layout: str,
    device: torch.device, dtype: torch.dtype,
) -> Trained:  # fmt: skip
    """Trains a model. Without ranks, this process has all of it.

    A data rank has its samples of each batch, and a context rank its rows of them, in the layout
    that `attend` needs. The gradients of a rank are those of its rows, so they are added up over
    the ranks with the same weights, as in data-parallel training.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = example.model(config)
    which: dict[str, Any] = {"rank": 0, "size": 1}
    samples, same = slice(None), 1
    if ranks:
        model.divide(ranks.mesh["tp"])
        each = config.batch // ranks.mesh["dp"].size()
        first = ranks.mesh.get_local_rank("dp") * each
        which, samples = {"group": ranks.mesh["cp"]}, slice(first, first + each)
        same = ranks.same.size()
    sharded = config.large and same > 1
    if sharded:  # FSDP takes the mean over the ranks; the loss is multiplied by N to get the sum
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ranks.same, mp_policy=policy)
    else:
        model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), config.rate)
    where = positions(config.tokens, layout, device=device, **which)
    losses, times = [], []
    batches = example.batches(config)
    for _ in range(config.steps):
        start = time.perf_counter()
        x, target = (shard(t[samples].to(device), layout, **which) for t in next(batches))
        x, target = (t.to(dtype) if t.is_floating_point() else t for t in (x, target))
        loss = model(x, target, where, attend, example.loss) / (config.batch * config.tokens)
        (loss * same if sharded else loss).backward()
        total = loss.detach().clone()
        if same > 1:
            dist.all_reduce(total, group=ranks.same.get_group())
            if not sharded:
                add_gradients(model, ranks.same.get_group())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
        times.append(time.perf_counter() - start)
    used = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return Trained(model, losses, sum(times[1:]) / max(len(times) - 1, 1), used)


def add_gradients(model: Transformer, group: dist.ProcessGroup) -> None:
    """Adds up the gradients over the group, in one collective."""
    grads = [parameter.grad for parameter in model.parameters()]
    total = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(total, group=group)
    for grad, part in zip(grads, total.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that training and prediction share."""
    add = parser.add_argument
    add("--algorithm", default="auto", help="the algorithm of ringx_attention (default auto)")
    add(
        "--dtype", choices=DTYPES, help="dtype (default float64; bfloat16 for large configurations)"
    )
    add(
        "--context-parallel", type=int, metavar="N",
        help="ranks that share a sequence (default: all ranks, divided by the tensor ranks)",
    )  # fmt: skip
    add(
        "--tensor-parallel", type=int, default=1, metavar="M",
        help="ranks that share the weights of the blocks (default 1). The ranks that are left, "
        "divided by N and M, have different samples: they are the data ranks",
    )  # fmt: skip
    add(
        "--parallel-order", default=ORDERS[0], choices=ORDERS,
        help="context, tensor and data ranks, neighbours first (default %(default)s)",
    )  # fmt: skip


def plan(
    example: Example, config: Config, options: argparse.Namespace, size: int
) -> tuple[str, dict[str, int]]:
    """Returns the layout, and the numbers of context, tensor and data ranks.

    Raises:
        ConfigError: an option does not fit the others, the model or the number of ranks.
    """
    layout = layout_of(options.algorithm, example.causal)
    counts = counts_of(size, options.context_parallel, options.tensor_parallel)
    most = math.gcd(config.heads, config.kv_heads, config.hidden)
    if most % counts["tp"]:
        raise ConfigError(
            f"--tensor-parallel {counts['tp']}: the model has heads={config.heads}, "
            f"kv_heads={config.kv_heads} and hidden={config.hidden}, which have to be multiples of "
            f"it (want a number that divides {most})"
        )
    return layout, counts


def start(counts: dict[str, int], order: str) -> tuple[Ranks, torch.device]:
    """Joins the ranks that torchrun has started, or makes a world of one. They are on CPUs if this
    host has fewer GPUs than ranks."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_gpus = 0 < local <= torch.cuda.device_count()
    device = torch.device("cpu")
    if on_gpus:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    return ranks_of(counts, order, device.type), device


def stop() -> None:
    """Leaves the ranks, after a barrier: a thread of gloo that still holds the tensor of a
    collective when Python exits aborts the process."""
    dist.barrier()
    dist.destroy_process_group()


def dtype_of(options: argparse.Namespace, config: Config) -> torch.dtype:
    return getattr(torch, options.dtype or ("bfloat16" if config.large else "float64"))


def sharded(example: Example, algorithm: str, layout: str, ranks: Ranks) -> Attend:
    """Returns the attention over a sequence that the context ranks share."""
    group = ranks.mesh["cp"]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ringx_attention(
            q, k, v, causal=example.causal, algorithm=algorithm, layout=layout, group=group
        )

    return attend


def whole(example: Example) -> Attend:
    """Returns torch's attention over a whole sequence."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            *heads_first, is_causal=example.causal, enable_gqa=True
        )
        return out.transpose(1, 2)

    return attend


def judge(what: str, apart: float, dtype: torch.dtype) -> None:
    """Prints whether these values are equal to those of one process, and exits with 1 if not."""
    limit = min(1e4 * torch.finfo(dtype).eps, 0.1)
    verdict = "equal" if apart <= limit else "DIFFERENT"
    print(f"  {what} {verdict}: at most {apart:.1e} apart, relative (limit {limit:.0e})")
    if not apart <= limit:
        raise SystemExit(1)


def main(example: Example, epilog: str | None = None) -> None:
    """The command line of an example: training."""
    parser = argparse.ArgumentParser(
        description=f"Trains a {example.name} with ringx.", epilog=epilog
    )
    names = [*example.configs]
    parser.add_argument(
        "--config", choices=names, default=names[0], help=f"the model (default {names[0]})"
    )
    add_options(parser)
    add = parser.add_argument
    numbers = {
        "steps": "number of steps",
        "batch": "samples of a step, of all data ranks together",
        "tokens": "length of a sequence",
        "layers": "number of layers",
    }
    for field, what in numbers.items():
        add(f"--{field}", type=int, help=f"{what} (default: that of the configuration)")
    add("--plot", metavar="FILE", help="draw the losses to FILE")
    add("--save", metavar="FILE", help="keep the weights in FILE")
    add("--ranks", type=int, metavar="N", help="print only the estimate, for N GPUs")
    add("--tflops", type=float, default=500, help="TFLOP/s of a GPU in the estimate (default 500)")
    add("--gbs", type=float, default=300, help="GB/s of a link in the estimate (default 300)")
    options = parser.parse_args()
    config = example.configs[options.config]
    given = {field: n for field in numbers if (n := getattr(options, field)) is not None}
    for field, n in given.items():
        if n < 1:
            parser.error(f"--{field} {n}: want 1 or more")
    config = dataclasses.replace(config, **given)
    if options.ranks is not None and options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: want 1 or more")
    for rate in ("tflops", "gbs"):
        if not 0 < getattr(options, rate) < math.inf:
            parser.error(f"--{rate} {getattr(options, rate):g}: want a number above 0")
    if options.plot and config.large:
        parser.error("--plot: the losses of large configurations are not compared")
    size = options.ranks or int(os.environ.get("WORLD_SIZE", 1))
    try:
        layout, counts = plan(example, config, options, size)
    except ConfigError as error:
        parser.error(str(error))
    data = counts["dp"]
    if config.batch % data:
        parser.error(
            f"--batch {config.batch} with {data} data ranks ({size} ranks, of which "
            f"{counts['cp']} x {counts['tp']} share a sample): want a multiple of {data}"
        )
    for name in ("save", "plot"):
        path = getattr(options, name)
        if path and not Path(path).absolute().parent.is_dir():
            parser.error(f"--{name} {path}: its folder does not exist (make it first)")
    if (config.large or options.ranks) and int(os.environ.get("RANK", 0)) == 0:
        estimate(example, config, options, counts)
    if options.ranks:
        return
    if config.large and not torch.cuda.is_available():
        print("not run: training needs GPUs, and torchrun with one process for each GPU")
        return
    run(example, config, options, layout, counts)


def run(
    example: Example, config: Config, options: argparse.Namespace, layout: str,
    counts: dict[str, int],
) -> None:  # fmt: skip
    """Trains on all ranks, then, if the model is small, in one process, and compares."""
    ranks, device = start(counts, options.parallel_order)
    dtype = dtype_of(options, config)
    attend = sharded(example, options.algorithm, layout, ranks)
    trained = train(example, config, ranks, attend, layout, device, dtype)
    if options.save:
        weights = trained.model.whole_weights(ranks.mesh["tp"])
        if dist.get_rank() == 0:
            kept = {"name": example.name, "config": dataclasses.asdict(config), "weights": weights}
            torch.save(kept, options.save)
    if dist.get_rank() == 0:
        losses, size = trained.losses, dist.get_world_size()
        split = "{cp} context x {tp} tensor x {dp} data".format_map(counts)
        print(f"{example.name}: {config.tokens:,} tokens, world size {size} ({split}), ", end="")
        print(f"{config.steps} steps")
        print(f"  loss {losses[0]:.6f} -> {losses[-1]:.6f}, {trained.seconds:.3f} s a step", end="")
        print(f", at most {trained.memory:.1f} GB" if trained.memory else "")
        if not config.large:
            alone = train(example, config, None, whole(example), layout, device, dtype)
            print(f"  one process, torch's attention: -> {alone.losses[-1]:.6f}, ", end="")
            print(f"{alone.seconds:.3f} s a step")
            if options.plot:
                plot(options.plot, example.name, losses, alone.losses, size)
            pairs = zip(losses, alone.losses, strict=True)
            judge("losses", max(abs(a - b) / abs(b) for a, b in pairs), dtype)
    stop()
