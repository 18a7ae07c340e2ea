"""push_pull, wait, get_batch and respond, with all nodes in this process."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nodes import LIMIT, Cluster, in_thread, together

import fserver

MakeCluster = Callable[..., Cluster]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def round_trip(pair: Cluster, x: torch.Tensor, key: int = 0) -> torch.Tensor:
    """Sends x there and back, through an answer of its own."""
    y = torch.empty_like(x)
    h = pair.worker.push_pull([x], [key], [y], [key])
    [(handler, [seen], keys)] = pair.server.get_batch(LIMIT * 1e3)
    assert keys == [key]
    assert (seen.shape, seen.dtype) == (x.shape, x.dtype)
    assert seen.device.type == "cpu" and seen.is_contiguous()
    pair.server.respond([seen.clone()], handler)
    pair.worker.wait(h, LIMIT * 1e3)
    return y


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def bytes_of(t: torch.Tensor) -> bytes:
    return t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def test_echo(pair: Cluster) -> None:
    x = torch.randn(7, 64)
    assert same(round_trip(pair, x), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(pair: Cluster, dtype: torch.dtype) -> None:
    x = torch.arange(24).reshape(2, 3, 4).to(dtype)
    assert same(round_trip(pair, x), x)


@pytest.mark.parametrize(
    "shape",
    [(), (0,), (0, 576), (3, 0, 2), (1,), (1,) * 10 + (3,), (2,) * 10, (1,) * 64],
    ids=str,
)
def test_shapes(pair: Cluster, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert same(round_trip(pair, x), x)


def test_sizes_that_change_under_one_key(pair: Cluster) -> None:
    for rows in (4, 1, 0, 4, 300, 2, 0, 5000, 5000, 1):
        x = torch.randn(rows, 33)
        assert same(round_trip(pair, x, key=5), x)


def test_shape_and_type_that_change_under_one_key(pair: Cluster) -> None:
    for x in (
        torch.randn(4, 8),
        torch.arange(9),
        torch.randn(2, 2, 2).half(),
        torch.tensor(1.5),
        torch.randn(4, 8),
    ):
        assert same(round_trip(pair, x, key=5), x)


def test_another_tensor_under_a_known_key(pair: Cluster) -> None:
    tensors = [torch.full((64, 64), float(i)) for i in range(8)]
    for x in tensors * 2:
        assert same(round_trip(pair, x, key=1), x)


def test_large(pair: Cluster) -> None:
    x = torch.randint(256, (24 << 20,), dtype=torch.uint8)
    assert same(round_trip(pair, x), x)


def test_views_with_an_offset(pair: Cluster) -> None:
    base = torch.arange(100.0)
    out = torch.zeros(100)
    h = pair.worker.push_pull([base[10:20]], [0], [out[50:60]], [0])
    [(handler, [seen], _)] = pair.server.get_batch()
    pair.server.respond([seen + 1], handler)
    pair.worker.wait(h)
    assert torch.equal(out[50:60], base[10:20] + 1)
    assert out.count_nonzero() == 10


@pytest.mark.parametrize("key", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_keys_of_64_bits(pair: Cluster, key: int) -> None:
    assert same(round_trip(pair, torch.ones(3), key), torch.ones(3))


def test_keys_of_any_sequence(pair: Cluster) -> None:
    x = [torch.full((2,), float(i)) for i in range(3)]
    y = [torch.empty(2) for _ in range(3)]
    for keys in (range(3), (0, 1, 2), [0, 1, 2], torch.arange(3), torch.arange(3).numpy()):
        h = pair.worker.push_pull(x, keys, y, keys)
        [(handler, seen, got)] = pair.server.get_batch()
        assert got == [0, 1, 2]
        pair.server.respond(seen, handler)
        pair.worker.wait(h)
        assert all(map(same, x, y))


def test_tensors_of_a_tuple_and_keywords(pair: Cluster) -> None:
    x, y = torch.ones(3), torch.empty(3)
    h = pair.worker.push_pull(
        push_tensors=(x,), push_keys=(1,), pull_tensors=(y,), pull_keys=(1,), need_event=False
    )
    [(handler, seen, _)] = pair.server.get_batch(timeout_ms=None)
    pair.server.respond(tensors=tuple(seen), handler=handler, need_event=True)
    pair.worker.wait(handler=h, timeout_ms=1000.5)
    assert same(x, y)


def test_lone_push_and_lone_pull(pair: Cluster) -> None:
    x = torch.ones(3)
    h = pair.worker.push_pull([x], [1], [], [])
    [(handler, [seen], keys)] = pair.server.get_batch()
    assert (keys, seen.tolist()) == ([1], [1, 1, 1])
    with pytest.raises(fserver.TimeoutError):  # a push completes with its answer
        pair.worker.wait(h, timeout_ms=20)
    pair.server.respond([], handler)
    pair.worker.wait(h)

    y = torch.empty(3)
    h = pair.worker.push_pull([], [], [y], [2])
    [(handler, seen, keys)] = pair.server.get_batch()
    assert (seen, keys) == ([], [])
    pair.server.respond([x], handler)
    pair.worker.wait(h)
    assert same(x, y)


def test_more_pulls_than_pushes(pair: Cluster) -> None:
    y = [torch.empty(i + 1) for i in range(40)]
    h = pair.worker.push_pull([torch.ones(1)], [0], y, range(40))
    [(handler, _, _)] = pair.server.get_batch()
    pair.server.respond([torch.full((i + 1,), float(i)) for i in range(40)], handler)
    pair.worker.wait(h)
    assert all(y[i].tolist() == [i] * (i + 1) for i in range(40))


def test_handlers_are_counted_from_0(pair: Cluster) -> None:
    x, y = [torch.ones(1), torch.ones(2)], [torch.empty(1)]
    firsts = []
    for _ in range(3):
        h = pair.worker.push_pull(x, [0, 1], y, [0])
        firsts.append(h)
        assert pair.worker.get_all_handlers(h) == [h, h + 1, h + 2]
        [(handler, _, _)] = pair.server.get_batch()
        pair.server.respond([torch.ones(1)], handler)
        pair.worker.wait(h + 2)  # each of them stands for the request
    assert firsts == [0, 3, 6]


def test_wait_twice(pair: Cluster) -> None:
    x = torch.ones(1)
    h = pair.worker.push_pull([x], [0], [], [])
    pair.server.respond([], pair.server.get_batch()[0][0])
    pair.worker.wait(h)
    pair.worker.wait(h, timeout_ms=0)


def test_wait_in_another_order(pair: Cluster) -> None:
    y = [torch.empty(1) for _ in range(10)]
    handlers = [pair.worker.push_pull([torch.tensor([i])], [i], [y[i]], [i]) for i in range(10)]
    for i in range(10):
        [(handler, [seen], [key])] = pair.server.get_batch()
        assert (key, seen.item()) == (i, i)
        pair.server.respond([torch.full((1,), float(i))], handler)
    for h in reversed(handlers):
        pair.worker.wait(h)
    assert [t.item() for t in y] == list(range(10))


def test_answers_in_another_order(pair: Cluster) -> None:
    y = [torch.empty(1), torch.empty(1)]
    handlers = [pair.worker.push_pull([torch.ones(1)], [i], [y[i]], [0]) for i in range(2)]
    requests = [pair.server.get_batch()[0][0] for _ in range(2)]
    pair.server.respond([torch.tensor([1.0])], requests[1])
    pair.worker.wait(handlers[1])
    with pytest.raises(fserver.TimeoutError):
        pair.worker.wait(handlers[0], timeout_ms=1)
    pair.server.respond([torch.tensor([0.0])], requests[0])
    pair.worker.wait(handlers[0])
    assert [t.item() for t in y] == [0, 1]


def test_a_key_is_not_overwritten_before_the_answer(pair: Cluster) -> None:
    handlers = [pair.worker.push_pull([torch.full((4,), float(i))], [0], [], []) for i in range(3)]
    for i in range(3):
        [(handler, [seen], _)] = pair.server.get_batch()
        assert pair.server.get_batch(timeout_ms=20) == []
        assert seen.tolist() == [i] * 4
        pair.server.respond([], handler)
    for h in handlers:
        pair.worker.wait(h)


def test_timeouts_count_from_the_request_and_leave_the_handler_valid(pair: Cluster) -> None:
    y = torch.empty(1)
    h = pair.worker.push_pull([torch.ones(1)], [0], [y], [0])
    for timeout_ms in (30, 30, 0):
        with pytest.raises(fserver.TimeoutError, match=rf"handler {h}.* {timeout_ms} ms") as e:
            pair.worker.wait(h, timeout_ms=timeout_ms)
        assert isinstance(e.value, TimeoutError) and isinstance(e.value, RuntimeError)
    pair.server.respond([torch.ones(1)], pair.server.get_batch()[0][0])
    pair.worker.wait(h)
    assert y.item() == 1


def test_get_batch_with_a_time_limit(pair: Cluster) -> None:
    assert pair.server.get_batch(timeout_ms=0) == []
    assert pair.server.get_batch(timeout_ms=120.5) == []


def test_trace(pair: Cluster) -> None:
    before = fserver.get_nanosecond()
    h = pair.worker.push_pull([torch.ones(1)], [0], [torch.empty(1)], [0])
    pair.server.respond([torch.ones(1)], pair.server.get_batch()[0][0])
    pair.worker.wait(h)
    stamps = pair.worker.fetch_trace(h)
    assert len(stamps) == 8
    times = [before, *stamps, fserver.get_nanosecond()]
    assert times == sorted(times)


def test_two_servers_get_the_push_and_answer_each_their_part(cluster: MakeCluster) -> None:
    c = cluster(servers=2)
    x = torch.randn(5, 3)
    pulls = [torch.empty(5, 3) for _ in range(4)]  # server-major, two of each
    for keys in ([0, 1], [0, 1, 2, 3]):
        h = c.worker.push_pull([x], [0], pulls, keys)
        for i, server in enumerate(c.servers):
            [(handler, [seen], _)] = server.get_batch()
            assert same(seen, x)
            server.respond([seen + 10 * i, seen + 10 * i + 1], handler)
        c.worker.wait(h)
        assert all(same(pulls[i * 2 + j], x + 10 * i + j) for i in range(2) for j in range(2))


def test_batches_of_those_that_ask(cluster: MakeCluster) -> None:
    """at_least: idle groups and those that are gone are not waited for."""
    c = cluster(workers=3)
    x, y = torch.ones(4), [torch.empty(4) for _ in c.workers]

    def ask(i: int) -> int:
        return c.workers[i].push_pull([x * i], [5], [y[i]], [6])

    def answer(least: int, ranks: list[int]) -> None:
        batch = c.server.get_batch(LIMIT * 1e3, at_least=least)
        assert [c.server.worker_of(handler) for handler, _, _ in batch] == ranks
        for rank, (handler, (seen,), keys) in zip(ranks, batch, strict=True):
            assert keys == [5] and seen.tolist() == [rank] * 4
            c.server.respond([seen + 10], handler)
            with pytest.raises(fserver.ShapeError, match=f"worker_of handler {handler}: no such"):
                c.server.worker_of(handler)

    h = ask(1)
    answer(1, [1])
    c.workers[1].wait(h, LIMIT * 1e3)
    assert y[1].tolist() == [11] * 4
    handles = {1: ask(1), 2: ask(2)}
    answer(2, [1, 2])
    handles[0] = ask(0)
    assert c.server.get_batch(20, at_least=2) == []
    assert c.server.get_batch(20) == []
    answer(1, [0])
    for i, h in handles.items():
        c.workers[i].wait(h, LIMIT * 1e3)

    c.workers[2].close()
    with pytest.raises(fserver.Error, match="worker"):
        c.server.get_batch(LIMIT * 1e3)
    with pytest.raises(fserver.Error, match="worker"):
        c.server.get_batch(LIMIT * 1e3, at_least=3)
    handles = {0: ask(0), 1: ask(1)}
    answer(2, [0, 1])
    for i, h in handles.items():
        c.workers[i].wait(h, LIMIT * 1e3)
    for bad in (0, -1, 2**40, 1.5, "all"):
        with pytest.raises(fserver.ConfigError, match="at_least"):
            c.server.get_batch(0, at_least=bad)
    with pytest.raises(fserver.ShapeError, match="at_least is 4, want 1 to 3"):
        c.server.get_batch(0, at_least=4)


def test_a_batch_has_one_request_of_each_worker_in_rank_order(cluster: MakeCluster) -> None:
    c = cluster(workers=3)
    y = [torch.empty(1) for _ in c.workers]
    for order in ((2, 0, 1), (1, 2, 0)):
        handlers = {}
        for rank in order:
            worker = c.workers[rank]
            assert (worker.rank, worker.workers, worker.servers) == (rank, 3, 1)
            assert c.server.get_batch(timeout_ms=0) == []
            handlers[rank] = worker.push_pull([torch.full((rank,), 7)], [rank], [y[rank]], [0])
        batch = c.server.get_batch()
        assert [keys for _, _, keys in batch] == [[0], [1], [2]]
        assert [len(tensors[0]) for _, tensors, _ in batch] == [0, 1, 2]
        for rank, (handler, _, _) in enumerate(batch):
            c.server.respond([torch.tensor([float(rank)])], handler)
        for rank in order:
            c.workers[rank].wait(handlers[rank])
    assert [t.item() for t in y] == [0, 1, 2]


def test_rails_do_not_meet(cluster: MakeCluster) -> None:
    c = cluster(workers=2, servers=1, group_size=2)
    assert [w.instance for w in c.workers] == [0, 1, 0, 1]
    assert [w.group for w in c.workers] == [0, 0, 1, 1]
    handlers = [w.push_pull([torch.tensor([w.rank])], [0], [], []) for w in c.workers]
    for server in c.servers:
        batch = server.get_batch()
        assert [t[0].item() for _, t, _ in batch] == [server.instance, server.instance + 2]
        for handler, _, _ in batch:
            server.respond([], handler)
    for worker, h in zip(c.workers, handlers, strict=True):
        worker.wait(h)


def test_respond_vec_gives_each_its_own_rows(cluster: MakeCluster) -> None:
    c = cluster(workers=2)
    rows = [3, 2]
    x = [torch.randn(n, 4) for n in rows]
    y = [torch.empty(n, 4) for n in rows]

    def ask() -> list[int]:
        return [w.push_pull([x[i]], [0], [y[i].zero_()], [0]) for i, w in enumerate(c.workers)]

    for vec_of in (lambda tensors: tensors, lambda tensors: tensors[0]):
        handlers = ask()
        batch = c.server.get_batch()
        vec = [vec_of(tensors) for _, tensors, _ in batch]
        c.server.respond_vec(torch.cat(x) * 2, vec, [handler for handler, _, _ in batch])
        for w, h in zip(c.workers, handlers, strict=True):
            w.wait(h)
        assert same(y[0], x[0] * 2) and same(y[1], x[1] * 2)

    handlers = ask()  # too small for both: everybody gets the first rows, as with StepMesh
    batch = c.server.get_batch()
    whole = torch.randn(3, 4)
    c.server.respond_vec(whole, [t for _, t, _ in batch], [handler for handler, _, _ in batch])
    for w, h in zip(c.workers, handlers, strict=True):
        w.wait(h)
    assert same(y[0], whole) and same(y[1], whole[:2])


def test_respond_vec_with_zero_rows(cluster: MakeCluster) -> None:
    c = cluster(workers=2)
    x = [torch.empty(0, 4), torch.ones(2, 4)]
    y = [torch.empty(0, 4), torch.empty(2, 4)]
    handlers = [w.push_pull([x[i]], [0], [y[i]], [0]) for i, w in enumerate(c.workers)]
    batch = c.server.get_batch()
    c.server.respond_vec(torch.ones(2, 4), [t for _, t, _ in batch], [h for h, _, _ in batch])
    for w, h in zip(c.workers, handlers, strict=True):
        w.wait(h)
    assert same(y[1], torch.ones(2, 4))


def test_registered_receive_buffer(cluster: MakeCluster) -> None:
    c = cluster(workers=2)
    buffer = torch.zeros(4, 8)
    c.server.register_recv_buffer(buffer, [0, 1, 1, 0], [5, 5, 6, 6])
    handlers = []
    for rank, worker in enumerate(c.workers):
        x = [torch.full((8,), 10.0 * rank + key) for key in (5, 6)]
        handlers.append(worker.push_pull(x, [5, 6], [], []))
    batch = c.server.get_batch()
    for handler, tensors, _ in batch:
        assert all(
            buffer.data_ptr() <= t.data_ptr() < buffer.data_ptr() + buffer.nbytes for t in tensors
        )
        c.server.respond([], handler)
    assert buffer[:, 0].tolist() == [5, 15, 16, 6]
    for worker, h in zip(c.workers, handlers, strict=True):
        worker.wait(h)
    # Less than the slice, and none: views of the start of the slice.
    handlers = [w.push_pull([torch.ones(3), torch.ones(0)], [5, 6], [], []) for w in c.workers]
    batch = c.server.get_batch()
    assert [[t.shape[0] for t in tensors] for _, tensors, _ in batch] == [[3, 0], [3, 0]]
    assert batch[1][1][0].data_ptr() == buffer[1].data_ptr()
    for handler, _, _ in batch:
        c.server.respond([], handler)


def test_more_than_a_registered_buffer_takes(cluster: MakeCluster) -> None:
    c = cluster()
    c.server.register_recv_buffer(torch.zeros(4), [0], [5])
    h = c.worker.push_pull([torch.ones(5)], [5], [], [])
    with pytest.raises(fserver.Error, match=r"(?s)20 bytes.*key 5.*16"):
        c.worker.wait(h)
    h = c.worker.push_pull([torch.ones(4)], [5], [], [])  # the others go on
    c.server.respond([], c.server.get_batch()[0][0])
    c.worker.wait(h)


def test_received_tensors_share_memory_from_batch_to_batch(pair: Cluster) -> None:
    seen = []
    for i in range(2):
        h = pair.worker.push_pull([torch.full((4,), float(i))], [0], [], [])
        [(handler, [t], _)] = pair.server.get_batch()
        seen.append(t)
        pair.server.respond([], handler)
        pair.worker.wait(h)
    assert seen[0].data_ptr() == seen[1].data_ptr()
    assert seen[0].tolist() == [1] * 4


@pytest.mark.parametrize("instance_barrier", [True, False])
def test_barrier(cluster: MakeCluster, instance_barrier: bool) -> None:
    c = cluster(workers=2, servers=1)
    for servers, workers in ((True, True), (False, True), (True, False), (True, True)):
        nodes: list[Any] = c.servers * servers + c.workers * workers
        waiting = [
            in_thread(
                lambda n, s=servers, w=workers: n.barrier(
                    include_server=s, include_client=w, instance_barrier=instance_barrier
                ),
                node,
            )
            for node in nodes[1:]
        ]
        for future in waiting:
            with pytest.raises(concurrent.futures.TimeoutError):  # not the built-in one in 3.10
                future.result(0.05)
        nodes[0].barrier(servers, workers, instance_barrier)
        for future in waiting:
            future.result(LIMIT)


def test_group_barrier_is_called_once_per_group(cluster: MakeCluster) -> None:
    c = cluster(workers=2, servers=1, group_size=2)
    nodes = [c.workers[1], c.workers[2], c.servers[0]]
    together([lambda n=n: n.barrier(True, True, instance_barrier=False) for n in nodes])


def test_barrier_with_a_time_limit(pair: Cluster) -> None:
    with pytest.raises(fserver.TimeoutError):
        pair.worker.barrier(True, True, timeout_ms=50)


def test_stop_together(cluster: MakeCluster) -> None:
    c = cluster(workers=2, servers=2)
    together([node.stop for node in c.nodes])
    for node in c.nodes:
        assert node.closed
        node.stop()
        node.close()
    with pytest.raises(fserver.ClosedError, match="push_pull: the node is closed"):
        c.worker.push_pull([torch.ones(1)], [0], [], [])


def test_get_batch_ends_when_the_workers_have_stopped(pair: Cluster) -> None:
    batch = in_thread(pair.server.get_batch)
    stopped = in_thread(pair.worker.stop)
    with pytest.raises(fserver.ClosedError, match="left"):
        batch.result(LIMIT)
    together([pair.server.stop, pair.scheduler.stop])
    stopped.result(LIMIT)


def test_close_releases_blocked_calls(pair: Cluster) -> None:
    h = pair.worker.push_pull([torch.ones(1)], [0], [torch.empty(1)], [0])
    waiting = in_thread(lambda: pair.worker.wait(h, LIMIT * 1e3))
    barrier = in_thread(lambda: pair.worker.barrier(True, True))
    pair.worker.close()
    for future in (waiting, barrier):
        with pytest.raises(fserver.ClosedError):
            future.result(LIMIT)


def test_server_with_a_scheduler_and_context_managers() -> None:
    server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, connect=False)
    x, y = torch.ones(3), torch.empty(3)

    def work() -> None:
        with fserver.Worker(scheduler=server.scheduler) as worker:
            worker.wait(worker.push_pull([x], [0], [y], [0]))

    done = in_thread(work)
    with server:
        server.connect()
        [(handler, tensors, _)] = server.get_batch()
        server.respond(tensors, handler)
    done.result(LIMIT)
    assert same(x, y)
    assert server.closed


@pytest.mark.parametrize(("on", "off"), [(" 1\t", " "), ("On", "off"), ("1", "0")])
def test_a_scheduler_in_the_server_by_environment(
    monkeypatch: pytest.MonkeyPatch, on: str, off: str
) -> None:
    monkeypatch.setenv("FSERVER_HOST_SCHEDULER", on)
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", "0")
    server = fserver.Server.from_env(connect=False)
    monkeypatch.delenv("FSERVER_HOST_SCHEDULER")
    worker = fserver.Worker(scheduler=server.scheduler, connect=False)
    together([server.connect, worker.connect])
    together([server.stop, worker.stop])
    monkeypatch.setenv("FSERVER_HOST_SCHEDULER", off)  # a blank is as good as none
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", "7000")
    server = fserver.Server.from_env(connect=False)
    with pytest.raises(fserver.ClosedError, match="hosts no scheduler"):
        _ = server.scheduler
    server.close()
    monkeypatch.setenv("FSERVER_HOST_SCHEDULER", "yes")
    with pytest.raises(fserver.ConfigError, match="SCHEDULER='yes': want 0, 1, off or on"):
        fserver.Server.from_env(connect=False)


def test_a_failed_block_does_not_wait_for_the_others(pair: Cluster) -> None:
    with pytest.raises(KeyError), pair.worker:
        raise KeyError
    assert pair.worker.closed


def test_two_clusters_in_one_process(cluster: MakeCluster) -> None:
    a, b = cluster(), cluster()
    ha = a.worker.push_pull([torch.zeros(1)], [0], [], [])
    hb = b.worker.push_pull([torch.ones(1)], [0], [], [])
    assert ha == 0 == hb and ha != hb  # handles of two workers: asyncio.gather merges equal ones
    for c, h, value in ((b, hb, 1), (a, ha, 0)):
        [(handler, [seen], _)] = c.server.get_batch()
        assert seen.item() == value
        c.server.respond([], handler)
        c.worker.wait(h)


def test_with_a_secret(cluster: MakeCluster) -> None:
    c = cluster(secret="one that all nodes know")
    assert same(round_trip(c, torch.ones(3)), torch.ones(3))


def test_as_many_at_once_as_may_be(pair: Cluster) -> None:
    """One more is refused as a limit, which ends when one of them does."""
    x = torch.ones(1)
    handlers = [pair.worker.push_pull([x], [0], [], []) for _ in range(4096)]
    with pytest.raises(fserver.LimitError, match=r"4096 push_pulls .*in progress.*wait") as raised:
        pair.worker.push_pull([x], [0], [], [])
    assert not isinstance(raised.value, ValueError)  # nothing is wrong with the arguments
    [(handler, _, _)] = pair.server.get_batch(LIMIT * 1e3)
    pair.server.respond([], handler)
    pair.worker.wait(handlers[0], LIMIT * 1e3)
    pair.worker.push_pull([x], [0], [], [])


def test_over_tls(cluster: MakeCluster) -> None:
    c = cluster(secret="one that all nodes know", transport="tcp", tls=True)
    x = torch.arange(1 << 20, dtype=torch.float32)
    assert same(round_trip(c, x), x)
    with pytest.raises(fserver.ConfigError, match="FSERVER_TLS=on"):
        fserver.Worker(scheduler="127.0.0.1:1", tls=True)


def test_describe_and_repr(pair: Cluster) -> None:
    assert isinstance(pair.worker.describe(), dict)
    [link] = pair.worker.links()
    assert repr(pair.worker) == f"<fserver.Worker 0: connected to server 0 by {link.transport}>"
    pair.worker.close()
    assert repr(pair.worker) == "<fserver.Worker 0: closed>"


@pytest.mark.parametrize("progress", ["caller", "thread"])
@pytest.mark.parametrize(
    ("settings", "transport"),
    [
        ({"FSERVER_TRANSPORT": "tcp"}, "tcp"),
        ({"BYTEPS_ENABLE_IPC": 0}, "tcp"),
        ({"FSERVER_CMA": "staged"}, "cma/staged"),
        ({}, "cma"),
    ],
)
def test_links(
    cluster: Callable[..., Cluster], settings: dict[str, Any], transport: str, progress: str
) -> None:
    c = cluster(settings={**settings, "FSERVER_PROGRESS": progress})
    [link] = c.worker.links()
    [back] = c.server.links()
    assert (link.role, link.rank, back.role, back.rank) == ("server", 0, "worker", 0)
    assert link.transport == back.transport
    if link.transport != transport:
        assert transport == "cma" and link.reason  # what the kernel said
    for rows in (1, 0, 700_000, 3):
        x = torch.randn(rows, 3)
        assert same(round_trip(c, x), x)


def test_inference_mode(pair: Cluster) -> None:
    with torch.inference_mode():
        x = torch.randn(3, 3)
        assert same(round_trip(pair, x), x)
    assert same(round_trip(pair, x), x)


def test_autograd_sees_that_a_pull_writes(pair: Cluster) -> None:
    w = torch.ones(2, requires_grad=True)
    y = torch.ones(2)
    loss = (w * y).sum()
    h = pair.worker.push_pull([w], [0], [y], [0])
    [(handler, [seen], _)] = pair.server.get_batch()
    pair.server.respond([seen], handler)
    pair.worker.wait(h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
