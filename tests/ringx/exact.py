"""Runs ringx on shards of a problem, on every rank of a group, against dense attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from world import Rank, World

from fserver import ringx
from fserver.ringx import ringx_attention
from fserver.ringx.algorithms import ALGORITHMS


class Row(NamedTuple):
    """An algorithm with one of its masks."""

    algorithm: str
    causal: bool
    layout: str


ROWS = {
    name if causal == next(iter(how.masks)) else f"{name} full": Row(
        name, causal, how.layout(causal)
    )
    for name, how in ALGORITHMS.items()
    for causal in how.masks
}
NAMES = [*ROWS]
CAUSAL = [name for name, row in ROWS.items() if row.causal]
EXACT = 1e-12
"""Relative error that float64 leaves."""

Lengths = tuple[Sequence[int], Sequence[int]]
"""Of the rows and of the keys, by rank."""


@dataclass(frozen=True)
class Problem:
    """Attention over whole sequences of random numbers."""

    batch: int = 1
    rows: int = 24
    keys: int = 24
    heads: int = 2
    kv_heads: int = 2
    dim: int = 8
    level: float = 0.0  # of the scores, and so of lse
    sink: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0
    device: str = "cpu"
    ends: tuple[int, ...] | None = None  # of packed documents, from 0 on
    window: int | None = None  # keys that a row sees at most

    def tensors(self) -> list[Tensor]:
        """q, k, v, the gradient of out, and the sink. The same on all ranks."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        kind = {"dtype": torch.float64, "device": self.device, "generator": generator}

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, **kind)

        q = random(self.batch, self.rows, self.heads, self.dim)
        k, v = (random(self.batch, self.keys, self.kv_heads, self.dim) for _ in range(2))
        if self.level:
            q[..., 0] = (abs(self.level) * self.dim**0.5) ** 0.5
            k[..., 0] = math.copysign(float(q[0, 0, 0, 0]), self.level)
        found = [q, k, v, random(*q.shape), random(self.heads)]
        return [t.to(self.dtype) for t in found]


def fitted(problem: Problem, name: str, size: int) -> Problem:
    """With so many heads that each rank can have a part of them, where the algorithm wants it."""
    short = ALGORITHMS[ROWS[name].algorithm].by_heads and problem.heads % size
    return replace(problem, heads=problem.heads * size) if short else problem


SCORES = 128 << 20
"""Bytes of the scores that `dense` makes at a time; autograd has some eight times as many, and all
ranks may do so on one GPU."""


def seen(problem: Problem, causal: bool, rows: Tensor) -> Tensor:
    """The mask of some rows: which keys each of them sees, [rows, keys]."""
    at, row = torch.arange(problem.keys, device=rows.device), rows[:, None]
    mask = (at <= row) if causal else torch.ones_like(at <= row)
    if problem.window is not None:
        mask &= row - at < problem.window
    if problem.ends is not None:
        ends = torch.tensor(problem.ends[1:], device=rows.device)
        of_row, of_key = (torch.bucketize(places, ends, right=True) for places in (row, at))
        mask &= of_row == of_key
    return mask


def dense(problem: Problem, causal: bool) -> dict[str, Tensor]:
    """out, lse and the gradients by autograd, in float64, of the problem as its type has it. One
    head and some rows at a time, so that long sequences have room."""
    at_once = max(1, SCORES // (8 * problem.batch * problem.keys))
    q, k, v, dout, sink = (t.double().requires_grad_() for t in problem.tensors())
    out, lse = torch.empty_like(q), q.new_empty(problem.batch, problem.heads, problem.rows)
    at = torch.arange(problem.rows, device=q.device)
    for head in range(problem.heads):
        near = head * problem.kv_heads // problem.heads
        for rows in at.split(at_once):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            scores = q[:, here, head] @ k[:, :, near].mT * problem.dim**-0.5
            scores = scores.masked_fill(~seen(problem, causal, rows), -torch.inf)
            if problem.sink:
                level = sink[head].expand(*scores.shape[:2], 1)
                scores = torch.cat((scores, level), -1)
            answer = scores.softmax(-1)[..., : problem.keys] @ v[:, :, near]
            answer.backward(dout[:, here, head])
            with torch.no_grad():
                out[:, here, head], lse[:, head, here] = answer, scores.logsumexp(-1)
    found = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {**found, "dsink": sink.grad} if problem.sink else found


def split(
    length: int, lengths: Sequence[int] | None, layout: str, rank: int, size: int,
    ends: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Which rows of the whole the rank has; `lengths` says how many each has, if these are uneven,
    `ends` where documents end."""
    if lengths is None:
        return ringx.shard(torch.arange(length), layout, rank, size, 0, cu_seqlens=ends)
    start = sum(lengths[:rank])
    return torch.arange(start, start + lengths[rank])


@dataclass
class Shard:
    """What one rank has of a problem."""

    leaves: list[Tensor]  # q, k and v, and the sink if there is one
    dout: Tensor
    rows: Tensor
    keys: Tensor  # the positions of both


def shard(
    me: Rank,
    problem: Problem,
    layout: str,
    lengths: Lengths | None = None,
    strided: bool = False,
) -> Shard:
    q, k, v, dout, sink = problem.tensors()
    of_q, of_k = lengths or (None, None)
    rows = split(problem.rows, of_q, layout, me.rank, me.size, problem.ends)
    keys = split(problem.keys, of_k, layout, me.rank, me.size, problem.ends)
    parts = [q[:, rows], k[:, keys], v[:, keys]]
    if strided:  # the heads before the sequence in memory, every other number
        parts = [spread(t) for t in parts]
    leaves = [t.requires_grad_() for t in parts]
    leaves += [sink.requires_grad_()] if problem.sink else []
    return Shard(leaves, dout[:, rows], rows, keys)


def call(
    me: Rank, mine: Shard, algorithm: str, repeats: int = 1, **options: Any
) -> dict[str, Tensor]:
    """out, lse and gradients of a shard."""
    out, lse = ringx_attention(
        *mine.leaves[:3],
        algorithm=ROWS[algorithm].algorithm,
        causal=ROWS[algorithm].causal,
        group=me.group,
        sink=mine.leaves[3] if len(mine.leaves) > 3 else None,
        return_lse=True,
        **options,
    )
    for _ in range(repeats):
        grads = torch.autograd.grad(out, mine.leaves, mine.dout, retain_graph=True)
    names = ("out", "lse", "dq", "dk", "dv", "dsink")
    return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=False))


def attend(
    me: Rank,
    problem: Problem,
    algorithm: str,
    lengths: Lengths | None = None,
    strided: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """out, lse and gradients of this rank's shards."""
    problem = fitted(problem, algorithm, me.size)
    mine = shard(me, problem, ROWS[algorithm].layout, lengths, strided)
    return call(me, mine, algorithm, **options)


def spread(x: Tensor) -> Tensor:
    """The same numbers with gaps, and with the heads before the sequence."""
    wide = torch.full((x.shape[0], x.shape[2], x.shape[1], 2 * x.shape[3]), torch.nan).to(x.dtype)
    wide = wide.transpose(1, 2)[..., ::2]
    return wide.copy_(x)


def assembled(
    parts: list[dict[str, Tensor]],
    problem: Problem,
    algorithm: str,
    lengths: Lengths | None = None,
) -> dict[str, Tensor]:
    """The ranks' shards at their places."""
    layout, size = ROWS[algorithm].layout, len(parts)
    of_q, of_k = lengths or (None, None)
    rows = torch.cat([split(problem.rows, of_q, layout, r, size) for r in range(size)]).argsort()
    keys = torch.cat([split(problem.keys, of_k, layout, r, size) for r in range(size)]).argsort()
    whole = {}
    for name in parts[0]:
        if name == "dsink":
            whole[name] = torch.stack([part[name].double() for part in parts]).sum(0)
        else:
            dim = 2 if name == "lse" else 1
            order = keys if name in ("dk", "dv") else rows
            whole[name] = torch.cat([part[name] for part in parts], dim).index_select(dim, order)
    return whole


def errors(found: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each, relative to its largest number. NaN is infinite."""
    assert found.keys() == want.keys()
    relative = {}
    for name, right in want.items():
        assert found[name].shape == right.shape, name
        right = right.detach()
        error = (found[name].double() - right).abs().max() / right.abs().max()
        relative[name] = float(torch.nan_to_num(error, nan=torch.inf))
    return relative


@contextmanager
def poison() -> Iterator[None]:
    """torch.empty and its kind give NaN, not whatever is in the memory."""
    makers = (torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")
    before = [getattr(*maker) for maker in makers]

    def filled(make: Any) -> Any:
        def empty(*args: Any, **options: Any) -> Tensor:
            made = make(*args, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return empty

    for maker, make in zip(makers, before, strict=True):
        setattr(*maker, filled(make))
    try:
        yield
    finally:
        for maker, make in zip(makers, before, strict=True):
            setattr(*maker, make)


def poisoned(me: Rank, *args: Any, **options: Any) -> dict[str, Tensor]:
    with poison():
        return attend(me, *args, **options)


def check(
    world: World,
    members: Sequence[int],
    problem: Problem,
    algorithm: str,
    lengths: Lengths | None = None,
    limit: float = EXACT,
    function: Callable[..., Any] = attend,
    **options: Any,
) -> None:
    """The ranks' shards, put together, are what dense attention gives."""
    parts = world.run(members, function, problem, algorithm, lengths, **options)
    problem = fitted(problem, algorithm, len(members))
    found = assembled(parts, problem, algorithm, lengths)
    worst = errors(found, dense(problem, ROWS[algorithm].causal))
    assert max(worst.values()) <= limit, worst
