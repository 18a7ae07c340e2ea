"""A worker and a server between two doctors: the caller's worker sends tensors to the listener's
server, by the settings of both, and compares every byte that comes back."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import fserver
from fserver import env
from fserver.percentiles import percentile

from . import names
from .protocol import PAIR_LIMIT, Channel, ProtocolError, Type
from .report import Check, Report, size

SIZES = tuple(4**i for i in range(13))  # 1 B to 16 MiB
SECONDS = 0.15  # for each size
COUNT = 200  # exchanges of a size, at most
WAIT_MS = 8000
OPEN_LIMIT = 30.0  # seconds, for the listener: it imports torch for its first server
DEVICES = "`fserver doctor` on each host says which devices work, and what to do about the others"

_busy = threading.Lock()  # a listener has one server at a time


def _settings(scheduler: str) -> dict[str, Any]:
    """How both nodes are opened. The rest is as the environment says, the transport too."""
    whole = {"workers": 1, "servers": 1, "group_size": 1, "node_rank": 0, "gpu": 0}
    rest = {"rank_offset": 0, "instance": 0, "port": 0, "init_timeout": PAIR_LIMIT}
    quiet = {"FSERVER_LOG": "error", "FSERVER_REJOIN_TIMEOUT": "0.01"}
    return {
        **whole,
        **rest,
        "backend": "CPU",
        "on_peer_lost": "raise",
        "scheduler": scheduler,
        "connect": False,
        "settings": quiet,
    }


def _link(node: fserver.Node) -> dict[str, Any]:
    """How the only link of a node travels. Several connections have a path each."""
    (link,) = node.links()
    paths = dict.fromkeys(m.path for m in link.members if m.path) or [link.path]
    return {
        "transport": link.transport,
        "reason": link.reason,
        "path": "; ".join(paths),
        "members": [m._asdict() for m in link.members],
    }


# -- the listener


def serve(channel: Channel) -> None:
    """Answers PAIR: runs a server until the caller asks for its link, or is gone."""

    def say(**words: Any) -> None:
        channel.send(Type.DONE, json.dumps(words).encode())

    if not _busy.acquire(blocking=False):
        say(error="the listener tests another caller at this moment (try again)")
        return
    try:
        with contextlib.ExitStack() as stack:
            at = names.join(channel.sock.getsockname()[0], 0)
            try:
                server = fserver.Server(host_scheduler=True, **_settings(at))
            except fserver.Error as e:
                say(error=f"the listener cannot open a server: {e}")
                return
            stack.callback(server.close)
            echo = threading.Thread(target=_echo, args=(server,), daemon=True)
            echo.start()
            say(port=int(server.scheduler.rpartition(":")[2]))
            kind, _ = channel.receive(2 * PAIR_LIMIT)
            if kind == Type.LINK:
                links = server.links()
                say(**(_link(server) if links else {"error": "no worker is connected"}))
        echo.join(PAIR_LIMIT)
    finally:
        _busy.release()


def _echo(server: fserver.Server) -> None:
    with contextlib.suppress(fserver.Error):
        server.connect()
        while True:
            for handler, tensors, _ in server.get_batch():
                server.respond(tensors, handler)
            del tensors


# -- the caller


def check(report: Report, host: str, address: str, channel: Channel, wanted: str) -> None:
    """Sends tensors of all sizes to the listener. `wanted` is the value of FSERVER_TRANSPORT."""
    title = f"Tensors to {host}"
    if importlib.util.find_spec("torch") is None:
        report.add(title, Check("tensors", "info", "not tested: this Python has no torch"))
        return
    channel.send(Type.PAIR)
    said = json.loads(bytes(channel.expect(Type.DONE, OPEN_LIMIT)))
    found: dict[str, Any] = {"wanted": wanted, "sizes": []}
    report.data["tensors"] = found
    error = said.get("error", "")
    if not error:
        try:
            _worker(names.join(address, said["port"]), channel, found)
        except (fserver.Error, ValueError) as e:
            error = str(e)
    if error:
        remedy = "correct what the text names; workers connect to ports of the other host that "
        remedy += "its kernel chooses, so the firewall has to let them pass"
        report.add(title, Check("tensors", "no", error, remedy, fatal=True))
        return
    report.add(title, *_verdict(found, wanted))
    report.tables[title] = list(_table(found["sizes"]))


def _worker(scheduler: str, channel: Channel, found: dict[str, Any]) -> None:
    worker = fserver.Worker(host_scheduler=False, **_settings(scheduler))
    try:
        worker.connect()
        found["sizes"] = list(_exchange(worker))
        found["here"] = _link(worker)
        channel.send(Type.LINK)
        found["there"] = json.loads(bytes(channel.expect(Type.DONE)))
    finally:
        worker.close()
    if "error" in found["there"]:
        raise ProtocolError(found["there"]["error"])


def _exchange(worker: fserver.Worker) -> Iterator[dict[str, float]]:
    """Sends tensors of each size there and back. A wrong byte is a ValueError."""
    import torch

    for count in SIZES:
        x = torch.randint(0, 256, (count,), dtype=torch.uint8)
        y = torch.empty_like(x)
        times: list[int] = []
        end = time.monotonic() + SECONDS
        while len(times) < 3 or len(times) < COUNT and time.monotonic() < end:
            x += 1
            y.copy_(~x)
            begin = time.monotonic_ns()
            worker.wait(worker.push_pull([x], [count], [y], [count]), WAIT_MS)
            times.append(time.monotonic_ns() - begin)
            if not torch.equal(x, y):
                at = int((x != y).nonzero()[0])
                raise ValueError(f"of {count} bytes the one at {at} came back wrong (report this)")
        times.sort()
        p50 = percentile(times, 50)
        yield {
            "bytes": count,
            "count": len(times),
            "round_trip_us": round(p50 / 1000, 1),
            "gb_s": round(2 * count / p50, 3),
        }


def _verdict(found: dict[str, Any], wanted: str) -> Iterator[Check]:
    here, there = found["here"], found["there"]
    count = sum(s["count"] for s in found["sizes"])
    text = f"every byte of {count} exchanges of {size(SIZES[0])} to {size(SIZES[-1])} was right"
    yield Check("bytes", "yes", text)
    way = here["transport"]
    yield Check("transport", "yes", f"{way} (FSERVER_TRANSPORT={wanted})")
    for side, link in (("here", here), ("there", there)):
        yield from _members(side, link["members"])
        if link["path"]:
            yield Check(f"path {side}", "yes", link["path"])
    yield from _better(found, wanted, env.transports())


def _better(found: dict[str, Any], wanted: str, ways: list[dict[str, Any]]) -> Iterator[Check]:
    """Yields what speaks against the better transports between hosts, and against devices."""
    sides = found["here"], found["there"]
    way = sides[0]["transport"]
    used = next((i for i, w in enumerate(ways) if way.startswith(w["name"])), 0)
    others = [w["name"] for w in ways if w["inside"] or wanted not in ("auto", ways[used]["name"])]
    said = dict.fromkeys(why for side in sides for why in side["reason"].split("; "))
    whys = [why for why in said if why and not why.startswith(tuple(others))]
    better = [w["name"] for w in ways[:used] if not w["inside"]]
    if whys:
        text = f"tensors went by {way}: {'; '.join(whys)}"
        yield Check("not used", "note", text, DEVICES)
    elif better and wanted == "auto":
        text = f"{', '.join(better)}: one of the hosts has no device that auto takes"
        yield Check("not used", "info", text)


def _members(side: str, members: list[dict[str, Any]]) -> Iterator[Check]:
    """Each of several connections: whether it is used, and which share of the bytes it has sent."""
    total = sum(m["sent"] for m in members) or 1
    for m in members:
        name = f"{m['interface']} {side}"
        if m["remote"]:
            share = f"{100 * m['sent'] / total:.0f} % of the bytes"
            yield Check(name, "yes", f"to {m['remote']} by {m['transport']}, {share}")
        else:
            yield Check(name, "note", f"not used: {m['reason']}")


def _table(sizes: list[dict[str, float]]) -> Iterator[str]:
    yield f"       {'bytes':>10}  {'round trip':>12}  {'both ways':>12}  exchanges"
    for s in sizes:
        trip, rate = f"{s['round_trip_us']:.1f} µs", f"{s['gb_s']:.3f} GB/s"
        yield f"       {size(s['bytes']):>10}  {trip:>12}  {rate:>12}  {s['count']}"
