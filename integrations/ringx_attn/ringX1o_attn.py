"""RingX's module of this name, for programs that import it without its package."""

from ringX_attn.ringX1o_attn import ringX1o_attn_func

__all__ = ["ringX1o_attn_func"]
