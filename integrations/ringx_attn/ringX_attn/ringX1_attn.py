"""RingX's module of this name."""

from ._maker import make

ringX1_attn_func = make("X1", __name__)
