"""Attention over a sequence that is split over the ranks of a group: `ringx_attention`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx.node import has_side_effect

from fserver.errors import Error, ShapeError

from . import copies as by_copies
from . import schedules
from .algorithms import ALGORITHMS, SLIDING, Algorithm, automatic
from .arguments import CuSeqlens, Options, check_flags, settled
from .kernels import ENABLED, Given, Triple, accumulator, enabled, enabling
from .ranks import Group, Lengths, Ranks, ranks_of
from .schedules import Job
from .window import window_of


def _way(
    how: Algorithm, job: Job, k: Tensor, backward: bool
) -> tuple[Callable[..., Any], AbstractContextManager[None]]:
    """Returns the forward or backward to call, by copies if these are possible, and the context in
    which to call it."""
    together = min(how.together, job.ranks.size - 1)
    if job.window and together and by_copies.fits(job, k, together, backward):
        schedule = schedules.backward if backward else schedules.forward
        exchange = partial(by_copies.copies, together=together)
        return partial(schedule, exchange=exchange), job.window.call()
    return how.backward if backward else how.forward, nullcontext()


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
    return out.to(q.dtype).contiguous(), lse.contiguous()


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
        dsink = -(share * (dout.to(lse.dtype) * out).sum(-1)).sum((0, 1)).to(sink.dtype)
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
    agreed: bool | None = None,
    copies: bool = False,
    cu_seqlens: CuSeqlens | None = None,
    window: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes exact attention of the local queries to the keys of all ranks.

    Every rank of the group has to call it, with equal arguments except for the tensors.
    docs/long-contexts.md is the guide to algorithms, layouts and options.

    Args:
        q: ``[B, Sq, H, D]``, the local queries, as ``shard`` returns them.
        k: ``[B, Sk, Hkv, D]``, the local keys. H is a multiple of Hkv.
        v: ``[B, Sk, Hkv, D]``, the local values.
        algorithm: its name, or ``"auto"`` for the fastest one by measurements.
        causal: whether a query attends to the keys at its own position and before, or to all keys.
        layout: ``"contiguous"`` or ``"zigzag"``, as ``layout_of`` returns it for the algorithm.
            None: it is not checked, and the wrong one gives wrong results under a causal mask.
        scale: factor of the scores, above 0. None: ``1 / sqrt(D)``.
        group: the process group, or a DeviceMesh with one dimension. None: all ranks.
        sink: ``[H]``, for each head the score of a key that has no value. Each rank gets the
            gradient of its local queries, and the caller has to sum those of the ranks.
        reduce_dtype: dtype of sums over ranks, or that of q if it is wider.
        return_lse: whether to return lse too. It has no gradient.
        agreed: when the ranks compare their arguments. None: in the first call with these. False:
            in each call. True: never; if they differ, the call may hang or return wrong values.
        copies: whether X3, X3b and X4 copy from GPU to GPU where they can, without collectives.
        cu_seqlens: ``[D + 1]``, cumulative lengths of packed documents in the *whole* sequence, on
            the CPU or as a list. A query attends to keys of its own document only.
        window: a query attends to its own key and the ``window - 1`` before. None: to all before.

    Returns:
        out, ``[B, Sq, H, D]`` of the dtype of q. With return_lse, ``(out, lse)``, where lse is
        ``[B, H, Sq]`` in float32 or float64.

    Raises:
        ConfigError, ShapeError: an argument is wrong on a rank, or differs between ranks. All ranks
            that compare raise it before any data travels; without a comparison, this rank alone.
        TimeoutError: a rank has not joined a collective or a comparison in time; also in backward.
        Error: a rank has ended, or a collective has failed; also in backward.
    """
    options = Options(
        algorithm, causal, layout, scale, reduce_dtype, agreed, copies, window, cu_seqlens
    )
    out, lse = run(q, k, v, sink, group, options, partial(check_flags, return_lse=return_lse))
    return (out, lse) if return_lse else out


def run(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, group: Group | None, options: Options,
    more: Callable[[], None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ringx_attention. `more` checks the arguments that only the calling function has."""
    if torch.compiler.is_compiling():
        more()
        gradients = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (q, k, v, sink)
        )
        ends = options.cu_seqlens
        found: tuple[Tensor, Tensor, Tensor] = _opaque(
            q, k, v, sink, None if ends is None else torch.as_tensor(ends), _name_of(group),
            *options[:-1], gradients,
        )  # fmt: skip
        return found[0], found[1].detach()
    ranks = ranks_of(group)
    lengths = settled(ranks, q, k, v, sink, options, more)
    with torch.cuda.device_of(q):
        out, lse = _Attention.apply(
            *_even(q, k, v), sink, *_planned(ranks, lengths, q, k, sink, options)
        )
        return out, lse


def _even(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """cuDNN keeps the plan of a backward by the strides of q, k and v, and uses it again whatever
    those of out and its gradient are: these have to be as q is."""
    return q.contiguous(), k.contiguous(), v.contiguous()


def _planned(
    ranks: Ranks, lengths: Lengths, q: Tensor, k: Tensor, sink: Tensor | None, options: Options
) -> tuple[Algorithm, Job]:
    """Returns the algorithm, and the work with the window by which it copies, if it does."""
    (of_q, of_k), ends = lengths, options.ends
    if ends is not None and ends[-1] != sum(of_k):
        raise ShapeError(
            f"ringx: cu_seqlens ends at {ends[-1]}, but the ranks have {sum(of_k)} tokens: want "
            "the length of the whole sequence"
        )
    reduce_dtype = torch.promote_types(options.reduce_dtype, q.dtype)
    name = options.algorithm
    if ends is not None:
        name = "X3"
    elif name == "auto" and options.window is None:
        name = _fastest(ranks, lengths, q, k, reduce_dtype, options)
    how = ALGORITHMS[name] if options.window is None else SLIDING
    copied = options.copies and how.together and ends is None
    window = window_of(ranks, q.device) if copied else None
    out_dtype = q.dtype if sink is None else accumulator(q.dtype)
    blocks, factor = how.masks[options.causal], options.factor(q)
    job = Job(
        ranks, blocks, factor, of_q, of_k, reduce_dtype, out_dtype, window, ends, options.window
    )
    return how, job


def _fastest(
    ranks: Ranks, lengths: Lengths, q: Tensor, k: Tensor, reduce_dtype: torch.dtype,
    options: Options,
) -> str:  # fmt: skip
    """Returns the algorithm of ``"auto"``. docs/ringx.md has the formulas."""
    of_q, of_k = lengths
    batch, length, heads, dim = q.shape
    row = dim * q.element_size() + (dim + 1) * reduce_dtype.itemsize
    row += 2 * accumulator(q.dtype).itemsize
    moved = 2 * batch * k.shape[2] * dim * sum(of_k)
    return automatic(
        options.causal, length, len(of_q), queries=batch * heads * row * sum(of_q),
        keys=moved * k.element_size(), even=len({*zip(of_q, of_k, strict=True)}) == 1,
        gathered=moved * (k.element_size() + reduce_dtype.itemsize), copies=options.copies,
        direct=q.is_cuda and not ranks.staged(q.device),
    )  # fmt: skip


# Under torch.compile: two operators that the compiler does not look into


def _name_of(group: Group | None) -> str:
    """Returns what _group_of takes; empty for all ranks."""
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    return "" if group is None else group.group_name


def _group_of(name: str) -> dist.ProcessGroup | None:
    named: Any = name  # torch has a type of its own for it
    return _resolve_process_group(named) if name else None


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? cu_seqlens"
OPTIONS = (
    "str group, str algorithm, bool causal, str? layout, float? scale, ScalarType reduce_dtype, "
    "bool? agreed, bool copies, int? window, bool gradients"
)
"""Those of `Options`, behind the group. `gradients`: whether a backward may follow."""


@torch.library.custom_op(
    "fserver::ringx_attention",
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _opaque(q: Tensor, k: Tensor, v: Tensor, sink: Any, ends: Any, group: str, *how: Any) -> Any:
    """Returns out, lse, and for backward, on the CPU: the lengths of q and of k on all ranks, and
    which kernels were enabled, ``[2 N + 4]``."""
    *some, gradients = how
    options, ranks = Options._make((*some, ends)), ranks_of(_group_of(group))
    lengths = settled(ranks, q, k, v, sink, options, lambda: None, gradients)
    with torch.cuda.device_of(q):
        plan = _planned(ranks, lengths, q, k, sink, options)
        out, lse = forward_of(*_even(q, k, v), sink, *plan)
    kept = [*lengths[0], *lengths[1], *(backend in enabled() for backend in ENABLED)]
    return out, lse, torch.tensor(kept, dtype=torch.int64, device="cpu")


@_opaque.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sink: Any, ends: Any, group: str, *_: object) -> Any:
    batch, rows, heads, _dim = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=accumulator(q.dtype))
    size = ranks_of(_group_of(group)).size
    kept = torch.empty(2 * size + len(ENABLED), dtype=torch.int64, device="cpu")
    return q.new_empty(q.shape), lse, kept


@torch.library.custom_op(
    "fserver::ringx_attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor out, Tensor lse, Tensor kept, {INPUTS}, {OPTIONS}) -> Tensor[]",
)
def _opaque_backward(
    dout: Tensor, out: Tensor, lse: Tensor, kept: Tensor, q: Tensor, k: Tensor, v: Tensor,
    sink: Any, ends: Any, group: str, *how: Any,
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v, and of sink if there is one."""
    options, ranks = Options._make((*how[:-1], ends)), ranks_of(_group_of(group))
    numbers = kept.tolist()
    size = ranks.size
    lengths, flags = (numbers[:size], numbers[size : 2 * size]), numbers[2 * size :]
    with torch.cuda.device_of(q):
        plan = _planned(ranks, lengths, q, k, sink, options)
        given = Given(dout.contiguous(), *_even(q, k, v), out, lse)
        with enabling([one for one, flag in zip(ENABLED, flags, strict=True) if flag]):
            grads = backward_of(given, sink, *plan)
    return [_alone(grad) for grad in grads if grad is not None]


def _alone(t: Tensor) -> Tensor:
    """Returns a contiguous tensor with memory of its own, as an operator has to: schedules give dk
    and dv as views of one buffer."""
    whole = t.untyped_storage().nbytes() == t.nbytes and t.is_contiguous()
    return t if whole else t.clone(memory_format=torch.contiguous_format)


@_opaque_backward.register_fake
def _(dout: Tensor, out: Tensor, lse: Tensor, kept: Tensor, *inputs: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in inputs[:4] if t is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:5])
    ctx.how = inputs[5:]


def _gradients(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = _opaque_backward(dout, *ctx.saved_tensors, *ctx.how)
    return *found, *[None] * (15 - len(found))


_opaque.register_autograd(_gradients, setup_context=_keep)

# Other ranks wait for a call whose result is not used here: the compiler has to keep it. An ordered
# effect (`register_effect`) would too, but torch 2.11 then fails under activation checkpointing.
for _operator in torch.ops.fserver.ringx_attention, torch.ops.fserver.ringx_attention_backward:
    has_side_effect(_operator.default)
