"""What several blocks of keys gave to the same rows, made one.

Answers are weighed, ``out = sum_i exp(lse_i - lse) out_i`` with ``lse = log sum_i exp(lse_i)``
(Milakov and Gimelshein, Online normalizer calculation for softmax, 2018); gradients are added up.
Both go through memory once for all parts and not once for each: on a GPU in one kernel of Triton's
where `Trial` has seen it run, else in torch's.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kernels import capturing
from .part import Part

if TYPE_CHECKING:
    from types import ModuleType


class Parts:
    """Collects parts, which it may write over.

    Args:
        rows: how many there are in all. Each is in one part at least.
        dtype: of sums of some of the parts.
        most: parts that are kept apart at a time; two need least memory, four least time.
    """

    def __init__(self, rows: int, dtype: torch.dtype, most: int):
        self._rows, self._dtype, self._most = rows, dtype, most
        self._parts: list[Part] = []

    def add(self, rows: slice | Tensor, value: Tensor, lse: Tensor | None = None) -> None:
        """Adds what some rows got. If an index picks them, the others get nothing."""
        if isinstance(rows, Tensor):
            every = value.new_zeros(value.shape[0], self._rows, *value.shape[2:])
            value = every.index_copy_(1, rows, value)
            if lse is not None:
                none = lse.new_full((*lse.shape[:2], self._rows), -torch.inf)
                lse = none.index_copy_(2, rows, lse)
            rows = slice(0, self._rows)
        if len(self._parts) == self._most:
            self.settle()
        self._parts.append(Part(rows, value, lse))

    def settle(self) -> None:
        """Makes them one, which needs the tensors that were added no more."""
        every = slice(0, self._rows)
        self._parts = [Part(every, *combine(self._parts, self._rows, self._dtype))]

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """All of it, ``[B, S, H, D]`` of this type, and lse ``[B, H, S]``."""
        return combine(self._parts, self._rows, dtype)


def combine(parts: list[Part], rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Gives the sum of the parts as contiguous tensors: the value in `dtype`, lse as it was. They
    may be those of the first part."""
    _, value, lse = parts[0]
    batch, length, heads, dim = value.shape
    whole = length == rows
    if len(parts) == 1 and whole:
        return value.to(dtype).contiguous(), lse
    if not (whole and value.dtype is dtype and value.is_contiguous()):
        value = torch.empty(batch, rows, heads, dim, dtype=dtype, device=value.device)
    if lse is not None and not (whole and lse.is_contiguous()):
        lse = lse.new_empty(batch, heads, rows)
    fusible = value.is_cuda and dtype is not torch.float64
    fused = _trial.module(value.device) if fusible else None
    (fused.combine if fused else _combine)(parts, value, lse)
    return value, lse


def _combine(parts: list[Part], value: Tensor, lse: Tensor | None) -> None:
    """Fills value and lse, which may be those of the first part."""
    kept = torch.promote_types(value.dtype, torch.float32)
    total = torch.zeros(value.shape, dtype=kept, device=value.device)
    level = None if lse is None else torch.full_like(lse, -torch.inf)
    for rows, _, some in parts:
        if level is not None and some is not None:
            level[:, :, rows] = torch.logaddexp(level[:, :, rows], some)
    for rows, part, some in parts:
        if level is not None and some is not None:
            part = part * (some - level[:, :, rows]).exp_().transpose(1, 2)[..., None]
        total[:, rows] += part
    value.copy_(total)
    if lse is not None and level is not None:
        lse.copy_(level)


class Trial:
    """Runs Triton's kernel once on small tensors and keeps the result.

    A success holds for the rest of the process, as does an ImportError: Triton is not installed.
    After any other failure (no memory, no compiler, a full disk) the kernel is tried again, but
    not within `PAUSE` seconds. Nothing is tried while a graph is captured, because an error of CUDA
    would end the capture.
    """

    PAUSE = 60.0

    def __init__(self) -> None:
        self._module: ModuleType | None = None
        self._next = 0.0  # when the kernel may be tried, by the monotonic clock

    def module(self, device: torch.device) -> ModuleType | None:
        """Returns the module with the kernel, or None as long as the kernel has not run."""
        if self._module or time.monotonic() < self._next or capturing(device):
            return self._module
        try:
            from . import fused

            small = torch.ones(1, 2, 1, 16, dtype=torch.bfloat16, device=device)
            lse = small[..., 0].float().transpose(1, 2)
            parts = [Part(slice(0, 2), small, lse), Part(slice(1, 2), small[:, 1:], lse[..., 1:])]
            fused.combine(parts, torch.empty_like(small), torch.empty_like(lse))
            self._module = fused
        except ImportError:
            self._next = float("inf")
        except Exception as error:
            self._next = time.monotonic() + self.PAUSE
            warnings.warn(
                "ringx: Triton's kernel did not run. torch's kernels take its place, which are "
                f"slower; it is tried again after {self.PAUSE:g} s: {error}",
                stacklevel=2,
            )
        return self._module


_trial = Trial()
