"""`fserver doctor --peer`: tests the path to a scheduler, or to a doctor on another host."""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import socket
import struct
import threading
import time
from typing import Any

from fserver import _loader, env
from fserver.errors import Error
from fserver.percentiles import percentile

from . import names, pair, protocol
from .protocol import Channel, ProtocolError, SecretError, Type
from .report import Check, Report

CONNECT_LIMIT = 3.0  # seconds
PROBE_LIMIT_MS = 5000
ECHOES = 300
ECHO_LIMIT = 2.0  # seconds, for all of them
STREAM = 0.5  # seconds, each way
_IP_MTU = 14  # of linux/in.h; the module socket does not have it
_IPV6_MTU = 24

SECRET = "set FSERVER_SECRET (or FSERVER_SECRET_FILE) to the same secret on all nodes"
TLS = "set FSERVER_TLS to the same value, on or off, on all nodes"
TLS_SETTINGS = "compare FSERVER_SECRET, FSERVER_CLUSTER and FSERVER_TLS_* on both sides"
FIT = "change what this text names on the side that is wrong (`fserver env` prints its settings)"
# The settings that both sides compare. All others may differ.
SHARED = ("FSERVER_CLUSTER", "FSERVER_SECRET", "FSERVER_SECRET_FILE")
WORDS = {
    "differs": "the secrets of the two sides differ",
    "only here": "this side has a secret, but the peer has none",
    "only there": "the peer has a secret, but this side has none",
}


def check(report: Report, host: str, port: int, values: dict[str, str]) -> None:
    """Tests the path between this host and another one. Every step has a time limit."""
    title = f"Path to {names.join(host, port)}"
    found: dict[str, object] = {"host": host, "port": port, "kind": "none"}
    report.data["peer"] = found
    report.add(title)
    address = _reach(report, title, found, host, port)
    if address and not _node(report, title, found, address, port, values):
        _doctor(report, title, found, host, address, port, values)


def _reach(report: Report, title: str, found: dict[str, Any], host: str, port: int) -> str:
    """Tries all addresses of a host. Returns the first one that accepts a connection, or ""."""
    try:
        all_ = names.resolve(host, port)
    except OSError as e:
        remedy = "give an address, or a name that this host can resolve (see getent hosts)"
        text = f"cannot resolve {host}: {e.strerror or e}"
        report.add(title, Check("name", "no", text, remedy, fatal=True))
        return ""
    text = " ".join(dict.fromkeys(str(a[4][0]) for a in all_))
    report.add(title, Check("name", "yes", text))
    found["addresses"] = []
    first = ""
    failed = []
    for family, kind, _, _, at in all_:
        one: dict[str, object] = {"address": at[0], "connect_us": None, "error": ""}
        found["addresses"].append(one)
        begin = time.monotonic_ns()
        try:
            sock = _connect(family, kind, at)
        except OSError as e:
            one["error"] = e.strerror or str(e)
            failed.append((at[0], e))
            continue
        with sock:
            one["connect_us"] = round((time.monotonic_ns() - begin) / 1000, 1)
            report.add(title, Check("reach", "yes", f"{at[0]} port {port} accepts connections"))
            if not first:
                first = str(at[0])
                _mtu(report, title, found, sock)
    for address, error in failed:
        text = f"{address} port {port}: {error.strerror or error}"
        state = "note" if first else "no"  # one way there is enough
        report.add(title, Check("reach", state, text, _remedy(error), fatal=not first))
    return first


def _connect(family: int, kind: int, at: Any) -> socket.socket:
    sock = socket.socket(family, kind)
    try:
        sock.settimeout(CONNECT_LIMIT)
        sock.connect(at)
    except OSError:
        sock.close()
        raise
    return sock


def _remedy(e: OSError) -> str:
    if isinstance(e, TimeoutError):
        return "no answer: check that the host is up and that no firewall drops this port"
    if e.errno == errno.ECONNREFUSED:
        return "nothing listens on this port: start the scheduler, or `fserver doctor --listen`"
    if e.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return "no route: check the address, `ip route get` and the firewall"
    if e.errno == errno.EAFNOSUPPORT:
        return "this kernel has no such addresses: give one of the other family, IPv4 or IPv6"
    return "check the address and the network between the hosts"


def _path_mtu(sock: socket.socket) -> int:
    """Returns the MTU of the path as far as the kernel knows it, else 0."""
    level, option = socket.IPPROTO_IP, _IP_MTU
    if sock.family == socket.AF_INET6:
        level, option = socket.IPPROTO_IPV6, _IPV6_MTU
    try:
        return sock.getsockopt(level, option)
    except OSError:
        return 0


def _mtu(report: Report, title: str, found: dict[str, Any], sock: socket.socket) -> None:
    mtu = _path_mtu(sock)
    found["mtu"], found["from"] = mtu, sock.getsockname()[0]
    text = f"MTU {mtu or 'unknown'} on the path from {sock.getsockname()[0]}"
    small = 0 < mtu < 4000
    remedy = "on a private network, an MTU of 9000 makes large messages cheaper" if small else ""
    report.add(title, Check("mtu", "yes", text, remedy))


def _node(
    report: Report,
    title: str,
    found: dict[str, Any],
    address: str,
    port: int,
    values: dict[str, str],
) -> bool:
    """Asks a node of fserver for its identity. Returns False if it is not a node that listens."""
    settings = {n: v for n, v in values.items() if n in SHARED or n.startswith("FSERVER_TLS")}
    settings |= {"DMLC_ROLE": "worker"}
    settings |= {"DMLC_PS_ROOT_URI": address, "DMLC_PS_ROOT_PORT": str(port)}
    try:
        text = _loader.engine().probe([f"{n}={v}" for n, v in settings.items()], PROBE_LIMIT_MS)
    except _loader.LoadError as e:
        remedy = "repair the installation; without the engine only a listening doctor can be tested"
        report.add(title, Check("engine", "no", str(e), remedy, fatal=True))
        return False
    except Error as e:
        remedy = "correct the settings (`fserver env` prints them)"
        report.add(title, Check("settings", "no", str(e), remedy, fatal=True))
        return True
    probe = json.loads(text)
    if not (probe["spoke"] or probe["tls"]):
        return False
    found["kind"], found["tls"] = "node", probe["tls"] or "none"
    if not probe["accepted"]:
        why = _refused if probe["spoke"] else _apart
        report.add(title, why(found, probe))
        return True
    found["kind"] = probe["role"]
    rank = f" {probe['rank']}" if probe["role"] != "scheduler" else ""
    text = f"a {probe['role']}{rank} listens there ({probe['build']})"
    tls, trips = ("on both sides", "four") if probe["tls"] else ("on neither side", "three")
    has = bool(values.get("FSERVER_SECRET") or values.get("FSERVER_SECRET_FILE"))
    found["secret"] = "same" if has else "none"
    again = "run `fserver doctor --listen` there and --peer here"
    report.add(
        title,
        Check("node", "yes", text),
        Check("secret", "yes", "the same on both sides" if has else "none on either side"),
        Check("tls", "info", tls),
        Check("handshake", "yes", f"{probe['ns'] / 1e6:.2f} ms, {trips} round trips"),
        Check("bandwidth", "info", "not measured, so as not to disturb the node", again),
        Check("way back", "info", "not tested", again),
    )
    return True


def _apart(found: dict[str, Any], probe: dict[str, Any]) -> Check:
    """Returns the finding for two sides that fail because of TLS."""
    if found["tls"] == "only here":
        text = "this side uses TLS, but the node there does not"
        return Check("tls", "no", text, TLS, fatal=True)
    found["kind"] = "unknown"  # it has said nothing but TLS
    text, remedy = probe["error"], TLS_SETTINGS
    if found["tls"] == "only there":
        text, remedy = "the peer uses TLS, but this side does not", TLS
    remedy += f"; if another program has port {found['port']}, `ss -ltnp` there shows it"
    return Check("tls", "no", text, remedy, fatal=True)


def _refused(found: dict[str, Any], probe: dict[str, Any]) -> Check:
    """Returns the finding for a node that refuses this side, or that this side refuses."""
    if probe["secret"]:
        found["secret"] = probe["secret"]
        return Check("secret", "no", WORDS[found["secret"]], SECRET, fatal=True)
    text = f"the two sides do not fit: {probe['error']}"
    return Check("node", "no", text, FIT, fatal=True)


def _doctor(
    report: Report,
    title: str,
    found: dict[str, Any],
    host: str,
    address: str,
    port: int,
    values: dict[str, str],
) -> None:
    try:
        key = protocol.secret(values)
    except OSError as e:
        text = f"cannot read {e.filename}: {e.strerror}"
        report.add(title, Check("secret", "no", text, SECRET, fatal=True))
        return
    with contextlib.suppress(_loader.LoadError):  # if tensors are sent, the worker says why
        _loader.load()  # now: it takes seconds, and a listener does not wait long
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
            step = "tensors"
            pair.check(report, names.join(host, port), address, channel, _wanted(values))
    except SecretError as e:
        found["kind"], found["secret"] = "doctor", e.args[0]
        report.add(
            title,
            Check("peer", "yes", "a doctor listens there"),
            Check("secret", "no", WORDS[e.args[0]], SECRET, fatal=True),
        )
    except (OSError, ProtocolError) as e:
        why = "no answer in time" if isinstance(e, TimeoutError) else str(e)
        if step == "peer":
            found["kind"] = "unknown"
            text = f"the program that listens there is neither a node nor a doctor: {why}"
            remedy = f"free port {port}, or give another one (`ss -ltnp` there shows the program)"
        else:
            text = f"the connection broke off: {why}"
            remedy = "try again; if it fails again, check the network for lost packets"
        report.add(title, Check(step, "no", text, remedy, fatal=True))


def _wanted(values: dict[str, str]) -> str:
    """The transport that the settings ask for, whatever their spelling."""
    try:
        settings = env.settings(values)["settings"]
    except _loader.LoadError:
        return values.get("FSERVER_TRANSPORT") or "auto"
    return next(s["value"] for s in settings if s["name"] == "FSERVER_TRANSPORT") or "auto"


def _latency(report: Report, title: str, found: dict[str, Any], channel: Channel) -> None:
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
    p50, p99 = percentile(times, 50), percentile(times, 99)
    found["latency_us"] = {"p50": round(p50, 1), "p99": round(p99, 1), "count": len(times)}
    text = f"p50 {p50:.0f} µs, p99 {p99:.0f} µs for {len(times)} round trips of 17 bytes"
    report.add(title, Check("latency", "yes", text))


def _bandwidth(report: Report, title: str, found: dict[str, Any], channel: Channel) -> None:
    protocol.stream(channel, STREAM)
    count, took = struct.unpack("<QQ", channel.expect(Type.DONE))
    out = count / max(took, 1)
    channel.send(Type.FETCH, struct.pack("<I", int(STREAM * 1000)))
    count, took = protocol.drain(channel)
    back = count / max(took, 1)
    found["bandwidth_gb_s"] = {"out": round(out, 3), "in": round(back, 3)}
    text = f"{out:.2f} GB/s there, {back:.2f} GB/s back (one TCP connection, from Python)"
    report.add(title, Check("bandwidth", "yes", text))
    mtu = _path_mtu(channel.sock)
    if 0 < mtu < found["mtu"]:  # found out on the way, by packets that were too large
        text = f"the path has an MTU of {mtu}, less than the {found['mtu']} of this interface"
        remedy = "set the same MTU on all interfaces and switches of the path"
        report.add(title, Check("path mtu", "note", text, remedy))
        found["mtu"] = mtu


def _back(
    report: Report, title: str, found: dict[str, Any], channel: Channel, values: dict[str, str]
) -> None:
    """Tests whether the peer can connect to this host, as workers connect to servers."""
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
    text = f"the peer cannot connect to {host}: {error or 'its connection reached another host'}"
    remedy = "open the firewall of this host, or set DMLC_NODE_HOST to an address that it can reach"
    needed = values.get("DMLC_ROLE", "server").lower() in ("server", "scheduler", "joint")
    report.add(title, Check("way back", "no", text, remedy, fatal=needed))


def _take(server: socket.socket, nonce: bytes, came: threading.Event) -> None:
    """Accepts connections until the one with the nonce has come, or the time is up."""
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
