"""Attention over a sequence that is split over the ranks of a group: `ringx_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from fserver.errors import ConfigError, Error, ShapeError

from . import copies as by_copies
from .algorithms import ALGORITHMS, DOCUMENTS, SLIDING, Algorithm
from .arguments import (
    FACTS,
    agree,
    argument_problem,
    device_of,
    facts_of,
    flag_problem,
    kernel_problem,
)
from .kernels import ENABLED, Given, Triple, accumulator, capturing, enabled, enabling
from .layout import CuSeqlens, ends_of
from .ranks import Group, Ranks, ranks_of
from .schedules import Job
from .window import window_of

GATHER_LIMIT = 4 << 30
"""Bytes of gathered k, v, dk and dv on a rank above which `auto` takes X4 instead of X3."""


def _way(
    how: Algorithm, job: Job, k: Tensor, backward: bool
) -> tuple[Callable[..., Any], AbstractContextManager[None]]:
    """Returns the forward or backward to call, by copies if these are possible, and the context in
    which to call it."""
    together = min(how.together, job.ranks.size - 1)
    if job.window and together and by_copies.fits(job, k, together, backward):
        copied = by_copies.backward if backward else by_copies.forward
        return partial(copied, blocks=how.blocks, together=together), job.window.call()
    return partial(how.backward if backward else how.forward, blocks=how.blocks), nullcontext()


def forward_of(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, how: Algorithm, job: Job
) -> tuple[Tensor, Tensor]:
    """Returns out and lse, ``[B, Sq, H, D]`` and ``[B, H, Sq]``."""
    job.ranks.step = "forward"
    forward, turn = _way(how, job, k, backward=False)
    with turn, torch.autocast(q.device.type, enabled=False):  # types are what the caller gave
        out, lse = forward(job, q, k, v)
    if sink is not None:
        level = sink.to(lse.dtype)[:, None]
        out = out * torch.sigmoid(lse - level).transpose(1, 2)[..., None]
        lse = torch.logaddexp(lse, level)
    return out.to(q.dtype).contiguous(), lse


def backward_of(
    given: Given, sink: Tensor | None, how: Algorithm, job: Job
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of q, k, v and sink. A schedule's backward is written in terms of the
    global out and lse."""
    dout, q, k, v, out, lse = given
    job.ranks.step = "backward"
    backward, turn = _way(how, job, k, backward=True)
    with turn, torch.autocast(q.device.type, enabled=False):
        dq, dk, dv = backward(job, given)
    dsink = None
    if sink is not None:
        share = torch.exp(sink.to(lse.dtype)[:, None] - lse).transpose(1, 2)
        dsink = -(share * (dout * out).sum(-1, dtype=lse.dtype)).sum((0, 1)).to(sink.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink


class _Attention(torch.autograd.Function):
    """Saves out and lse for backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, how: Algorithm, job: Job
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, lse = forward_of(q, k, v, sink, how, job)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.how, ctx.job, ctx.enabled = how, job, enabled()
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dlse is not None:
            raise Error("ringx: lse has no gradient (use lse.detach())")
        if torch.is_grad_enabled():
            raise Error(
                "ringx: backward with create_graph=True: there is no second derivative (use "
                "create_graph=False)"
            )
        q, k, v, sink, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        given = Given(dout, q, k, v, out, lse)
        with enabling(ctx.enabled):  # the kernels of forward
            return *backward_of(given, sink, ctx.how, ctx.job), None, None


def ringx_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    algorithm: str = "auto",
    causal: bool,
    layout: str | None = None,
    scale: float | None = None,
    group: Group | None = None,
    sink: Tensor | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    return_lse: bool = False,
    agreed: bool = False,
    copies: bool = False,
    cu_seqlens: CuSeqlens | None = None,
    window: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes exact attention of the local queries to the keys of all ranks.

    Every rank of the group has to call it, with equal arguments except for the tensors.

    Args:
        q: ``[B, Sq, H, D]``, the local queries. ``shard`` returns them, with the layout that
            ``layout_of`` returns for the algorithm.
        k: ``[B, Sk, Hkv, D]``, the local keys. H is a multiple of Hkv.
        v: ``[B, Sk, Hkv, D]``, the local values.
        algorithm: for a full mask and contiguous parts: ``"X1"`` and ``"X1o"``, which allow
            different lengths on the ranks, or ``"X3b"``. For a causal mask and contiguous parts:
            ``"X2"`` and ``"X2o"``, which also allow different lengths. For a causal mask and zigzag
            parts: ``"X3"``, ``"X3c"``, ``"X4"`` and ``"X4o"``. ``"auto"`` chooses: with a full mask
            X1o or X3b, whichever moves less data; with a causal mask X3, or X4 if X3 would gather
            more than GATHER_LIMIT bytes.
        causal: True: a query attends to the keys at its own position and before. False: a query
            attends to all keys.
        layout: how the sequence is split over the ranks, ``"contiguous"`` or ``"zigzag"``. The call
            raises an error if the algorithm needs another layout. None: the layout is not checked,
            and with a causal mask the wrong layout gives wrong results.
        scale: factor of the scores, above 0. None: ``1 / sqrt(D)``.
        group: the process group, or a DeviceMesh with one dimension. None: all ranks.
        sink: ``[H]``, for each head the score of a key that has no value. Each rank gets the
            gradient of its local queries. As for any replicated weight, the caller has to sum the
            gradients of the ranks.
        reduce_dtype: dtype of sums over ranks. If the dtype of q is wider, such as float64, it is
            used instead.
        return_lse: whether to return lse too. It has no gradient.
        agreed: True: skip the comparison of arguments between ranks, so that the CPU need not wait
            for it. The caller guarantees that all ranks pass equal arguments and lengths, for
            example in a loop after a first call with ``agreed=False``. If the guarantee is broken,
            the call may hang or return wrong values. The capture of a CUDA graph needs
            ``agreed=True``.
        copies: True: X3, X3b and X4 use copies instead of collectives if all ranks are GPUs of one
            host that can reach each other's memory. The first such call of a group finds this out.
            In other cases, for example on the CPU or if ``"auto"`` chooses X1o, it has no effect.
        cu_seqlens: ``[D + 1]``, where packed documents end in the *whole* sequence: 0 first, the
            number of all ranks' tokens last. A tensor of int32 or int64 on the CPU, or a sequence.
            A query attends to keys of its own document only. All rows of the batch have these
            documents. They need a causal mask, algorithm ``"auto"`` or ``"X3"`` and the layout
            zigzag by document, as ``shard(..., cu_seqlens=cu_seqlens)`` returns it. The length of
            each document has to be a multiple of 2N for N ranks, unless there is a window.
        window: a query attends to the key at its own position and to the ``window - 1`` keys
            before it. It needs a causal mask, algorithm ``"auto"`` and contiguous parts, whose
            lengths may differ. None: to all keys before it.

    Returns:
        out, ``[B, Sq, H, D]`` of the dtype of q. With return_lse, ``(out, lse)``, where lse is
        ``[B, H, Sq]`` in float32 or float64.

    Raises:
        ConfigError: an argument is wrong on a rank, or differs between ranks. All ranks raise an
            error, before any data is exchanged. With agreed, or during the capture of a CUDA graph,
            only this rank raises.
        ShapeError: as ConfigError, for a shape.
        TimeoutError: a rank has not joined a collective within the timeout of the group. The
            backward pass may raise it too.
        Error: a rank has ended, or a collective has failed. The backward pass may raise it too. See
            *Ranks that do not come* in docs/ringx.md.
    """
    more = partial(flag_problem, agreed=agreed, copies=copies, return_lse=return_lse)
    out, lse = run(
        q, k, v, algorithm, causal, scale, group, sink, reduce_dtype, more,
        layout=layout, agreed=agreed, copies=copies, cu_seqlens=cu_seqlens, window=window,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def run(
    q: Tensor, k: Tensor, v: Tensor, algorithm: str, causal: bool, scale: float | None,
    group: Group | None, sink: Tensor | None, reduce_dtype: torch.dtype,
    more: Callable[[], Error | None], layout: str | None = None, agreed: bool = False,
    copies: bool = False, cu_seqlens: CuSeqlens | None = None, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ringx_attention. `more` checks the arguments that only the calling function has."""
    if torch.compiler.is_compiling():
        problem = more()
        if problem:
            raise problem
        gradients = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (q, k, v, sink)
        )
        ends = None if cu_seqlens is None else torch.as_tensor(cu_seqlens)
        found: tuple[Tensor, Tensor, Tensor] = _opaque(
            q, k, v, sink, ends, _name_of(group), algorithm, causal, layout, scale, reduce_dtype,
            agreed, copies, window, gradients,
        )  # fmt: skip
        return found[0], found[1].detach()
    ranks = ranks_of(group)
    job = _planned(
        ranks, q, k, v, algorithm, causal, scale, sink, reduce_dtype, layout, agreed, copies,
        cu_seqlens, window, None, more,
    )  # fmt: skip
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        how = _chosen(job, algorithm, q, k, causal, copies)
        out, lse = _Attention.apply(*_even(q, k, v), sink, *how)
        return out, lse


def _even(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """cuDNN keeps the plan of a backward by the strides of q, k and v, and uses it again whatever
    those of out and its gradient are: these have to be as q is."""
    return q.contiguous(), k.contiguous(), v.contiguous()


def _chosen(
    job: Job, algorithm: str, q: Tensor, k: Tensor, causal: bool, copies: bool
) -> tuple[Algorithm, Job]:
    """Returns the algorithm, and the work with the window by which it copies, if it does."""
    if job.span is not None:
        return SLIDING, job
    if job.ends is not None:
        return DOCUMENTS, job
    how = ALGORITHMS[_auto(job, q, k, causal) if algorithm == "auto" else algorithm]
    if copies and how.together:
        job = replace(job, window=window_of(job.ranks, q.device, len(FACTS)))
    return how, job


def _planned(
    ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, algorithm: str, causal: bool,
    scale: float | None, sink: Tensor | None, reduce_dtype: torch.dtype, layout: str | None,
    agreed: bool, copies: bool, cu_seqlens: CuSeqlens | None, window: int | None,
    gradients: bool | None, more: Callable[[], Error | None],
) -> Job:  # fmt: skip
    """Checks the arguments here and on all ranks, and returns the work. `gradients`: whether a
    backward may follow; None: as the tensors say."""
    facts = [1] + [0] * (len(FACTS) - 1)
    factor, ends = 0.0, None
    q_lengths: Sequence[int]
    k_lengths: Sequence[int]
    try:
        ends = None if cu_seqlens is None else ends_of(cu_seqlens)
        problem = argument_problem(
            ranks, q, k, v, algorithm, causal, layout, scale, sink, reduce_dtype, copies, ends,
            window,
        )  # fmt: skip
        problem = problem or more()
        if not problem and not agreed:
            problem = kernel_problem(q, k, v, causal)
        if not problem:
            factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
            if gradients is None:
                wanted = any(t is not None and t.requires_grad for t in (q, k, v, sink))
                gradients = wanted and torch.is_grad_enabled()
            facts = facts_of(
                q, k, v, algorithm, causal, factor, sink, reduce_dtype, copies, gradients, ends,
                window,
            )  # fmt: skip
    except Error as error:
        problem = error
    except Exception as error:  # the other ranks would wait
        problem = ConfigError(f"ringx: the arguments cannot be checked: {error!r} (see its cause)")
        problem.__cause__ = error
    device = device_of(ranks, q)
    if cu_seqlens is not None and capturing(device):
        problem = ConfigError(
            "ringx: cu_seqlens in the capture of a CUDA graph: a graph would keep these documents "
            "(capture without cu_seqlens)"
        )
    if agreed is True:
        if problem:
            raise problem
        q_lengths, k_lengths = [q.shape[1]] * ranks.size, [k.shape[1]] * ranks.size
    else:
        if capturing(device):
            raise ConfigError(
                "ringx: agreed False in the capture of a CUDA graph: ranks cannot compare their "
                "arguments there (make one call before the capture, then capture "
                "ringx_attention(agreed=True))"
            )
        q_lengths, k_lengths = agree(ranks, device, facts, algorithm, causal, window, problem)
    if ends is not None and ends[-1] != sum(k_lengths):
        raise ShapeError(
            f"ringx: cu_seqlens ends at {ends[-1]}, but the ranks have {sum(k_lengths)} tokens: "
            "want the length of the whole sequence"
        )
    return _job(ranks, factor, q_lengths, k_lengths, reduce_dtype, q, sink, ends, window)


def _job(
    ranks: Ranks, factor: float, q_lengths: Sequence[int], k_lengths: Sequence[int],
    reduce_dtype: torch.dtype, q: Tensor, sink: Tensor | None, ends: tuple[int, ...] | None,
    window: int | None,
) -> Job:  # fmt: skip
    reduce_dtype = torch.promote_types(reduce_dtype, q.dtype)
    out_dtype = q.dtype if sink is None else accumulator(q.dtype)
    return Job(ranks, factor, q_lengths, k_lengths, reduce_dtype, out_dtype, ends=ends, span=window)


def _auto(job: Job, q: Tensor, k: Tensor, causal: bool) -> str:
    """Returns the algorithm that moves the least data within the memory limit; docs/ringx.md has
    the formulas."""
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


# Under torch.compile: two operators that the compiler does not look into


def _name_of(group: Group | None) -> str:
    """Returns what _group_of takes; empty for all ranks."""
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    return "" if group is None else group.group_name


def _group_of(name: str) -> dist.ProcessGroup | None:
    named: Any = name  # torch has a type of its own for it
    return _resolve_process_group(named) if name else None


@torch.library.custom_op("fserver::ringx_attention", mutates_args=())
def _opaque(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None, group: str,
    algorithm: str, causal: bool, layout: str | None, scale: float | None,
    reduce_dtype: torch.dtype, agreed: bool, copies: bool, window: int | None, gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns out, lse, and for backward, on the CPU: the lengths of q and of k on all ranks, and
    which kernels were enabled, ``[2 N + 4]``."""
    job = _planned(
        ranks_of(_group_of(group)), q, k, v, algorithm, causal, scale, sink, reduce_dtype, layout,
        agreed, copies, cu_seqlens, window, gradients, lambda: None,
    )  # fmt: skip
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        out, lse = forward_of(*_even(q, k, v), sink, *_chosen(job, algorithm, q, k, causal, copies))
    kept = [*job.q_lengths, *job.k_lengths, *(backend in enabled() for backend in ENABLED)]
    return out, lse, torch.tensor(kept, dtype=torch.int64)


@_opaque.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None, group: str,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, rows, heads, _dim = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=accumulator(q.dtype))
    size = ranks_of(_group_of(group)).size
    return q.new_empty(q.shape), lse, torch.empty(2 * size + len(ENABLED), dtype=torch.int64)


@torch.library.custom_op("fserver::ringx_attention_backward", mutates_args=())
def _opaque_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None,
    out: Tensor, lse: Tensor, kept: Tensor, group: str, algorithm: str, causal: bool,
    scale: float | None, reduce_dtype: torch.dtype, copies: bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v and sink; without a sink, an empty one."""
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    ranks, numbers = ranks_of(_group_of(group)), kept.tolist()
    lengths, flags = numbers[: 2 * ranks.size], numbers[2 * ranks.size :]
    of_q, of_k = lengths[: ranks.size], lengths[ranks.size :]
    ends = None if cu_seqlens is None else ends_of(cu_seqlens)
    job = _job(ranks, factor, of_q, of_k, reduce_dtype, q, sink, ends, window)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        how = _chosen(job, algorithm, q, k, causal, copies)
        given = Given(dout.contiguous(), *_even(q, k, v), out, lse)
        with enabling([one for one, flag in zip(ENABLED, flags, strict=True) if flag]):
            dq, dk, dv, dsink = backward_of(given, sink, *how)
    return _alone(dq), _alone(dk), _alone(dv), q.new_empty(0) if dsink is None else dsink


def _alone(t: Tensor) -> Tensor:
    """Returns a contiguous tensor with memory of its own, as an operator has to: schedules give dk
    and dv as views of one buffer."""
    whole = t.untyped_storage().nbytes() == t.nbytes and t.is_contiguous()
    return t if whole else t.clone(memory_format=torch.contiguous_format)


@_opaque_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, group, algorithm, causal, _, scale, reduce_dtype, _, copies, window, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.how = group, algorithm, causal, scale, reduce_dtype, copies, window


def _gradients(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    sink = ctx.saved_tensors[3]
    *found, dsink = _opaque_backward(dout, *ctx.saved_tensors, *ctx.how)
    return *found, None if sink is None else dsink, *[None] * 11


_opaque.register_autograd(_gradients, setup_context=_keep)
