"""`fserver doctor --listen`: the other end of `--peer`."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time

from . import names, pair, protocol
from .protocol import Channel, ProtocolError, SecretError, Type
from .report import say

SESSIONS = 8  # at a time; more wait in the kernel's queue
NAME = "doctor session"  # of their threads
CALL_LIMIT = 3.0  # seconds, to connect back
WORDS = {
    "differs": "refused, because its secret differs from the one here",
    "only here": "refused, because it has no secret and this side has one",
    "only there": "refused, because it has a secret and this side has none",
}


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises OSError if that is not possible."""
    family, kind, _, _, at = names.resolve(host, port)[0]
    server = socket.socket(family, kind)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(at)
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def serve(server: socket.socket, key: bytes) -> None:
    """Answers callers until it is interrupted, or until the socket is shut down or closed."""
    free = threading.BoundedSemaphore(SESSIONS)

    def session(sock: socket.socket, remote: str) -> None:
        try:
            with sock:
                _session(Channel(sock), remote, key)
        finally:
            free.release()

    while True:
        free.acquire()
        try:
            sock, address = server.accept()
        except OSError as e:
            free.release()
            if e.errno in (errno.EBADF, errno.EINVAL):
                return
            say(f"cannot accept a connection: {e}")
            time.sleep(0.1)  # most likely no descriptor is free; one that is closed helps
            continue
        remote = names.join(*address[:2])
        threading.Thread(target=session, name=NAME, args=(sock, remote), daemon=True).start()


def _session(channel: Channel, remote: str, key: bytes) -> None:
    try:
        protocol.answer(channel, key)
        say(f"{remote}: {'the same secret' if key else 'no secret on either side'}")
        _requests(channel)
    except SecretError as e:
        say(f"{remote}: {WORDS[e.args[0]]}")
    except (OSError, ProtocolError):
        pass  # a port scan, a node that probes this port, or a caller that has finished


def _requests(channel: Channel) -> None:
    for _ in range(protocol.MAX_ECHOES):
        kind, data = channel.receive(protocol.HANDSHAKE_LIMIT)
        if kind == Type.ECHO and len(data) <= protocol.MAX_ECHO:
            channel.send(Type.ECHO, bytes(data))
        elif kind == Type.DATA:
            count, took = protocol.drain(channel, len(data))
            channel.send(Type.DONE, struct.pack("<QQ", count, took))
        elif kind == Type.FETCH and len(data) == 4:
            protocol.stream(channel, struct.unpack("<I", data)[0] / 1000)
        elif kind == Type.CALL and len(data) == 18:
            channel.send(Type.DONE, _call(channel, bytes(data)).encode())
        elif kind == Type.PAIR:
            pair.serve(channel)
        else:
            return


def _call(channel: Channel, request: bytes) -> str:
    """Connects to the address that the caller came from, and to no other. Returns what failed."""
    port, nonce = struct.unpack("<H16s", request)
    if port < 1024:
        return f"port {port} is not allowed (want 1024 or above)"
    host = channel.sock.getpeername()[0]
    try:
        with socket.create_connection((host, port), timeout=CALL_LIMIT) as back:
            back.sendall(nonce)
    except OSError as e:
        return e.strerror or str(e)
    return ""
