"""RingX's module of this name, for programs that import it without its package."""

from ringX_attn.ringX1_attn import ringX1_attn_func

__all__ = ["ringX1_attn_func"]
