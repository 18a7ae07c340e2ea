"""RingX's module of this name, for programs that import it without its package."""

from ringX_attn.ringX2o_attn import ringX2o_attn_func

__all__ = ["ringX2o_attn_func"]
