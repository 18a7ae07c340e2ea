"""Attention over a sequence that is split over the ranks of a group: `ringx_attention`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fserver.errors import ConfigError, Error

from . import copies as by_copies
from .algorithms import ALGORITHMS, Algorithm
from .arguments import (
    FACTS,
    agree,
    argument_problem,
    device_of,
    facts_of,
    flag_problem,
    kernel_problem,
    ranks_of,
)
from .kernels import Given, accumulator, capturing
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


class _Attention(torch.autograd.Function):
    """Saves the global out and lse; a schedule's backward is written in terms of them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, how: Algorithm, job: Job
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        job.ranks.step = "forward"
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
            raise Error("ringx: lse has no gradient (use lse.detach())")
        if torch.is_grad_enabled():
            raise Error(
                "ringx: backward with create_graph=True: there is no second derivative (use "
                "create_graph=False)"
            )
        q, k, v, sink, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        how: Algorithm = ctx.how
        job: Job = ctx.job
        job.ranks.step = "backward"
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
    layout: str | None = None,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    sink: Tensor | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    return_lse: bool = False,
    agreed: bool = False,
    copies: bool = False,
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
        group: the process group. None: all ranks.
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
    out, lse = _run(
        q, k, v, algorithm, causal, scale, group, sink, reduce_dtype, more,
        layout=layout, agreed=agreed, copies=copies,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _run(
    q: Tensor, k: Tensor, v: Tensor, algorithm: str, causal: bool, scale: float | None,
    group: dist.ProcessGroup | None, sink: Tensor | None, reduce_dtype: torch.dtype,
    more: Callable[[], Error | None], layout: str | None = None, agreed: bool = False,
    copies: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ringx_attention. `more` checks the arguments that only the calling function has."""
    ranks = ranks_of(group)
    facts = [1] + [0] * (len(FACTS) - 1)
    factor = 0.0
    q_lengths: Sequence[int]
    k_lengths: Sequence[int]
    try:
        problem = argument_problem(
            ranks, q, k, v, algorithm, causal, layout, scale, sink, reduce_dtype, copies
        )
        problem = problem or more()
        if not problem and not agreed:
            problem = kernel_problem(q, k, v, causal)
        if not problem:
            factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
            facts = facts_of(q, k, v, algorithm, causal, factor, sink, reduce_dtype, copies)
    except Exception as error:  # the other ranks would wait
        problem = ConfigError(f"ringx: the arguments cannot be checked: {error!r} (see its cause)")
        problem.__cause__ = error
    if agreed is True:
        if problem:
            raise problem
        q_lengths, k_lengths = [q.shape[1]] * ranks.size, [k.shape[1]] * ranks.size
    else:
        device = device_of(ranks, q)
        if capturing(device):
            raise ConfigError(
                "ringx: agreed False in the capture of a CUDA graph: ranks cannot compare their "
                "arguments there (make one call before the capture, then capture "
                "ringx_attention(agreed=True))"
            )
        q_lengths, k_lengths = agree(ranks, device, facts, algorithm, causal, problem)
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
        out, lse = _Attention.apply(q, k, v, sink, how, job)
        return out, lse


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


# The functions of the reference


def _reference_problem(
    q: Tensor, dropout_p: object, window_size: tuple[int, int], alibi_slopes: Tensor | None,
    deterministic: bool, return_attn_probs: bool,
) -> Error | None:  # fmt: skip
    """Checks the arguments that `ringx_attention` does not have. Returns the error, or None."""
    if not isinstance(dropout_p, Real) or dropout_p != 0:
        return ConfigError(f"ringx: dropout_p {reprlib.repr(dropout_p)}: not supported (use 0.0)")
    if not isinstance(window_size, (tuple, list)) or tuple(window_size) != (-1, -1):
        window = reprlib.repr(window_size)
        return ConfigError(f"ringx: window_size {window}: not supported (use (-1, -1))")
    if alibi_slopes is not None:
        return ConfigError("ringx: alibi_slopes: not supported (use None)")
    problem = flag_problem(deterministic=deterministic, return_attn_probs=return_attn_probs)
    if problem:
        return problem
    if deterministic and q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        return ConfigError(
            "ringx: deterministic True: torch decides which kernels it uses (call "
            "torch.use_deterministic_algorithms(True) first, or use deterministic=False)"
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
    function.__doc__ = f"""Computes attention by algorithm {algorithm}, with the arguments of RingX.

    Args:
        q: ``[B, Sq, H, D]``, the local queries.
        k: ``[B, Sk, Hkv, D]``, the local keys.
        v: ``[B, Sk, Hkv, D]``, the local values.
        dropout_p: must be 0.
        softmax_scale: factor of the scores, above 0. None: ``1 / sqrt(D)``.
        causal: must be {ALGORITHMS[algorithm].causal}.
        window_size: must be ``(-1, -1)``.
        alibi_slopes: must be None.
        deterministic: True needs ``torch.use_deterministic_algorithms(True)`` on GPUs.
        return_attn_probs: whether to return ``(out, lse, None)``.
        group: the process group. None: all ranks.

    Returns:
        out, ``[B, Sq, H, D]`` of the dtype of q. With return_attn_probs ``(out, lse, None)``.

    Raises:
        ConfigError: as ``ringx_attention``.
        ShapeError: as ``ringx_attention``.
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
