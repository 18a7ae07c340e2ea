"""Memory that the driver and the members of a cluster share: who has done what, and when.

It is a file that all of them map, with a row for each process. Each field has one writer, and is
written as a whole. Times are seconds of the monotonic clock, the same for all processes of a host;
0 means not yet.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import fserver


class Name(NamedTuple):
    """A member: its role and its rank within it."""

    role: str
    rank: int

    def __str__(self) -> str:
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"


@dataclass(frozen=True)
class Shape:
    """A cluster: groups of each role, and members of a group, each on its own rail."""

    name: str
    workers: int
    servers: int
    group_size: int = 1

    def members(self) -> list[Name]:
        """Everybody."""
        roles = [("worker", self.workers), ("server", self.servers)]
        return [
            Name("scheduler", 0),
            *(Name(role, i) for role, n in roles for i in range(n * self.group_size)),
        ]

    def peers(self, name: Name) -> list[Name]:
        """Whom a worker or a server exchanges tensors with, by group."""
        return [
            peer
            for peer in self.members()
            if peer.role not in (name.role, "scheduler")
            and (peer.rank - name.rank) % self.group_size == 0
        ]


SHAPES = [
    Shape("fan-in", 2, 1),
    Shape("rails", 1, 1, 2),
    Shape("fan-out", 1, 2),
    Shape("mesh", 2, 2),
]

MEMBERS = [Name("scheduler", 0), *(Name(r, i) for r in ("worker", "server") for i in range(2))]
"""Everybody in all shapes: the index of a member in a row."""


CLOSE, OPEN = 1, 2

TAKEN_FOR_LOST = 3  # exit status of a process whose node was closed by the others


def enter(_: Any, *args: Any) -> None:
    """What a process starts with. The driver has no need of torch, and does not import it."""
    from member import main

    main(*args)


class Row(ctypes.Structure):
    """What one process says of itself. The driver resets `lost_at`."""

    _fields_ = (
        ("order", ctypes.c_int64),  # the driver's: CLOSE, then OPEN
        ("run", ctypes.c_int64),  # of this member; 0: it is not in the cluster yet
        ("closed_at", ctypes.c_double),  # just before it obeyed CLOSE
        ("exchanges", ctypes.c_int64),  # that were right
        ("wrong", ctypes.c_int64),  # exchanges with wrong bytes
        ("barriers", ctypes.c_int64),  # that it has come through in this run
        ("barrier_at", ctypes.c_double),  # the last of them
        ("waits_since", ctypes.c_double),  # inside a barrier; 0: it is not
        ("lost_at", ctypes.c_double * len(MEMBERS)),  # the first PeerLostError that named it
        ("met", ctypes.c_int64 * len(MEMBERS)),  # the run of the last right exchange with it
    )

    def saw_loss(self, error: fserver.PeerLostError) -> None:
        """A call has raised it."""
        i = MEMBERS.index(Name(error.role, error.rank))
        if not self.lost_at[i]:
            self.lost_at[i] = time.monotonic()


class Board:
    """The rows, mapped, and `quit`, by which the driver ends the work of all."""

    def __init__(self, path: str, count: int):
        class Sheet(ctypes.Structure):
            _fields_ = (("quit", ctypes.c_int64), ("rows", Row * count))

        self.path, self.count = path, count
        with open(path, "a+b") as file:
            file.truncate(ctypes.sizeof(Sheet))
            self.sheet = Sheet.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Sheet)))
        self.rows = self.sheet.rows
        self.free = iter(range(count))
