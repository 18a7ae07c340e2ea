"""Peers in other namespaces of one host, as two containers are: which way their links and channels
take, and what they say of it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nodes import LIMIT, Child, Cluster, Parent, together

import fserver
from fserver.channel import describe, opening

MakeChild = Callable[..., Child]
MakeCluster = Callable[..., Cluster]

CLONE_NEWNET = 0x40000000
HOSTS = ("10.77.0.1", "10.77.0.2")
QUIET = {"FSERVER_LOG": "error"}


def shell(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needs(*tools: str) -> None:
    """Skips where this process cannot make namespaces."""
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    done = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True)
    if done.returncode:
        pytest.skip(f"no namespaces: {done.stderr.decode().strip()}")


def moved(parent: Parent) -> int:
    """Puts this process into a network namespace of its own, without a way out; gives its pid."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    shell("ip", "link", "set", "lo", "up")
    parent.put(os.getpid())
    return os.getpid()


def up(name: str, host: str) -> None:
    shell("ip", "addr", "add", f"{host}/24", "dev", name)
    shell("ip", "link", "set", name, "up")


def worker_process(parent: Parent, mine: dict[str, str], options: dict[str, Any]) -> None:
    """The scheduler and the worker; it makes the wire to the server's namespace."""
    moved(parent)
    other = parent.get()
    shell("ip", "link", "add", "a0", "type", "veth", "peer", "name", "b0", "netns", str(other))
    up("a0", HOSTS[0])
    own = {"settings": {**QUIET, "DMLC_NODE_HOST": HOSTS[0]}, **options, "connect": False}
    scheduler = fserver.Scheduler(scheduler=f"{HOSTS[0]}:0", **own)
    own["settings"] = {**own["settings"], **mine}
    worker = fserver.Worker(scheduler=scheduler.scheduler, **own)
    parent.put(scheduler.scheduler)
    together([scheduler.connect, worker.connect])
    x, y = torch.arange(1000.0), torch.empty(1000)
    worker.wait(worker.push_pull([x], [1], [y], [2]))
    parent.put((bool((x + 1 == y).all()), worker.links()))
    together([scheduler.stop, worker.stop])


def server_process(parent: Parent, mine: dict[str, str], options: dict[str, Any]) -> None:
    moved(parent)
    scheduler = parent.get()
    up("b0", HOSTS[1])
    own = {**options, "settings": {**QUIET, "DMLC_NODE_HOST": HOSTS[1], **mine}}
    server = fserver.Server(scheduler=scheduler, **own)
    [(handler, [x], _)] = server.get_batch()
    server.respond([x + 1], handler)
    parent.put(server.links())
    server.stop()


NETWORK = "cma: the two processes are in different network namespaces of one host"
BY_TCP, BY_IPC = "cma: FSERVER_TRANSPORT=tcp at ", "cma: BYTEPS_ENABLE_IPC=0 at "


@pytest.mark.parametrize(
    ("at_worker", "at_server", "worker_says", "server_says"),
    [
        ({}, {}, NETWORK, NETWORK),
        (
            {"FSERVER_TRANSPORT": "tcp"},
            {"FSERVER_TRANSPORT": "tcp"},
            f"{BY_TCP}worker 0",
            f"{BY_TCP}server 0",
        ),
        ({}, {"BYTEPS_ENABLE_IPC": "0"}, f"{BY_IPC}server 0", f"{BY_IPC}server 0"),
        ({"BYTEPS_ENABLE_IPC": "0"}, {}, f"{BY_IPC}worker 0", f"{BY_IPC}worker 0"),
    ],
)
def test_network_namespaces(
    child: MakeChild,
    at_worker: dict[str, str],
    at_server: dict[str, str],
    worker_says: str,
    server_says: str,
) -> None:
    needs("unshare", "ip")
    options = {"backend": "CPU", "init_timeout": LIMIT}
    worker = child(worker_process, at_worker, options)
    server = child(server_process, at_server, options)
    worker.get()
    worker.put(server.get())
    server.put(worker.get())
    same, [link] = worker.get()
    [back] = server.get()
    assert same
    assert (link.transport, back.transport) == ("tcp", "tcp")
    assert link.reason.startswith(worker_says) and back.reason.startswith(server_says)
    worker.end()
    server.end()


CLONE = {"net": CLONE_NEWNET, "ipc": 0x08000000, "mount": 0x20000, "pid": 0x20000000}


def elsewhere(parent: Parent, *kinds: str) -> None:
    """Says its GPU's place, in namespaces of its own of these kinds."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = sum(CLONE[kind] for kind in kinds)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")
    if "pid" in kinds:  # which only children are in, and /proc has to be mounted for them
        if child := os.fork():
            os.waitpid(child, 0)
            return
        shell("mount", "--make-rprivate", "/")
        shell("mount", "-t", "proc", "proc", "/proc")
    parent.put(opening._place(torch.device("cuda", 0)))
    if "pid" in kinds:
        os._exit(0)


def test_place(child: MakeChild) -> None:
    needs("unshare")
    here = opening._place(torch.device("cuda"))
    assert here.startswith("cuda@")
    assert child(elsewhere, "net").get() == here  # which the driver needs not
    assert describe.apart(0, here, here) == ""
    for kinds, named in (
        (["pid", "mount"], "different PID and mount namespaces"),
        (["ipc"], "different IPC namespaces"),
        (["mount"], "different mount namespaces"),
    ):
        there = child(elsewhere, *kinds).get()
        assert there != here
        for one, other in ((here, there), (there, here)):
            text = describe.apart(3, one, other)
            assert text.startswith("worker 3 and its server are in ") and named in text


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        ("cpu", "cpu", ""),
        ("cpu", "cuda@a pid:1", "the tensors of its server are on the CPU"),
        ("cuda@a pid:1", "cpu", "the tensors of worker 1 are on the CPU"),
        ("cuda@a pid:1", "cuda@b pid:1", "worker 1 and its server are on different hosts"),
        ("cuda@a pid:1", "cuda@a pid:2", "in different PID namespaces of one host"),
        ("cuda@a pid:1 mnt:1", "cuda@a", "in different PID and mount namespaces of one host"),
        ("cuda@a pid:1", "cuda@a pid:1 x", "in different other namespaces of one host"),
    ],
)
def test_apart(here: str, there: str, text: str) -> None:
    said = describe.apart(1, here, there)
    assert said == text if not text else text in said


class Side:
    """In place of a side on a GPU."""

    abort_word = 0

    def __init__(self) -> None:
        self.closed = False

    def describe(self, peer: int) -> dict[str, Any]:
        return {}

    def attach(self, descriptions: Any) -> None:
        raise AssertionError("a GPU was to map memory that it cannot reach")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_channel(cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Sides on GPUs of two containers take the engine, and both say why."""
    pair, local, made = cluster(), threading.local(), []
    monkeypatch.setattr(opening, "_direct", lambda mode, device: mode != "host")
    monkeypatch.setattr(opening, "_gpu", lambda *_: made.append(Side()) or made[-1])
    monkeypatch.setattr(opening, "_place", lambda device: f"cuda@host pid:[1] mnt:[{local.at}]")
    x, y = torch.arange(8.0), torch.empty(8)

    def at(place: int, call: Callable[..., Any], *args: Any) -> Any:
        local.at = place
        return call(*args, mode=mode, timeout_ms=LIMIT * 1000)

    w, s = together(
        [
            lambda: at(1, pair.worker.channel, [x], [1], [y], [2]),
            lambda: at(2, pair.server.channel, [1], [torch.empty(8)], [2]),
        ]
    )
    assert [side.closed for side in made] == [True]  # the worker's; the server has made none
    for ch in (w, s):
        assert (ch.mode, ch.path) == (mode, "host")
        assert ch.reason.startswith("worker 0 and its server are in different mount namespaces of")
    w.send()
    s.recv()
    s.outgoing[0].copy_(s.incoming[0] * 2)
    s.send()
    w.recv()
    assert y.tolist() == (x * 2).tolist()
    together([w.close, s.close])


def test_channel_without_reason(cluster: MakeCluster) -> None:
    pair = cluster()
    x = torch.empty(8)
    for mode in ("kernel", "host"):
        w, s = together(
            [
                lambda: pair.worker.channel([x], [1], [], [], mode=mode),  # noqa: B023
                lambda: pair.server.channel([1], [], [], mode=mode),  # noqa: B023
            ]
        )
        assert (w.path, w.reason, s.path, s.reason) == ("host", "", "host", "")
        together([w.close, s.close])


def test_channel_to_two_servers(cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """One beside the worker and one in another container: all use the engine, and say why."""
    pair, local = cluster(servers=2), threading.local()
    monkeypatch.setattr(opening, "_direct", lambda mode, device: mode != "host")
    monkeypatch.setattr(opening, "_gpu", lambda *_: Side())
    monkeypatch.setattr(opening, "_place", lambda device: f"cuda@host ipc:[{local.at}]")
    x = torch.empty(8)

    def at(place: int, call: Callable[..., Any], *args: Any) -> Any:
        local.at = place
        return call(*args, timeout_ms=LIMIT * 1000)

    found = together(
        [
            lambda: at(1, pair.worker.channel, [x], [1], [], []),
            lambda: at(1, pair.servers[0].channel, [1], [], []),
            lambda: at(2, pair.servers[1].channel, [1], [], []),
        ]
    )
    for channel in found:
        assert channel.path == "host" and "in different IPC namespaces" in channel.reason
    together([channel.close for channel in found])
