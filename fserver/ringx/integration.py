"""ringx as an attention implementation of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fserver.errors import ConfigError

from .api import ringx_attention
from .arguments import need
from .ranks import Group

REFUSED = ("softcap", "position_bias", "cache")
REMEDY = "use another attn_implementation, or a model without it"


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

    options: dict[str, Any] = {
        "layout": layout, "group": group, "reduce_dtype": reduce_dtype, "agreed": agreed,
        "copies": copies,
    }  # fmt: skip

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
        s_aux: Tensor | None = None, sliding_window: int | None = None,
        cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        refused = {"attention_mask": attention_mask, "dropout": dropout or None}
        refused |= {name: more.get(name) for name in REFUSED}
        for what, given in refused.items():
            need(given is None, what, given, f"none (not supported: {REMEDY})")
        for_q, for_k = cu_seq_lens_q, cu_seq_lens_k
        if for_k is not None and (for_q is None or not torch.equal(for_q, for_k)):
            raise ConfigError(
                "ringx: cu_seq_lens_k differs from cu_seq_lens_q: not supported (give the model "
                "the same documents for both)"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        how = algorithm if sliding_window is None else "auto"
        out = ringx_attention(
            q, k, v, algorithm=how, causal=causal, scale=scaling, sink=s_aux,
            cu_seqlens=cu_seq_lens_q, window=sliding_window, **options,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out, None

    def mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
        """The mask that attention is given: none."""
        if attention_mask is not None and not attention_mask.all():
            raise ConfigError(
                "ringx: attention_mask hides tokens: not supported (pad behind the tokens, leave "
                "the mask out, and leave the padding out of the loss)"
            )

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
