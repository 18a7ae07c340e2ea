"""``torch.ops.fserver.send`` and ``recv``: calls of a channel inside torch.compile.

    torch.ops.fserver.send(ch.number, ch.outgoing, ch.token)
    torch.ops.fserver.recv(ch.number, ch.incoming, ch.token)

Both operators declare that they change ``token``, so the compiler keeps the calls and their order.
``recv`` declares that it changes the tensors. It takes ``[*ch.incoming, *ch.rows]`` too: pass that
in a function that reads ``ch.rows``, or a compiler may read them before the message has come.

A tensor that is not the channel's own is copied to or from it. A function that receives several
messages passes new tensors to each ``recv``. The next ``send`` allows the peer to overwrite
``ch.incoming``, which no compiler knows: it may still have to read the message there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fserver.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

_library: Any = None
_lock = threading.Lock()


def define(torch: Any) -> None:
    """Registers the operators, once."""
    global _library
    with _lock:
        if _library is not None:
            return
        library = torch.library.Library("fserver", "DEF")
        library.define("send(int channel, Tensor[] tensors, Tensor(a!) token) -> ()")
        library.define("recv(int channel, Tensor(a!)[] tensors, Tensor(b!) token) -> ()")
        for key in ("CPU", "CUDA"):
            library.impl("send", _send, key)
            library.impl("recv", _recv, key)
        for name in ("send", "recv"):
            torch.library.register_fake(f"fserver::{name}", _fake, lib=library)
        _library = library


def _fake(channel: int, tensors: Sequence[Tensor], token: Tensor) -> None:
    """Neither operator returns a value or changes a shape."""


def _pairs(
    call: str, given: Sequence[Tensor], own: Sequence[Tensor], what: str
) -> list[tuple[Any, Any]]:
    """Returns the given tensors that are copies, each with the channel's own. ``what`` says in
    errors what to pass."""
    if len(given) != len(own):
        raise ShapeError(
            f"torch.ops.fserver.{call}: {len(given)} tensors given, but the channel has "
            f"{len(own)}: pass {what}"
        )
    for i, (a, b) in enumerate(zip(given, own, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ShapeError(
                f"torch.ops.fserver.{call}: tensor {i} is {a.dtype} {list(a.shape)}, but the "
                f"channel's tensor is {b.dtype} {list(b.shape)}: pass {what}, or copies of them"
            )
    return [
        (a, b)
        for a, b in zip(given, own, strict=True)
        if a.data_ptr() != b.data_ptr() and a.numel()
    ]


def _send(channel: int, tensors: Sequence[Tensor], token: Tensor) -> None:
    import torch

    from fserver.channel.channel import find

    ch = find(channel)
    pairs = _pairs("send", tensors, ch.outgoing, "channel.outgoing")
    with torch.inference_mode():  # whatever has made the tensors, and unseen by autograd
        for given, own in pairs:
            own.copy_(given)
    ch.send()


def _recv(channel: int, tensors: Sequence[Tensor], token: Tensor) -> None:
    import torch

    from fserver.channel.channel import find

    ch = find(channel)
    own, what = ch.incoming, "channel.incoming"
    if len(tensors) > len(own):
        own, what = [*own, *ch.rows], "[*channel.incoming, *channel.rows]"
    pairs = _pairs("recv", tensors, own, what)
    ch.recv()
    with torch.inference_mode():
        for given, own in pairs:
            given.copy_(own)
