"""Attention over a sequence that the ranks of a group share: `ringx_attention`."""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fserver.errors import ConfigError, Error, ShapeError

from . import copies as by_copies
from . import schedules
from .kernels import DTYPES, Given, accumulator, choose
from .schedules import Job, Ranks
from .window import known, window_of

GATHER_LIMIT = 4 << 30
"""Bytes of gathered k, v, dk and dv on a rank above which `auto` takes X4 instead of X3."""


class Algorithm(NamedTuple):
    """A row of the table of what there is. forward and backward are by collectives."""

    blocks: schedules.Blocks
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    uneven: bool = False  # the ranks' lengths may differ
    together: int = 0  # owners from which are copied at a time; 0: none ever

    @property
    def causal(self) -> bool:
        return self.blocks is not schedules.full

    @property
    def layout(self) -> str:
        return "zigzag" if self.blocks is schedules.zigzag else "contiguous"


def _queries(blocks: schedules.Blocks, overlap: bool) -> Algorithm:
    forward = partial(schedules.queries_forward, overlap=overlap)
    backward = partial(schedules.broadcast_backward, ahead=overlap, behind=overlap)
    return Algorithm(blocks, forward, backward, uneven=True)


def _gather(blocks: schedules.Blocks, pieces: int, together: int = 0) -> Algorithm:
    forward = partial(schedules.gather_forward, pieces=pieces)
    backward = partial(schedules.gather_backward, pieces=pieces)
    return Algorithm(blocks, forward, backward, together=together)


def _broadcast(behind: bool, together: int = 0) -> Algorithm:
    backward = partial(schedules.broadcast_backward, ahead=True, behind=behind)
    return Algorithm(schedules.zigzag, schedules.broadcast_forward, backward, together=together)


EVERY_OWNER = 1 << 30

ALGORITHMS = {
    "X1": _queries(schedules.full, overlap=False),
    "X1o": _queries(schedules.full, overlap=True),
    "X2": _queries(schedules.contiguous, overlap=False),
    "X2o": _queries(schedules.contiguous, overlap=True),
    "X3": _gather(schedules.zigzag, pieces=1, together=EVERY_OWNER),
    "X3c": _gather(schedules.zigzag, pieces=2),
    "X3b": _gather(schedules.full, pieces=1, together=EVERY_OWNER),
    "X4": _broadcast(behind=False, together=1),
    "X4o": _broadcast(behind=True),
}


def _way(
    how: Algorithm, job: Job, k: Tensor, backward: bool
) -> tuple[Callable[..., Any], AbstractContextManager[None]]:
    """The forward or backward to call, by copies where these can be, and what is open then."""
    together = min(how.together, job.ranks.size - 1)
    if job.window and together and by_copies.fits(job, k, together, backward):
        copied = by_copies.backward if backward else by_copies.forward
        return partial(copied, blocks=how.blocks, together=together), job.window.call()
    return partial(how.backward if backward else how.forward, blocks=how.blocks), nullcontext()


class _Attention(torch.autograd.Function):
    """Saves the global out and lse; a schedule's backward is written in terms of them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, how: Algorithm, job: Job
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        forward, turn = _way(how, job, k, backward=False)
        with turn, torch.autocast(q.device.type, enabled=False):  # types are what the caller gave
            out, lse = forward(job, q, k, v)
        if sink is not None:
            level = sink.to(lse.dtype)[:, None]
            out = out * torch.sigmoid(lse - level).transpose(1, 2)[..., None]
            lse = torch.logaddexp(lse, level)
        out = out.to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.how, ctx.job = how, job
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dlse is not None:
            raise Error("ringx: no gradient goes through lse (use lse.detach())")
        if torch.is_grad_enabled():
            raise Error("ringx: create_graph: there is no second derivative")
        q, k, v, sink, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        how: Algorithm = ctx.how
        job: Job = ctx.job
        backward, turn = _way(how, job, k, backward=True)
        with turn, torch.autocast(q.device.type, enabled=False):
            dq, dk, dv = backward(job, Given(dout, q, k, v, out, lse))
        dsink = None
        if sink is not None:
            share = torch.exp(sink.to(lse.dtype)[:, None] - lse).transpose(1, 2)
            dsink = -(share * (dout * out).sum(-1, dtype=lse.dtype)).sum((0, 1)).to(sink.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None


def ringx_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    algorithm: str = "auto",
    causal: bool,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    sink: Tensor | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    return_lse: bool = False,
    agreed: bool = False,
    copies: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of the local rows to the keys of all ranks. Every rank of the group calls it.

    Args:
        q: ``[B, Sq, H, D]``, the local rows; see `fserver.ringx.layout` for which those are.
        k, v: ``[B, Sk, Hkv, D]``, the local keys and values. H is a multiple of Hkv.
        algorithm: "X1", "X1o" (full mask, contiguous, lengths may differ over the ranks), "X3b"
            (full mask, contiguous), "X2", "X2o" (causal, contiguous, lengths may differ), "X3",
            "X3c", "X4", "X4o" (causal, zigzag). "auto" is X1o or X3b for a full mask, whichever
            moves less, and for a causal one, zigzag, X3, or X4 above GATHER_LIMIT bytes.
        causal: a row sees the keys at its own and at earlier positions.
        scale: of the scores, more than 0; 1 / sqrt(D) without.
        group: the ranks; all without.
        sink: ``[H]``, the score of a key that has no value. Its gradient is what the local rows
            give, as for any weight that all ranks have: the sum over the ranks is the caller's.
        reduce_dtype: of sums over ranks; q's type, if that is wider, as float64 for float64.
        return_lse: also give lse, ``[B, H, Sq]``, in float32 or float64. It has no gradient.
        agreed: do not ask the other ranks, as every call does else: the caller knows that all pass
            the same arguments and equal lengths, as in a loop whose first call has asked. It saves
            the CPU a wait. If it is not so, the call may hang or be wrong.
        copies: X3, X3b and X4 do without collectives where the ranks are GPUs of one host that
            reach each other's memory. The group's first call with it finds that out. Elsewhere,
            tensors on a CPU among that, they do as without it, and so does "auto" where it is X1o.

    Returns:
        out ``[B, Sq, H, D]`` of q's type; with return_lse (out, lse).

    Raises:
        ConfigError, ShapeError: an argument is wrong here, or not the same on all ranks. All ranks
            raise then, and nothing has been exchanged; with agreed, only this one raises.
    """
    more = partial(_flag_problem, agreed=agreed, copies=copies, return_lse=return_lse)
    out, lse = _run(
        q, k, v, algorithm, causal, scale, group, sink, reduce_dtype, more,
        agreed=agreed, copies=copies,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _run(
    q: Tensor, k: Tensor, v: Tensor, algorithm: str, causal: bool, scale: float | None,
    group: dist.ProcessGroup | None, sink: Tensor | None, reduce_dtype: torch.dtype,
    more: Callable[[], Error | None], agreed: bool = False, copies: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`more` gives what is wrong with arguments that are the caller's own."""
    ranks = _ranks(group)
    facts = [1] + [0] * (len(FACTS) - 1)
    factor = 0.0
    q_lengths: Sequence[int]
    k_lengths: Sequence[int]
    try:
        problem = _problem(ranks, q, k, v, algorithm, causal, scale, sink, reduce_dtype, copies)
        problem = problem or more()
        if not problem and not agreed:
            problem = _kernel_problem(q, k, v, causal)
        if not problem:
            factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
            facts = _facts(q, k, algorithm, causal, factor, sink, reduce_dtype, copies)
    except Exception as error:  # the other ranks would wait
        problem = ConfigError(f"ringx: the arguments cannot be checked: {error!r} (see its cause)")
        problem.__cause__ = error
    if agreed is True:
        if problem:
            raise problem
        q_lengths, k_lengths = [q.shape[1]] * ranks.size, [k.shape[1]] * ranks.size
    else:
        device = _device(ranks, q)
        q_lengths, k_lengths = _agree(ranks, device, facts, algorithm, causal, problem)
    reduce_dtype = torch.promote_types(reduce_dtype, q.dtype)
    out_dtype = q.dtype if sink is None else accumulator(q.dtype)
    job = Job(ranks, factor, q_lengths, k_lengths, reduce_dtype, out_dtype)
    how = ALGORITHMS[_auto(job, q, k, causal) if algorithm == "auto" else algorithm]
    # cuDNN keeps the plan of a backward by the strides of q, k and v, and uses it again whatever
    # those of out and its gradient are: these have to be as q is.
    q, k, v = (t.contiguous() for t in (q, k, v))
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        if copies and how.together:
            job = replace(job, window=window_of(ranks, q.device, len(FACTS)))
        return _Attention.apply(q, k, v, sink, how, job)


def _auto(job: Job, q: Tensor, k: Tensor, causal: bool) -> str:
    """What moves least, within the memory; docs/ringx.md has the formulas."""
    moved = 2 * k.shape[0] * k.shape[2] * k.shape[3] * sum(job.k_lengths)
    if causal:
        gathered = moved * (k.element_size() + job.reduce_dtype.itemsize)
        return "X3" if gathered <= GATHER_LIMIT else "X4"
    if len({*zip(job.q_lengths, job.k_lengths, strict=True)}) > 1:
        return "X1o"
    batch, _, heads, dim = q.shape
    row = dim * q.element_size() + (dim + 1) * job.reduce_dtype.itemsize
    row += 2 * accumulator(q.dtype).itemsize
    return "X1o" if batch * heads * row * sum(job.q_lengths) < moved * k.element_size() else "X3b"


# Arguments


def _ranks(group: object) -> Ranks:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError("ringx: torch.distributed has no group (call init_process_group first)")
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("ringx: group: this process is not in it (call on its members only)")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"ringx: group {_said(group)}: want one of new_group, or None for all")
    try:
        return Ranks(group)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"ringx: group {_said(group)}: {error} (make another)") from error


def _backends(ranks: Ranks) -> dict[str, str]:
    """Of the group, by type of device."""
    pairs = dist.get_backend_config(ranks.group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)


def _device(ranks: Ranks, q: object) -> torch.device:
    """Where this rank takes part in the agreement: where q is, or, if the group cannot go there,
    where the others most likely are."""
    backends = _backends(ranks)
    if isinstance(q, Tensor) and q.device.type in backends:
        return q.device
    if torch.cuda.is_available() and backends.get("cuda", "gloo") != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _said(value: object) -> str:
    """A value in a message."""
    return f"{reprlib.repr(value)} of type {type(value).__name__}"


def _flag_problem(**flags: object) -> Error | None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            return ConfigError(f"ringx: {name} {_said(flag)}: want True or False")
    return None


def _tensor_problem(name: str, value: object) -> Error | None:
    if not isinstance(value, Tensor):
        return ConfigError(f"ringx: {name} {_said(value)}: want a torch.Tensor")
    wrapped = hasattr(value, "__tensor_flatten__")  # such as a DTensor
    if wrapped or value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else type(value).__name__ if wrapped else value.layout
        return ConfigError(
            f"ringx: {name} is {kind}: want a dense tensor (use to_padded_tensor, to_local or "
            "to_dense)"
        )
    return None


def _problem(
    ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, algorithm: str, causal: bool,
    scale: float | None, sink: Tensor | None, reduce_dtype: torch.dtype, copies: bool,
) -> Error | None:  # fmt: skip
    """What is wrong with the arguments of this rank, of whatever type they are."""
    problem = _flag_problem(causal=causal) or _scale_problem(scale)
    if problem:
        return problem
    devices = [*_backends(ranks)]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        problem = _tensor_problem(name, tensor)
        if problem:
            return problem
        if tensor.device.type not in devices:
            return ConfigError(
                f"ringx: {name} is on {tensor.device}: want it where the group has a backend, on "
                f"one of {devices}"
            )
        if tensor.dim() != 4:
            return ShapeError(f"ringx: {name}.shape {tuple(tensor.shape)}: want [B, S, H, D]")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            return ConfigError(
                f"ringx: {name} is {tensor.dtype} on {tensor.device} and q {q.dtype} on {q.device}:"
                " want one type and device"
            )
    if k.shape != v.shape:
        return ShapeError(f"ringx: v.shape {tuple(v.shape)}: want that of k, {tuple(k.shape)}")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        return ShapeError(
            f"ringx: k.shape {tuple(k.shape)}: want the batch and the head dimension of q, "
            f"{tuple(q.shape)}"
        )
    if not (q.shape[0] and q.shape[2] and k.shape[2] and q.shape[3]):
        return ShapeError(
            f"ringx: q.shape {tuple(q.shape)}, k.shape {tuple(k.shape)}: empty (want B, H and D of "
            "1 or more)"
        )
    if q.shape[2] % k.shape[2]:
        return ShapeError(
            f"ringx: q has {q.shape[2]} heads and k {k.shape[2]}: want a multiple (repeat k and v)"
        )
    if causal and q.shape[1] != k.shape[1]:
        return ShapeError(
            f"ringx: causal with q.shape[1] {q.shape[1]} and k.shape[1] {k.shape[1]}: want equal "
            "lengths, or causal=False"
        )
    problem = None if sink is None else _tensor_problem("sink", sink)
    if problem:
        return problem
    if sink is not None and (
        sink.shape != q.shape[2:3] or sink.device != q.device or sink.dtype not in DTYPES
    ):
        return ShapeError(
            f"ringx: sink of shape {tuple(sink.shape)}, {sink.dtype} on {sink.device}: want "
            f"[{q.shape[2]}], a score for each head of q, one of {DTYPES} on {q.device}"
        )
    for name, dtype in (("reduce_dtype", reduce_dtype), ("q.dtype", q.dtype)):
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            return ConfigError(f"ringx: {name} {reprlib.repr(dtype)}: want one of {DTYPES}")
    return _mask_problem(algorithm, causal, q.shape[1], copies)


def _scale_problem(scale: object) -> Error | None:
    """Kernels have it in float32, and some are wrong where it is not more than 0."""
    if scale is None:
        return None
    want = "want a positive number (a negative one: negate q; a tensor: multiply q by it)"
    limits = torch.finfo(torch.float32)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        return ConfigError(f"ringx: scale {_said(scale)}: {want}")
    if scale < limits.tiny or not scale <= limits.max:
        return ConfigError(
            f"ringx: scale {reprlib.repr(scale)}: {want} from {limits.tiny:g} to {limits.max:g}"
        )
    return None


def _mask_problem(algorithm: str, causal: bool, length: int, copies: bool) -> Error | None:
    if not isinstance(algorithm, str) or algorithm not in (*ALGORITHMS, "auto"):
        return ConfigError(
            f"ringx: algorithm {reprlib.repr(algorithm)}: want auto or one of {[*ALGORITHMS]}"
        )
    if algorithm == "auto":
        layout = "zigzag" if causal else "contiguous"
    else:
        how = ALGORITHMS[algorithm]
        layout = how.layout
        if how.causal != causal:
            fitting = [name for name, row in ALGORITHMS.items() if row.causal == causal]
            return ConfigError(
                f"ringx: algorithm {algorithm} with causal={causal}: its mask is "
                f"{'causal' if how.causal else 'full'} (use causal={how.causal}, or one of "
                f"{fitting})"
            )
        if copies is True and not how.together:
            able = [name for name, row in ALGORITHMS.items() if row.together]
            return ConfigError(
                f"ringx: copies True with algorithm {algorithm}: it has no copies (use one of "
                f"{able}, or copies=False)"
            )
    if layout == "zigzag" and (length % 2 or not length):
        return ShapeError(
            f"ringx: q.shape[1] is {length}, and zigzag wants two chunks of one length on each "
            "rank (pad the sequence to a multiple of twice the ranks, or use X2)"
        )
    return None


def _kernel_problem(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Error | None:
    """Whether the kernels take these tensors; a schedule says so too, but only when others have
    begun to exchange."""
    try:
        if q.shape[1] and k.shape[1]:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            choose(q, k, v, causal)
    except ConfigError as problem:
        return problem
    return None


FACTS = (
    *("problem", "algorithm", "causal", "scale", "sink", "reduce_dtype", "copies"),
    *("q.dtype", "q.shape[0]"),
    *("q.shape[2]", "q.shape[3]", "k.shape[2]", "q.shape[1]", "k.shape[1]"),
)
"""What the ranks tell each other; all but the lengths has to be the same."""


def _facts(
    q: Tensor, k: Tensor, algorithm: str, causal: bool, scale: float, sink: Tensor | None,
    reduce_dtype: torch.dtype, copies: bool,
) -> list[int]:  # fmt: skip
    scale_bits = struct.unpack("q", struct.pack("d", scale))[0]
    types = DTYPES.index(reduce_dtype), bool(copies), DTYPES.index(q.dtype)
    lengths = q.shape[1], k.shape[1]
    which = [*ALGORITHMS, "auto"].index(algorithm)
    shape = q.shape[0], *q.shape[2:], k.shape[2]
    return [0, which, causal, scale_bits, sink is not None, *types, *shape, *lengths]


def _agree(
    ranks: Ranks, device: torch.device, facts: list[int], algorithm: str, causal: bool,
    problem: Error | None,
) -> tuple[Sequence[int], Sequence[int]]:  # fmt: skip
    """One small all-gather before anything else. Gives the ranks' lengths of q and of k.

    On a GPU it runs beside the current stream, so that the CPU waits for the group's last
    collective at most, not for what is being computed; and not even for a place on the GPU where
    the ranks have a board.

    Raises:
        ConfigError, ShapeError: on all ranks, if one has a problem or they differ.
    """
    window = known(ranks)
    if window:
        found = window.board.gather(facts)
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
        raise ConfigError(f"ringx: rank {rank} of the group refused its arguments (see its error)")
    uneven = not causal if algorithm == "auto" else ALGORITHMS[algorithm].uneven
    lengths = columns.pop("q.shape[1]"), columns.pop("k.shape[1]")
    for name, values in columns.items():
        if len({*values}) > 1:
            raise _differ(name, values, "the same on all ranks")
    for name, values in zip(("q.shape[1]", "k.shape[1]"), lengths, strict=True):
        if len({*values}) > 1 and not uneven:
            raise _differ(name, values, f"one length (pad, or use {'X2' if causal else 'X1'})")
        if not sum(values):
            raise ShapeError(f"ringx: {name} is 0 on all ranks: want 1 or more on one")
    return lengths


def _differ(name: str, values: Sequence[int], want: str) -> Error:
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    kind = ShapeError if "shape" in name else ConfigError
    first, second = (_fact(name, values[rank]) for rank in (0, other))
    return kind(
        f"ringx: {name} is {first} on rank 0 and {second} on rank {other} of the group: want {want}"
    )


def _fact(name: str, number: int) -> object:
    """What a number that ranks told each other stands for."""
    if name == "scale":
        return struct.unpack("d", struct.pack("q", number))[0]
    if name in ("q.dtype", "reduce_dtype"):
        return DTYPES[number]
    if name in ("causal", "copies"):
        return bool(number)
    which = {"algorithm": [*ALGORITHMS, "auto"], "sink": ["None", "a tensor"]}
    return which[name][number] if name in which else number


@lru_cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# The functions of the reference


def _reference_problem(
    q: Tensor, dropout_p: object, window_size: tuple[int, int], alibi_slopes: Tensor | None,
    deterministic: bool, return_attn_probs: bool,
) -> Error | None:  # fmt: skip
    """What is wrong with the arguments that `ringx_attention` does not have."""
    if not isinstance(dropout_p, Real) or dropout_p != 0:
        return ConfigError(f"ringx: dropout_p {reprlib.repr(dropout_p)}: not supported (use 0.0)")
    if not isinstance(window_size, (tuple, list)) or tuple(window_size) != (-1, -1):
        window = reprlib.repr(window_size)
        return ConfigError(f"ringx: window_size {window}: not supported (use (-1, -1))")
    if alibi_slopes is not None:
        return ConfigError("ringx: alibi_slopes: not supported (use None)")
    problem = _flag_problem(deterministic=deterministic, return_attn_probs=return_attn_probs)
    if problem:
        return problem
    if deterministic and q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        return ConfigError(
            "ringx: deterministic True: torch decides (call torch.use_deterministic_algorithms)"
        )
    return None


def _like_reference(algorithm: str) -> Callable[..., Any]:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, None]:
        theirs = (dropout_p, window_size, alibi_slopes, deterministic, return_attn_probs)
        more = partial(_reference_problem, q, *theirs)
        out, lse = _run(q, k, v, algorithm, causal, softmax_scale, group, None, torch.float32, more)
        return (out, lse, None) if return_attn_probs else out

    function.__name__ = function.__qualname__ = f"ring{algorithm}_attn_func"
    function.__doc__ = f"""Attention by {algorithm}, with the signature of the reference.

    The arguments are those of `ringx_attention`. dropout_p, window_size and alibi_slopes have to
    be left alone, and causal has to be {ALGORITHMS[algorithm].causal}. With return_attn_probs the
    result is (out, lse, None).

    Raises:
        ConfigError, ShapeError: as for `ringx_attention`.
    """
    return function


ringX1_attn_func = _like_reference("X1")
ringX1o_attn_func = _like_reference("X1o")
ringX2_attn_func = _like_reference("X2")
ringX2o_attn_func = _like_reference("X2o")
ringX3_attn_func = _like_reference("X3")
ringX3b_attn_func = _like_reference("X3b")
ringX4_attn_func = _like_reference("X4")
ringX4o_attn_func = _like_reference("X4o")
