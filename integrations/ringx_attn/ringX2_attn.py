"""RingX's module of this name, for programs that import it without its package."""

from ringX_attn.ringX2_attn import ringX2_attn_func

__all__ = ["ringX2_attn_func"]
