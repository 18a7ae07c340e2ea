"""Attention of one process to sequences that hold several documents side by side.

`forward` and `backward` are as those of `kernels`, with the same shapes, for rows and keys that are
cut into documents. On a GPU one call of flash attention's operator for variable lengths takes them
all, if flash takes such tensors; it has not been run. Elsewhere there is a call for each document,
and with a window for each block of rows, so that scores of one block alone are in memory.
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

BLOCK = 512
"""Rows of a block, at most, where a window is a mask."""


class Segments(NamedTuple):
    """Documents: where each ends among the rows and among the keys, from 0 on. `causal`: the rows
    of a document are those of its last keys. `window`: how many keys a causal row sees, at most."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    window: int | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Pair:
    """Gives out and lse."""
    if _together(q, k, v):
        flat = (t.flatten(0, 1) for t in (q, k, v))
        where, options = _flash_options(segments, q, k, scale)
        found, of_rows, *_ = aten._flash_attention_forward(
            *flat, *where, 0.0, segments.causal, False, **options
        )
        return found.view(q.shape), of_rows.view(q.shape[2], *q.shape[:2]).transpose(0, 1)
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulator(q.dtype))
    for rows, keys, causal, mask in _pieces(segments, q.device):
        out[:, rows], lse[:, :, rows] = kernels.forward(
            q[:, rows], k[:, keys], v[:, keys], causal, scale, mask
        )
    return out, lse


def backward(given: Given, segments: Segments, scale: float) -> Triple:
    """Gives what these rows and keys add to dq, dk and dv."""
    dout, q, k, v, out, lse = given
    if _together(q, k, v):
        flat = (t.flatten(0, 1) for t in given[:5])
        of_rows = lse.transpose(0, 1).flatten(1).contiguous()
        where, options = _flash_options(segments, q, k, scale)
        state = kernels._no_dropout(q.device, torch.uint64)
        grads = aten._flash_attention_backward(
            *flat, of_rows, *where, 0.0, segments.causal, *state, **options
        )
        dq, dk, dv = (t.view(like.shape) for t, like in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv
    kept = accumulator(q.dtype)
    dq = torch.empty(q.shape, dtype=kept, device=q.device)
    dk, dv = (torch.zeros(k.shape, dtype=kept, device=k.device) for _ in range(2))
    for rows, keys, causal, mask in _pieces(segments, q.device):
        some = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows]
        dq[:, rows], of_k, of_v = kernels.backward(Given(*some), causal, scale, mask)
        dk[:, keys] += of_k
        dv[:, keys] += of_v
    return dq, dk, dv


def _pieces(
    segments: Segments, device: torch.device
) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
    """Gives rows, the keys that they see, whether that is causal, and if not, the mask."""
    documents = zip(pairwise(segments.rows), pairwise(segments.keys), strict=True)
    for (start, stop), (first, last) in documents:
        if segments.window is None:
            yield slice(start, stop), slice(first, last), segments.causal, None
            continue
        for row in range(start, stop, BLOCK):
            count = min(BLOCK, stop - row)
            end = last - (stop - row - count)  # behind the own key of the last row
            begin = max(first, end - count + 1 - segments.window)
            seen = torch.ones(count, end - begin, dtype=torch.bool, device=device)
            own = end - begin - count  # the own key of row 0
            mask = seen.tril(own).triu(own - segments.window + 1)
            yield slice(row, row + count), slice(begin, end), False, mask


def _together(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether flash's operator for variable lengths takes these tensors."""
    if not (q.is_cuda and q.shape[1] and k.shape[1]):
        return False
    return kernels.FLASH.usable(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), False)


def _flash_options(
    segments: Segments, q: Tensor, k: Tensor, scale: float
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives the operator's lengths, and what it takes by name. flash aligns a mask at the last row
    and the last key of a document, as Segments does."""
    stream = torch.cuda.current_stream(q.device).cuda_stream
    both = ((segments.rows, q), (segments.keys, k))
    ends = (_ends(of, t.shape[0], t.shape[1], t.device, stream) for of, t in both)
    longest = (max(stop - start for start, stop in pairwise(of)) for of, _ in both)
    options: dict[str, Any] = {"scale": scale}
    if segments.window is not None:
        options |= {"window_size_left": segments.window - 1, "window_size_right": 0}
    return (*ends, *longest), options


@lru_cache(maxsize=16)
def _ends(
    ends: tuple[int, ...], batch: int, length: int, device: torch.device, stream: int
) -> Tensor:
    """Where documents end in all sequences of a batch, one behind the other. It is kept for the
    layers of a model, for each stream: what made it is before them there."""
    starts = on_device(torch.tensor([*range(0, batch * length, length)]), device)[:, None]
    every = (starts + on_device(torch.tensor(ends[:-1]), device)).flatten()
    return torch.nn.functional.pad(every, (0, 1), value=batch * length).int()


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor there; a GPU is not waited for."""
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)
