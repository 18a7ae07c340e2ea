"""RingX's module of this name, for programs that import it without its package."""

from ringX_attn.ringX3b_attn import ringX3b_attn_func

__all__ = ["ringX3b_attn_func"]
