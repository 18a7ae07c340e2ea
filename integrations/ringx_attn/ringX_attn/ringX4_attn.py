"""RingX's module of this name."""

from ._maker import make

ringX4_attn_func = make("X4", __name__)
