"""RingX's package, computed by `fserver.ringx`. docs/ringx.md says what differs."""

from ._maker import make
from .backend import available_backends, get_backend, set_backend
from .ringX1_attn import ringX1_attn_func
from .ringX1o_attn import ringX1o_attn_func
from .ringX2_attn import ringX2_attn_func
from .ringX2o_attn import ringX2o_attn_func
from .ringX3_attn import ringX3_attn_func
from .ringX3b_attn import ringX3b_attn_func
from .ringX4_attn import ringX4_attn_func
from .ringX4o_attn import ringX4o_attn_func

ringX_varlen_attn_func = make("X1o", __name__, "ringX_varlen_attn_func")

__all__ = [
    "available_backends",
    "get_backend",
    "ringX1_attn_func",
    "ringX1o_attn_func",
    "ringX2_attn_func",
    "ringX2o_attn_func",
    "ringX3_attn_func",
    "ringX3b_attn_func",
    "ringX4_attn_func",
    "ringX4o_attn_func",
    "ringX_varlen_attn_func",
    "set_backend",
]
