"""Attention over a sequence that the ranks of a group share: `ringx_attention`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
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

    causal: bool
    layout: str
    uneven: bool  # the ranks' lengths may differ
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    blocks: schedules.Blocks
    together: int = 0  # owners from which are copied at a time; 0: none ever


def _queries(blocks: schedules.Blocks, overlap: bool) -> Algorithm:
    forward = partial(schedules.queries_forward, blocks=blocks, overlap=overlap)
    backward = partial(schedules.broadcast_backward, blocks=blocks, ahead=overlap, behind=overlap)
    return Algorithm(blocks is not schedules.full, "contiguous", True, forward, backward, blocks)


def _keys(
    forward: Callable[..., Any], backward: Callable[..., Any], together: int = 0, **how: Any
) -> Algorithm:
    causal = how["blocks"] is not schedules.full
    layout = "zigzag" if causal else "contiguous"
    given = partial(forward, **how), partial(backward, **how)
    return Algorithm(causal, layout, False, *given, how["blocks"], together)


EVERY_OWNER = 1 << 30

_gather = partial(_keys, schedules.gather_forward, schedules.gather_backward)
_broadcast = partial(_keys, schedules.broadcast_forward, schedules.broadcast_backward)

ALGORITHMS = {
    "X1": _queries(schedules.full, overlap=False),
    "X1o": _queries(schedules.full, overlap=True),
    "X2": _queries(schedules.contiguous, overlap=False),
    "X2o": _queries(schedules.contiguous, overlap=True),
    "X3": _gather(EVERY_OWNER, blocks=schedules.zigzag, planner=schedules.by_rows),
    "X3c": _gather(blocks=schedules.zigzag, planner=schedules.by_half),
    "X3b": _gather(EVERY_OWNER, blocks=schedules.full, planner=schedules.by_rows),
    "X4": _broadcast(1, blocks=schedules.zigzag, ahead=True, behind=False),
    "X4o": _broadcast(blocks=schedules.zigzag, ahead=True, behind=True),
}


def _copies(how: Algorithm, job: Job, k: Tensor, backward: bool) -> dict[str, Any] | None:
    """The keywords of `by_copies`, if this forward or backward can do so."""
    together = min(how.together, job.ranks.size - 1)
    if not together or not by_copies.fits(job, k, together, backward):
        return None
    return {"blocks": how.blocks, "together": together}


class _Attention(torch.autograd.Function):
    """Saves the global out and lse; a schedule's backward is written in terms of them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, how: Algorithm, job: Job
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        options = _copies(how, job, k, backward=False)
        forward = how.forward
        turn: AbstractContextManager[None] = nullcontext()
        if options and job.window:
            forward, turn = partial(by_copies.forward, **options), job.window.call()
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
        options = _copies(how, job, k, backward=True)
        backward = how.backward
        turn: AbstractContextManager[None] = nullcontext()
        if options and job.window:
            backward, turn = partial(by_copies.backward, **options), job.window.call()
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
        scale: of the scores; 1 / sqrt(D) without.
        group: the ranks; all without.
        sink: ``[H]``, the score of a key that has no value. Its gradient is what the local rows
            give, as for any weight that all ranks have: the sum over the ranks is the caller's.
        reduce_dtype: of sums over ranks; float64 for float64 tensors in any case.
        return_lse: also give lse, ``[B, H, Sq]``, in float32 or float64. It has no gradient.
        agreed: do not ask the other ranks, as every call does else: the caller knows that all pass
            the same arguments and equal lengths, as in a loop whose first call has asked. It saves
            the CPU a wait. If it is not so, the call may hang or be wrong.
        copies: X3, X3b and X4 do without collectives where the ranks are GPUs of one host that
            reach each other's memory. The group's first call with it finds that out.

    Returns:
        out ``[B, Sq, H, D]`` of q's type; with return_lse (out, lse).

    Raises:
        ConfigError, ShapeError: an argument is wrong here, or not the same on all ranks. All ranks
            raise then, and nothing has been exchanged; with agreed, only this one raises.
    """
    out, lse = _run(
        q, k, v, algorithm, causal, scale, group, sink, reduce_dtype, agreed=agreed, copies=copies
    )
    return (out, lse) if return_lse else out


def _run(
    q: Tensor, k: Tensor, v: Tensor, algorithm: str, causal: bool, scale: float | None,
    group: dist.ProcessGroup | None, sink: Tensor | None, reduce_dtype: torch.dtype,
    problem: Error | None = None, agreed: bool = False, copies: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ranks = _ranks(group)
    problem = problem or _problem(q, k, v, algorithm, causal, sink, reduce_dtype)
    factor = 0.0
    if not problem:
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q_lengths: Sequence[int]
    k_lengths: Sequence[int]
    if agreed:
        if problem:
            raise problem
        q_lengths, k_lengths = [q.shape[1]] * ranks.size, [k.shape[1]] * ranks.size
    else:
        problem = problem or _kernel_problem(q, k, v, causal)
        facts = [1] + [0] * (len(FACTS) - 1)
        if not problem:
            facts = _facts(q, k, algorithm, causal, factor, sink, reduce_dtype, copies)
        q_lengths, k_lengths = _agree(ranks, q.device, facts, algorithm, causal, problem)
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


def _ranks(group: dist.ProcessGroup | None) -> Ranks:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError("ringx: torch.distributed has no group (call init_process_group first)")
    group = dist.group.WORLD if group is None else group
    assert group is not None
    ranks = Ranks(group)
    if ranks.rank < 0:
        raise ConfigError("ringx: group: this process is not in it (call on its members only)")
    return ranks


def _problem(
    q: Tensor, k: Tensor, v: Tensor, algorithm: str, causal: bool, sink: Tensor | None,
    reduce_dtype: torch.dtype,
) -> Error | None:  # fmt: skip
    """What is wrong with the arguments of this rank."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
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
        return ShapeError(f"ringx: q.shape {tuple(q.shape)}, k.shape {tuple(k.shape)}: empty")
    if q.shape[2] % k.shape[2]:
        return ShapeError(
            f"ringx: q has {q.shape[2]} heads and k {k.shape[2]}: want a multiple (repeat k and v)"
        )
    if causal and q.shape[1] != k.shape[1]:
        return ShapeError(
            f"ringx: causal with q.shape[1] {q.shape[1]} and k.shape[1] {k.shape[1]}: want equal "
            "lengths, or causal=False"
        )
    if sink is not None and (
        sink.shape != q.shape[2:3] or sink.device != q.device or sink.dtype not in DTYPES
    ):
        return ShapeError(
            f"ringx: sink of shape {tuple(sink.shape)}, {sink.dtype} on {sink.device}: want "
            f"[{q.shape[2]}], a score for each head of q, one of {DTYPES} on {q.device}"
        )
    for name, dtype in (("reduce_dtype", reduce_dtype), ("q.dtype", q.dtype)):
        if dtype not in DTYPES:
            return ConfigError(f"ringx: {name} {dtype}: want one of {DTYPES}")
    return _mask_problem(algorithm, causal, q.shape[1])


def _mask_problem(algorithm: str, causal: bool, length: int) -> Error | None:
    if algorithm == "auto":
        layout = "zigzag" if causal else "contiguous"
    elif algorithm not in ALGORITHMS:
        return ConfigError(f"ringx: algorithm {algorithm!r}: want auto or one of {[*ALGORITHMS]}")
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
            raise ShapeError(f"ringx: {name} is 0 on all ranks")
    return lengths


def _differ(name: str, values: Sequence[int], want: str) -> Error:
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    kind = ShapeError if "shape" in name else ConfigError
    if name == "scale":
        values = struct.unpack(f"{len(values)}d", struct.pack(f"{len(values)}q", *values))
    return kind(
        f"ringx: {name} is {values[0]} on rank 0 and {values[other]} on rank {other} of the group:"
        f" want {want}"
    )


@lru_cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# The functions of the reference


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
        problem = None
        if dropout_p != 0:
            problem = ConfigError(f"ringx: dropout_p {dropout_p}: not supported (use 0.0)")
        if tuple(window_size) != (-1, -1):
            problem = ConfigError(f"ringx: window_size {window_size}: not supported (use (-1, -1))")
        if alibi_slopes is not None:
            problem = ConfigError("ringx: alibi_slopes: not supported (use None)")
        if deterministic and q.is_cuda and not torch.are_deterministic_algorithms_enabled():
            problem = ConfigError(
                "ringx: deterministic: torch decides (call torch.use_deterministic_algorithms)"
            )
        out, lse = _run(
            q, k, v, algorithm, causal, softmax_scale, group, None, torch.float32, problem
        )
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
