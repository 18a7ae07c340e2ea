"""RingX's module of this name."""

from ._maker import make

ringX2_attn_func = make("X2", __name__)
