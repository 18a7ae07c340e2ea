"""The kernel of `combine`: all parts of a row in one pass. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .part import Part

VALUES = 4096  # of a program: 32 for each thread


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows none of these
    out, lse, values, lses, strides, bounds, total, length, heads, dim,
    WEIGHED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows are numbered as in out [B, S, H, D]; strides of a part: 3 of its value, 3 of its lse."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    head = row % heads
    place = row // heads % length
    batch = row // heads // length
    inside = row < total
    weight_of_all = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    if WEIGHED:
        for i in tl.static_range(len(values)):
            here = inside & (place >= bounds[i][0]) & (place < bounds[i][1])
            at = batch * strides[i][3] + (place - bounds[i][0]) * strides[i][5]
            at += head * strides[i][4]
            top = tl.maximum(top, tl.load(lses[i] + at, mask=here, other=float("-inf")))
        top = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in tl.static_range(len(values)):
        here = inside & (place >= bounds[i][0]) & (place < bounds[i][1])
        from_row = batch * strides[i][0] + (place - bounds[i][0]) * strides[i][1]
        from_row += head * strides[i][2]
        wanted = here[:, None] & (column < dim)[None, :]
        value = tl.load(values[i] + from_row[:, None] + column[None, :], mask=wanted, other=0.0)
        value = value.to(tl.float32)
        if WEIGHED:
            at = batch * strides[i][3] + (place - bounds[i][0]) * strides[i][5]
            at += head * strides[i][4]
            level = tl.load(lses[i] + at, mask=here, other=float("-inf"))
            weight = tl.exp(level - top)
            weight_of_all += weight
            value *= weight[:, None]
        sums += value
    # out and lse may be those of a part, and every thread reads the levels of all its rows: none
    # may write before the slowest has read.
    tl.debug_barrier()
    if WEIGHED:
        sums /= tl.where(weight_of_all == 0.0, 1.0, weight_of_all)[:, None]
        to = (batch * heads + head) * length + place
        tl.store(lse + to, top + tl.log(weight_of_all), mask=inside)
    wanted = inside[:, None] & (column < dim)[None, :]
    tl.store(out + row[:, None] * dim + column[None, :], sums, mask=wanted)


def combine(parts: list[Part], out: Tensor, lse: Tensor | None) -> None:
    """Fills out ``[B, S, H, D]`` and, for parts that have one, lse ``[B, H, S]``, contiguous. They
    may be those of the first part: a program reads its rows before it writes them."""
    batch, length, heads, dim = out.shape
    values = tuple(p.value if p.value.stride(3) == 1 else p.value.contiguous() for p in parts)
    lses = tuple(value if p.lse is None else p.lse for p, value in zip(parts, values, strict=True))
    strides = tuple((*v.stride()[:3], *s.stride()[:3]) for v, s in zip(values, lses, strict=True))
    bounds = tuple((p.rows.start, p.rows.stop) for p in parts)
    total, width = batch * length * heads, triton.next_power_of_2(dim)
    rows = max(1, VALUES // width)
    with torch.cuda.device_of(out):
        _kernel[triton.cdiv(total, rows),](
            out, out if lse is None else lse, values, lses, strides, bounds,
            total, length, heads, dim, WEIGHED=lse is not None, ROWS=rows, WIDTH=width,
        )  # fmt: skip
