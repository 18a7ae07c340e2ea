"""Plans where each byte of a stream channel goes: what one side describes to the other, and which
segments its device gets. Planning needs no GPU: ``Memory`` is the interface to one."""

from __future__ import annotations

import hmac
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fserver.errors import ConfigError, Error, ShapeError

# Kinds of cs_channel.h.
PACKETS, PLACE, LANDING = range(3)


class Table(NamedTuple):
    """How a tensor is transferred, by its size.

    The default values were measured on two H200. There, packets save the fence and the flag (1.4 us
    a leg at 64 KiB), but send twice the bytes and need a copy at the end (2 us a leg at 1 MiB).
    tune.py measures other GPUs.

    Attributes:
        packets_up_to: the largest tensor that is sent in packets, in bytes.
        blocks: pairs of bytes and CUDA blocks. A larger tensor is copied by the blocks of the first
            pair whose bytes are enough.
    """

    packets_up_to: int = 256 << 10
    blocks: tuple[tuple[int, int], ...] = ((2 << 20, 16), (8 << 20, 32), (1 << 62, 64))


TABLE = Table()
PACKET_THREADS = 512  # 1,024 where that is one block
MOST_PACKET_BLOCKS = 32
COPY_THREADS = 1024
MOST_BLOCKS = 64  # of a segment
MOST_SEGMENTS = 24  # of a launch: CS_MANY
MOST_ROWS = (1 << 32) - 1  # of a tensor: the rows of cs_segment
# Blocks of one launch that wait: they must not fill the GPU.
BUSY_BLOCKS = 96

FILL = 64 << 10  # bytes: kFill of csrc/lane_watch.cc

_ALIGN = 128

_NUMBERS = ("kind", "blocks", "stride", "flags", "counted", "bytes")

# Two nodes in one process do not share memory by handles: it is theirs already. What one of them
# has described is known by a proof that nobody else can make, not even a child of this process.
_secret = b""


def _renew() -> None:
    global _secret
    _secret = os.urandom(32)


_renew()
os.register_at_fork(after_in_child=_renew)


def _prove(description: dict[str, Any]) -> str:
    text = json.dumps({k: v for k, v in description.items() if k != "proof"}, sort_keys=True)
    return hmac.new(_secret, text.encode(), "sha256").hexdigest()


@dataclass(frozen=True)
class Piece:
    """A tensor: contiguous memory of ``rows`` rows."""

    address: int
    rows: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


class Memory(Protocol):
    """What a plan asks of a device; ``_C.Lane`` is one."""

    def allocate(self, bytes: int) -> int: ...
    def share(self, address: int) -> tuple[bytes, int, int]: ...
    def map(self, handle: bytes, owner: str) -> tuple[int, int]: ...
    def reach(self, device: int) -> None: ...
    def plan(self, sends: bool, steps: list[Any], counts: int, dead: int) -> None: ...
    def plan_copies(self, sends: bool, segments: list[Any]) -> None: ...
    def begin(self, in_turn: bool, send_first: bool, flags: int, bytes: int) -> None: ...


def choose(size: int, shareable: bool, mode: str, table: Table = TABLE) -> tuple[int, int]:
    """Kind and number of blocks for a tensor of ``size`` bytes."""
    if mode == "kernel" and size <= table.packets_up_to:
        packets = _packets(size)
        if packets <= 2 * PACKET_THREADS:
            return PACKETS, 1
        return PACKETS, min(MOST_PACKET_BLOCKS, -(-packets // PACKET_THREADS))
    blocks = next(blocks for most, blocks in table.blocks if size <= most)
    return (PLACE if shareable else LANDING), blocks


def _packets(size: int) -> int:
    return -(-size // 8) + 1


class _Arena:
    """Gives out offsets."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, size: int) -> int:
        at = self.size
        self.size += -(-size // _ALIGN) * _ALIGN
        return at


@dataclass
class _Incoming:
    piece: Piece
    kind: int
    blocks: int
    memory: int  # of the description: 0 is the arena
    offset: int
    stride: int  # packets; 0: one landing buffer
    flags: int
    counted: int


class Plan:
    """One side of a channel.

    Args:
        memory: the device.
        device: its ordinal in this process.
        mode: ``"kernel"`` or ``"copy"``.
        outgoing, incoming: for each peer, the tensors that go to it and come from it.
        send_first: this side speaks first (a worker).
        table: how what is incoming comes.

    A channel with tensors both ways goes in turn, and the answer is the credit for the next
    send. One that has tensors one way only has credits of its own.
    """

    def __init__(
        self,
        memory: Memory,
        device: int,
        mode: str,
        outgoing: Sequence[Sequence[Piece]],
        incoming: Sequence[Sequence[Piece]],
        send_first: bool,
        table: Table = TABLE,
    ) -> None:
        self.memory, self.device, self.mode, self.table = memory, device, mode, table
        self.outgoing = [list(tensors) for tensors in outgoing]
        self.send_first = send_first
        n_out = sum(map(len, outgoing))
        n_in = sum(map(len, incoming))
        self.in_turn = n_out > 0 and n_in > 0
        arena = _Arena()
        self._dead = arena.take(8)
        self._out_counts = arena.take(4 * MOST_BLOCKS * n_out)
        self._in_counts = arena.take(4 * MOST_BLOCKS * n_in)
        self._counted = arena.take(8 * n_in)
        self._shared: list[tuple[bytes, int, int]] = []  # handle, bytes, base address
        self._incoming: list[list[_Incoming]] = []
        for tensors in incoming:
            before = sum(map(len, self._incoming))
            self._incoming.append(
                [self._place(p, before + i, arena) for i, p in enumerate(tensors)]
            )
        self._flags = arena.size
        for e in itertools.chain.from_iterable(self._incoming):
            e.flags = arena.take(8 * e.blocks)
        self._credits = [[arena.take(4 * MOST_BLOCKS) for _ in row] for row in self.outgoing]
        if mode == "copy":  # which fills all of them when the channel ends
            arena.take(-(arena.size - self._flags) % FILL)
        self._flags_bytes = arena.size - self._flags
        self.arena, self.used = memory.allocate(arena.size), arena.size
        self.layout = {
            "dead": self._dead,
            "counts of sends": self._out_counts,
            "counts of receives": self._in_counts,
            "rows": self._counted,
            "flags": self._flags,
            "credits": self._credits[0][0] if n_out and self._credits[0] else arena.size,
        }
        handle, size, offset = memory.share(self.arena)
        if not handle:
            raise Error(
                "channel: the GPU memory of the channel cannot be shared between processes (use "
                "mode='host')"
            )
        self._shared.insert(0, (handle, size, self.arena - offset))
        self._arena_offset = offset
        self._peers: dict[int, list[tuple[int, int]]] = {}  # memories of a peer: address, bytes
        self._theirs: dict[int, dict[str, Any]] = {}

    def _place(self, piece: Piece, number: int, arena: _Arena) -> _Incoming:
        """Chooses where a tensor that comes in is received."""
        where = self._share(piece) if self._wants_place(piece) else None
        kind, blocks = choose(piece.bytes, where is not None, self.mode, self.table)
        stride = 0
        if kind == PACKETS:
            n = _packets(piece.bytes)
            stride = 0 if self.in_turn else -(-n // 8) * 8
            where = (0, arena.take(16 * (n + stride)))
        elif where is None:
            where = (0, arena.take(piece.bytes))
        return _Incoming(piece, kind, blocks, *where, stride, 0, self._counted + 8 * number)

    @property
    def rows(self) -> tuple[int, list[int]]:
        """Where the numbers of received rows are, and how many there are from each peer."""
        return self.arena + self._counted, [len(row) for row in self._incoming]

    def _wants_place(self, piece: Piece) -> bool:
        return piece.bytes > 0 and (self.mode == "copy" or piece.bytes > self.table.packets_up_to)

    def _share(self, piece: Piece) -> tuple[int, int] | None:
        handle, size, offset = self.memory.share(piece.address)
        if not handle:
            return None
        entry = (handle, size, piece.address - offset)
        if entry not in self._shared:
            self._shared.append(entry)
        # The arena comes first in what is told.
        return self._shared.index(entry) + 1, offset

    def describe(self, peer: int) -> dict[str, Any]:
        """What peer number ``peer`` has to know."""
        base = self._arena_offset
        described: dict[str, Any] = {
            "mode": self.mode,
            "turn": self.in_turn,
            "device": self.device,
            "memory": [[handle.hex(), size, at] for handle, size, at in self._shared],
            "in": [
                {
                    "kind": e.kind,
                    "blocks": e.blocks,
                    "at": [e.memory, e.offset + (0 if e.memory else base)],
                    "stride": e.stride,
                    "flags": e.flags + base,
                    "counted": e.counted + base,
                    "bytes": e.piece.bytes,
                }
                for e in self._incoming[peer]
            ],
            "out": [at + base for at in self._credits[peer]],
        }
        return {**described, "proof": _prove(described)}

    def attach(self, peer: int, theirs: Any) -> None:
        """Takes what a peer has described, after checking all of it.

        Raises:
            ConfigError: the modes of the sides differ, or the sides cannot share memory.
            ShapeError: the tensors of the sides differ.
            Error: the description is malformed.
        """
        try:
            self._check(peer, theirs)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            if isinstance(error, Error):
                raise
            raise Error(
                f"channel: peer {peer} describes its side in a malformed message: run the same "
                "version of fserver on both sides"
            ) from error

    def _same(self, peer: int, theirs: dict[str, Any]) -> None:
        """Checks that both sides have the same mode and as many tensors."""
        if theirs["mode"] != self.mode:
            raise ConfigError(
                f"channel: mode is {self.mode!r} here and {str(theirs['mode'])[:16]!r} at peer "
                f"{peer}: open both sides with the same mode"
            )
        if theirs["turn"] is not self.in_turn:
            here, there = ("both directions", "one direction")[:: 1 if self.in_turn else -1]
            raise ShapeError(
                f"channel: this side has tensors in {here}, but peer {peer} in {there}: give the "
                "same tensors on both sides"
            )
        if len(theirs["in"]) != len(self.outgoing[peer]):
            raise ShapeError(
                f"channel: this side sends {len(self.outgoing[peer])} tensors to peer {peer}, "
                f"which receives {len(theirs['in'])}: give the same tensors on both sides"
            )
        if len(theirs["out"]) != len(self._incoming[peer]):
            raise ShapeError(
                f"channel: this side receives {len(self._incoming[peer])} tensors from peer "
                f"{peer}, which sends {len(theirs['out'])}: give the same tensors on both sides"
            )

    def _check(self, peer: int, theirs: dict[str, Any]) -> None:
        self._same(peer, theirs)
        numbers = [*theirs["out"]]
        for entry in theirs["in"]:
            numbers += [*entry["at"], *(entry[name] for name in _NUMBERS)]
        if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
            raise ValueError
        memories = []
        local = hmac.compare_digest(theirs["proof"].encode(), _prove(theirs).encode())
        if local:
            self.memory.reach(int(theirs["device"]))
        if not 1 <= len(theirs["memory"]) <= 1024:
            raise ValueError
        owner = f"gpu {int(theirs['device'])} of peer {peer}, as its process counts"
        for handle, size, at in theirs["memory"]:
            memories.append(
                (int(at), int(size)) if local else self.memory.map(bytes.fromhex(handle), owner)
            )
        for piece, entry in zip(self.outgoing[peer], theirs["in"], strict=True):
            kind, blocks = entry["kind"], entry["blocks"]
            if kind not in (PACKETS, PLACE, LANDING) or not 1 <= blocks <= MOST_BLOCKS:
                raise ValueError
            if self.mode == "copy" and kind == PACKETS:
                raise ValueError
            if entry["bytes"] != piece.bytes:
                raise ShapeError(
                    f"channel: this side sends a tensor of {piece.bytes} bytes to peer {peer}, "
                    f"which receives {entry['bytes']}: give the same tensors on both sides"
                )
            size = piece.bytes
            if kind == PACKETS:
                n = _packets(size)
                if entry["stride"] and entry["stride"] < n:
                    raise ValueError
                size = 16 * (n + entry["stride"])
            self._within(memories, entry["at"], size, 16 if kind == PACKETS else 1)
            self._within(memories, [0, entry["flags"]], 8 * blocks, 8)
            self._within(memories, [0, entry["counted"]], 8, 8)
        for at in theirs["out"]:
            self._within(memories, [0, at], 4 * MOST_BLOCKS, 4)
        self._peers[peer], self._theirs[peer] = memories, theirs

    @staticmethod
    def _within(
        memories: list[tuple[int, int]], where: Sequence[int], size: int, unit: int
    ) -> None:
        """Refuses what is outside of its memory, or misaligned: a store there ends the context."""
        index, offset = where
        begin, bytes = memories[index]
        if index < 0 or offset < 0 or offset + size > bytes or (begin + offset) % unit:
            raise ValueError

    def install(self) -> None:
        """Gives the device its segments; all peers are attached."""
        if self.mode == "copy":
            self.memory.plan_copies(True, self._copies_out())
            self.memory.plan_copies(False, self._copies_in())
        else:
            dead = self.arena + self._dead
            out, incoming = self._segments_out(), self._segments_in()
            self.memory.plan(True, _steps(out, True), self.arena + self._out_counts, dead)
            self.memory.plan(False, _steps(incoming, False), self.arena + self._in_counts, dead)
        flags = self.arena + self._flags
        self.memory.begin(self.in_turn, self.send_first, flags, self._flags_bytes)

    def _at(self, peer: int, offset: int) -> int:
        return self._peers[peer][0][0] + offset

    def _segments_out(self) -> list[tuple[int, ...]]:
        result: list[tuple[int, ...]] = []
        number = 0  # of the row count
        for peer, row in enumerate(self.outgoing):
            if self.send_first:  # a worker, whose tensors go to every server
                number = 0
            for piece, entry, credit in zip(
                row, self._theirs[peer]["in"], self._credits[peer], strict=True
            ):
                index, offset = entry["at"]
                kind = entry["kind"]
                result.append(
                    (
                        number,
                        piece.row_bytes,
                        kind,
                        piece.address,
                        self._peers[peer][index][0] + offset,
                        self._at(peer, entry["flags"]),
                        0 if self.in_turn else self.arena + credit,
                        0,
                        piece.bytes,
                        piece.rows,
                        entry["stride"],
                        {PACKETS: 2, LANDING: 1, PLACE: 0}[kind],
                        entry["blocks"],
                        peer,
                    )
                )
                number += 1
        return result

    def _segments_in(self) -> list[tuple[int, ...]]:
        result: list[tuple[int, ...]] = []
        for peer, row in enumerate(self._incoming):
            for e, credit in zip(row, self._theirs[peer]["out"], strict=True):
                place = e.kind == PLACE
                result.append(
                    (
                        len(result),
                        e.piece.row_bytes,
                        e.kind,
                        0 if place else self.arena + e.offset,
                        e.piece.address,
                        self.arena + e.flags,
                        0 if self.in_turn else self._at(peer, credit),
                        self.arena + e.counted,
                        e.piece.bytes,
                        e.piece.rows,
                        e.blocks if place else e.stride,
                        0,
                        1 if place else e.blocks,
                        peer,
                    )
                )
        return result

    def _copies_out(self) -> list[tuple[int, ...]]:
        result: list[tuple[int, ...]] = []
        for segment, first, last in _ends(self._segments_out()):
            s = list(segment)
            entry = self._theirs[s[13]]["in"][len(result) - self._first(s[13], self.outgoing)]
            s[5] = s[5] if last else 0  # one flag for all that goes to a peer, after it
            s[6] = s[6] if first else 0
            s[7] = self._at(s[13], entry["counted"])
            result.append(tuple(s))
        # A peer waits for the flag of its first tensor.
        for peer in range(len(self.outgoing)):
            mine = [i for i, s in enumerate(result) if s[13] == peer]
            if mine:
                s = list(result[mine[-1]])
                s[5] = self._at(peer, self._theirs[peer]["in"][0]["flags"])
                result[mine[-1]] = tuple(s)
        return result

    def _copies_in(self) -> list[tuple[int, ...]]:
        result = []
        for segment, first, _ in _ends(self._segments_in()):
            s = list(segment)
            s[5] = s[5] if first else 0
            s[6] = s[6] if first else 0
            result.append(tuple(s))
        return result

    @staticmethod
    def _first(peer: int, rows: Sequence[Sequence[Any]]) -> int:
        return sum(len(row) for row in rows[:peer])


def _ends(segments: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], bool, bool]]:
    """Each segment, and whether it is the first and the last of its peer."""
    peers = [s[13] for s in segments]
    return [
        (s, i == 0 or peers[i - 1] != s[13], i + 1 == len(peers) or peers[i + 1] != s[13])
        for i, s in enumerate(segments)
    ]


def _steps(segments: list[tuple[int, ...]], sends: bool) -> list[tuple[list[Any], int]]:
    """Launches: their segments, and threads of a block."""
    steps = []
    group: list[tuple[int, ...]] = []
    busy = 0
    for s in segments:
        if group and (len(group) == MOST_SEGMENTS or busy + s[12] > BUSY_BLOCKS):
            steps.append(group)
            group, busy = [], 0
        group.append(s)
        busy += s[12]
    if group:
        steps.append(group)
    return [(group, _threads(group, sends)) for group in steps]


def _threads(group: list[tuple[int, ...]], sends: bool) -> int:
    kinds = {s[2] for s in group}
    if kinds == {PACKETS}:
        # A small tensor needs no more threads than packets.
        most = max(-(-_packets(s[8]) // s[12]) for s in group)
        return min(2 * PACKET_THREADS, -(-most // 32) * 32)
    if kinds == {PLACE} and not sends:
        return MOST_BLOCKS
    return COPY_THREADS
