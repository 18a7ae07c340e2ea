"""Attention of which a row sees its own document alone, or a window of it.

Packed documents under the causal mask, by X3: a rank has two chunks of each document (zigzag), so
all ranks have the same rows and the same work, however long documents are. All keys are gathered at
once. There are three calls of `kernels`, each for all documents: the own rows with the own keys;
all rows with the first chunks of the owners before; and second chunks with both chunks of the
owners behind. An index picks the keys of a call, document after document, and puts their gradients
back.

A sliding window: a row sees its own key and the `window` - 1 before it, of its own document. Rank r
has part r of the sequence (contiguous). It gets the keys before its own that its rows see, its
*halo*, from the ranks that own them, in one all-to-all. So what travels, and the work of a rank,
depend on the window and not on the length of the sequence. In backward another all-to-all takes the
gradients of a halo back to the owners of its keys.

Source: Beltagy, Peters, Cohan, Longformer, 2020 (sliding window attention). The exchange of halos
is that of stencil computations.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .exchanges import Gather
from .kernels import Segments, on_device, ranges, stream_of
from .schedules import Arrivals, Block, Exchange, Job, pack, unpack


class Documents(Gather):
    """As Gather, with an index that picks the keys of a call."""

    def __init__(self, job: Job, k: Tensor, v: Tensor, *, backward: bool):
        super().__init__(job, k, v, backward=backward)
        if backward:
            self._dkv.zero_()
            self._written = [slice(0, len(self._dkv))]

    def _planned(self) -> list[Block]:
        ends, ranks, device = self.job.ends, self.job.ranks, self.k.device
        assert ends is not None
        return documents_planned(ends, ranks.rank, ranks.size, device, stream_of(device))

    def _pick(self, keys: Any) -> Tensor:
        return self._kv[keys]

    def give(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        self._dkv.index_copy_(0, block.keys, pack(dk, dv).to(self._dkv.dtype))


@lru_cache(maxsize=16)
def documents_planned(
    ends: tuple[int, ...], rank: int, size: int, device: torch.device, stream: int
) -> list[Block]:
    """The calls of a rank, the own one first. Kept for the layers of a model: on each stream,
    behind what has made it there."""
    local, halves = (tuple(end // parts for end in ends) for parts in (size, 2 * size))
    starts = on_device([*local], device)
    chunks = starts.diff() // 2
    first, second = (
        ranges(begin, chunks, halves[-1]) for begin in (starts[:-1], starts[:-1] + chunks)
    )
    by_owner = torch.arange(ends[-1], device=device).view(size, -1)
    every = slice(0, local[-1])
    calls = [Block(every, by_owner[rank], Segments(local, local, True))]
    if rank:
        before = tuple(rank * end for end in halves)
        calls.append(
            Block(every, by_owner[:rank, first].T.flatten(), Segments(local, before, False))
        )
    if rank < size - 1:
        behind = tuple((size - 1 - rank) * end for end in local)
        keys = by_owner[rank + 1 :].T.flatten()
        calls.append(Block(second, keys, Segments(halves, behind, False)))
    return calls


class Halo(Exchange):
    """Brings the halo; the own keys are behind it. There is one block."""

    def __init__(self, job: Job, k: Tensor, v: Tensor, *, backward: bool):
        super().__init__(job, k, v, backward=backward)
        mine = pack(k, v)
        self._of_each, self._to_each, self._seen = halo_planned(job)
        halo = mine.new_empty((sum(self._of_each), *mine.shape[1:]))
        sent = torch.cat([mine[len(mine) - count :] for count in self._to_each])
        job.ranks.exchange(halo, sent, self._of_each, self._to_each).wait()
        self._kv = torch.cat((halo, mine))

    def arrivals(self) -> Arrivals:
        rows = slice(0, self.job.q_lengths[self.job.ranks.rank])
        yield Block(rows, None, self._seen), *unpack(self._kv)

    def give(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        """Sends back what the halo got, and adds to the own keys what is sent back."""
        grads = pack(dk, dv).to(self.job.reduce_dtype)
        lent, self.mine = grads.tensor_split([sum(self._of_each)])
        back = lent.new_empty((sum(self._to_each), *lent.shape[1:]))
        self.job.ranks.exchange(back, lent, self._to_each, self._of_each).wait()
        for part in back.split(self._to_each):
            self.mine[len(self.mine) - len(part) :] += part


def halo_planned(job: Job) -> tuple[list[int], list[int], Segments]:
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
