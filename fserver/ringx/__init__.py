"""Exact attention over a sequence that is split over several ranks.

It needs ``torch.distributed``, but neither the engine nor a scheduler. docs/long-contexts.md is the
guide. docs/ringx.md describes the algorithms, and how much data each one moves.
"""

from fserver.ringx.api import ringx_attention
from fserver.ringx.arguments import layout_of
from fserver.ringx.integration import register_attention
from fserver.ringx.layout import positions, shard, unshard
from fserver.ringx.reference import (
    ringX1_attn_func,
    ringX1o_attn_func,
    ringX2_attn_func,
    ringX2o_attn_func,
    ringX3_attn_func,
    ringX3b_attn_func,
    ringX4_attn_func,
    ringX4o_attn_func,
)

__all__ = [
    "layout_of",
    "positions",
    "register_attention",
    "ringX1_attn_func",
    "ringX1o_attn_func",
    "ringX2_attn_func",
    "ringX2o_attn_func",
    "ringX3_attn_func",
    "ringX3b_attn_func",
    "ringX4_attn_func",
    "ringX4o_attn_func",
    "ringx_attention",
    "shard",
    "unshard",
]
