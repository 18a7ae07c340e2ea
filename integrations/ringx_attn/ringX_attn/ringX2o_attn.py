"""RingX's module of this name."""

from ._maker import make

ringX2o_attn_func = make("X2o", __name__)
