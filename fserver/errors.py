"""What fserver raises. Every class is an ``Error``, which is a ``RuntimeError``."""

from __future__ import annotations

import builtins

__all__ = [
    "ClosedError",
    "ConfigError",
    "Error",
    "LimitError",
    "PeerLostError",
    "RefusedError",
    "ShapeError",
    "TimeoutError",
]


class Error(RuntimeError):
    """An error of fserver, or of what lies below it. The base of all others."""


class TimeoutError(Error, builtins.TimeoutError):
    """The limit of a call is over. What the call waited for goes on.

    It is also Python's ``TimeoutError``.
    """


class PeerLostError(Error):
    """A node that the call needs is gone.

    Attributes:
        role: ``"scheduler"``, ``"worker"`` or ``"server"``.
        rank: the node's rank within its role.
        address: the node's address, or its process inside a host.
        reason: what showed that it is gone.
    """

    def __init__(
        self, message: str, role: str = "", rank: int = -1, address: str = "", reason: str = ""
    ) -> None:
        super().__init__(message, role, rank, address, reason)
        self.role = role
        self.rank = rank
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class RefusedError(Error):
    """A server's application has refused a request (``Server.fail``).

    Attributes:
        rank: the server's rank.
        reason: the server's text, at most 500 bytes of UTF-8.
    """

    def __init__(self, message: str, rank: int = -1, reason: str = "") -> None:
        super().__init__(message, rank, reason)
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class ConfigError(Error, ValueError):
    """A setting or an argument is wrong. The text has its name, its value and what is allowed.

    It is also a ``ValueError``.
    """


class ShapeError(Error, ValueError):
    """The number, shape, size or dtype of tensors, or the number of keys, does not fit.

    It is also a ``ValueError``.
    """


class LimitError(Error):
    """As many operations are under way as a node may have.

    The arguments are right: the same call succeeds when one of the operations has ended.
    """


class ClosedError(Error):
    """The node is closed, was never opened or is not connected yet, or the cluster has ended."""
