"""Attention of one process: ``forward`` gives out and lse, ``backward`` takes them from outside.

Rows and keys may be any part of a sequence. ``backward`` is right for a part when ``out`` and
``lse`` are those of the rows over all their keys, wherever these lie, so a schedule passes the
global ones. Every kernel is an operator of torch that gives lse; `torch.nn.attention.sdpa_kernel`
chooses among them, as it does for torch's own attention.

Shapes: q, out ``[B, Sq, H, D]``; k, v ``[B, Sk, Hkv, D]`` with H a multiple of Hkv; lse, the
natural logarithm of the sum of exponentials, ``[B, H, Sq]`` in float32 (float64 for float64).
Inside a kernel the heads come before the sequence.

The mask is True (causal), False, HALVES, `Segments` (several documents side by side), or a tensor
``[Sq, Sk]`` that says which keys each row sees, for the reference kernel. On a GPU, if flash takes
the tensors, one call of its operator for variable lengths takes all documents.
Elsewhere there is a call for each document, or, under a window, for some of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from fserver.errors import ConfigError

aten = torch.ops.aten

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]

HALVES = "halves"
"""The mask of two halves of rows, each of which sees its own keys causally. Only for backward."""

ROWS = 128
"""Rows of a mask that is a tensor, at most, so that their scores alone are in memory."""


class Given(NamedTuple):
    """What backward is given: dout, out and lse are of all the keys of these rows."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Segments(NamedTuple):
    """Where documents end among the rows and among the keys. A causal row sees its own key and the
    keys before it, or so many of them as the window has; the own keys are the last ones."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    window: int | None = None

    def pieces(self, device: torch.device) -> Iterator[tuple[slice, slice, bool | Tensor]]:
        """Gives rows, the keys that they see, and the mask between them."""
        for (start, stop), (first, last) in zip(
            pairwise(self.rows), pairwise(self.keys), strict=True
        ):
            if self.window is None:
                yield slice(start, stop), slice(first, last), self.causal
                continue
            for row in range(start, stop, ROWS):
                count = min(ROWS, stop - row)
                end = last - (stop - row - count)
                begin = max(first, end - count + 1 - self.window)
                seen = torch.ones(count, end - begin, dtype=torch.bool, device=device)
                own = end - begin - count  # the own key of the first row
                mask = seen.tril_(own).triu_(own - self.window + 1)
                yield slice(row, row + count), slice(begin, end), mask


class Kernel(NamedTuple):
    """One implementation; its tensors are [B, H, S, D]."""

    name: str
    grouped: bool  # takes k and v with fewer heads than q
    usable: Callable[[Tensor, Tensor, Tensor, bool], bool]
    forward: Callable[[Tensor, Tensor, Tensor, Any, float], Pair]
    backward: Callable[[Given, Any, float], Triple]


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Pair:
    """Gives out and lse. Without keys they are 0 and -inf.

    Raises:
        ConfigError: no kernel takes these tensors.
    """
    if isinstance(mask, Segments):
        return _segments_forward(q, k, v, mask, scale)
    # Kernels differ in what they mean by a causal block that is not square.
    assert mask is not True or q.shape[1] == k.shape[1]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if not (q.shape[2] and k.shape[2]):
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulator(q.dtype))
        return torch.zeros_like(q).transpose(1, 2), lse
    kernel = choose(q, k, v, mask)
    out, lse = kernel.forward(q, *_heads(kernel, q, k, v), mask, scale)
    return out.transpose(1, 2), lse


def backward(given: Given, mask: Any, scale: float) -> Triple:
    """Gives what these rows and keys add to dq, dk and dv.

    Raises:
        ConfigError: as for forward.
    """
    if isinstance(mask, Segments):
        return _segments_backward(given, mask, scale)
    if mask is HALVES:  # as if they were a batch
        pairs = [t.unflatten(1, (2, -1)).flatten(0, 1) for t in given[:5]]
        pairs.append(given.lse.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1))
        grads = backward(Given(*pairs), True, scale)
        dq, dk, dv = (t.unflatten(0, (-1, 2)).flatten(1, 2) for t in grads)
        return dq, dk, dv
    dout, q, k, v, out = (t.transpose(1, 2) for t in given[:5])
    if not (q.shape[2] and k.shape[2]):
        return torch.zeros_like(given.q), torch.zeros_like(given.k), torch.zeros_like(given.v)
    kernel = choose(q, k, v, mask)
    heads = _heads(kernel, q, k, v)
    grads = kernel.backward(Given(dout, q, *heads, out, given.lse.contiguous()), mask, scale)
    dq, dk, dv = (t.transpose(1, 2) for t in grads)
    if heads[0] is not k:  # they had been repeated
        groups = (t.unflatten(2, (k.shape[1], -1)) for t in (dk, dv))
        dk, dv = (t.sum(3, dtype=accumulator(t.dtype)) for t in groups)
    return dq, dk, dv


def _segments_forward(q: Tensor, k: Tensor, v: Tensor, seen: Segments, scale: float) -> Pair:
    if _flash(q, k, v):
        where, options = _lengths(seen, q, k, scale)
        out, of_rows, *_ = aten._flash_attention_forward(
            *(t.flatten(0, 1) for t in (q, k, v)), *where, 0.0, seen.causal, False, **options
        )
        return out.view(q.shape), of_rows.view(q.shape[2], *q.shape[:2]).transpose(0, 1)
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulator(q.dtype))
    for rows, keys, mask in seen.pieces(q.device):
        found = forward(q[:, rows], k[:, keys], v[:, keys], mask, scale)
        out[:, rows], lse[:, :, rows] = found
    return out, lse


def _segments_backward(given: Given, seen: Segments, scale: float) -> Triple:
    dout, q, k, v, out, lse = given
    if _flash(q, k, v):
        where, options = _lengths(seen, q, k, scale)
        some = *(t.flatten(0, 1) for t in given[:5]), lse.transpose(0, 1).flatten(1)
        state = _no_dropout(q.device, torch.uint64)
        grads = aten._flash_attention_backward(*some, *where, 0.0, seen.causal, *state, **options)
        dq, dk, dv = (t.view(like.shape) for t, like in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv
    dq, dk, dv = (torch.zeros_like(t, dtype=accumulator(q.dtype)) for t in (q, k, v))
    for rows, keys, mask in seen.pieces(q.device):
        some = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows]
        dq[:, rows], of_k, of_v = backward(Given(*some), mask, scale)
        dk[:, keys] += of_k
        dv[:, keys] += of_v
    return dq, dk, dv


def _flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Reports whether flash's operator for variable lengths takes these tensors."""
    if not (q.is_cuda and q.shape[1] and k.shape[1]):
        return False
    return FLASH.usable(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), False)


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


def _ends(
    ends: tuple[int, ...], batch: int, length: int, device: torch.device, stream: int
) -> Tensor:
    """Returns where documents end in the sequences of a batch, one behind the other. Without
    documents nothing is uploaded or kept, as the capture of a CUDA graph may be under way."""
    if len(ends) == 2:
        return torch.arange(0, batch * length + 1, length, device=device, dtype=torch.int32)
    return _uploaded(ends, batch, length, device, stream)


@lru_cache(maxsize=64)  # 4 for each packing
def _uploaded(
    ends: tuple[int, ...], batch: int, length: int, device: torch.device, stream: int
) -> Tensor:
    """Kept for the layers of a model: on each stream, behind what has made it there."""
    every = [row * length + end for row in range(batch) for end in ends[:-1]]
    return on_device([*every, batch * length], device).int()


def on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Returns them as a tensor there; a GPU is not waited for."""
    made = torch.tensor(numbers, device="cpu")  # whatever the default device is
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


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are kept in."""
    return torch.promote_types(dtype, torch.float32)


def capturing(device: torch.device) -> bool:
    """Reports whether a CUDA graph is captured on the current stream of the device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


ENABLED: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: cuda.math_sdp_enabled,
}


def enabled() -> list[SDPBackend]:
    """Returns the backends that `torch.nn.attention.sdpa_kernel` leaves enabled here."""
    return [backend for backend, flag in ENABLED.items() if flag()]


def enabling(backends: list[SDPBackend]) -> AbstractContextManager[object]:
    """Returns a context in which exactly these backends are enabled."""
    return nullcontext() if backends == enabled() else sdpa_kernel(backends)


def choose(q: Tensor, k: Tensor, v: Tensor, causal: bool | Tensor) -> Kernel:
    """The first kernel that is enabled and takes these tensors, [B, H, S, D].

    Raises:
        ConfigError: there is none.
    """
    if isinstance(causal, Tensor):
        return REFERENCE
    if q.dtype in DTYPES[:3]:
        for kernel in KERNELS.get(q.device.type, ()):
            if kernel.usable(q, *_heads(kernel, q, k, v, look=True), causal):
                return kernel
    if q.dtype is torch.float64 or (q.dtype in DTYPES and not {*enabled()} - {SDPBackend.MATH}):
        return REFERENCE
    raise ConfigError(
        f"ringx: no attention kernel for q.dtype {q.dtype}, head dimension {q.shape[-1]} on "
        f"{q.device} (use bfloat16, float16, float32 or float64, pad the head dimension to a "
        "multiple of 8, or enable more kernels with torch.nn.attention.sdpa_kernel)"
    )


def _heads(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, look: bool = False) -> Pair:
    """k and v with as many heads as the kernel needs; for a `look` without a copy, one head in the
    place of all."""
    if kernel.grouped or q.shape[1] == k.shape[1]:
        return k, v
    if look:
        shape = (-1, q.shape[1], -1, -1)
        return k[:, :1].expand(shape), v[:, :1].expand(shape)
    times = q.shape[1] // k.shape[1]
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _asks(can_use: Callable[..., bool]) -> Callable[[Tensor, Tensor, Tensor, bool], bool]:
    """torch's own check, which also looks whether the kernel is enabled. torch pads head dimensions
    for its kernels; here that is the caller's."""

    def usable(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
        params = cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
        return q.shape[3] % 8 == 0 and can_use(params, False)

    return usable


@lru_cache
def _no_dropout(device: torch.device, dtype: torch.dtype) -> Pair:
    """State of a random generator, as backward wants it. Without dropout nobody reads it."""
    return torch.zeros(2, dtype=dtype, device=device), torch.zeros((), dtype=dtype, device=device)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
    forward = aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = forward(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse.reshape(q.shape[:3])


@lru_cache
def _cudnn_lse_dims(device: torch.device) -> int:
    """lse of cuDNN has a last dimension of 1 in some versions of torch."""
    x = torch.zeros(1, 1, 64, 64, dtype=torch.float16, device=device)
    lse: Tensor = aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1]
    return lse.dim()


def _cudnn_backward(given: Given, causal: bool, scale: float) -> Triple:
    lse, lengths = given.lse, (given.q.shape[2], given.k.shape[2])
    lse = lse.reshape(lse.shape + (1,) * (_cudnn_lse_dims(lse.device) - 3))
    backward = aten._scaled_dot_product_cudnn_attention_backward
    state = _no_dropout(lse.device, torch.int64)
    none = (None, None, None)  # bias, and the lengths of packed sequences
    grads: Triple = backward(
        *given[:5], lse, *state, *none, *lengths, 0.0, causal, scale=scale
    )  # fmt: skip
    return grads


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _flash_backward(given: Given, causal: bool, scale: float) -> Triple:
    lengths, state = (given.q.shape[2], given.k.shape[2]), _no_dropout(given.q.device, torch.uint64)
    backward = aten._scaled_dot_product_flash_attention_backward
    grads: Triple = backward(*given, None, None, *lengths, 0.0, causal, *state, scale=scale)
    return grads


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
    forward = aten._scaled_dot_product_efficient_attention
    out, lse, *_ = forward(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]  # it is as long as whole blocks of 32 rows


def _efficient_backward(given: Given, causal: bool, scale: float) -> Triple:
    dout, q, k, v, out, lse = given
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)  # rows that give nothing: exp(-inf)
    state, wanted = _no_dropout(q.device, torch.int64), [True, True, True, False]
    backward = aten._scaled_dot_product_efficient_attention_backward
    dq, dk, dv, *_ = backward(
        dout, q, k, v, None, out, lse, *state, 0.0, wanted, causal, scale=scale
    )  # fmt: skip
    return dq, dk, dv


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = forward(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cpu_backward(given: Given, causal: bool, scale: float) -> Triple:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads: Triple = backward(*given, 0.0, causal, scale=scale)
    return grads


def _scores(q: Tensor, k: Tensor, causal: bool | Tensor, scale: float) -> Tensor:
    scores = q.to(accumulator(q.dtype)) @ k.to(accumulator(k.dtype)).mT * scale
    if causal is True:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if causal is False else scores.masked_fill(~causal, -torch.inf)


def _reference_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | Tensor, scale: float
) -> Pair:
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.to(lse.dtype)).to(q.dtype), lse


def _reference_backward(given: Given, causal: bool | Tensor, scale: float) -> Triple:
    p = (_scores(given.q, given.k, causal, scale) - given.lse[..., None]).exp()
    dout, q, k, v, out = (t.to(p.dtype) for t in given[:5])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ dout


CUDNN = Kernel("cudnn", True, _asks(cuda.can_use_cudnn_attention), _cudnn_forward, _cudnn_backward)
FLASH = Kernel("flash", True, _asks(cuda.can_use_flash_attention), _flash_forward, _flash_backward)
EFFICIENT_ASKS = _asks(cuda.can_use_efficient_attention)
EFFICIENT = Kernel("efficient", False, EFFICIENT_ASKS, _efficient_forward, _efficient_backward)
CPU_FLASH = Kernel(
    "cpu flash", False, lambda *_: bool(cuda.flash_sdp_enabled()), _cpu_forward, _cpu_backward
)
REFERENCE = Kernel("reference", False, lambda *_: True, _reference_forward, _reference_backward)
KERNELS = {"cpu": (CPU_FLASH,), "cuda": (CUDNN, FLASH, EFFICIENT)}
"""By device, the best first: on Hopper cuDNN is nearly twice as fast as flash."""
