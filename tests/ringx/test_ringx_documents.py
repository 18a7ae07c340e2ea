"""Packed documents against the unsplit model with an explicit mask, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import EXACT, Problem, errors, poison
from world import Rank, World

from fserver.ringx import ringx_attention, shard, unshard

RANKS = (0, 1), (1, 2, 3), (0, 1, 2, 3)
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")


def masked(problem: Problem, ends: list[int], window: int | None = None) -> dict[str, torch.Tensor]:
    """out, lse and all gradients of the whole, by autograd over a mask."""
    q, k, v, dout, sink = problem.tensors()
    leaves = [t.double().requires_grad_() for t in (q, k, v, sink)]
    q, k, v, sink = leaves
    at = torch.arange(problem.rows)
    document = torch.bucketize(at, torch.tensor(ends[1:]), right=True)
    seen = (document[:, None] == document) & (at[:, None] >= at)
    if window is not None:
        seen &= at[:, None] - at < window
    k, v = (t.repeat_interleave(problem.heads // problem.kv_heads, 2) for t in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * problem.dim**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    if problem.sink:
        level = sink[:, None, None].expand(problem.batch, -1, problem.rows, 1)
        scores = torch.cat((scores, level), -1)
    p = scores.softmax(-1)[..., : problem.rows]
    out = torch.einsum("bhst,bthd->bshd", p, v)
    grads = torch.autograd.grad(out, leaves[: 3 + problem.sink], dout.double())
    return dict(zip(NAMES, (out, scores.logsumexp(-1), *grads), strict=False))


def attend(
    me: Rank, problem: Problem, ends: Any, layout: str = "zigzag", function: Any = None,
    packed: bool = True, **options: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The same of this rank's part. `packed`: whether the call is told of documents."""
    q, k, v, dout, sink = problem.tensors()
    more = {"cu_seqlens": ends} if packed else {}
    mine = [shard(t, layout, me.rank, me.size, **more) for t in (q, k, v, dout)]
    leaves = [t.requires_grad_() for t in (*mine[:3], *[sink] * problem.sink)]
    options |= {**more, "layout": layout, "causal": True, "group": me.group, "return_lse": True}
    with poison():
        out, lse = (function or ringx_attention)(
            *leaves[:3], sink=sink if problem.sink else None, **options
        )
        grads = torch.autograd.grad(out, leaves, mine[3])
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=False))


def joined(parts: list[dict[str, torch.Tensor]], layout: str, **more: Any) -> dict[str, Any]:
    whole = {}
    for name in parts[0]:
        each = [part[name].double() for part in parts]
        if name == "dsink":
            whole[name] = torch.stack(each).sum(0)
        else:
            whole[name] = unshard(each, layout, 2 if name == "lse" else 1, **more)
    return whole


def check(
    world: World, members: tuple[int, ...], problem: Problem, ends: Any, limit: float = EXACT,
    function: Any = attend, **options: Any,
) -> None:  # fmt: skip
    parts = world.run(members, function, problem, ends, **options)
    worst = errors(joined(parts, "zigzag", cu_seqlens=ends), masked(problem, [*map(int, ends)]))
    assert max(worst.values()) <= limit, worst


def packing(size: int, *chunks: int) -> list[int]:
    """Where documents of so many chunks' lengths end."""
    return [2 * size * sum(chunks[:count]) for count in range(len(chunks) + 1)]


def sized(ends: list[int], **options: Any) -> Problem:
    return Problem(rows=ends[-1], keys=ends[-1], **options)


@pytest.mark.parametrize("members", [(0,), *RANKS], ids=str)
@pytest.mark.parametrize(
    "chunks", [(3,), (1,) * 9, (1, 5, 2), (2, 0, 3)], ids=["one", "short", "mixed", "empty"]
)
def test_is_the_unsplit_model(world: World, members: tuple[int, ...], chunks: tuple[int, ...]):
    ends = packing(len(members), *chunks)
    check(world, members, sized(ends, heads=4, kv_heads=2), ends)


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda x: torch.tensor(x).int()])
def test_batch_sink_and_kinds_of_lengths(world: World, kind: Any):
    ends = packing(3, 2, 1, 3)
    problem = sized(ends, batch=2, heads=5, kv_heads=1, dim=7, sink=True)
    check(world, (1, 2, 3), problem, kind(ends), agreed=True, algorithm="X3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_types(world: World, dtype: torch.dtype):
    ends = packing(2, 2, 1, 3)
    limit = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    check(world, (2, 3), sized(ends, heads=4, kv_heads=2, dim=16, dtype=dtype), ends, limit)
