"""Stream channels: a fixed set of tensors that a worker and its servers exchange again and again.

``send`` and ``recv`` run on the current CUDA stream and can be captured in a CUDA graph.
``Worker.channel`` and ``Server.channel`` open a channel. docs/channels.md is the guide.
"""

from fserver.channel.channel import Channel

__all__ = ["Channel"]
