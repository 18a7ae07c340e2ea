"""RingX's module of this name."""

from ._maker import make

ringX4o_attn_func = make("X4o", __name__)
