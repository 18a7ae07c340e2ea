"""The protocol between two doctors, over one TCP connection.

A message has a header of 9 bytes (magic number, type and length) and at most 256 KiB of data. First
the two sides prove to each other that they know the same secret, as nodes do: by HMAC-SHA-256 over
the side and both hellos, each of which has a nonce. Only then does the listener serve requests: it
echoes small messages, receives and sends data for at most two seconds, and connects back to the
address that the connection came from. It serves a limited number of requests for a limited time.

    caller     listener
    HELLO  ->
           <-  WELCOME, proof       the proof is empty where one side has no secret
    PROOF  ->
           <-  OK or REFUSED
    ECHO   ->  ECHO
    DATA.. END ->  DONE             upload
    FETCH  ->  DATA.. END           download
    CALL   ->  DONE                 connect back
    PAIR   ->  DONE                 open a server, for tensors; JSON: the port of its scheduler
    LINK   ->  DONE                 end it; JSON: how it saw the caller's worker
"""

from __future__ import annotations

import enum
import hmac
import os
import secrets
import socket
import struct
import time

MAGIC = b"fsdr"
VERSION = 2
CHUNK = 256 << 10
_HEADER = struct.Struct("<4sBI")
_HELLO = struct.Struct("<BB32s")

HANDSHAKE_LIMIT = 10.0  # seconds, for each message
STEP_LIMIT = 10.0  # for each message after that
SESSION_LIMIT = 60.0  # for a whole connection
PAIR_LIMIT = 10.0  # for the two nodes to find each other
STREAM_LIMIT = 2.0  # for one stream of data
MAX_ECHOES = 10_000
MAX_ECHO = 64
MAX_SECRET = 4096


class Type(enum.IntEnum):
    HELLO = 1
    WELCOME = 2
    PROOF = 3
    OK = 4
    REFUSED = 5
    ECHO = 16
    DATA = 17
    END = 18
    FETCH = 19
    CALL = 20
    DONE = 21
    PAIR = 22
    LINK = 23


class ProtocolError(Exception):
    """The other side is not a doctor, or is faulty. The text says what it sent."""


class SecretError(Exception):
    """The sides have no common secret. The argument is "differs", "only here" or "only there"."""


class Channel:
    """Messages over a connected socket. A call raises TimeoutError if it exceeds its own limit,
    or if all calls together exceed SESSION_LIMIT."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._end = time.monotonic() + SESSION_LIMIT
        self._buffer = bytearray(CHUNK)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _arm(self, end: float) -> None:
        left = min(end, self._end) - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self.sock.settimeout(left)

    def send(self, kind: Type, data: bytes | memoryview = b"", limit: float = STEP_LIMIT) -> None:
        self._arm(time.monotonic() + limit)
        header = _HEADER.pack(MAGIC, kind, len(data))
        if len(data) <= 4096:
            self.sock.sendall(header + bytes(data))  # one packet
        else:
            self.sock.sendall(header)
            self.sock.sendall(data)

    def receive(self, limit: float = STEP_LIMIT) -> tuple[int, memoryview]:
        """Returns type and data of the next message. The data is valid until the next call."""
        end = time.monotonic() + limit
        magic, kind, length = _HEADER.unpack(self._read(_HEADER.size, end))
        if magic != MAGIC:
            raise ProtocolError(f"it sent {magic!r} instead of {MAGIC!r}")
        if length > CHUNK:
            raise ProtocolError(
                f"it announced a message of {length} bytes, but the limit is {CHUNK}"
            )
        return kind, self._read(length, end)

    def _read(self, count: int, end: float) -> memoryview:
        view = memoryview(self._buffer)[:count]
        done = 0
        while done < count:
            self._arm(end)
            n = self.sock.recv_into(view[done:])
            if n == 0:
                what = f" after {bytes(view[:done])!r}" if done and count < 64 else ""
                raise ProtocolError(f"it closed the connection{what}")
            done += n
        return view

    def expect(self, kind: Type, limit: float = STEP_LIMIT) -> memoryview:
        got, data = self.receive(limit)
        if got != kind:
            raise ProtocolError(f"it sent a message of type {got} instead of {kind.value}")
        return data


def secret(values: dict[str, str]) -> bytes:
    """Returns the secret of these settings, empty if there is none. Raises OSError if the file of
    the secret cannot be read."""
    text = values.get("FSERVER_SECRET", "").strip().encode()
    path = values.get("FSERVER_SECRET_FILE", "").strip()
    if text or not path:
        return text
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
    try:
        return os.read(fd, MAX_SECRET).strip()
    finally:
        os.close(fd)


def _proof(key: bytes, side: str, hello: bytes, welcome: bytes) -> bytes:
    label = f"fserver doctor proof of the {side}".encode()
    return hmac.digest(key, label + hello + welcome, "sha256")


def _parse(data: memoryview) -> bool:
    """Reports whether the side that sent this hello has a secret."""
    version, flag, _ = _HELLO.unpack(data)
    if version != VERSION:
        raise ProtocolError(
            f"it is a doctor of protocol version {version}, but this one has version {VERSION}"
        )
    return bool(flag == 1)


def call(channel: Channel, key: bytes) -> None:
    """Makes the handshake as the caller. Failures are SecretError, ProtocolError or OSError."""
    hello = _HELLO.pack(VERSION, bool(key), secrets.token_bytes(32))
    channel.send(Type.HELLO, hello)
    answer = bytes(channel.expect(Type.WELCOME, HANDSHAKE_LIMIT))
    if len(answer) not in (_HELLO.size, _HELLO.size + 32):
        raise ProtocolError(f"it sent a hello of {len(answer)} bytes")
    welcome, proof = answer[: _HELLO.size], answer[_HELLO.size :]
    theirs = _parse(memoryview(welcome))
    if theirs != bool(key):
        raise SecretError("only there" if theirs else "only here")
    if key and not hmac.compare_digest(proof, _proof(key, "listener", hello, welcome)):
        channel.send(Type.PROOF)
        raise SecretError("differs")
    channel.send(Type.PROOF, _proof(key, "caller", hello, welcome) if key else b"")
    kind, _ = channel.receive(HANDSHAKE_LIMIT)
    if kind != Type.OK:
        raise SecretError("differs")


def answer(channel: Channel, key: bytes) -> None:
    """Makes the handshake as the listener. Raises as `call`."""
    hello = bytes(channel.expect(Type.HELLO, HANDSHAKE_LIMIT))
    if len(hello) != _HELLO.size:
        raise ProtocolError(f"it sent a hello of {len(hello)} bytes")
    theirs = _parse(memoryview(hello))
    welcome = _HELLO.pack(VERSION, bool(key), secrets.token_bytes(32))
    both = bool(key) and theirs
    channel.send(Type.WELCOME, welcome + (_proof(key, "listener", hello, welcome) if both else b""))
    if theirs != bool(key):
        raise SecretError("only there" if theirs else "only here")
    proof = bytes(channel.expect(Type.PROOF, HANDSHAKE_LIMIT))
    if key and not hmac.compare_digest(proof, _proof(key, "caller", hello, welcome)):
        channel.send(Type.REFUSED)
        raise SecretError("differs")
    channel.send(Type.OK)


def stream(channel: Channel, seconds: float) -> int:
    """Sends data for this time. Returns the number of bytes."""
    chunk = memoryview(bytes(CHUNK))
    end = time.monotonic() + min(seconds, STREAM_LIMIT)
    count = 0
    while time.monotonic() < end:
        channel.send(Type.DATA, chunk)
        count += len(chunk)
    channel.send(Type.END)
    return count


def drain(channel: Channel, first: int = 0) -> tuple[int, int]:
    """Receives data up to END. Returns the bytes, including ``first``, and the nanoseconds."""
    begin = time.monotonic_ns()
    count = first
    while True:
        kind, data = channel.receive()
        if kind == Type.END:
            return count, time.monotonic_ns() - begin
        if kind != Type.DATA:
            raise ProtocolError(f"it sent a message of type {kind} among data")
        count += len(data)
        if time.monotonic_ns() - begin > (STREAM_LIMIT + STEP_LIMIT) * 1e9:
            raise ProtocolError("its data does not end")
