"""The ranks of a run: those that share a sequence, the weights of a block, or the samples."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fserver import ConfigError

ORDERS = ["-".join(names) for names in permutations(("cp", "tp", "dp"))]

Sections = tuple[int, tuple[int, ...]]
"""How tensor ranks divide a weight: the dimension, and the lengths of the sections along it. Each
rank has a part of every section."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, as this process sees them.

    Attributes:
        mesh: its dimensions are "cp", the context ranks, which share a sequence; "tp", the tensor
            ranks, which share the weights of each block; and "dp", the data ranks, which have
            different samples.
        same: the ranks with the same weights, which are those of "cp" and "dp".
    """

    mesh: DeviceMesh
    same: DeviceMesh


def counts_of(size: int, context: int | None, tensor: int) -> dict[str, int]:
    """Returns the numbers of context, tensor and data ranks, by dimension of the mesh.

    Raises:
        ConfigError: `size` ranks cannot be divided so.
    """
    for name, value in (("context", context), ("tensor", tensor)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name}-parallel {value}: want 1 or more")
    context = context or max(size // tensor, 1)
    if size % (context * tensor):
        raise ConfigError(
            f"--context-parallel {context} and --tensor-parallel {tensor} with {size} ranks: want "
            f"a multiple of {context * tensor} ranks, or numbers whose product divides {size}"
        )
    return {"cp": context, "tp": tensor, "dp": size // (context * tensor)}


def ranks_of(counts: dict[str, int], order: str, device_type: str) -> Ranks:
    """Makes the groups. All ranks make the call. In the dimension that `order` names first, the
    ranks of a group are neighbours."""
    names = tuple(reversed(order.split("-")))  # in a mesh, neighbours differ in the last dimension
    shape = [counts[name] for name in names]
    ranks = torch.arange(dist.get_world_size()).view(shape)
    rows = ranks.movedim(names.index("tp"), 0).flatten(1)
    by_weights = DeviceMesh(device_type, rows, mesh_dim_names=("tp", "same"))
    return Ranks(DeviceMesh(device_type, ranks, mesh_dim_names=names), by_weights["same"])


def part_of(weight: Tensor, sections: Sections, tp: DeviceMesh) -> Tensor:
    """Returns the part of a weight that this tensor rank holds, as a copy."""
    dim, lengths = sections
    parts = (s.chunk(tp.size(), dim)[tp.get_local_rank()] for s in weight.split(lengths, dim))
    return torch.cat([*parts], dim)


def joined(part: Tensor, sections: Sections, tp: DeviceMesh) -> Tensor:
    """Returns the whole weight. All tensor ranks make the call."""
    dim, lengths = sections
    parts = [torch.empty_like(part) for _ in range(tp.size())]
    dist.all_gather(parts, part.contiguous(), group=tp.get_group())
    shorter = [length // tp.size() for length in lengths]
    by_section = zip(*(p.split(shorter, dim) for p in parts), strict=True)
    return torch.cat([piece for section in by_section for piece in section], dim)


def copied(x: Tensor, tp: dist.ProcessGroup | None) -> Tensor:
    """Returns x, which is the same on all tensor ranks. Backward adds up their gradients."""
    return x if tp is None else _Copied.apply(x, tp)


def summed(x: Tensor, tp: dist.ProcessGroup | None) -> Tensor:
    """Returns the sum over the tensor ranks. Backward passes its gradient on."""
    return x if tp is None else _Summed.apply(x, tp)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: dist.ProcessGroup) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.tp)
        return total, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=tp)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
