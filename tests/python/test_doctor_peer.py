"""`fserver doctor`: what it says of the path to others, and what a listening doctor answers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from nodes import LIMIT, Cluster, eventually
from reports import Doctor, line, states

import fserver
from fserver.doctor import listen, pair, peer, protocol
from fserver.doctor.protocol import Channel, Type
from fserver.doctor.report import Report

SECRET = "a secret of decent length"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tensors of each size."""
    monkeypatch.setattr("fserver.doctor.pair.SECONDS", 0.001)


# -- the path to others


@pytest.fixture
def listener() -> Iterator[Callable[[str], str]]:
    """Starts a listening doctor with a secret in this process; gives its address."""
    servers = []

    def start(secret: str) -> str:
        server = listen.listen("127.0.0.1", 0)
        servers.append(server)
        threading.Thread(target=listen.serve, args=(server, secret.encode()), daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.mark.parametrize("secret", ["", SECRET])
def test_peer(
    doctor: Doctor,
    listener: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    secret: str,
) -> None:
    if secret:
        monkeypatch.setenv("FSERVER_SECRET", secret)
    at = listener(secret)
    status, found = doctor("--peer", at)
    assert status == 0, found["sections"][f"Path to {at}"][-1]
    path = found["sections"][f"Path to {at}"]
    names = ["name", "reach", "mtu", "peer", "secret", "latency", "bandwidth", "way back"]
    assert [check["name"] for check in path] == names
    assert {check["state"] for check in path} == {"yes"}
    peer = found["peer"]
    assert peer["kind"] == "doctor" and peer["secret"] == ("same" if secret else "none")
    assert peer["mtu"] > 0 and peer["back"]
    assert 0 < peer["latency_us"]["p50"] <= peer["latency_us"]["p99"]
    assert peer["bandwidth_gb_s"]["out"] > 0 and peer["bandwidth_gb_s"]["in"] > 0
    assert [a["error"] for a in peer["addresses"]] == [""]


def test_the_extension_is_loaded_before_the_listener_waits(
    doctor: Doctor, listener: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes up to ten seconds under load; the listener's server waits that long for a worker."""
    steps = []
    load, call = peer._loader.load, protocol.call
    monkeypatch.setattr("fserver._loader.load", lambda: steps.append("load") or load())
    monkeypatch.setattr("fserver.doctor.protocol.call", lambda *a: steps.append("call") or call(*a))
    status, _ = doctor("--peer", listener(""))
    assert status == 0 and steps.index("load") < steps.index("call")


def test_settings_of_this_host(
    doctor: Doctor, listener: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a server that hosts the scheduler are not for the worker of this test. The transport
    may have an older name."""
    monkeypatch.setenv("FSERVER_HOST_SCHEDULER", "1")
    monkeypatch.setenv("DMLC_ENABLE_RDMA", "0")
    at = listener("")
    _, found = doctor("--peer", at)
    assert line(found, f"Tensors to {at}", "transport")["text"] == "tcp (FSERVER_TRANSPORT=tcp)"


def test_a_kernel_without_ipv6(
    doctor: Doctor, listener: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = listener("")
    both = [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", int(at[10:])))]
    resolved = [(family, socket.SOCK_STREAM, 0, "", address) for family, address in both]
    real = socket.socket

    def kernel(family: int = -1, *rest: Any, **how: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return real(family, *rest, **how)

    monkeypatch.setattr("fserver.doctor.peer.names.resolve", lambda *_: resolved)
    monkeypatch.setattr("fserver.doctor.peer.socket.socket", kernel)
    report = Report()
    found: dict[str, Any] = {}
    assert peer._reach(report, "Path", found, "here", int(at[10:])) == "127.0.0.1"
    failed = report.sections["Path"][-1]
    assert (failed.name, failed.state) == ("reach", "note") and "not supported" in failed.text
    assert "this kernel has no such addresses" in failed.remedy


def test_tensors_with_wrong_bytes(
    doctor: Doctor, listener: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong byte is found, at any size, and the doctor says where."""

    def echo(server: fserver.Server) -> None:
        with contextlib.suppress(fserver.Error):
            server.connect()
            while True:
                for handler, (x,), _ in server.get_batch():
                    if len(x) == 4096:
                        x = x.clone()
                        x[77] += 1
                    server.respond([x], handler)

    monkeypatch.setattr("fserver.doctor.pair._echo", echo)
    at = listener("")
    status, found = doctor("--peer", at)
    check = line(found, f"Tensors to {at}", "tensors")
    assert status == 1 and check["text"].startswith("of 4096 bytes the one at 77 came back wrong")


def test_several_connections(
    doctor: Doctor, listener: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection has a line with its share; one that is not used says why."""
    other = next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if name != "lo" and any(a.family == socket.AF_INET for a in addresses)
        ),
        None,
    )
    if other is None:
        pytest.skip("this host has the loopback interface alone")
    monkeypatch.setenv("DMLC_INTERFACE", f"lo,{other}")
    monkeypatch.setenv("FSERVER_TRANSPORT", "tcp")
    at = listener("")
    status, found = doctor("--peer", at)
    assert status == 0, found["sections"][f"Tensors to {at}"]
    for name in ("lo here", f"{other} here", "lo there", f"{other} there"):
        check = line(found, f"Tensors to {at}", name)
        share = re.fullmatch(r"to [^ ]+ by tcp, (\d+) % of the bytes", check["text"])
        assert check["state"] == "yes" and share and 10 <= int(share[1]) <= 90

    lost = {"interface": "eth9", "remote": "", "transport": "", "sent": 0, "reason": "no carrier"}
    (check,) = pair._members("here", [lost])
    assert (check.name, check.state, check.text) == ("eth9 here", "note", "not used: no carrier")


def test_one_pair_at_a_time(
    doctor: Doctor, listener: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = listener("")
    one = channel(at)
    with one.sock:
        protocol.call(one, b"")

        def opens() -> bool:  # a listener of the test before may still close its own
            one.send(Type.PAIR)
            said = json.loads(bytes(one.expect(Type.DONE)))
            assert "port" in said or "another caller" in said["error"]
            return "port" in said

        eventually(opens)
        status, found = doctor("--peer", at)
        check = line(found, f"Tensors to {at}", "tensors")
        assert status == 1 and "another caller" in check["text"]
        one.send(Type.LINK)
        assert "no worker" in json.loads(bytes(one.expect(Type.DONE)))["error"]
    eventually(lambda: doctor("--peer", at)[0] == 0)


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        (SECRET, "another one", "differs"),
        (SECRET, "", "only here"),
        ("", SECRET, "only there"),
    ],
)
def test_secrets_that_differ(
    doctor: Doctor,
    listener: Callable[[str], str],
    cluster: Callable[..., Cluster],
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    there: str,
    expected: str,
) -> None:
    """A doctor and a scheduler are told apart, and both lead to the same verdict."""
    scheduler = cluster(connect=False, **({"secret": there} if there else {})).scheduler.scheduler
    if here:
        monkeypatch.setenv("FSERVER_SECRET", here)
    for at in (listener(there), scheduler):
        status, found = doctor("--peer", at)
        assert status == 1
        assert found["peer"]["secret"] == expected
        assert line(found, f"Path to {at}", "secret")["fatal"]


@pytest.mark.parametrize(
    ("here", "there", "sides", "word"),
    [
        ("on", "on", "both", "on both sides"),
        ("on", "off", "only here", "this side uses TLS, but the node there does not"),
        ("off", "on", "only there", "the peer uses TLS, but this side does not"),
        ("off", "off", "none", "on neither side"),
    ],
)
def test_tls(
    doctor: Doctor,
    cluster: Callable[..., Cluster],
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    there: str,
    sides: str,
    word: str,
) -> None:
    settings = {"FSERVER_TLS": there, "FSERVER_LOG": "error"}
    at = cluster(connect=False, secret=SECRET, settings=settings).scheduler.scheduler
    monkeypatch.setenv("FSERVER_SECRET", SECRET)
    monkeypatch.setenv("FSERVER_TLS", here)
    status, found = doctor("--peer", at)
    check = line(found, f"Path to {at}", "tls")
    assert status == (here != there), check
    assert found["peer"]["tls"] == sides and check["text"] == word
    assert (
        here == there or check["fatal"] and "set FSERVER_TLS to the same value" in check["remedy"]
    )
    assert here != there or found["peer"]["kind"] == "scheduler"


def test_tls_of_another_secret(
    doctor: Doctor, cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"FSERVER_TLS": "on", "FSERVER_LOG": "error"}
    at = cluster(connect=False, secret=SECRET, settings=settings).scheduler.scheduler
    monkeypatch.setenv("FSERVER_SECRET", "another one, quite as long")
    monkeypatch.setenv("FSERVER_TLS", "on")
    status, found = doctor("--peer", at)
    check = line(found, f"Path to {at}", "tls")
    assert status == 1 and "the peer's certificate does not come from our secret" in check["text"]
    assert check["remedy"].startswith("compare FSERVER_SECRET, FSERVER_CLUSTER and FSERVER_TLS_*")


def test_doctors_talk_without_tls(
    doctor: Doctor, listener: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSERVER_SECRET", SECRET)
    monkeypatch.setenv("FSERVER_TLS", "on")
    status, found = doctor("--peer", listener(SECRET))
    assert status == 0 and found["peer"]["kind"] == "doctor"


def test_frames_that_are_sent_again(
    doctor: Doctor, cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PS_RESEND is each node's own."""
    settings = {"PS_RESEND": "1", "FSERVER_LOG": "error"}
    at = cluster(connect=False, settings=settings).scheduler.scheduler
    assert doctor("--peer", at)[0] == 0
    monkeypatch.setenv("PS_RESEND", "1")
    assert doctor("--peer", at)[0] == 0


def test_secret_from_a_file(
    doctor: Doctor, listener: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(f" {SECRET}\n")
    monkeypatch.setenv("FSERVER_SECRET_FILE", str(file))
    assert doctor("--peer", listener(SECRET))[0] == 0
    file.unlink()
    status, found = doctor("--peer", listener(SECRET))
    assert status == 1 and "no such file" in json.dumps(found)


def test_a_running_cluster_is_not_disturbed(
    doctor: Doctor, cluster: Callable[..., Cluster]
) -> None:
    waiting = cluster(connect=False)
    at = waiting.scheduler.scheduler
    status, found = doctor("--peer", at)
    assert status == 0 and found["peer"]["kind"] == "scheduler"

    running = cluster()
    at = running.scheduler.scheduler
    status, found = doctor("--peer", at)
    assert status == 0
    assert found["peer"]["secret"] == "none"
    assert line(found, f"Path to {at}", "bandwidth")["state"] == "info"
    threads = [threading.Thread(target=node.stop) for node in running.nodes]
    [t.start() for t in threads], [t.join(LIMIT) for t in threads]
    assert all(node._node.closed for node in running.nodes)


def test_another_cluster(
    doctor: Doctor, cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = cluster(connect=False, cluster="blue").scheduler.scheduler
    monkeypatch.setenv("FSERVER_CLUSTER", "green")
    status, found = doctor("--peer", at)
    assert status == 1
    check = line(found, f"Path to {at}", "node")
    assert "blue" in check["text"] and "FSERVER_CLUSTER" in check["text"]
    assert "change what this text names" in check["remedy"]


@pytest.mark.parametrize(
    ("probe", "name", "secret"),
    [
        ({"spoke": True, "secret": "differs"}, "secret", "differs"),
        ({"spoke": True, "secret": ""}, "node", None),
        ({"spoke": False, "secret": "", "tls": "both"}, "tls", None),
    ],
)
def test_no_finding_depends_on_a_text(
    doctor: Doctor,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    probe: dict[str, Any],
    name: str,
    secret: str | None,
) -> None:
    """The engine says by a field of the probe whether the secrets differ."""
    answer = {
        "tls": "",
        "accepted": False,
        "error": "handshake: the proof of a worker has",
        **probe,
    }
    engine = SimpleNamespace(probe=lambda *_: json.dumps(answer))
    monkeypatch.setattr("fserver.doctor.peer._loader.engine", lambda: engine)
    with socket.create_server(("127.0.0.1", port)):
        status, found = doctor("--peer", f"127.0.0.1:{port}")
    assert status == 1 and found["peer"].get("secret") == secret
    assert line(found, f"Path to 127.0.0.1:{port}", name)["fatal"]


def test_ipv6(doctor: Doctor) -> None:
    try:
        server = listen.listen("::1", 0)
    except OSError as e:
        pytest.skip(f"no IPv6 loopback: {e}")
    with server:
        threading.Thread(target=listen.serve, args=(server, b""), daemon=True).start()
        at = f"[::1]:{server.getsockname()[1]}"
        status, found = doctor("--peer", at)
        server.shutdown(socket.SHUT_RDWR)
    assert status == 0 and found["peer"]["back"]
    assert set(states(found, f"Path to {at}").values()) == {"yes"}


def test_a_name_that_nobody_answers_for(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr("fserver.doctor.names.LIMIT", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: done.wait(LIMIT) and [])
    status, found = doctor("--peer", "somewhere:7000")
    done.set()
    assert status == 1
    assert "no answer within" in line(found, "Path to somewhere:7000", "name")["text"]


def test_nobody_there(doctor: Doctor, port: int) -> None:
    status, found = doctor("--peer", f"127.0.0.1:{port}")
    assert status == 1
    check = line(found, f"Path to 127.0.0.1:{port}", "reach")
    assert "refused" in check["text"] and "fserver doctor --listen" in check["remedy"]
    status, found = doctor("--peer", "no.such.host.invalid:7000")
    assert status == 1
    assert line(found, "Path to no.such.host.invalid:7000", "name")["state"] == "no"


def stranger(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something else that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    with sock, contextlib.suppress(OSError):
                        answer(sock)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


HEADER = struct.Struct("<4sBI")


@pytest.mark.parametrize("tls", ["off", "on"])
@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
        b"",
        b"FSRV\xff\xff\xff\xff",
        b"FSRV\x04\x00\x00\x00junk",
        HEADER.pack(b"fsdr", Type.WELCOME, 1 << 31),
        HEADER.pack(b"fsdr", Type.WELCOME, 3) + b"abc",
        HEADER.pack(b"fsdr", Type.WELCOME, 34) + bytes([9, 0]) + bytes(32),
        HEADER.pack(b"fsdr", 99, 0),
    ],
)
def test_garbage(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, garbage: bytes, tls: str) -> None:
    monkeypatch.setenv("FSERVER_SECRET", SECRET)
    monkeypatch.setenv("FSERVER_TLS", tls)

    def answer(sock: socket.socket) -> None:
        sock.sendall(garbage)
        sock.settimeout(1)
        sock.recv(64)

    with contextlib.contextmanager(stranger)(answer) as at:
        status, found = doctor("--peer", at)
    assert status == 1
    assert any(c["state"] == "no" for c in found["sections"][f"Path to {at}"])
    assert found["peer"]["kind"] in ("unknown", "node")


def test_silence_has_a_bound(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HANDSHAKE_LIMIT", 0.2)
    monkeypatch.setattr("fserver.doctor.peer.PROBE_LIMIT_MS", 200)
    done = threading.Event()
    with contextlib.contextmanager(stranger)(lambda sock: done.wait(LIMIT) and None) as at:
        begin = time.monotonic()
        status, found = doctor("--peer", at)
        done.set()
    assert status == 1 and time.monotonic() - begin < 10
    assert "no answer in time" in line(found, f"Path to {at}", "peer")["text"]


# -- what a listening doctor takes


def channel(at: str) -> Channel:
    host, _, port = at.partition(":")
    return Channel(socket.create_connection((host, int(port)), LIMIT))


@pytest.mark.parametrize(
    "request_",
    [
        (Type.ECHO, bytes(protocol.MAX_ECHO + 1)),
        (Type.CALL, struct.pack("<H16s", 22, bytes(16))),
        (Type.CALL, b"short"),
        (Type.FETCH, b"x"),
        (99, b""),
    ],
)
def test_requests_that_are_refused(
    listener: Callable[[str], str], request_: tuple[int, bytes]
) -> None:
    one = channel(listener(""))
    with one.sock:
        protocol.call(one, b"")
        one.send(*request_)
        if request_[1][:2] == struct.pack("<H", 22):
            assert bytes(one.expect(Type.DONE)) == b"port 22 is not allowed (want 1024 or above)"
        else:
            with pytest.raises((protocol.ProtocolError, OSError)):
                one.receive()


def test_nothing_is_done_before_the_secret(listener: Callable[[str], str]) -> None:
    at = listener(SECRET)
    for kind in (Type.ECHO, Type.FETCH, Type.CALL, Type.PROOF, Type.DATA):
        one = channel(at)
        with one.sock, pytest.raises((protocol.ProtocolError, OSError)):
            one.send(kind, bytes(4))
            one.receive()
    # Who does not know the secret cannot pass with the listener's own proof.
    one = channel(at)
    with one.sock:
        hello = struct.pack("<BB32s", protocol.VERSION, 1, bytes(32))
        one.send(Type.HELLO, hello)
        welcome = bytes(one.expect(Type.WELCOME))
        one.send(Type.PROOF, welcome[-32:])
        assert one.receive()[0] == Type.REFUSED


@pytest.mark.parametrize("key", [b"", SECRET.encode()])
def test_random_messages(key: bytes) -> None:
    """A session with a caller that sends what is nearly right ends, and raises nothing."""
    rng = random.Random(7)
    calls = [
        (Type.HELLO, struct.pack("<BB32s", protocol.VERSION, bool(key), bytes(32))),
        (Type.PROOF, b""),
        (Type.ECHO, bytes(8)),
        (Type.DATA, bytes(100)),
        (Type.END, b""),
        (Type.CALL, struct.pack("<H16s", 22, bytes(16))),
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for turn in range(400):
            said = calls if turn % 2 else rng.choices(calls, k=rng.randint(1, 9))
            text = bytearray(b"".join(HEADER.pack(b"fsdr", k, len(d)) + d for k, d in said))
            for _ in range(turn // 2 % 4):
                text[rng.randrange(len(text))] = rng.randrange(256)
            caller = socket.create_connection(server.getsockname())
            with caller, server.accept()[0] as taken:
                caller.sendall(text)
                caller.shutdown(socket.SHUT_WR)
                listen._session(Channel(taken), "caller", key)


def test_a_stream_has_an_end(listener: Callable[[str], str]) -> None:
    one = channel(listener(""))
    with one.sock:
        protocol.call(one, b"")
        one.send(Type.FETCH, struct.pack("<I", 1 << 31))
        count, took = protocol.drain(one)
    assert count > 0 and took < (protocol.STREAM_LIMIT + 3) * 1e9


def test_sessions_are_bounded(listener: Callable[[str], str]) -> None:
    at = listener("")

    def count() -> int:
        return sum(thread.name == listen.NAME for thread in threading.enumerate())

    eventually(lambda: count() == 0)
    silent = [channel(at) for _ in range(3 * listen.SESSIONS)]
    eventually(lambda: count() == listen.SESSIONS)
    for one in silent:
        assert count() <= listen.SESSIONS
        one.sock.close()
    eventually(lambda: count() == 0)


def test_the_command_line() -> None:
    """A listening process and one that tries it, as two hosts would."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "FSERVER_SECRET": SECRET}
    command = [sys.executable, "-m", "fserver", "doctor"]
    listening = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], env=env, stderr=subprocess.PIPE, text=True
    )
    _, err = listening.communicate(timeout=60)
    assert listening.returncode == 2 and "port from 1 to 65535" in err

    listening = subprocess.Popen(
        [*command, "--listen"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        first = listening.stdout.readline()
        port = re.fullmatch(r"listening on 0\.0\.0\.0:(\d+)\n", first)[1]
        done = subprocess.run(
            [*command, "--peer", f"localhost:{port}"],
            env=env, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "yes  secret     the same on both sides\n" in done.stdout
    finally:
        listening.terminate()
        _, err = listening.communicate(timeout=60)
    assert "the same secret" in err and SECRET not in err + done.stdout
