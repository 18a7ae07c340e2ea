"""Link: one connection of a node, as people and programs see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class LinkMember(NamedTuple):
    """One connection of a link that uses several.

    They are what ``DMLC_INTERFACE``, ``FSERVER_RDMA_DEVICE`` and ``STEPAF_QP_NUM`` ask for.

    Attributes:
        interface: the network interface; or the RDMA device with its port and, if it has several
            queue pairs, the number of this one: ``"mlx5_0:1/0"``.
        remote: the peer's address. Empty while there is no connection.
        transport: as in ``Link``; over a bonded RDMA NIC with its port, ``"verbs/port2"``. Empty
            while there is no connection.
        sent: bytes that this node has sent to the peer over this connection, repeated ones
            included.
        reason: why there is no connection, or empty.
        path: as in ``Link``.
    """

    interface: str
    remote: str
    transport: str
    sent: int
    reason: str
    path: str = ""


class Link(NamedTuple):
    """A connection of a node to one of its peers, as ``links()`` returns it.

    Attributes:
        role: the peer's role, ``"worker"`` or ``"server"``.
        rank: the peer's rank within its role.
        remote: where the peer is: its address, or, inside a host, its process.
        transport: how tensors travel to and from the peer. ``"tcp"``: sockets. ``"tcp/tls"``:
            sockets, encrypted. ``"cma"``: inside a host, one copy from process to process.
            ``"cma/staged"``: inside a host, two copies through shared memory. ``"cudaipc"``:
            between GPUs of a host, by their copy engines. ``"verbs"``: RDMA.
        reason: why each better transport is not used, one after the other, separated by
            semicolons. Empty if there is no better one.
        members: with several interfaces, RDMA devices or queue pairs, one entry for each; else
            empty.
        path: over RDMA, this node's device, port and GID, the peer's GID, bytes of a packet and
            traffic class; else empty.
    """

    role: str
    rank: int
    remote: str
    transport: str
    reason: str
    members: tuple[LinkMember, ...] = ()
    path: str = ""

    def __repr__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"<fserver.Link to {self.role} {self.rank} at {self.remote} by {self.transport}{why}>"
        )


_NAMED = 4  # peers that a repr names one by one


def linked(role: str, expected: int, links: Sequence[Link]) -> str:
    """Which peers a node is connected to, and which it is not, for people."""
    parts = [f"{link.rank} by {link.transport}" for link in links]
    if len(links) > _NAMED:
        ways = Counter(link.transport for link in links)
        parts = [f"{count} by {way}" for way, count in ways.items()]
    kind = f"{role} " if len(links) <= _NAMED else f"{len(links)} {role}s, "
    said = f"connected to {kind}{', '.join(parts)}" if links else ""
    missing = expected - len(links)
    lost = f"not connected to {missing} of {expected} {role}s" if missing else ""
    return "; ".join(filter(None, (said, lost)))
