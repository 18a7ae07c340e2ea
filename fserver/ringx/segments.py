"""Attention of one process to sequences that hold several documents side by side.

`forward` and `backward` are as those of `kernels`, with the same shapes. On a GPU, if flash takes
such tensors, one call of its operator for variable lengths takes all documents; it has not been
run. Elsewhere there is a call for each document. There a window is a mask for the reference kernel,
some rows at a time, so that their scores alone are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .kernels import Given, Pair, Triple, accumulator, aten

ROWS = 128
"""Rows of a mask, at most."""


class Segments(NamedTuple):
    """Where documents end among the rows and among the keys. A causal row sees its own key and the
    keys before it, or so many of them as the window has; the own keys are the last ones."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    window: int | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Pair:
    """Gives out and lse."""
    if _flash(q, k, v):
        where, options = _lengths(segments, q, k, scale)
        found, of_rows, *_ = aten._flash_attention_forward(
            *(t.flatten(0, 1) for t in (q, k, v)), *where, 0.0, segments.causal, False, **options
        )
        return found.view(q.shape), of_rows.view(q.shape[2], *q.shape[:2]).transpose(0, 1)
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulator(q.dtype))
    for rows, keys, causal in _pieces(segments, q.device):
        found = kernels.forward(q[:, rows], k[:, keys], v[:, keys], causal, scale)
        out[:, rows], lse[:, :, rows] = found
    return out, lse


def backward(given: Given, segments: Segments, scale: float) -> Triple:
    """Gives what these rows and keys add to dq, dk and dv."""
    dout, q, k, v, out, lse = given
    if _flash(q, k, v):
        where, options = _lengths(segments, q, k, scale)
        some = *(t.flatten(0, 1) for t in given[:5]), lse.transpose(0, 1).flatten(1)
        state = kernels._no_dropout(q.device, torch.uint64)
        grads = aten._flash_attention_backward(
            *some, *where, 0.0, segments.causal, *state, **options
        )
        dq, dk, dv = (t.view(like.shape) for t, like in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv
    dq, dk, dv = (torch.zeros_like(t, dtype=accumulator(q.dtype)) for t in (q, k, v))
    for rows, keys, causal in _pieces(segments, q.device):
        some = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows]
        dq[:, rows], of_k, of_v = kernels.backward(Given(*some), causal, scale)
        dk[:, keys] += of_k
        dv[:, keys] += of_v
    return dq, dk, dv


def _pieces(
    segments: Segments, device: torch.device
) -> Iterator[tuple[slice, slice, bool | Tensor]]:
    """Gives rows, the keys that they see, and the mask between them."""
    documents = zip(pairwise(segments.rows), pairwise(segments.keys), strict=True)
    for (start, stop), (first, last) in documents:
        if segments.window is None:
            yield slice(start, stop), slice(first, last), segments.causal
            continue
        for row in range(start, stop, ROWS):
            count = min(ROWS, stop - row)
            end = last - (stop - row - count)
            begin = max(first, end - count + 1 - segments.window)
            seen = torch.ones(count, end - begin, dtype=torch.bool, device=device)
            own = end - begin - count  # the own key of the first row
            mask = seen.tril_(own).triu_(own - segments.window + 1)
            yield slice(row, row + count), slice(begin, end), mask


def _flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Reports whether flash's operator for variable lengths takes these tensors."""
    if not (q.is_cuda and q.shape[1] and k.shape[1]):
        return False
    return kernels.FLASH.usable(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), False)


def _lengths(
    segments: Segments, q: Tensor, k: Tensor, scale: float
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what the operator takes by position of the documents, and what it takes by name."""
    both = ((segments.rows, q.shape[1]), (segments.keys, k.shape[1]))
    stream = stream_of(q.device)
    ends = (_ends(of, q.shape[0], length, q.device, stream) for of, length in both)
    longest = (max(stop - start for start, stop in pairwise(of)) for of, _ in both)
    options: dict[str, Any] = {"scale": scale}
    if segments.window is not None:
        before = min(segments.window, k.shape[1]) - 1
        options |= {"window_size_left": before, "window_size_right": 0}
    return (*ends, *longest), options


@lru_cache(maxsize=16)
def _ends(
    ends: tuple[int, ...], batch: int, length: int, device: torch.device, stream: int
) -> Tensor:
    """Returns where documents end in the sequences of a batch, one behind the other. Kept for the
    layers of a model: on each stream, behind what has made it there."""
    every = [row * length + end for row in range(batch) for end in ends[:-1]]
    return on_device([*every, batch * length], device).int()


def on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Returns them as a tensor there; a GPU is not waited for."""
    made = torch.tensor(numbers)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def stream_of(device: torch.device) -> int:
    """Identifies the current stream of a device."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def ranges(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Returns so many numbers from each start on, as one tensor. `total`: the sum of lengths, with
    which a GPU need not be waited for."""
    skipped = starts - (lengths.cumsum(0) - lengths)
    every = torch.arange(total, device=starts.device)
    return every + skipped.repeat_interleave(lengths, output_size=total)
