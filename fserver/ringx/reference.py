"""The functions of RingX, by `ringx_attention`'s algorithms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .algorithms import ALGORITHMS
from .api import run
from .arguments import Options, check_flags, need
from .ranks import Group


def _check_reference(
    q: Tensor, dropout_p: object, window_size: tuple[int, int], alibi_slopes: Tensor | None,
    deterministic: bool, return_attn_probs: bool,
) -> None:  # fmt: skip
    """Checks the arguments that `ringx_attention` does not have."""
    off = isinstance(dropout_p, Real) and dropout_p == 0
    reason = "kernels draw by the place in a block, so ranks would not drop what the unsplit model"
    need(off, "dropout_p", dropout_p, f"0.0 (others are not supported: {reason} drops)")
    none = isinstance(window_size, (tuple, list)) and tuple(window_size) == (-1, -1)
    need(none, "window_size", window_size, "(-1, -1) (others are not supported)")
    need(alibi_slopes is None, "alibi_slopes", alibi_slopes, "None (others are not supported)")
    check_flags(deterministic=deterministic, return_attn_probs=return_attn_probs)
    free = deterministic and q.is_cuda and not torch.are_deterministic_algorithms_enabled()
    reason = "torch decides which kernels it uses: call torch.use_deterministic_algorithms(True)"
    need(not free, "deterministic", deterministic, f"False ({reason} first)")


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
        group: Group | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, None]:
        theirs = (dropout_p, window_size, alibi_slopes, deterministic, return_attn_probs)
        more = partial(_check_reference, q, *theirs)
        options = Options(algorithm, causal, None, softmax_scale, torch.float32, None, False)
        out, lse = run(q, k, v, None, group, options, more)
        return (out, lse, None) if return_attn_probs else out

    function.__name__ = function.__qualname__ = f"ring{algorithm}_attn_func"
    function.__doc__ = f"""Computes attention by algorithm {algorithm}, with the arguments of RingX.

    Args:
        q, k, v, group: as in `ringx_attention`.
        softmax_scale: its ``scale``.
        causal: must be {True in ALGORITHMS[algorithm].masks}.
        dropout_p, window_size, alibi_slopes: must be 0, ``(-1, -1)`` and None.
        deterministic: True needs ``torch.use_deterministic_algorithms(True)`` on GPUs.

    Returns:
        out, ``[B, Sq, H, D]`` of the dtype of q. With return_attn_probs ``(out, lse, None)``.

    Raises:
        ConfigError, ShapeError: as `ringx_attention`.
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
