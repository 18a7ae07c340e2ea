"""The arguments of `ringx_attention`: the checks of each rank, and the comparison between ranks."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import pairwise
from numbers import Real
from operator import index
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fserver.errors import ConfigError, Error, ShapeError, TimeoutError

from .algorithms import ALGORITHMS, SLIDING
from .kernels import DTYPES, capturing, choose, enabled
from .ranks import Lengths, Ranks, said

LAYOUTS = ("contiguous", "zigzag")

CuSeqlens = Tensor | Sequence[int]
"""Cumulative lengths of packed documents, ``[D + 1]``, from 0 to the length of the sequence."""


class Options(NamedTuple):
    """The arguments of `ringx_attention` that choose how it runs."""

    algorithm: str
    causal: bool
    layout: str | None
    scale: float | None
    reduce_dtype: torch.dtype
    agreed: bool | None
    copies: bool
    window: int | None = None
    cu_seqlens: CuSeqlens | None = None

    @property
    def ends(self) -> tuple[int, ...] | None:
        """Where packed documents end in the whole sequence, from 0 on."""
        return None if self.cu_seqlens is None else ends_of(self.cu_seqlens)

    def factor(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else float(self.scale)


# What is wrong on this rank. Every call waits for these checks: long texts are made once, here.

SCALES = torch.finfo(torch.float32)  # kernels take it so, and some are wrong at 0 and below
WANT_SCALE = (
    f"a positive number from {SCALES.tiny:g} to {SCALES.max:g} (a negative one: negate q; a "
    "tensor: multiply q by it)"
)
WANT_DTYPE = f"one of {DTYPES}"
WANT_LAYOUT = f"one of {LAYOUTS}"
WANT_ALGORITHM = f"auto or one of {[*ALGORITHMS]}"


def need(good: object, name: str, value: object, want: str) -> None:
    """Raises a ConfigError unless the value is good."""
    if not good:
        raise ConfigError(f"ringx: {name} {said(value)}: want {want}")


def check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        need(isinstance(flag, bool), name, flag, "True or False")


def check_layout(layout: str) -> None:
    """Raises a ConfigError unless the layout is valid."""
    need(isinstance(layout, str) and layout in LAYOUTS, "layout", layout, WANT_LAYOUT)


def whole(name: str, value: int, least: int) -> int:
    """Returns a whole number that is not below the least one, else raises a ConfigError."""
    try:
        found = least - 1 if isinstance(value, bool) else index(value)
    except TypeError:
        found = least - 1
    need(found >= least, name, value, f"a whole number, {least} or more")
    return found


def check_dim(name: str, value: Tensor, dim: int) -> None:
    need(isinstance(value, Tensor), name, value, "a torch.Tensor")
    least, most = -value.dim(), value.dim() - 1
    good = whole("dim", dim, least) <= most
    need(good, "dim", dim, f"{least} to {most}, as {name}.shape is {tuple(value.shape)}")


def ends_of(cu_seqlens: CuSeqlens) -> tuple[int, ...]:
    """Returns cu_seqlens as numbers.

    Raises:
        ConfigError: it is of another type, or on a GPU.
        ShapeError: its numbers are not cumulative lengths.
    """
    found: Any = cu_seqlens
    try:
        if isinstance(found, Tensor):
            found = found.tolist() if found.device.type == "cpu" else None
        ends = tuple(map(index, found))
    except TypeError:
        want = "whole numbers, in a sequence or in a tensor on the CPU with one dimension"
        need(False, "cu_seqlens", cu_seqlens, want)
    if len(ends) < 2 or ends[0] or [*ends] != sorted(ends):
        raise ShapeError(
            f"ringx: cu_seqlens {reprlib.repr(ends)}: want cumulative lengths, with 0 first and "
            "the length of the whole sequence last"
        )
    return ends


def check_chunks(ends: Sequence[int], size: int) -> None:
    """Raises a ShapeError if a document cannot be cut into 2N chunks."""
    for number, (start, stop) in enumerate(pairwise(ends)):
        if over := (stop - start) % (2 * size):
            which = f" of document {number}" if len(ends) > 2 else ""
            raise ShapeError(
                f"ringx: length {stop - start}{which}: want a multiple of {2 * size} for layout "
                f"zigzag over {size} ranks (pad it by {2 * size - over})"
            )


def check_arguments(
    ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, options: Options
) -> None:
    """Checks the arguments of this rank, whatever their type.

    Raises:
        ConfigError, ShapeError: one is wrong.
    """
    check_flags(causal=options.causal, copies=options.copies)
    if options.agreed is not None:
        check_flags(agreed=options.agreed)
    if (scale := options.scale) is not None:
        number = isinstance(scale, (int, float, Real)) and not isinstance(scale, bool)
        need(number and SCALES.tiny <= scale <= SCALES.max, "scale", scale, WANT_SCALE)
    devices = [pair.split(":")[0] for pair in dist.get_backend_config(ranks.group).split(",")]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor)
        if tensor.device.type not in devices:
            raise ConfigError(
                f"ringx: {name} is on {tensor.device}, for which the group has no backend: want a "
                f"tensor on one of {devices}"
            )
        if tensor.dim() != 4:
            raise ShapeError(f"ringx: {name}.shape {tuple(tensor.shape)}: want [B, S, H, D]")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise ConfigError(
                f"ringx: {name} is {tensor.dtype} on {tensor.device}, but q is {q.dtype} on "
                f"{q.device}: want one dtype and one device"
            )
    _check_shapes(q, k, v, options.causal)
    if sink is not None:
        _check_tensor("sink", sink)
        if (sink.shape, sink.device) != (q.shape[2:3], q.device) or sink.dtype not in DTYPES:
            raise ShapeError(
                f"ringx: sink has shape {tuple(sink.shape)} and is {sink.dtype} on {sink.device}: "
                f"want shape ({q.shape[2]},), one score for each head of q, one of {DTYPES}, on "
                f"{q.device}"
            )
    for name, dtype in (("reduce_dtype", options.reduce_dtype), ("q.dtype", q.dtype)):
        good = isinstance(dtype, torch.dtype) and dtype in DTYPES
        need(good, name, dtype, WANT_DTYPE)
    _check_algorithm(options, q, ranks.size)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ConfigError(f"ringx: {name} {said(value)}: want a torch.Tensor")
    wrapped = hasattr(value, "__tensor_flatten__")  # such as a DTensor
    if wrapped or value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else type(value).__name__ if wrapped else value.layout
        raise ConfigError(
            f"ringx: {name} is {kind}: want a dense tensor (use to_padded_tensor, to_local or "
            "to_dense)"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    (batch, rows, heads, dim), (k_batch, keys, kv_heads, k_dim) = q.shape, k.shape
    full = batch and heads and kv_heads and dim
    rules = (
        (v.shape == k.shape, "k.shape for v"),
        ((batch, dim) == (k_batch, k_dim), "one batch size and one head dimension"),
        (full, "B, H and D of 1 or more, not empty"),
        (full and heads % kv_heads == 0, "a multiple of k's heads in q (repeat those of k and v)"),
        (not causal or rows == keys, "equal lengths with causal=True, or causal=False"),
    )
    for kept, want in rules:
        if not kept:
            shapes = f"k.shape {tuple(k.shape)}, v.shape {tuple(v.shape)}"
            raise ShapeError(f"ringx: q.shape {tuple(q.shape)}, {shapes}: want {want}")


def layout_of(algorithm: str, causal: bool | None = None, *, window: int | None = None) -> str:
    """Returns the layout that an algorithm of `ringx_attention` needs, for `shard` and `positions`.

    Args:
        algorithm: ``"auto"``, or the name of an algorithm.
        causal: whether the mask is causal. ``"auto"``, ``"ring"`` and ``"ulysses"`` need it. Any
            other algorithm has one mask only: leave ``causal`` out, or give that mask.
        window: that of `ringx_attention`, which needs ``"auto"`` and a causal mask.

    Returns:
        ``"contiguous"`` or ``"zigzag"``.

    Raises:
        ConfigError: the algorithm does not exist or has another mask, or needs ``causal``. Or the
            window is not valid with them.
    """
    known = isinstance(algorithm, str) and algorithm in (*ALGORITHMS, "auto")
    need(known, "algorithm", algorithm, WANT_ALGORITHM)
    if causal is not None:
        check_flags(causal=causal)
    if window is not None:
        whole("window", window, 1)
        if algorithm != "auto" or not causal:
            raise ConfigError(
                f"ringx: window {window} with algorithm {algorithm} and causal={causal}: want auto "
                "and causal=True"
            )
        return SLIDING.layout(True)
    # auto is X3, X4 and ring, or X1o, X3b and ring: ring has the layouts of all of them.
    how = ALGORITHMS["ring" if algorithm == "auto" else algorithm]
    if causal is None and len(how.masks) > 1:
        raise ConfigError(
            f"ringx: layout_of({algorithm!r}) depends on the mask: want causal=True or causal=False"
        )
    causal = next(iter(how.masks)) if causal is None else causal
    if causal not in how.masks:
        raise ConfigError(
            f"ringx: algorithm {algorithm} with causal={causal}: its mask is "
            f"{'full' if causal else 'causal'} (use causal={not causal}, or one of "
            f"{_fitting(causal)})"
        )
    return how.layout(causal)


def _fitting(causal: bool, layout: str | None = None) -> list[str]:
    """The algorithms with this mask and, if given, this layout."""
    rows = ((name, how) for name, how in ALGORITHMS.items() if causal in how.masks)
    return [name for name, how in rows if layout in (None, how.layout(causal))]


def _check_algorithm(options: Options, q: Tensor, size: int) -> None:
    algorithm, causal, layout = options[:3]
    window, ends = options.window, options.ends
    wanted = layout_of(algorithm, causal, window=window)
    how = ALGORITHMS.get(algorithm)
    if layout is not None:
        check_layout(layout)
    if options.copies and how and not how.together:
        able = [name for name, row in ALGORITHMS.items() if row.together]
        raise ConfigError(
            f"ringx: copies True with algorithm {algorithm}, which cannot use copies (use one of "
            f"{able}, or copies=False)"
        )
    if layout not in (None, wanted):
        others = _fitting(causal, layout) if window is None else []
        more = "" if window is None else f", window={window}"
        raise ConfigError(
            f"ringx: layout {layout} with algorithm {algorithm}{more}, which needs {wanted} parts "
            f"(shard by layout_of({algorithm!r}, {causal}{more})"
            + (f", or use one of {others})" if others else ")")
        )
    if wanted == "zigzag" and (q.shape[1] % 2 or not q.shape[1]):
        raise ShapeError(
            f"ringx: q.shape[1] is {q.shape[1]}, but zigzag needs two chunks of equal length on "
            "each rank (pad the sequence to a multiple of twice the number of ranks, or use X2)"
        )
    if how and how.by_heads and q.shape[2] % size:
        others = [name for name in _fitting(causal, wanted) if name != algorithm]
        raise ConfigError(
            f"ringx: q has {q.shape[2]} heads, and algorithm {algorithm} divides them over {size} "
            f"ranks: want a multiple of {size} (or use one of {others})"
        )
    if ends is None or window is not None:
        return
    if not causal or algorithm not in ("auto", "X3"):
        raise ConfigError(
            f"ringx: cu_seqlens with algorithm {algorithm} and causal={causal}: want auto or X3, "
            "and causal=True"
        )
    check_chunks(ends, size)


# What differs between ranks

GRADIENTS = "requires_grad (of q, k, v or sink, in grad mode)"
CALL = "the number of this call in the group"
KNOWN = 4096  # signatures that are kept of a group
ALONE = (
    "If this rank alone has changed an argument, such as a length, or the kernels that sdpa_kernel "
    "enables, since the calls before: the others compare only calls that are new to all (pass "
    "agreed=False to all calls in which ranks may change them alone). "
)


def facts_of(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, options: Options, gradients: bool | None
) -> dict[str, Any]:
    """Returns what the ranks compare. All but the lengths has to be equal. `gradients`: whether a
    backward may follow; None: as the tensors say."""
    if gradients is None:
        wanted = any(t is not None and t.requires_grad for t in (q, k, v, sink))
        gradients = wanted and torch.is_grad_enabled()
    ends = options.ends
    digest = ends and blake2b(repr(ends).encode(), digest_size=7).hexdigest()
    return {
        "algorithm": options.algorithm,
        "causal": options.causal,
        "sink": None if sink is None else "a tensor",
        "reduce_dtype": options.reduce_dtype,
        "copies": options.copies,
        GRADIENTS: gradients,
        "cu_seqlens": ends and f"of digest {digest}",
        "window": options.window,
        "q.device.type": q.device.type,
        "q.dtype": q.dtype,
        **{f"q.shape[{dim}]": q.shape[dim] for dim in (0, 2, 3)},
        "k.shape[2]": k.shape[2],
        # Behind the shapes, as that which is the default follows from q.shape[3].
        "scale": options.factor(q),
        "q.shape[1]": q.shape[1],
        "k.shape[1]": k.shape[1],
    }


def settled(
    ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, options: Options,
    more: Callable[[], None], gradients: bool | None = None,
) -> Lengths:  # fmt: skip
    """Checks the arguments here, by `more` those that only the calling function has, and compares
    them with the other ranks', unless all have compared the same before. Returns the lengths of all
    ranks.

    Raises:
        ConfigError, ShapeError: on all ranks, if one rank has a problem or the arguments differ;
            with `agreed` on this rank.
        TimeoutError, Error: a rank does not compare.
    """
    kept, problem = ranks.kept, None
    kept.calls += 1
    facts: dict[str, Any] = {}
    known: Lengths | None = None
    try:
        check_arguments(ranks, q, k, v, sink, options)
        more()
        facts = facts_of(q, k, v, sink, options, gradients)
        signature = q.device, *enabled(), *facts.values()
        if options.agreed:
            known = [q.shape[1]] * ranks.size, [k.shape[1]] * ranks.size
        elif options.agreed is None and not kept.uneven:
            known = kept.agreed.get(signature)
        if not known and q.shape[1] and k.shape[1]:  # a schedule would find out too late
            heads = [t.contiguous().transpose(1, 2) for t in (q, k, v)]  # as the kernels get them
            choose(heads[0], heads[1], heads[2], options.causal)
    except Error as error:
        problem = error
    except Exception as error:  # the other ranks would wait
        problem = ConfigError(f"ringx: the arguments cannot be checked: {error!r} (see its cause)")
        problem.__cause__ = error
    ranks.check_unbroken()
    captured = isinstance(q, Tensor) and capturing(q.device)
    if captured and options.cu_seqlens is not None:
        raise ConfigError(
            "ringx: cu_seqlens in the capture of a CUDA graph: a graph would keep these documents "
            "(capture without cu_seqlens)"
        )
    if known:
        return known
    if problem and options.agreed is True:
        raise problem
    if captured:
        remedy = "make the same call once before the capture, with agreed=None, or"
        if kept.uneven:
            remedy = (
                "ranks of this group have had different lengths, so that each call compares: use "
                "another group, or, if all lengths are equal here,"
            )
        raise ConfigError(
            f"ringx: agreed {options.agreed} in the capture of a CUDA graph: ranks cannot compare "
            f"their arguments there ({remedy} capture ringx_attention(agreed=True))"
        )
    lengths = _compared(ranks, facts, problem, options)
    kept.uneven |= any(len({*values}) > 1 for values in lengths)
    if len(kept.agreed) == KNOWN:
        kept.agreed.clear()  # as on all ranks
    kept.agreed[signature] = lengths
    return lengths


def _compared(
    ranks: Ranks, facts: dict[str, Any], problem: Error | None, options: Options
) -> Lengths:
    """Compares what all ranks have, before anything else travels."""
    ranks.step = "comparing the arguments"
    said_here = problem and (type(problem), str(problem).removeprefix("ringx: "))
    mine = said_here, {CALL: ranks.kept.calls, **facts}
    if problem and ranks.kept.agreed:  # the others may be in a call that they need not compare
        warnings.warn(f"{problem} (this rank waits for the others of its group)", stacklevel=2)
    try:
        answers = ranks.ask(mine, ALONE if ranks.kept.agreed else "")
    except TimeoutError as late:
        if problem:  # perhaps the others have none
            raise problem from late
        raise
    if problem:
        raise problem
    for rank, (theirs, _) in enumerate(answers):
        if theirs:
            kind, text = theirs
            raise kind(f"ringx: rank {rank} of the group has refused its own arguments: {text}")
    how = ALGORITHMS.get(options.algorithm)
    uneven = options.window is not None or (how.uneven if how else not options.causal)
    lengths = {f"{name}.shape[1]": list[int]() for name in "qk"}
    for name in answers[0][1]:
        values = [theirs[name] for _, theirs in answers]
        want = "the same on all ranks"
        if name in lengths:
            lengths[name] = values
            want = f"one length (pad the sequence, or use {'X2' if options.causal else 'X1'})"
            if not any(values):
                raise ShapeError(f"ringx: {name} is 0 on all ranks: want 1 or more on at least one")
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None and not (name in lengths and uneven):
            raise (ShapeError if "shape" in name else ConfigError)(
                f"ringx: {name} is {values[0]} on rank 0 and {values[other]} on rank {other} of "
                f"the group: want {want}"
            )
    of_q, of_k = lengths.values()
    return of_q, of_k
