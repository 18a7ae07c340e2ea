"""Tensors in shared memory: what they are, and what a server sees of them."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import LIMIT, Child, Cluster, Parent, eventually, in_thread
from test_push_pull import DTYPES, same

import fserver
from fserver import _loader

MakeCluster = Callable[..., Cluster]
MakeChild = Callable[..., Child]

MS = LIMIT * 1e3
CMA = {"transport": "cma"}
DIRECT_AND_STAGED = ["auto", "staged"]


def mappings() -> tuple[int, int]:
    """How often this process has mapped shared memory of its own, and of others."""
    lines = [x for x in Path("/proc/self/maps").read_text().splitlines() if "fserver-shared" in x]
    views = sum(" r--s " in x for x in lines)
    return len(lines) - views, views


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def counters(node: Any) -> dict[str, Any]:
    return json.loads(node._node.describe())


def push(pair: Cluster, x: torch.Tensor, key: int = 0) -> tuple[Any, Any, int]:
    """Pushes x; gives what the server sees, its handler and the worker's."""
    h = pair.worker.push_pull([x], [key], [], [])
    [(handler, [seen], _)] = pair.server.get_batch(MS)
    return seen, handler, h


def answer(pair: Cluster, handler: int, h: int) -> None:
    pair.server.respond([], handler)
    pair.worker.wait(h, MS)


def settled(pair: Cluster) -> tuple[int, int]:
    """The mappings when both sides have told each other what there is to tell."""
    gc.collect()
    for _ in range(3):
        answer(pair, *push(pair, torch.ones(1), 99)[1:])
    return mappings()


@pytest.fixture(params=DIRECT_AND_STAGED)
def lending(request: pytest.FixtureRequest, cluster: MakeCluster) -> Cluster:
    made = cluster(**CMA, settings={"FSERVER_LOG": "error", "FSERVER_CMA": request.param})
    assert made.worker.links()[0].transport.startswith("cma")
    return made


# The tensor


def test_like_empty() -> None:
    for size in [(3, 4), ((3, 4),), ([3, 4],), (torch.Size([3, 4]),), (7,), ((),), (0,), (2, 0)]:
        want, x = torch.empty(*size), fserver.empty_shared(*size)
        assert (x.shape, x.dtype, x.device, x.stride()) == (
            want.shape,
            want.dtype,
            want.device,
            want.stride(),
        )
        assert x.is_leaf and not x._is_view() and x.is_contiguous()
        assert bool((x == 0).all())
        x.fill_(3)
        assert bool((x == 3).all())
    for dtype in DTYPES:
        x = fserver.empty_shared(5, dtype=dtype)
        assert x.dtype == dtype and x.numel() == 5
        assert (fserver.shared_like(x).shape, fserver.shared_like(x).dtype) == (x.shape, dtype)


@pytest.mark.parametrize("size", [(-1,), (2**62,), (2**31, 2**31), ("x",)])
def test_sizes_that_there_are_not(size: Any) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        fserver.empty_shared(*size)


def test_goes_with_its_last_view() -> None:
    fserver.empty_shared(1)  # loads the engine
    gc.collect()
    own, files = mappings()[0], descriptors()
    x = fserver.empty_shared(1000)
    view = x[10:].reshape(-1, 3)
    assert mappings()[0] == own + 1
    del x
    view.fill_(1)
    assert mappings()[0] == own + 1
    del view
    assert (mappings()[0], descriptors()) == (own, files)


# A push of it


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(lending: Cluster, dtype: torch.dtype) -> None:
    x = fserver.empty_shared(7, 64, dtype=dtype)
    x.copy_(torch.randint(0, 2, (7, 64)).to(dtype))
    seen, handler, h = push(lending, x)
    assert same(seen, x) and seen.is_contiguous()
    assert seen.data_ptr() != x.data_ptr()
    answer(lending, handler, h)
    assert counters(lending.worker)["loans"] == 1
    assert counters(lending.worker)["bytes_out"] == 0


def test_views_and_slices(lending: Cluster) -> None:
    x = fserver.empty_shared(100, 32)
    x.copy_(torch.randn(100, 32))
    for y in [x[1:], x[99:], x[3:4, 5], x[50].view(torch.int32), x.view(-1)[7:9], x[7, 7]]:
        seen, handler, h = push(lending, y)
        assert seen.dtype == y.dtype and torch.equal(seen, y)
        answer(lending, handler, h)
    assert counters(lending.worker)["loans"] == 6
    copied = x[:, :3].contiguous()  # memory of its own again
    seen, handler, h = push(lending, copied)
    assert same(seen, copied)
    answer(lending, handler, h)
    assert counters(lending.worker)["loans"] == 6


def test_the_next_values_are_seen(lending: Cluster) -> None:
    x = fserver.empty_shared(1 << 16)
    for i in range(100):
        x.fill_(i)
        seen, handler, h = push(lending, x)
        assert bool((seen == i).all())
        answer(lending, handler, h)
    del seen
    assert settled(lending)[1] == 1


def test_many_at_once(lending: Cluster) -> None:
    shared = [fserver.empty_shared(100 + i).fill_(i) for i in range(20)]
    both = [t for x in shared for t in (x, x[:50].clone())]
    for _ in range(3):
        h = lending.worker.push_pull(both, list(range(40)), [], [])
        [(handler, seen, keys)] = lending.server.get_batch(MS)
        assert keys == list(range(40))
        assert all(same(a, b) for a, b in zip(seen, both, strict=True))
        answer(lending, handler, h)
    assert counters(lending.worker)["loans"] == 60


def test_growth_and_change_of_kind(lending: Cluster) -> None:
    for n in [10, 5, 1000, 100_000, 3]:
        for x in (fserver.empty_shared(n).fill_(n), torch.full((n,), n + 1.0)):
            seen, handler, h = push(lending, x)
            assert same(seen, x)
            answer(lending, handler, h)


def test_one_key_again_before_the_answer(lending: Cluster) -> None:
    """Each is memory of its own, so none waits for the other."""
    first = [push(lending, fserver.empty_shared(8).fill_(i), 5) for i in range(5)]
    for i, (seen, _, _) in enumerate(first):
        assert bool((seen == i).all())
    for _, handler, h in reversed(first):
        answer(lending, handler, h)


def test_several_servers(cluster: MakeCluster) -> None:
    made = cluster(workers=1, servers=3, **CMA)
    x = fserver.empty_shared(1000).fill_(5)
    for _ in range(3):
        h = made.worker.push_pull([x], [0], [], [])
        for server in made.servers:
            [(handler, [seen], _)] = server.get_batch(MS)
            assert same(seen, x)
            server.respond([], handler)
        made.worker.wait(h, MS)
    assert counters(made.worker)["loans"] == 9


def test_echo(lending: Cluster) -> None:
    """A view can be the answer, and a shared tensor take it."""
    x, y = fserver.empty_shared(50_000).normal_(), fserver.empty_shared(50_000)
    h = lending.worker.push_pull([x], [0], [y], [0])
    [(handler, [seen], _)] = lending.server.get_batch(MS)
    lending.server.respond([seen], handler)
    lending.worker.wait(h, MS)
    assert same(x, y)


def test_registered_buffer_gets_the_bytes(lending: Cluster) -> None:
    own = torch.zeros(64)
    lending.server.register_recv_buffer(own, [0], [3])
    x = fserver.empty_shared(64)
    for i in range(3):
        seen, handler, h = push(lending, x.fill_(i), 3)
        assert seen.data_ptr() == own.data_ptr() and same(own, x)
        answer(lending, handler, h)
    with pytest.raises(fserver.ShapeError, match="exceeds its buffer of"):
        lending.worker.wait(lending.worker.push_pull([fserver.empty_shared(65)], [3], [], []), MS)


@pytest.mark.parametrize("options", [{"transport": "tcp"}, {"settings": {"FSERVER_LOANS": "0"}}])
def test_sent_where_it_cannot_be_lent(cluster: MakeCluster, options: Any) -> None:
    made = cluster(**options)
    x = fserver.empty_shared(3, 5000).normal_()
    for _ in range(3):
        seen, handler, h = push(made, x)
        assert same(seen, x)
        seen.add_(1)  # a receive buffer
        answer(made, handler, h)
    assert counters(made.worker)["loans"] == 0
    assert mappings()[1] == 0


# How long it lasts


def test_freed_while_the_server_looks(lending: Cluster) -> None:
    x = fserver.empty_shared(1000).fill_(7)
    seen, handler, h = push(lending, x)
    answer(lending, handler, h)
    own = mappings()[0]
    del x
    assert settled(lending) == (own - 1, 1)
    part = seen[5:]
    del seen
    lending.close()
    assert bool((part == 7).all())
    assert mappings()[1] == 1
    del part
    assert mappings()[1] == 0


def test_alive_until_the_answer(lending: Cluster) -> None:
    x = fserver.empty_shared(1000).fill_(7)
    seen, handler, h = push(lending, x)
    own = mappings()[0]
    del x
    gc.collect()
    assert mappings()[0] == own
    answer(lending, handler, h)
    assert bool((seen == 7).all())
    del seen
    assert settled(lending) == (own - 1, 0)


def test_nothing_grows(lending: Cluster) -> None:
    for i in range(200):
        seen, handler, h = push(lending, fserver.empty_shared(5000).fill_(i))
        answer(lending, handler, h)
    del seen
    before, files, live = settled(lending), descriptors(), _loader.load().live()
    memory = Path("/proc/self/statm").read_text().split()
    for i in range(10_000):
        seen, handler, h = push(lending, fserver.empty_shared(5000).fill_(i))
        assert seen[0] == i
        answer(lending, handler, h)
    del seen
    assert settled(lending) == before
    eventually(lambda: descriptors() <= files and _loader.load().live() == live)
    grown = int(Path("/proc/self/statm").read_text().split()[1]) - int(memory[1])
    assert grown * os.sysconf("SC_PAGESIZE") < 32 << 20


def test_more_than_a_server_takes(lending: Cluster) -> None:
    """1,024 pieces at a time are lent, the others sent."""
    if resource_limit() < 2500:
        pytest.skip("needs 2,500 descriptors (ulimit -n)")
    all_of_them = [fserver.empty_shared(4).fill_(i) for i in range(1030)]
    for _ in range(2):
        for i, x in enumerate(all_of_them):
            seen, handler, h = push(lending, x)
            assert bool((seen == i).all())
            answer(lending, handler, h)
    del seen
    assert mappings()[1] == 1024
    assert counters(lending.worker)["loans"] == 2 * 1024
    del all_of_them, x
    assert settled(lending)[1] == 0


def resource_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# Other processes


def serving(parent: Parent, port: int, transport: str) -> None:
    """Answers with what it sees, plus one; writes to it where it sees a 13."""
    server = fserver.Server(
        scheduler=f"127.0.0.1:{port}", host_scheduler=True, transport=transport, connect=False
    )
    parent.put("here")
    server.connect()
    while True:
        try:
            [(handler, [seen], _)] = server.get_batch()
        except fserver.Error as error:
            parent.put(type(error).__name__)
            parent.put((float(seen[0]), mappings()[1]))
            server.close()
            parent.put((float(seen[0]), mappings()[1]))
            del seen
            parent.put(mappings()[1])
            return
        if seen[0] == 13:
            seen.add_(1)
        if seen[0] == 14:
            parent.put("waits")
            parent.get()
        server.respond([seen + 1], handler)


def other_process(child: MakeChild, port: int, transport: str = "cma") -> tuple[Child, Any]:
    """A server in another process, and a worker here."""
    made = child(serving, port, transport, FSERVER_LOG="error")
    assert made.get() == "here"
    worker = fserver.Worker(
        scheduler=f"127.0.0.1:{port}", transport=transport, settings={"FSERVER_LOG": "error"}
    )
    return made, worker


def exchange(worker: fserver.Worker, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    worker.wait(worker.push_pull([x], [0], [y], [0]), MS)
    return y


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_two_processes(child: MakeChild, port: int, transport: str) -> None:
    made, worker = other_process(child, port, transport)
    for n in [1, 1000, 1 << 20]:
        x = fserver.empty_shared(n).normal_()
        for _ in range(3):
            assert same(exchange(worker, x), x + 1)
    assert counters(worker)["loans"] == (9 if transport == "cma" else 0)
    worker.close()
    assert made.get() == "PeerLostError"


def test_server_that_writes_to_it(child: MakeChild, port: int) -> None:
    """The write ends the server, and nothing else: no wrong bytes anywhere."""
    made, worker = other_process(child, port)
    x = fserver.empty_shared(1000).fill_(13)
    with pytest.raises(fserver.PeerLostError):
        exchange(worker, x)
    made.process.join(LIMIT)
    assert made.process.exitcode == -signal.SIGSEGV
    assert bool((x == 13).all())
    worker.close()


def test_server_dies(child: MakeChild, port: int) -> None:
    made, worker = other_process(child, port)
    x = fserver.empty_shared(1000).fill_(14)
    waits = in_thread(exchange, worker, x)
    assert made.get() == "waits"
    made.kill()
    with pytest.raises(fserver.PeerLostError):
        waits.result(LIMIT)
    x.fill_(3)
    worker.close()


def lend_and_die(parent: Parent, port: int) -> None:
    worker = fserver.Worker(scheduler=f"127.0.0.1:{port}", transport="cma")
    assert exchange(worker, fserver.empty_shared(1000).fill_(7))[0] == 8
    x = fserver.empty_shared(1 << 20).fill_(8)
    assert exchange(worker, x)[0] == 9
    parent.put("lent")
    parent.get()


def test_worker_dies(child: MakeChild, port: int) -> None:
    """What the server still looks at stays, whatever becomes of its owner."""
    server = child(serving, port, "cma", FSERVER_LOG="error")
    assert server.get() == "here"
    worker = child(lend_and_die, port, FSERVER_LOG="error")
    assert worker.get() == "lent"
    worker.kill()
    assert server.get() == "PeerLostError"
    assert server.get() == (8.0, 1)
    assert server.get() == (8.0, 1)
    assert server.get() == 0


def test_fork() -> None:
    """A child of fork shares the memory, makes none, and ends well."""
    x = fserver.empty_shared(10).fill_(1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            x.add_(1)
            try:
                fserver.empty_shared(10)
            except fserver.Error as error:
                status = 0 if "fork" in str(error) else 2
            del x
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bool((x == 2).all())


def test_no_engine_before_the_call(child: MakeChild) -> None:
    made = child(_without_node)
    assert made.get() == (False, True)
    assert made.get() == 5.0


def _without_node(parent: Parent) -> None:
    before = "fserver._C" in sys.modules
    x = fserver.empty_shared(3).fill_(5)
    parent.put((before, "fserver._C" in sys.modules))
    parent.put(float(x[2]))


def test_crash_leaves_no_file(child: MakeChild) -> None:
    def files() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if "fserver" in name}

    before = files()
    made = child(_hold)
    assert made.get() == "holds"
    assert files() <= before
    made.kill()
    made.process.join(LIMIT)
    eventually(lambda: files() <= before)


def _hold(parent: Parent) -> None:
    x = fserver.empty_shared(1 << 20).fill_(1)
    parent.put("holds")
    parent.get()
    del x
