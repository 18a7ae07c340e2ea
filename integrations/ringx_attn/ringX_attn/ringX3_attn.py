"""RingX's module of this name."""

from ._maker import make

ringX3_attn_func = make("X3", __name__)
