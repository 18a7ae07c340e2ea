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

import torch
from torch import Tensor

from . import segments
from .kernels import Given, Pair, Triple
from .schedules import Job, _pack, _unpack
from .segments import Segments


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Pair:
    of_each, to_each, seen = _planned(job)
    kv = _with_halo(job, k, v, of_each, to_each)
    return segments.forward(q, *_unpack(kv), seen, job.scale)


def backward(job: Job, given: Given) -> Triple:
    """Sends back what the rows give to the halo, and adds to the own keys what is sent back."""
    of_each, to_each, seen = _planned(job)
    kv = _with_halo(job, given.k, given.v, of_each, to_each)
    k, v = _unpack(kv)
    dq, *got = segments.backward(given._replace(k=k, v=v), seen, job.scale)
    lent, mine = _pack(*got).to(job.reduce_dtype).tensor_split([sum(of_each)])
    back = mine.new_empty((sum(to_each), *mine.shape[1:]))
    job.ranks.exchange(back, lent, to_each, of_each).wait()
    for part in back.split(to_each):
        mine[len(mine) - len(part) :] += part
    return dq, *_unpack(mine)


def _with_halo(job: Job, k: Tensor, v: Tensor, of_each: list[int], to_each: list[int]) -> Tensor:
    """Returns the halo and, behind it, the own keys and values."""
    mine = _pack(k, v)
    halo = mine.new_empty((sum(of_each), *mine.shape[1:]))
    sent = torch.cat([mine[len(mine) - count :] for count in to_each])
    job.ranks.exchange(halo, sent, of_each, to_each).wait()
    return torch.cat((halo, mine))


def _planned(job: Job) -> tuple[list[int], list[int], Segments]:
    """Returns how many keys of each rank are the halo here, how many of the own keys are that of
    each rank, and the documents of the rows and of the keys with the halo."""
    rank, size, window = job.ranks.rank, job.ranks.size, job.span
    assert window is not None
    stops = [*accumulate(job.k_lengths)]
    starts = [0, *stops[:-1]]
    ends = job.ends or (0, stops[-1])
    firsts = [max(row - window + 1, ends[bisect_right(ends, row) - 1]) for row in starts]

    def lent(owner: int, taker: int) -> int:
        """The owner's last keys, if the taker's first row sees them."""
        first = max(starts[owner], firsts[taker])
        return max(0, stops[owner] - first) if owner < taker else 0

    start, stop = starts[rank], stops[rank]
    cuts = (*ends[bisect_right(ends, start) : bisect_right(ends, stop - 1)], stop)
    rows, keys = ((0, *(cut - first for cut in cuts)) for first in (start, firsts[rank]))
    return (
        [lent(owner, rank) for owner in range(size)],
        [lent(rank, taker) for taker in range(size)],
        Segments(rows, keys, True, window),
    )
