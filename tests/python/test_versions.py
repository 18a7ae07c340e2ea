"""What a user is told about versions: by `fserver --version`, and when two nodes differ."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nodes import LIMIT, eventually, in_thread

import fserver
from fserver import _loader

ROOT = Path(__file__).resolve().parents[2]
WIRE = json.loads(_loader.load().host([]))["engine"]["wire"]
BUILD = f"fserver {fserver.__version__}"


def said(*words: str, **env: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "fserver", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


def test_version_command() -> None:
    found = said("--version")
    header = (ROOT / "engine/cabi/fserver.h").read_text()
    codec = (ROOT / "engine/wire/codec.go").read_text()
    assert re.fullmatch(r"\d+\.\d+.*", found.pop("Go"))
    assert re.fullmatch("[0-9a-f]{7,40}(-dirty)?|unknown: .*", found.pop("commit"))
    assert found == {
        "fserver": fserver.__version__,
        "engine": fserver.__version__,
        "ABI": re.findall(r"#define FS_ABI (\d+)", header)[0],
        "wire": re.findall(r"const Version = (\d+)", codec)[0],
        "torch": torch.__version__,
    }


def test_version_command_without_torch(tmp_path: Path) -> None:
    """The engine says its versions all the same."""
    (tmp_path / "torch.py").write_text("raise ImportError('never imported')\n")
    found = said("--version", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert found["fserver"] == fserver.__version__
    assert found["torch"].startswith(f"unknown: {tmp_path}/version.py has no version: FileNotFound")
    assert found["wire"] == str(WIRE)


def text(data: bytes) -> tuple[str, bytes]:
    """A length, a text, and what follows."""
    length, at, shift = 0, 0, 0
    while True:
        length |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return data[at : at + length].decode(), data[at + length :]


class Peer:
    """One end of a connection to a node of another version, as far as the handshake goes: what
    docs/wire.md says that no version changes."""

    HELLO, WELCOME, REJECT = 240, 241, 244

    def __init__(self, connection: socket.socket, version: int) -> None:
        connection.settimeout(LIMIT)
        self.connection, self.version = connection, version

    def greet(self, kind: int) -> None:
        build = b"fserver 9.9.9"
        hello = bytes([kind]) + b"fsrv" + self.version.to_bytes(4, "little")
        hello += bytes([len(build)]) + build + b"what another version says of itself"
        self.connection.sendall(b"FSRV" + len(hello).to_bytes(4, "little") + hello)

    def receive(self) -> bytes:
        head = self.exactly(8)
        return self.exactly(int.from_bytes(head[4:], "little"))

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.connection.recv(count - len(data))
            assert part, "the node closed the connection"
            data += part
        return data

    def rejection(self) -> str:
        message = self.receive()
        assert message[0] == self.REJECT
        reason, rest = text(message[1:])
        assert not rest
        return reason


def reason(connects: tuple[int, str], accepts: tuple[int, str]) -> str:
    return (
        f'the node that connects has wire version {connects[0]} (build "{connects[1]}"), '
        f'the node that accepts has wire version {accepts[0]} (build "{accepts[1]}"): '
        "install the same version of fserver on all nodes (fserver --version prints it)"
    )


@pytest.fixture(params=[WIRE - 1, WIRE + 1], ids=["older", "newer"])
def other(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param


def test_a_node_of_another_version_connects(other: int, capfd: pytest.CaptureFixture) -> None:
    with fserver.Scheduler(scheduler="127.0.0.1:0", workers=1, servers=1, connect=False) as node:
        port = int(node.scheduler.rpartition(":")[2])
        peer = Peer(socket.create_connection(("127.0.0.1", port)), other)
        with peer.connection:
            peer.greet(Peer.HELLO)
            expected = reason((other, "fserver 9.9.9"), (WIRE, BUILD))
            assert peer.rejection() == expected
            assert peer.connection.recv(1) == b""  # closed
        # A node that closes does not log what it refuses meanwhile.
        log: list[str] = []

        def logged() -> bool:
            log.append(capfd.readouterr().err)
            return "connection refused" in "".join(log)

        eventually(logged)
    assert expected.replace('"', '\\"') in "".join(log)


@pytest.mark.parametrize("role", [fserver.Worker, fserver.Server])
def test_a_node_of_another_version_accepts(other: int, role: type[fserver.Node]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        scheduler = f"127.0.0.1:{listener.getsockname()[1]}"
        node = role(scheduler=scheduler, workers=1, servers=1, connect=False)
        try:
            call = in_thread(node.connect)
            peer = Peer(listener.accept()[0], other)
            with peer.connection:
                assert peer.receive()[0] == Peer.HELLO
                peer.greet(Peer.WELCOME)
                expected = reason((WIRE, BUILD), (other, "fserver 9.9.9"))
                assert peer.rejection() == expected
            error = call.exception(timeout=LIMIT)  # at once: to try again is no use
            assert isinstance(error, fserver.Error)
            assert scheduler in str(error) and expected in str(error)
        finally:
            node.close()


def test_a_node_of_another_version_refuses(other: int) -> None:
    """As our scheduler does, if the other's is the older build."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        scheduler = f"127.0.0.1:{listener.getsockname()[1]}"
        node = fserver.Worker(scheduler=scheduler, workers=1, servers=1, connect=False)
        try:
            call = in_thread(node.connect)
            peer = Peer(listener.accept()[0], other)
            with peer.connection:
                peer.receive()
                why = reason((WIRE, BUILD), (other, "fserver 9.9.9")).encode()
                message = bytes([Peer.REJECT, len(why) & 127 | 128, len(why) >> 7]) + why
                peer.connection.sendall(b"FSRV" + len(message).to_bytes(4, "little") + message)
                error = call.exception(timeout=LIMIT)
            assert isinstance(error, fserver.Error)
            assert f"refused by the peer: {why.decode()}" in str(error)
        finally:
            node.close()
