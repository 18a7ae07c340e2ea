"""`fserver doctor --peer`: the path to a scheduler, or to a doctor on another host."""

from __future__ import annotations

import errno
import json
import secrets
import socket
import struct
import threading
import time

from fserver import _loader
from fserver.errors import Error

from . import names, protocol
from .protocol import Channel, ProtocolError, SecretError, Type
from .report import Check, Report

CONNECT_LIMIT = 3.0  # seconds
PROBE_LIMIT_MS = 5000
ECHOES = 300
ECHO_LIMIT = 2.0  # seconds, for all of them
STREAM = 0.5  # seconds, each way
_IP_MTU = 14  # of linux/in.h; the module socket does not have it
_IPV6_MTU = 24

SECRET = "FSERVER_SECRET (or FSERVER_SECRET_FILE) must be the same on all nodes"
TLS = "FSERVER_TLS must be on, or off, on all nodes"
FIT = "FSERVER_SECRET, FSERVER_CLUSTER and FSERVER_TLS_* must fit each other on all nodes"
# What a peer is told, or proven: the rest of the settings is its own.
SHARED = ("FSERVER_CLUSTER", "FSERVER_SECRET", "FSERVER_SECRET_FILE", "PS_RESEND")
WORDS = {
    "differs": "both sides have a secret, and they differ",
    "only here": "this side has a secret, the peer has none",
    "only there": "the peer has a secret, this side has none",
}


def check(report: Report, host: str, port: int, values: dict[str, str]) -> None:
    """Tries everything between this host and another one. Every step has a bound on its time."""
    title = f"Path to {names.join(host, port)}"
    found: dict[str, object] = {"host": host, "port": port, "kind": "none"}
    report.data["peer"] = found
    report.add(title)
    address = _reach(report, title, found, host, port)
    if address and not _node(report, title, found, address, port, values):
        _doctor(report, title, found, address, port, values)


def _reach(report: Report, title: str, found: dict, host: str, port: int) -> str:
    """The first address that takes a connection, after all of them have been tried; or empty."""
    try:
        all_ = names.resolve(host, port)
    except OSError as e:
        remedy = "give an address, or a name that this host can resolve (getent hosts)"
        report.add(
            title, Check("name", "no", f"resolve {host}: {e.strerror or e}", remedy, fatal=True)
        )
        return ""
    text = " ".join(dict.fromkeys(str(a[4][0]) for a in all_))
    report.add(title, Check("name", "yes", text))
    found["addresses"] = []
    first = ""
    failed = []
    for family, kind, _, _, at in all_:
        one: dict[str, object] = {"address": at[0], "connect_us": None, "error": ""}
        found["addresses"].append(one)
        with socket.socket(family, kind) as sock:
            sock.settimeout(CONNECT_LIMIT)
            begin = time.monotonic_ns()
            try:
                sock.connect(at)
            except OSError as e:
                one["error"] = e.strerror or str(e)
                failed.append((at[0], e))
                continue
            one["connect_us"] = round((time.monotonic_ns() - begin) / 1000, 1)
            report.add(title, Check("reach", "yes", f"{at[0]} port {port} takes connections"))
            if not first:
                first = str(at[0])
                _mtu(report, title, found, sock)
    for address, error in failed:
        text = f"{address} port {port}: {error.strerror or error}"
        state = "note" if first else "no"  # one way there is enough
        report.add(title, Check("reach", state, text, _remedy(error), fatal=not first))
    return first


def _remedy(e: OSError) -> str:
    if isinstance(e, TimeoutError):
        return "nothing comes back: is the host up, and does a firewall drop this port?"
    if e.errno == errno.ECONNREFUSED:
        return "nobody listens there: start the scheduler, or `fserver doctor --listen` there"
    if e.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return "there is no route: check the address, `ip route get` and the firewall"
    return "check the address and the network between the hosts"


def _path_mtu(sock: socket.socket) -> int:
    """What the kernel knows of the path; 0 if nothing."""
    level, option = socket.IPPROTO_IP, _IP_MTU
    if sock.family == socket.AF_INET6:
        level, option = socket.IPPROTO_IPV6, _IPV6_MTU
    try:
        return sock.getsockopt(level, option)
    except OSError:
        return 0


def _mtu(report: Report, title: str, found: dict, sock: socket.socket) -> None:
    mtu = _path_mtu(sock)
    found["mtu"], found["from"] = mtu, sock.getsockname()[0]
    text = f"MTU {mtu or 'unknown'} on the path from {sock.getsockname()[0]}"
    small = 0 < mtu < 4000
    remedy = "on a network of your own, an MTU of 9000 costs less per byte" if small else ""
    report.add(title, Check("mtu", "yes", text, remedy))


def _node(
    report: Report, title: str, found: dict, address: str, port: int, values: dict[str, str]
) -> bool:
    """Asks a node of fserver who it is; False if what listens is none."""
    settings = {n: v for n, v in values.items() if n in SHARED or n.startswith("FSERVER_TLS")}
    settings |= {"DMLC_ROLE": "worker", "FSERVER_TRANSPORT": "tcp"}
    settings |= {"DMLC_PS_ROOT_URI": address, "DMLC_PS_ROOT_PORT": str(port)}
    try:
        text = _loader.load().probe([f"{n}={v}" for n, v in settings.items()], PROBE_LIMIT_MS)
    except _loader.LoadError as e:
        remedy = "without it only a doctor can be talked to: mend the installation"
        report.add(title, Check("engine", "no", str(e), remedy, fatal=True))
        return False
    except Error as e:
        remedy = "correct the settings: `fserver env`"
        report.add(title, Check("settings", "no", str(e), remedy, fatal=True))
        return True
    probe = json.loads(text)
    if not (probe["spoke"] or probe["tls"]):
        return False
    found["kind"], found["tls"] = "node", probe["tls"] or "none"
    if not probe["accepted"]:
        why = _refused if probe["spoke"] else _apart
        report.add(title, why(found, probe["error"]))
        return True
    found["kind"] = probe["role"]
    rank = f" {probe['rank']}" if probe["role"] != "scheduler" else ""
    text = f"a {probe['role']}{rank} listens there, {probe['build']}"
    tls, trips = ("on both sides", "four") if probe["tls"] else ("on neither side", "three")
    has = bool(values.get("FSERVER_SECRET") or values.get("FSERVER_SECRET_FILE"))
    found["secret"] = "same" if has else "none"
    again = "`fserver doctor --listen` there, and --peer here, measures that"
    report.add(
        title,
        Check("node", "yes", text),
        Check("secret", "yes", "the same on both sides" if has else "none on either side"),
        Check("tls", "info", tls),
        Check("handshake", "yes", f"{probe['ns'] / 1e6:.2f} ms, {trips} round trips"),
        Check("bandwidth", "info", "not measured: a node is not disturbed", again),
        Check("way back", "info", "not tried", again),
    )
    return True


def _apart(found: dict, error: str) -> Check:
    """Why TLS keeps the two apart."""
    if found["tls"] == "only here":
        return Check("tls", "no", "this side has TLS, the node there has none", TLS, fatal=True)
    found["kind"] = "unknown"  # it has said nothing but TLS
    text, remedy = error.rpartition("handshake: ")[2].removesuffix(f": {FIT}"), FIT
    if found["tls"] == "only there":
        text, remedy = "the peer has TLS, this side has none", TLS
    remedy += f"; if it is no node, somebody else has port {found['port']}: ss -ltnp there says who"
    return Check("tls", "no", text, remedy, fatal=True)


def _refused(found: dict, error: str) -> Check:
    """Why a node does not talk to this side; the engine's text says it for both."""
    text = error.rpartition("handshake: ")[2].removeprefix("refused by the peer: ")
    reason, _, remedy = text.rpartition(": ")
    if "secret, " in text or "proof of" in text:
        if "proof of" in text:
            found["secret"] = "differs"
        else:
            found["secret"] = "only here" if text.startswith("a worker has") else "only there"
        return Check("secret", "no", WORDS[found["secret"]], SECRET, fatal=True)
    if not reason:
        reason, remedy = text, "make it the same on both sides"
    return Check("node", "no", f"it does not take this side: {reason}", remedy, fatal=True)


def _doctor(
    report: Report, title: str, found: dict, address: str, port: int, values: dict[str, str]
) -> None:
    try:
        key = protocol.secret(values)
    except OSError as e:
        report.add(title, Check("secret", "no", f"read {e.filename}: {e.strerror}", SECRET, True))
        return
    step = "peer"
    try:
        with socket.create_connection((address, port), CONNECT_LIMIT) as sock:
            channel = Channel(sock)
            protocol.call(channel, key)
            found["kind"], found["secret"] = "doctor", "same" if key else "none"
            report.add(
                title,
                Check("peer", "yes", "a doctor listens there"),
                Check("secret", "yes", "the same on both sides" if key else "none on either side"),
            )
            step = "latency"
            _latency(report, title, found, channel)
            step = "bandwidth"
            _bandwidth(report, title, found, channel)
            step = "way back"
            _back(report, title, found, channel, values)
    except SecretError as e:
        found["kind"], found["secret"] = "doctor", e.args[0]
        report.add(
            title,
            Check("peer", "yes", "a doctor listens there"),
            Check("secret", "no", WORDS[e.args[0]], SECRET, fatal=True),
        )
    except (OSError, ProtocolError) as e:
        why = "nothing came in time" if isinstance(e, TimeoutError) else str(e)
        if step == "peer":
            found["kind"] = "unknown"
            text = f"what listens there is neither a node nor a doctor: {why}"
            remedy = f"somebody else has port {port}: ss -ltnp there says who"
        else:
            text, remedy = f"it broke off: {why}", "try again; the network loses what is sent"
        report.add(title, Check(step, "no", text, remedy, fatal=True))


def _latency(report: Report, title: str, found: dict, channel: Channel) -> None:
    times = []
    end = time.monotonic() + ECHO_LIMIT
    for i in range(ECHOES):
        begin = time.monotonic_ns()
        channel.send(Type.ECHO, i.to_bytes(8, "little"))
        if channel.expect(Type.ECHO) != i.to_bytes(8, "little"):
            raise ProtocolError("an echo came back changed")
        times.append((time.monotonic_ns() - begin) / 1000)
        if time.monotonic() > end:
            break
    times.sort()
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    found["latency_us"] = {"p50": round(p50, 1), "p99": round(p99, 1), "count": len(times)}
    text = f"p50 {p50:.0f} µs, p99 {p99:.0f} µs for {len(times)} round trips of 17 bytes"
    report.add(title, Check("latency", "yes", text))


def _bandwidth(report: Report, title: str, found: dict, channel: Channel) -> None:
    protocol.stream(channel, STREAM)
    count, took = struct.unpack("<QQ", channel.expect(Type.DONE))
    out = count / max(took, 1)
    channel.send(Type.FETCH, struct.pack("<I", int(STREAM * 1000)))
    count, took = protocol.drain(channel)
    back = count / max(took, 1)
    found["bandwidth_gb_s"] = {"out": round(out, 3), "in": round(back, 3)}
    text = f"{out:.2f} GB/s there, {back:.2f} GB/s back, over one TCP connection of Python's"
    report.add(title, Check("bandwidth", "yes", text))
    mtu = _path_mtu(channel.sock)
    if 0 < mtu < found["mtu"]:  # found out on the way, by packets that were too large
        text = f"somewhere on the path it is {mtu}, less than the {found['mtu']} of this interface"
        remedy = "give all interfaces and switches on the path the same MTU"
        report.add(title, Check("path mtu", "note", text, remedy))
        found["mtu"] = mtu


def _back(
    report: Report, title: str, found: dict, channel: Channel, values: dict[str, str]
) -> None:
    """Whether the peer can connect to this host, as workers do to servers."""
    nonce = secrets.token_bytes(16)
    came = threading.Event()
    with socket.socket(channel.sock.family) as server:
        server.bind((channel.sock.getsockname()[0], 0, *channel.sock.getsockname()[2:]))
        server.listen(4)
        server.settimeout(CONNECT_LIMIT + 1)
        taker = threading.Thread(target=_take, args=(server, nonce, came), daemon=True)
        taker.start()
        host, port = server.getsockname()[:2]
        channel.send(Type.CALL, struct.pack("<H16s", port, nonce))
        error = bytes(channel.expect(Type.DONE, CONNECT_LIMIT + 2)).decode(errors="replace")
        taker.join(CONNECT_LIMIT + 2)
    found["back"] = came.is_set()
    if came.is_set():
        report.add(title, Check("way back", "yes", f"the peer can connect to {host}"))
        return
    error = "".join(c if c.isprintable() else "?" for c in error[:200])
    text = f"the peer cannot connect to {host}: {error or 'the connection led elsewhere'}"
    remedy = "servers are connected to: open the firewall for this host, or set DMLC_NODE_HOST"
    needed = values.get("DMLC_ROLE", "server").lower() in ("server", "scheduler", "joint")
    report.add(title, Check("way back", "no", text, remedy, fatal=needed))


def _take(server: socket.socket, nonce: bytes, came: threading.Event) -> None:
    """Takes connections until the one with the nonce has come, or the time is up."""
    end = time.monotonic() + CONNECT_LIMIT + 1
    try:
        while time.monotonic() < end and not came.is_set():
            sock, _ = server.accept()
            with sock:
                sock.settimeout(1)
                if sock.recv(16, socket.MSG_WAITALL) == nonce:
                    came.set()
    except OSError:
        pass
