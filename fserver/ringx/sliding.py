"""A sliding window: a row sees its own key and the `window` - 1 before it, of its own document.

Rank r has part r of the sequence (contiguous). It gets the keys before its own that its rows see,
its *halo*, from the ranks that own them, in one all-to-all. So what travels, and the work of a
rank, depend on the window and not on the length of the sequence. In backward another all-to-all
takes the gradients of a halo back to the owners of its keys.

Source: Beltagy, Peters, Cohan, Longformer, 2020 (sliding window attention). The exchange of halos
is that of stencil computations.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from . import segments
from .kernels import Given, Pair, Triple
from .ranks import Collective
from .schedules import Blocks, Job, _head_start, _pack, _unpack
from .segments import Segments


class Span(NamedTuple):
    """Some of the local rows, and the keys that they see, halo first."""

    rows: slice
    keys: slice
    segments: Segments


class Plan(NamedTuple):
    """Keys of the halo from each rank, and to each rank's; rows that see no halo, and those that
    may."""

    of_each: list[int]
    to_each: list[int]
    spans: list[Span]


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, **_: Blocks) -> Pair:
    """Works on rows that see no halo while the halo travels, then on the others."""
    plan = _planned(job)
    kv, here = _with_halo(job, plan, k, v)
    _head_start(q.device)
    found = []
    for rows, keys, of_span in plan.spans:
        if rows.start == 0:
            here.wait()
        found.append(segments.forward(q[:, rows], *_unpack(kv[keys]), of_span, job.scale))
    (late, lse_late), (early, lse_early) = found
    return torch.cat((early, late), 1), torch.cat((lse_early, lse_late), 2)


def backward(job: Job, given: Given, **_: Blocks) -> Triple:
    """Adds up what the rows give to the keys, sends back what is the halo's, and adds to the own
    keys what is sent back."""
    dout, q, k, v, out, lse = given
    plan = _planned(job)
    halo, own = sum(plan.of_each), k.shape[1]
    kv, here = _with_halo(job, plan, k, v)
    dkv = torch.zeros(kv.shape, dtype=job.reduce_dtype, device=k.device)
    _head_start(q.device)
    dq = []
    for rows, keys, of_span in plan.spans:
        if rows.start == 0:
            here.wait()
        some = dout[:, rows], q[:, rows], *_unpack(kv[keys]), out[:, rows], lse[:, :, rows]
        part, *got = segments.backward(Given(*some), of_span, job.scale)
        dq.append(part)
        dkv[keys] += _pack(*got)
    got_back = dkv.new_empty((sum(plan.to_each), *dkv.shape[1:]))
    job.ranks.all_to_all(got_back, dkv[:halo], plan.to_each, plan.of_each).wait()
    mine = dkv[halo:]
    for part in got_back.split(plan.to_each):
        mine[own - len(part) :] += part
    return torch.cat(dq[::-1], 1), *_unpack(mine)


def _with_halo(job: Job, plan: Plan, k: Tensor, v: Tensor) -> tuple[Tensor, Collective]:
    """Gives the halo and, behind it, the own keys, which are there at once."""
    mine, halo = _pack(k, v), sum(plan.of_each)
    kv = mine.new_empty((halo + len(mine), *mine.shape[1:]))
    kv[halo:] = mine
    sent = torch.cat([mine[len(mine) - count :] for count in plan.to_each])
    return kv, job.ranks.all_to_all(kv[:halo], sent, plan.of_each, plan.to_each)


def _planned(job: Job) -> Plan:
    rank, size = job.ranks.rank, job.ranks.size
    stops = [*accumulate(job.k_lengths)]
    starts = [0, *stops[:-1]]
    ends = job.ends or (0, stops[-1])
    assert job.span is not None
    window = job.span

    def first(row: int) -> int:
        """The first key that a row sees."""
        return max(row - window + 1, ends[bisect_right(ends, row) - 1])

    def count(owner: int, taker: int) -> int:
        """How many of an owner's keys are the taker's halo: its last ones."""
        if not owner < taker:
            return 0
        return max(0, stops[owner] - max(starts[owner], first(starts[taker])))

    def span(row: int, stop: int) -> Span:
        start, key = starts[rank], first(row)
        cuts = [row, *ends[bisect_right(ends, row) : bisect_right(ends, stop - 1)], stop]
        of_rows = tuple(cut - row for cut in cuts)
        of_keys = (0, *(cut - key for cut in cuts[1:]))
        halo = first(start)  # where the keys begin
        keys = slice(key - halo, stop - halo)
        return Span(
            slice(row - start, stop - start), keys, Segments(of_rows, of_keys, True, window)
        )

    start, stop = starts[rank], stops[rank]
    late = min(start + window - 1, stop)  # from here on no row sees the halo
    return Plan(
        [count(owner, rank) for owner in range(size)],
        [count(rank, taker) for taker in range(size)],
        [span(late, stop), span(start, late)],
    )
