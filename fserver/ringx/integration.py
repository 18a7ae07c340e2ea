"""ringx as an attention implementation of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from fserver.errors import ConfigError

from .api import run
from .arguments import Options, need
from .kernels import capturing
from .ranks import Group

REMEDY = "use another attn_implementation, or a model without it"
REFUSED = ("block_indices", "cache", "dropout", "indices", "position_bias", "sinks", "softcap")
IGNORED = (
    "cache_position", "labels", "max_length_k", "max_length_q", "num_items_in_batch",
    "position_ids", "seq_idx", "shift_labels",
)  # fmt: skip
"""Tensors that a model passes on to its attention, and that change nothing there."""

KNOWN = {
    "and_masks", "bidirectional_mask_function", "causal_mask_function",
    "packed_sequence_mask_function", "remap_positions_for_packed_sequence",
    "sliding_window_overlay",
}  # fmt: skip
"""The functions of transformers from which ringx can follow a mask."""


@dataclass(frozen=True)
class Mask:
    """What attention has to know of a mask: why it is refused, if it is, its sliding window, and
    whether it is causal, which some modules do not say.
    A mask that raised an error itself would leave the other ranks waiting."""

    problem: str
    window: int | None
    causal: bool


def _mask(
    *_: Any, mask_function: Callable[..., Any], attention_mask: Tensor | None = None,
    local_size: int | None = None, use_vmap: bool = False, **__: Any,
) -> Mask | None:  # fmt: skip
    """Returns the mask that attention is given: None for a causal one that hides nothing else, as
    some models take what is not None for a tensor. Documents that transformers has seen by their
    positions are a matter for attention."""
    problem = ""
    if attention_mask is not None and not attention_mask.all():
        problem = (
            "attention_mask hides tokens: not supported (pad behind the tokens, leave the mask "
            "out, and leave the padding out of the loss)"
        )
    parts = _parts(mask_function)
    if use_vmap or not parts <= KNOWN:
        problem = (
            f"mask_function is made of {', '.join(sorted(parts))}, use_vmap is {use_vmap}: want a "
            "causal or full mask, with a sliding window or without, and no function of the "
            f"model's own (not supported: {REMEDY})"
        )
    mask = Mask(problem, local_size, "causal_mask_function" in parts)
    return None if mask == Mask("", None, True) else mask


def _parts(function: Callable[..., Any]) -> set[str]:
    """Returns the names of the functions of which transformers has made a mask."""
    found = {getattr(function, "__qualname__", repr(function)).split(".")[0]}
    for cell in getattr(function, "__closure__", None) or ():
        inside = cell.cell_contents
        for part in inside if isinstance(inside, tuple) else (inside,):
            if callable(part):
                found |= _parts(part)
    return found


class Positions:
    """Reports whether positions start again. The answer waits for the GPU, so it is kept for the
    layers of a model, which have one tensor of positions."""

    def __init__(self) -> None:
        self._last: Callable[[], Tensor | None] = lambda: None
        self._version, self._restart = -1, False

    def restart(self, where: object) -> bool:
        """Cannot tell, and says no, under torch.compile and in the capture of a CUDA graph."""
        if not isinstance(where, Tensor) or where.dim() > 2:  # more: those of pictures
            return False
        if torch.compiler.is_compiling() or capturing(where.device):
            return False
        version = -1 if where.is_inference() else where._version
        if self._last() is not where or self._version != version:
            self._last, self._version = ref(where), version
            begins = (where.diff() < 0) | (where[..., 1:] == 0)
            self._restart = bool(begins.any())
        return self._restart


def _check(mask: object, window: int | None, given: dict[str, Any]) -> None:
    """Checks what only a model gives."""
    if isinstance(mask, Mask):
        if mask.problem:
            raise ConfigError(f"ringx: {mask.problem}")
        want = f"{mask.window}, as the mask of the layer has it (not supported: {REMEDY})"
        need(mask.window == window, "sliding_window", window, want)
        mask = None
    for what, value in {"attention_mask": mask, **given}.items():
        unknown = isinstance(value, Tensor) and what not in IGNORED
        good = value is None or not (unknown or what in REFUSED)
        need(good, what, value, f"none (not supported: {REMEDY})")


def _check_documents(
    for_q: Tensor | None, for_k: Tensor | None, positions: Positions, where: object
) -> None:
    if for_k is not None and (for_q is None or not torch.equal(for_q, for_k)):
        raise ConfigError(
            "ringx: cu_seq_lens_k differs from cu_seq_lens_q: not supported (give the model the "
            "same documents for both)"
        )
    if for_q is None and positions.restart(where):
        raise ConfigError(
            "ringx: position_ids start again, as those of packed documents, and cu_seq_lens_q is "
            "None: want both (give the model cu_seq_lens_q=cu_seqlens)"
        )


def register_attention(
    name: str = "ringx",
    *,
    group: Group | None = None,
    layout: str = "zigzag",
    algorithm: str = "auto",
    reduce_dtype: torch.dtype = torch.float32,
    agreed: bool | None = None,
    copies: bool = False,
) -> None:
    """Registers `ringx_attention` with transformers, for ``attn_implementation=name``.

    Each rank gives the model its part of the tokens, with their ``position_ids``
    (``positions(...)[None]``), and computes the loss of its part. A mask of padding is refused,
    unless it hides nothing: under a causal mask, padding behind the tokens needs none.

    A ``sliding_window`` that the model has is the ``window`` of `ringx_attention`. It needs the
    layout ``"contiguous"``; layers without one then need an algorithm for it, such as ``"X2o"``.
    Packed documents are ``cu_seq_lens_q``, given to the model: those of the whole sequence, on the
    CPU.

    If one rank refuses a mask or documents, all ranks raise the error in a call that compares
    arguments. A later call with the same shapes does not compare: then that rank warns, and all
    wait until the group's timeout. Give ``agreed=False`` to compare in each call.

    Args:
        name: the name of the implementation.
        group: the process group, or a DeviceMesh with one dimension. None: all ranks.
        layout: how the tokens are split: ``"zigzag"`` for models with a causal mask,
            ``"contiguous"`` for those with a full one.
        algorithm: that of `ringx_attention`, for layers without a sliding window.
        reduce_dtype, agreed, copies: those of `ringx_attention`.

    Raises:
        ConfigError: transformers is not installed, or is too old. A call of the model raises it for
            dropout, and what else ringx does not compute.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ConfigError(
            f"ringx: transformers: {error} (install transformers 4.53 or newer)"
        ) from error

    options = Options(algorithm, True, layout, None, reduce_dtype, agreed, copies)
    AttentionInterface.register(name, partial(_attend, group, options, Positions()))
    AttentionMaskInterface.register(name, _mask)


def _attend(
    group: Group | None, options: Options, positions: Positions, module: Any, query: Tensor,
    key: Tensor, value: Tensor, attention_mask: object, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, s_aux: Tensor | None = None,
    sliding_window: int | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention of a layer. A model gives what is behind `positions`."""

    def check() -> None:
        _check(attention_mask, sliding_window, {"dropout": dropout or None, **more})
        _check_documents(cu_seq_lens_q, cu_seq_lens_k, positions, more.get("position_ids"))

    if isinstance(attention_mask, Mask):
        is_causal = attention_mask.causal
    # Under autocast a rotary embedding leaves q and k in float32.
    q, k, v = (t.transpose(1, 2).to(value.dtype) for t in (query, key, value))
    options = options._replace(
        algorithm=options.algorithm if sliding_window is None else "auto",
        causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        scale=scaling,
        window=sliding_window,
        cu_seqlens=cu_seq_lens_q,
    )
    return run(q, k, v, s_aux, group, options, check)[0], None
