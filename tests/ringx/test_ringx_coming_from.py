"""The rows of docs/ringx.md for callers of ring-flash-attention and of torch's context_parallel:
the parts that they have there, and the call to make with them here, against dense attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from exact import EXACT, Problem, dense, errors
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from world import Rank, World

from fserver.errors import ConfigError, ShapeError
from fserver.ringx import ringx_attention, shard, unshard

MEMBERS = (0, 1, 2, 3)
SIZE = len(MEMBERS)
TOKENS = 48
ENDS = (0, 16, 40, 48)  # lengths that zigzag parts need: multiples of 2N
ANY = (0, 5, 6, 29, 48)


# The parts of a sequence [T, ...] there


def ring(x: Tensor, rank: int, ends: tuple[int, ...] = (0, TOKENS)) -> Tensor:
    return torch.cat([one.chunk(SIZE)[rank] for one in documents(x, ends)])


def zigzag(x: Tensor, rank: int, ends: tuple[int, ...] = (0, TOKENS)) -> Tensor:
    """Two chunks of each document."""
    found = []
    for one in documents(x, ends):
        chunks = one.chunk(2 * SIZE)
        found += [chunks[rank], chunks[-1 - rank]]
    return torch.cat(found)


def documents(x: Tensor, ends: tuple[int, ...]) -> list[Tensor]:
    return [*x.tensor_split(ends[1:-1])]


class Row(NamedTuple):
    parts: Callable[..., Tensor]
    options: dict[str, Any]  # of the call here
    ends: tuple[int, ...] | None = None  # of packed documents
    parts_by_document: bool = True  # or of the sequence


LOCAL = torch.tensor(ENDS, dtype=torch.int32) // SIZE  # cu_seqlens of zigzag_..._varlen_func
ROWS = {
    "ring": Row(ring, {"causal": True, "layout": "contiguous", "algorithm": "X2o"}),
    "ring, by heads": Row(ring, {"causal": True, "layout": "contiguous", "algorithm": "ulysses"}),
    "ring, full": Row(ring, {"causal": False, "layout": "contiguous"}),
    "ring, full, the same": Row(
        ring, {"causal": False, "layout": "contiguous", "algorithm": "ring"}
    ),
    "zigzag": Row(zigzag, {"causal": True, "layout": "zigzag"}),
    "zigzag, the same": Row(zigzag, {"causal": True, "layout": "zigzag", "algorithm": "ring"}),
    "zigzag varlen": Row(
        zigzag, {"causal": True, "layout": "zigzag", "cu_seqlens": SIZE * LOCAL}, ENDS
    ),
    "llama3 varlen": Row(
        ring,
        {"causal": True, "layout": "contiguous", "cu_seqlens": ANY, "window": TOKENS},
        ANY,
        parts_by_document=False,
    ),
    "context_parallel, allgather": Row(
        zigzag, {"causal": True, "layout": "zigzag", "algorithm": "X3"}
    ),
    "context_parallel, full": Row(zigzag, {"causal": False}),
}


def part_of(row: Row, x: Tensor, rank: int) -> Tensor:
    """Of [1, T, ...]."""
    ends = row.ends if row.ends and row.parts_by_document else (0, TOKENS)
    return row.parts(x[0], rank, ends)[None]


def called(me: Rank, name: str) -> dict[str, Tensor]:
    row = ROWS[name]
    q, k, v, dout, _ = (part_of(row, t, me.rank) if t.dim() == 4 else t for t in PROBLEM.tensors())
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = ringx_attention(*leaves, group=me.group, **row.options)
    grads = torch.autograd.grad(out, leaves, dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


PROBLEM = Problem(rows=TOKENS, keys=TOKENS, heads=4, kv_heads=2)


@pytest.mark.parametrize("name", ROWS)
def test_the_call_is_right_with_the_parts_there(world: World, name: str):
    row = ROWS[name]
    whole = dense(replace(PROBLEM, ends=row.ends), row.options["causal"])
    for rank, found in enumerate(world.run(MEMBERS, called, name)):
        want = {key: part_of(row, whole[key].detach(), rank) for key in found}
        worst = errors(found, want)
        assert max(worst.values()) <= EXACT, (rank, worst)


def packed(me: Rank) -> bool:
    """Tensors that hold q, k and v, or k and v, of a batch or of packed documents."""
    x = torch.randn(2, 12, 3, 4, 8, generator=torch.manual_seed(me.rank), dtype=torch.float64)
    how: dict[str, Any] = {"causal": True, "layout": "zigzag", "group": me.group}
    want = ringx_attention(x[:, :, 0], x[:, :, 1], x[:, :, 2], **how)
    same = [
        torch.equal(ringx_attention(*x.unbind(2), **how), want),
        torch.equal(ringx_attention(x[:, :, 0], *x[:, :, 1:].unbind(2), **how), want),
    ]
    flat = x[0]  # [T, 3, H, D]
    found = ringx_attention(*flat.unsqueeze(0).unbind(2), **how, cu_seqlens=[0, TOKENS])[0]
    torch.testing.assert_close(found, want[0], rtol=EXACT, atol=EXACT)
    return all(same)


def test_packed_tensors(world: World):
    assert world.run(MEMBERS, packed) == [True] * SIZE


def refused(me: Rank) -> list[str]:
    """Packed documents under a full mask, and the cumulative lengths of a rank's part."""
    x, said = torch.ones(1, 12, 2, 8), []
    for options in ({"causal": False, "cu_seqlens": ENDS}, {"causal": True, "cu_seqlens": LOCAL}):
        with pytest.raises((ConfigError, ShapeError)) as error:
            ringx_attention(x, x, x, group=me.group, **options)
        said.append(str(error.value))
    return said


def test_what_is_refused(world: World):
    for full, local in world.run(MEMBERS, refused):
        assert "cu_seqlens with algorithm auto and causal=False: want auto or X3" in full
        assert "length 4 of document 0: want a multiple of 8 for layout zigzag" in local


def of_torch(me: Rank) -> bool:
    """torch's buffers in context_parallel are the parts of zigzag, and are joined alike."""
    mesh = DeviceMesh("cpu", [*MEMBERS])
    whole = torch.arange(float(TOKENS)).view(1, TOKENS)
    buffer = whole.clone()
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
        part = buffer.clone()
    mine = shard(whole, "zigzag", dim=1, group=mesh)
    (joined,) = context_parallel_unshard(mesh, [part], [1])
    same = torch.equal(part, mine) and torch.equal(joined, unshard(mine, "zigzag", group=mesh))
    return same and torch.equal(joined, whole)


def test_parts_of_context_parallel(world: World):
    assert world.run(MEMBERS, of_torch) == [True] * SIZE
