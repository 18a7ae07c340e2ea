"""X3, X3b and X4 without a collective, where ranks reach each other's memory: keys and values are
copied from their owners, and their gradients to them. docs/ringx.md says how, under *By copies*.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

import torch
from torch import Tensor

from .combine import Parts
from .kernels import Pair, accumulator
from .schedules import Block, Job, Work, head_start


@lru_cache
def _places(rank: int, size: int, together: int) -> dict[int, tuple[int, int]]:
    """Of each other rank as an owner: the round in which it has its turn here, with so many others,
    and its number in that. The first is the rank before, so that no two ranks have the same owner
    at a time."""
    owners = ((rank - 1 - turn) % size for turn in range(size - 1))
    return {owner: divmod(turn, together) for turn, owner in enumerate(owners)}


def _rounds(job: Job, together: int) -> list[list[Block]]:
    """The blocks of this rank in each round. Their keys are which ones, and of which owners."""
    rank, size = job.ranks.rank, job.ranks.size
    rounds: list[list[Block]] = []
    for owner, (number, _) in _places(rank, size, together).items():
        if number == len(rounds):
            rounds.append([])
        block = job.block(rank, owner)
        assert block is not None
        last = rounds[-1][-1] if rounds[-1] else None
        if last and (last.rows, last.keys[0]) == (block.rows, block.keys):
            last.keys[1].append(owner)
        else:
            rounds[-1].append(block._replace(keys=(block.keys, [owner])))
    return rounds


def _in_window(k: Tensor) -> tuple[int, ...]:
    """The shape of keys and values, or of their gradients, in a window: what a rank copies is one
    piece of each."""
    return 2, k.shape[1], k.shape[0], *k.shape[2:]


def fits(job: Job, k: Tensor, together: int, backward: bool) -> bool:
    """Whether the window has the memory for a forward or backward of such keys: for those of this
    rank, and for the gradients from the ranks of one round, or of two that alternate."""
    window = job.window
    if window is None or job.reduce_dtype is not accumulator(k.dtype):
        return False
    size = 2 * k.numel() * k.element_size()
    slots = together if together == job.ranks.size - 1 else 2 * together
    if not window.reserve(job.ranks, "keys", size):
        return False
    return not backward or window.reserve(job.ranks, "grads", slots * size)


def copies(
    job: Job, k: Tensor, v: Tensor, work: Work, backward: bool, *, together: int
) -> Pair | None:
    """Copies the keys of so many owners at a time, the next ones' while the rank works. What a call
    gives to dk and dv is copied to the owners as it is, and each adds up what has come for it."""
    return _Copies(job, k, v, together).run(work, backward)


class _Copies:
    def __init__(self, job: Job, k: Tensor, v: Tensor, together: int):
        assert job.window is not None
        self.job, self.k, self.v = job, k, v
        self._window = job.window
        self._together, self._shape = together, _in_window(k)
        self._rounds = _rounds(job, together)
        self._grads = [Parts(k.shape[1], accumulator(k.dtype), together + 2) for _ in range(2)]
        self._before: tuple[torch.cuda.Event, list[Tensor]] | None = None
        mine = self._of(job.ranks.rank)
        for part, tensor in zip(mine, (k, v), strict=True):
            part.copy_(tensor.transpose(0, 1))
        self._sent: list[Tensor] = []
        self._coming = deque([self._start(0)])

    def _of(self, owner: int) -> Tensor:
        """The keys and values of an owner."""
        return self._window.of(owner, "keys", self._shape, self.k.dtype)

    def _start(self, number: int) -> tuple[list[Tensor], torch.cuda.Event]:
        """Starts the copies of a round: for each block keys and values, [2, S, B, Hkv, D]."""
        blocks, window, found = self._rounds[number], self._window, list[Tensor]()
        for block in blocks:
            keys, owners = block.keys
            every = (2, len(owners) * (keys.stop - keys.start), *self._shape[2:])
            found.append(self.k.new_empty(every))
        with window.beside():
            if number == 0:
                window.fence()  # all have written theirs
            for block, kv in zip(blocks, found, strict=True):
                keys, owners = block.keys
                for owner, place in zip(owners, kv.chunk(len(owners), 1), strict=True):
                    for to, of in zip(place, self._of(owner), strict=True):
                        to.copy_(of[keys])
            came = window.mark()
            if number + 1 == len(self._rounds):
                window.fence()  # all have what they wanted
        return found, came

    def run(self, work: Work, backward: bool) -> Pair | None:
        own, half = self.job.own(backward, self.k.device)
        head_start(self.k.device)
        got = work(own, self.k, self.v)
        if backward:
            self._add(own.keys, *got)
        del got
        for number, blocks in enumerate(self._rounds):
            self._number = number
            if number + 1 < len(self._rounds):
                self._coming.append(self._start(number + 1))
            found, came = self._coming.popleft()
            came.wait()
            for block in blocks:
                kv = found.pop(0)
                got = work(block, kv[0].transpose(0, 1), kv[1].transpose(0, 1))
                if backward:
                    self._give(block, *got)
                del kv, got
        return self._end(work, half) if backward else None

    def _slot(self, rank: int, owner: int) -> Tensor:
        """The owner's room for what a rank gives to it."""
        number, turn = _places(rank, self.job.ranks.size, self._together)[owner]
        start = (number % 2 * self._together + turn) * 2 * self.k.numel()
        return self._window.of(owner, "grads", self._shape, self.k.dtype, start)

    def _take(self, number: int) -> None:
        """Adds what has come in a round, which all ranks have ended."""
        assert self._before
        self._before[0].wait()
        me, size = self.job.ranks.rank, self.job.ranks.size
        for rank in range(size):
            block = None if rank == me else self.job.block(rank, me)
            if block and _places(rank, size, self._together)[me][0] == number:
                for parts, came in zip(self._grads, self._slot(rank, me), strict=True):
                    parts.add(block.keys, came[block.keys].transpose(0, 1))

    def _give(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        number, (keys, owners) = self._number, block.keys
        last = block is self._rounds[number][-1]
        grads = [t.to(self.k.dtype).transpose(0, 1).contiguous() for t in (dk, dv)]
        self._sent += grads
        if last and number:
            self._take(number - 1)
            for parts in self._grads:
                parts.settle()  # the next round comes to the same place
        window, me = self._window, self.job.ranks.rank
        with window.beside():
            pieces = zip(*(t.chunk(len(owners)) for t in grads), strict=True)
            for owner, some in zip(owners, pieces, strict=True):
                for to, grad in zip(self._slot(me, owner), some, strict=True):
                    to[keys].copy_(grad)
            if last:
                window.fence()
                self._before, self._sent = (window.mark(), self._sent), []

    def _add(self, keys: slice, dk: Tensor, dv: Tensor) -> None:
        for parts, grad in zip(self._grads, (dk, dv), strict=True):
            parts.add(keys, grad)

    def _end(self, work: Work, half: Block | None) -> Pair:
        if half:
            head_start(self.k.device)
            self._add(half.keys, *work(half, self.k[:, half.keys], self.v[:, half.keys]))
        self._take(len(self._rounds) - 1)
        dk, dv = (parts.result(self.k.dtype)[0] for parts in self._grads)
        return dk, dv
