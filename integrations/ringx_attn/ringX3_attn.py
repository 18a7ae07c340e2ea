"""RingX's module of this name, for programs that import it without its package."""

from ringX_attn.ringX3_attn import ringX3_attn_func

__all__ = ["ringX3_attn_func"]
