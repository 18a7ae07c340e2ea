"""RingX's module of this name."""

from ._maker import make

ringX1o_attn_func = make("X1o", __name__)
