"""Stream channels: a fixed set of tensors between a worker and its servers, sent and received on
the current stream, also inside a CUDA graph. ``Worker.channel`` and ``Server.channel`` open one;
docs/channels.md says what they are for."""

from fserver.channel.channel import Channel

__all__ = ["Channel"]
