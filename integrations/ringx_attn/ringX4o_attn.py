"""RingX's module of this name, for programs that import it without its package."""

from ringX_attn.ringX4o_attn import ringX4o_attn_func

__all__ = ["ringX4o_attn_func"]
