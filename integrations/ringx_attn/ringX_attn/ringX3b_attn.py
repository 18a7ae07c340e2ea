"""RingX's module of this name."""

from ._maker import make

ringX3b_attn_func = make("X3b", __name__)
