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
    """Something in fserver or below it failed. The base of all others."""


class TimeoutError(Error, builtins.TimeoutError):
    """The time given to a call was over. What it waited for is still under way."""


class PeerLostError(Error):
    """A node that the call needs is gone.

    Attributes:
        role: ``"scheduler"``, ``"worker"`` or ``"server"``.
        rank: the node's rank within its role.
        address: where it was.
        reason: how its loss was seen.
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
        reason: what the server said; at most 500 bytes of UTF-8.
    """

    def __init__(self, message: str, rank: int = -1, reason: str = "") -> None:
        super().__init__(message, rank, reason)
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class ConfigError(Error, ValueError):
    """A setting or an argument is wrong. The text has its name, its value and what is allowed."""


class ShapeError(Error, ValueError):
    """The number, shape, size or type of tensors, or the number of keys, does not fit."""


class LimitError(Error):
    """As many operations are under way as a node may have. Nothing is wrong with the arguments: the
    same call succeeds when one of them has ended."""


class ClosedError(Error):
    """The node is closed or was never opened, or the cluster has ended."""
