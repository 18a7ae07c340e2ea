"""What the ranks exchange by collectives: keys and values from one owner after the other (X4, and
backward of X1 and X2), all at once (X3), or from each rank to the next (ring); or queries (forward
of X1 and X2). copies.py, packed.py and heads.py have more ways.

Source of the ring: H. Liu, M. Zaharia and P. Abbeel, *Ring Attention with Blockwise Transformers
for Near-Infinite Context*, 2023.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .kernels import Pair
from .ranks import Collective
from .schedules import (
    LEAST,
    Arrivals,
    Block,
    Exchange,
    Job,
    add,
    head_start,
    pack,
    put,
    unpack,
    zero_between,
)

KEYS_AHEAD = 2
"""So many broadcasts are under way: one that did not get its place before a block still has the
time of the next block."""


def in_turn(
    job: Job, send: Callable[[int], tuple[Tensor, Collective]], ahead: int
) -> Iterator[tuple[int, Tensor]]:
    """Gives (owner, its tensor) for all owners. The first broadcast starts at once; so many more
    are under way while the caller works on one."""
    size = job.ranks.size
    coming = deque(send(owner) for owner in range(min(max(ahead, 1), size)))

    def turns() -> Iterator[tuple[int, Tensor]]:
        for owner in range(size):
            tensor, work = coming.popleft() if coming else send(owner)
            work.wait()
            if ahead and owner + ahead < size:
                coming.append(send(owner + ahead))
            yield owner, tensor
            del tensor, work

    return turns()


class Broadcasts(Exchange):
    """Keys come from one owner after the other, with `ahead` while the rank works on others. dk and
    dv of each owner are added up there, with `behind` while the next owner's are computed.

    In forward the own block is first. In backward it has its turn among the others: a rank with
    nothing to do in its turn would wait for the sum.
    """

    most = LEAST

    def __init__(
        self, job: Job, k: Tensor, v: Tensor, *, backward: bool, ahead: bool = True,
        behind: bool = False,
    ):  # fmt: skip
        super().__init__(job, k, v, backward=backward)
        self._behind, mine = behind, pack(k, v)

        def send(owner: int) -> tuple[Tensor, Collective]:
            kv = mine
            if owner != job.ranks.rank:
                kv = mine.new_empty((job.k_lengths[owner], *mine.shape[1:]))
            return kv, job.ranks.broadcast(kv, owner)

        self._turns = in_turn(job, send, KEYS_AHEAD if ahead else 0)

    def arrivals(self) -> Arrivals:
        rank, device = self.job.ranks.rank, self.k.device
        own = self.job.own_block(in_two=self._behind), self.k, self.v
        if not self.backward:
            head_start(device)
            yield own
        for owner, kv in self._turns:
            self._owner, block = owner, self.job.block(rank, owner)
            if owner == rank:
                if self.backward:
                    head_start(device)
                    yield own
            elif block:
                head_start(device)
                yield block, *unpack(kv[block.keys])
            elif self.backward:
                self._sum([])
            del kv

    def give(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        self._sum([block.keys], dk, dv)

    def _sum(self, written: list[slice], *grads: Tensor) -> None:
        """Sends what the keys of the owner in turn got."""
        owner, (batch, _, heads, dim) = self._owner, self.k.shape
        shape = self.job.k_lengths[owner], batch, 2, heads, dim
        dkv = self.k.new_empty(shape, dtype=self.job.reduce_dtype)
        for keys in written:
            put(dkv, keys, *grads)
        zero_between(dkv, written)
        if owner == self.job.ranks.rank:
            self.mine = dkv
        self.sums.append(self.job.ranks.sum_at(owner, dkv))
        while len(self.sums) > self._behind:
            self.sums.popleft().wait()


class Gather(Exchange):
    """All keys are gathered while the rank works on its own block. dk and dv of all keys are
    written into one buffer, whose sum over the ranks is scattered."""

    def __init__(self, job: Job, k: Tensor, v: Tensor, *, backward: bool):
        super().__init__(job, k, v, backward=backward)
        mine = pack(k, v)
        self._kv = mine.new_empty((job.ranks.size * len(mine), *mine.shape[1:]))
        self._here = job.ranks.gather(self._kv, mine)
        if backward:
            self._dkv = torch.empty_like(self._kv, dtype=job.reduce_dtype)
        self._written = list[slice]()

    def arrivals(self) -> Arrivals:
        own, *calls = self._planned()
        head_start(self.k.device)
        yield own, self.k, self.v
        self._here.wait()
        for block in calls:
            yield block, *unpack(self._pick(block.keys))
        if self.backward:
            zero_between(self._dkv, self._written)
            self.mine = self._dkv.new_empty((self.k.shape[1], *self._dkv.shape[1:]))
            self.sums.append(self.job.ranks.scatter_sum(self.mine, self._dkv))

    def _planned(self) -> list[Block]:
        return planned(self.job)

    def _pick(self, keys: Any) -> Tensor:
        """Returns the keys of a call as one sequence."""
        picked = [self._kv[some] for some in keys]
        return picked[0] if len(picked) == 1 else torch.cat(picked)

    def give(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        lengths = [keys.stop - keys.start for keys in block.keys]
        for keys, *got in zip(block.keys, dk.split(lengths, 1), dv.split(lengths, 1), strict=True):
            put(self._dkv, keys, *got)
        self._written += block.keys


def planned(job: Job) -> list[Block]:
    """The calls where all keys are gathered: the own block, one call for what the same rows see of
    all owners before, and one of all behind. So there are three, however many ranks there are."""
    rank, keys = job.ranks.rank, job.k_lengths[job.ranks.rank]
    own = job.own_block(in_two=True)
    calls = [own._replace(keys=[slice(rank * keys, (rank + 1) * keys)])]
    for owner in range(job.ranks.size):
        block = job.block(rank, owner)
        if owner == rank or block is None:
            continue
        seen = slice(owner * keys + block.keys.start, owner * keys + block.keys.stop)
        if owner in (0, rank + 1):  # the first before me, the first behind
            calls.append(Block(block.rows, [seen]))
        elif calls[-1].keys[-1].stop == seen.start:
            calls[-1].keys[-1] = slice(calls[-1].keys[-1].start, seen.stop)
        else:
            calls[-1].keys.append(seen)
    return calls


class Ring(Exchange):
    """Keys go round, the next ones while the rank works, and behind them the sums of their
    gradients, which end at home."""

    most = LEAST

    def __init__(self, job: Job, k: Tensor, v: Tensor, *, backward: bool):
        super().__init__(job, k, v, backward=backward)
        self._kv = pack(k, v)
        self._coming = self._start(0)
        if backward:
            self.mine = torch.zeros_like(self._kv, dtype=job.reduce_dtype)

    def _start(self, step: int) -> tuple[Tensor, Collective] | None:
        """Passes on the keys of a step, but not the last ones."""
        if step + 1 == self.job.ranks.size:
            return None
        coming = torch.empty_like(self._kv)
        return coming, self.job.ranks.pass_on(coming, self._kv)

    def arrivals(self) -> Arrivals:
        rank, size = self.job.ranks.rank, self.job.ranks.size
        for step in range(size):
            block = self.job.block(rank, (rank - step) % size)
            assert block is not None
            head_start(self.k.device)
            yield block, *unpack(self._kv[block.keys])
            if self._coming:
                self._kv, work = self._coming
                work.wait()
                self._coming = self._start(step + 1)

    def give(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        if self.sums:
            self.sums.popleft().wait()
        add(self.mine, block.keys, dk, dv)
        if self.job.ranks.size > 1:
            sent, self.mine = self.mine, torch.empty_like(self.mine)
            self.sums.append(self.job.ranks.pass_on(self.mine, sent))


# Queries travel: the forward of X1 and X2, whose backward is by Broadcasts


def queries_forward(job: Job, q: Tensor, k: Tensor, v: Tensor, *, overlap: bool) -> Pair:
    """All ranks answer the queries of each owner in turn, and the answers are added up there.

    With `overlap`, while one owner's are answered the next one's are on their way here, the
    maximum for the last one is being found and the sum for the one before it.
    """
    ranks, dim = job.ranks, q.shape[-1]
    lag = 1 if overlap else 0
    answered: deque[tuple[int, Tensor, Tensor, Tensor, Collective]] = deque()
    summed: deque[tuple[int, Tensor, Tensor, Collective]] = deque()
    result: list[Tensor] = []

    def send(owner: int) -> tuple[Tensor, Collective]:
        if owner == ranks.rank:
            rows = q.transpose(0, 1).contiguous()
        else:
            rows = q.new_empty((job.q_lengths[owner], q.shape[0], *q.shape[2:]))
        return rows, ranks.broadcast(rows, owner)

    def weigh() -> None:
        """Numerators and denominators of one owner's rows, in one buffer, to the owner."""
        owner, out, lse, peak, found = answered.popleft()
        found.wait()
        weight = (lse - peak).exp_().permute(2, 0, 1)[..., None]
        flat = torch.empty(weight.numel() * (dim + 1), dtype=job.reduce_dtype, device=q.device)
        above, below = _parts(flat, weight.shape, dim)
        torch.mul(out.transpose(0, 1), weight, out=above)
        below.copy_(weight)
        summed.append((owner, flat, peak, ranks.sum_at(owner, flat)))

    def settle() -> None:
        owner, flat, peak, done = summed.popleft()
        done.wait()
        if owner == ranks.rank:
            shape = (q.shape[1], q.shape[0], q.shape[2], 1)
            above, below = (t.to(peak.dtype) for t in _parts(flat, shape, dim))
            lse = peak + below[..., 0].log().permute(1, 2, 0)
            result.extend(((above / below).transpose(0, 1), lse))

    for owner, rows in in_turn(job, send, lag):
        block = job.block(owner, ranks.rank) or Block(slice(0, len(rows)), slice(0, 0))
        some = rows.transpose(0, 1), k[:, block.keys], v[:, block.keys]
        out, lse = kernels.forward(*some, block.mask is True, job.scale)
        peak = lse.clone(memory_format=torch.contiguous_format)
        answered.append((owner, out, lse, peak, ranks.maximum(peak)))
        if len(answered) > lag:
            weigh()
        if len(summed) > lag:
            settle()
    while answered:
        weigh()
    while summed:
        settle()
    return result[0], result[1]


def _parts(flat: Tensor, shape: Sequence[int], dim: int) -> Pair:
    """Numerators [S, B, H, D] and denominators [S, B, H, 1] in their common buffer."""
    count = flat.numel() // (dim + 1) * dim
    return flat[:count].view(*shape[:-1], dim), flat[count:].view(shape)
