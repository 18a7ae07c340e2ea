"""The arguments of `ringx_attention`: the checks of each rank, and the comparison between ranks."""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from hashlib import blake2b
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

from fserver.errors import ConfigError, Error, ShapeError

from .algorithms import ALGORITHMS, SLIDING
from .kernels import DTYPES, choose
from .layout import check_layout, chunk_problem, whole
from .ranks import Ranks, said
from .window import known


def _backends(ranks: Ranks) -> dict[str, str]:
    """Returns the backends of the group, by type of device."""
    pairs = dist.get_backend_config(ranks.group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)


def device_of(ranks: Ranks, q: object) -> torch.device:
    """Returns the device on which this rank compares its arguments with the others: the device of
    q, or, if the group has no backend for it, the one that the other ranks most likely use."""
    backends = _backends(ranks)
    if isinstance(q, Tensor) and q.device.type in backends:
        return q.device
    if torch.cuda.is_available() and backends.get("cuda", "gloo") != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def flag_problem(**flags: object) -> Error | None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            return ConfigError(f"ringx: {name} {said(flag)}: want True or False")
    return None


def _tensor_problem(name: str, value: object) -> Error | None:
    if not isinstance(value, Tensor):
        return ConfigError(f"ringx: {name} {said(value)}: want a torch.Tensor")
    wrapped = hasattr(value, "__tensor_flatten__")  # such as a DTensor
    if wrapped or value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else type(value).__name__ if wrapped else value.layout
        return ConfigError(
            f"ringx: {name} is {kind}: want a dense tensor (use to_padded_tensor, to_local or "
            "to_dense)"
        )
    return None


def argument_problem(
    ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, algorithm: str, causal: bool,
    layout: str | None, scale: float | None, sink: Tensor | None, reduce_dtype: torch.dtype,
    copies: bool, ends: tuple[int, ...] | None, window: int | None,
) -> Error | None:  # fmt: skip
    """Checks the arguments of this rank, whatever their type. Returns the error, or None."""
    problem = flag_problem(causal=causal) or _scale_problem(scale)
    if problem:
        return problem
    devices = [*_backends(ranks)]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        problem = _tensor_problem(name, tensor)
        if problem:
            return problem
        if tensor.device.type not in devices:
            return ConfigError(
                f"ringx: {name} is on {tensor.device}, for which the group has no backend: want a "
                f"tensor on one of {devices}"
            )
        if tensor.dim() != 4:
            return ShapeError(f"ringx: {name}.shape {tuple(tensor.shape)}: want [B, S, H, D]")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            return ConfigError(
                f"ringx: {name} is {tensor.dtype} on {tensor.device}, but q is {q.dtype} on "
                f"{q.device}: want one dtype and one device"
            )
    problem = _shape_problem(q, k, v, causal)
    if problem:
        return problem
    problem = None if sink is None else _tensor_problem("sink", sink)
    if problem:
        return problem
    if sink is not None and (
        sink.shape != q.shape[2:3] or sink.device != q.device or sink.dtype not in DTYPES
    ):
        return ShapeError(
            f"ringx: sink has shape {tuple(sink.shape)} and is {sink.dtype} on {sink.device}: want "
            f"shape ({q.shape[2]},), one score for each head of q, one of {DTYPES}, on {q.device}"
        )
    for name, dtype in (("reduce_dtype", reduce_dtype), ("q.dtype", q.dtype)):
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            return ConfigError(f"ringx: {name} {reprlib.repr(dtype)}: want one of {DTYPES}")
    problem = _mask_problem(algorithm, causal, layout, q.shape[1], copies, window)
    if problem or ends is None or window is not None:
        return problem
    if not causal or algorithm not in ("auto", "X3"):
        return ConfigError(
            f"ringx: cu_seqlens with algorithm {algorithm} and causal={causal}: want auto or X3, "
            "and causal=True"
        )
    return chunk_problem(ends, ranks.size)


def _shape_problem(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Error | None:
    if k.shape != v.shape:
        return ShapeError(f"ringx: v.shape {tuple(v.shape)}: want k.shape, {tuple(k.shape)}")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        return ShapeError(
            f"ringx: k.shape {tuple(k.shape)}: want the batch size and the head dimension of "
            f"q.shape, {tuple(q.shape)}"
        )
    if not (q.shape[0] and q.shape[2] and k.shape[2] and q.shape[3]):
        return ShapeError(
            f"ringx: q.shape {tuple(q.shape)}, k.shape {tuple(k.shape)}: empty (want B, H and D to "
            "be 1 or more)"
        )
    if q.shape[2] % k.shape[2]:
        return ShapeError(
            f"ringx: q has {q.shape[2]} heads and k has {k.shape[2]}: want a multiple in q (repeat "
            "the heads of k and v)"
        )
    if causal and q.shape[1] != k.shape[1]:
        return ShapeError(
            f"ringx: causal with q.shape[1] {q.shape[1]} and k.shape[1] {k.shape[1]}: want equal "
            "lengths, or causal=False"
        )
    return None


def _scale_problem(scale: object) -> Error | None:
    """Checks the scale. Kernels take it in float32, and some compute wrong results if it is not
    above 0."""
    if scale is None:
        return None
    want = "want a positive number (a negative one: negate q; a tensor: multiply q by it)"
    limits = torch.finfo(torch.float32)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        return ConfigError(f"ringx: scale {said(scale)}: {want}")
    if scale < limits.tiny or not scale <= limits.max:
        return ConfigError(
            f"ringx: scale {reprlib.repr(scale)}: {want} from {limits.tiny:g} to {limits.max:g}"
        )
    return None


def layout_of(algorithm: str, causal: bool | None = None, *, window: int | None = None) -> str:
    """Returns the layout that an algorithm of `ringx_attention` needs, for `shard` and `positions`.

    Args:
        algorithm: ``"auto"``, or the name of an algorithm.
        causal: whether the mask is causal. ``"auto"`` needs it. Any other algorithm has one mask
            only: leave ``causal`` out, or give that mask.
        window: that of `ringx_attention`, which needs ``"auto"`` and a causal mask.

    Returns:
        ``"contiguous"`` or ``"zigzag"``.

    Raises:
        ConfigError: the algorithm does not exist or has another mask, or ``"auto"`` was given
            without causal. Or the window is not valid with them.
    """
    if not isinstance(algorithm, str) or algorithm not in (*ALGORITHMS, "auto"):
        raise ConfigError(
            f"ringx: algorithm {reprlib.repr(algorithm)}: want auto or one of {[*ALGORITHMS]}"
        )
    problem = None if causal is None else flag_problem(causal=causal)
    if problem:
        raise problem
    if window is not None:
        whole("window", window, 1)
        if algorithm != "auto" or not causal:
            raise ConfigError(
                f"ringx: window {window} with algorithm {algorithm} and causal={causal}: want auto "
                "and causal=True"
            )
        return SLIDING.layout
    if algorithm == "auto":
        if causal is None:
            raise ConfigError(
                "ringx: layout_of('auto') depends on the mask: want causal=True or causal=False"
            )
        return "zigzag" if causal else "contiguous"
    how = ALGORITHMS[algorithm]
    if causal is not None and how.causal != causal:
        raise ConfigError(
            f"ringx: algorithm {algorithm} with causal={causal}: its mask is "
            f"{'causal' if how.causal else 'full'} (use causal={how.causal}, or one of "
            f"{_fitting(causal)})"
        )
    return how.layout


def _fitting(causal: bool, layout: str | None = None) -> list[str]:
    """The algorithms with this mask and, if given, this layout."""
    rows = ((name, how) for name, how in ALGORITHMS.items() if how.causal == causal)
    return [name for name, how in rows if layout in (None, how.layout)]


def _mask_problem(
    algorithm: str, causal: bool, layout: str | None, length: int, copies: bool, window: int | None
) -> Error | None:
    try:
        wanted = layout_of(algorithm, causal, window=window)
        if layout is not None:
            check_layout(layout)
    except ConfigError as problem:
        return problem
    if copies is True and algorithm != "auto" and not ALGORITHMS[algorithm].together:
        able = [name for name, row in ALGORITHMS.items() if row.together]
        return ConfigError(
            f"ringx: copies True with algorithm {algorithm}, which cannot use copies (use one of "
            f"{able}, or copies=False)"
        )
    if layout not in (None, wanted):
        others = _fitting(causal, layout) if window is None else []
        more = "" if window is None else f", window={window}"
        return ConfigError(
            f"ringx: layout {layout} with algorithm {algorithm}{more}, which needs {wanted} parts "
            f"(shard by layout_of({algorithm!r}, {causal}{more})"
            + (f", or use one of {others})" if others else ")")
        )
    if wanted == "zigzag" and (length % 2 or not length):
        return ShapeError(
            f"ringx: q.shape[1] is {length}, but zigzag needs two chunks of equal length on each "
            "rank (pad the sequence to a multiple of twice the number of ranks, or use X2)"
        )
    return None


def kernel_problem(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Error | None:
    """Returns the error if no kernel takes these tensors, else None. A schedule would find out too,
    but only after other ranks have begun to exchange data."""
    try:
        if q.shape[1] and k.shape[1]:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            choose(q, k, v, causal)
    except ConfigError as problem:
        return problem
    return None


GRADIENTS = "requires_grad (of q, k, v or sink, in grad mode)"
FACTS = (
    *("problem", "algorithm", "causal", "sink", "reduce_dtype", "copies", GRADIENTS),
    *("cu_seqlens", "window", "q.dtype", "q.shape[0]", "q.shape[2]", "q.shape[3]", "k.shape[2]"),
    "scale",  # behind the shapes, as that which is the default follows from q.shape[3]
    *("q.shape[1]", "k.shape[1]"),
)
"""What the ranks compare. All but the lengths has to be equal."""


def facts_of(
    q: Tensor, k: Tensor, v: Tensor, algorithm: str, causal: bool, scale: float,
    sink: Tensor | None, reduce_dtype: torch.dtype, copies: bool, gradients: bool,
    ends: tuple[int, ...] | None, window: int | None,
) -> list[int]:  # fmt: skip
    """Returns a number for each of FACTS."""
    which = [*ALGORITHMS, "auto"].index(algorithm)
    same = sink is not None, DTYPES.index(reduce_dtype), bool(copies), gradients
    shape = q.shape[0], *q.shape[2:], k.shape[2]
    scale_bits = struct.unpack("q", struct.pack("d", scale))[0]
    lengths = q.shape[1], k.shape[1]
    digest = b"" if ends is None else blake2b(repr(ends).encode(), digest_size=7).digest()
    seen = int.from_bytes(digest, "little"), min(window or 0, 1 << 62)
    return [0, which, causal, *same, *seen, DTYPES.index(q.dtype), *shape, scale_bits, *lengths]


def agree(
    ranks: Ranks, device: torch.device, facts: list[int], algorithm: str, causal: bool,
    window: int | None, problem: Error | None,
) -> tuple[Sequence[int], Sequence[int]]:  # fmt: skip
    """Compares the arguments of all ranks by one small all-gather before anything else. Returns the
    ranks' lengths of q and of k.

    On a GPU it runs on a stream of its own. So the CPU waits at most for the last collective of the
    group, not for the computation. With a board the comparison does not use the GPU at all.

    Raises:
        ConfigError, ShapeError: on all ranks, if one rank has a problem or the arguments differ.
    """
    ranks.step = "comparing the arguments"
    copies = known(ranks)
    if copies:
        found = copies.board.gather(facts, ranks.step)
    else:
        with torch.cuda.stream(_beside(device)) if device.type == "cuda" else nullcontext():
            mine = torch.tensor(facts, dtype=torch.int64, device=device)
            everybody = torch.empty(ranks.size * len(facts), dtype=mine.dtype, device=device)
            ranks.gather(everybody, mine).wait()
            found = everybody.view(ranks.size, -1).tolist()
    columns = dict(zip(FACTS, map(list, zip(*found, strict=True)), strict=True))
    if problem:
        raise problem
    if any(columns["problem"]):
        rank = columns["problem"].index(1)
        raise ConfigError(
            f"ringx: rank {rank} of the group has refused its own arguments (see the error there)"
        )
    uneven = not causal if algorithm == "auto" else ALGORITHMS[algorithm].uneven
    uneven = uneven or window is not None
    lengths = columns.pop("q.shape[1]"), columns.pop("k.shape[1]")
    for name, values in columns.items():
        if len({*values}) > 1:
            raise _differ(name, values, "the same on all ranks")
    for name, values in zip(("q.shape[1]", "k.shape[1]"), lengths, strict=True):
        if len({*values}) > 1 and not uneven:
            other = "X2" if causal else "X1"
            raise _differ(name, values, f"one length (pad the sequence, or use {other})")
        if not sum(values):
            raise ShapeError(f"ringx: {name} is 0 on all ranks: want 1 or more on at least one")
    return lengths


def _differ(name: str, values: Sequence[int], want: str) -> Error:
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    kind = ShapeError if "shape" in name else ConfigError
    first, second = (_fact(name, values[rank]) for rank in (0, other))
    return kind(
        f"ringx: {name} is {first} on rank 0 and {second} on rank {other} of the group: want {want}"
    )


def _fact(name: str, number: int) -> object:
    """Returns the value that stands behind a number of FACTS."""
    if name == "scale":
        return struct.unpack("d", struct.pack("q", number))[0]
    if name in ("q.dtype", "reduce_dtype"):
        return DTYPES[number]
    if name in ("causal", "copies", GRADIENTS):
        return bool(number)
    if name == "cu_seqlens":
        return f"of digest {number:x}" if number else None
    if name == "window":
        return number or None
    which = {"algorithm": [*ALGORITHMS, "auto"], "sink": ["None", "a tensor"]}
    return which[name][number] if name in which else number


@lru_cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
