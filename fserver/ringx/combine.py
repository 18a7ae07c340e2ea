"""What several blocks of keys gave to the same rows, made one.

Answers are weighed, ``out = sum_i exp(lse_i - lse) out_i`` with ``lse = log sum_i exp(lse_i)``
(Milakov and Gimelshein, Online normalizer calculation for softmax, 2018); gradients are added up.
Both go through memory once for all parts and not once for each: on a GPU in one kernel, by Triton,
where that is installed and works, else in torch's.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from types import ModuleType


class Part(NamedTuple):
    """What some rows got: out or dq ``[B, n, H, D]``, and lse ``[B, H, n]`` of an out."""

    rows: slice  # of n, among all
    value: Tensor
    lse: Tensor | None


class Parts:
    """Collects parts; most of them are kept apart at a time, in `dtype` of what sums are kept in.

    Args:
        rows: how many there are in all. Each is in one part at least.
        dtype: of sums.
        most: two need least memory, four least time.
    """

    def __init__(self, rows: int, dtype: torch.dtype, most: int):
        self._rows, self._dtype, self._most = rows, dtype, most
        self._parts: list[Part] = []

    def add(self, rows: slice, value: Tensor, lse: Tensor | None = None) -> None:
        self._parts.append(Part(rows, value, lse))
        if len(self._parts) == self._most:
            every = slice(0, self._rows)
            self._parts = [Part(every, *combine(self._parts, self._rows, self._dtype))]

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """All of it, ``[B, S, H, D]`` of this type, and lse ``[B, H, S]``."""
        return combine(self._parts, self._rows, dtype)


def combine(parts: list[Part], rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Gives the sum of the parts as contiguous tensors: the value in `dtype`, lse as it was."""
    value = parts[0].value
    if len(parts) == 1 and value.shape[1] == rows:
        return value.to(dtype).contiguous(), parts[0].lse
    batch, _, heads, dim = value.shape
    out = torch.empty(batch, rows, heads, dim, dtype=dtype, device=value.device)
    if parts[0].lse is None:
        lse = None
    else:
        lse = parts[0].lse.new_full((batch, heads, rows), -torch.inf)
    fused = _fused() if value.is_cuda and dtype is not torch.float64 else None
    if fused is not None:
        fused.combine(parts, out, lse)
    else:
        _combine(parts, out, lse)
    return out, lse


def _combine(parts: list[Part], out: Tensor, lse: Tensor | None) -> None:
    whole = torch.promote_types(out.dtype, torch.float32)
    total = out if out.dtype is whole else torch.empty_like(out, dtype=whole)
    total.zero_()
    if lse is not None:
        for part in parts:
            some = lse[:, :, part.rows]
            some.copy_(torch.logaddexp(some, part.lse))
    for part in parts:
        some = total[:, part.rows]
        if lse is None:
            some += part.value
        else:
            weight = (part.lse - lse[:, :, part.rows]).exp_()
            some.addcmul_(part.value.to(whole), weight.transpose(1, 2)[..., None])
    if total is not out:
        out.copy_(total)


@lru_cache
def _fused() -> ModuleType | None:
    """The module with the kernel, once it has run."""
    try:
        from . import fused

        small = torch.ones(1, 2, 1, 16, dtype=torch.bfloat16, device="cuda")
        half: Any = Part(slice(1, 2), small[:, 1:], small[:, 1:, :, 0].float().transpose(1, 2))
        parts = [Part(slice(0, 2), small, small[..., 0].float().transpose(1, 2)), half]
        fused.combine(parts, torch.empty_like(small), small.new_empty(1, 1, 2).float())
    except ImportError:
        return None
    except Exception as error:
        warnings.warn(
            f"ringx: Triton's kernel does not run here, torch's take its place, slower: {error}",
            stacklevel=2,
        )
        return None
    return fused
