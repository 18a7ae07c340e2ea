"""What a server refuses, and what a worker is told of a request that is not answered."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nodes import LIMIT, Cluster, eventually, in_thread

import fserver

MakeCluster = Callable[..., Cluster]


@pytest.fixture(params=["tcp", "cma"])
def way(request: pytest.FixtureRequest, cluster: MakeCluster) -> Callable[..., Cluster]:
    """Makes clusters that use one transport."""

    def make(**options: Any) -> Cluster:
        c = cluster(**options)
        if request.param == "cma" and c.worker.links()[0].transport.partition("/")[0] != "cma":
            pytest.skip(c.worker.links()[0].reason)
        return c

    def of(**options: Any) -> Cluster:
        settings = {"FSERVER_LOG": "error", "FSERVER_TRANSPORT": "auto"}
        if request.param == "tcp":
            settings["FSERVER_TRANSPORT"] = "tcp"
        return make(settings=settings, **options)

    return of


def push(c: Cluster, *sizes: int, fill: float = 1.0) -> int:
    """Pushes float32 tensors of so many bytes under keys 1, 2 and so on."""
    tensors = [torch.full((n // 4,), fill, dtype=torch.float32) for n in sizes]
    return c.worker.push_pull(tensors, range(1, len(tensors) + 1), [], [])


def answer(c: Cluster, h: int, *sizes: int, fill: float = 1.0) -> None:
    """Checks what has come of push, and answers it."""
    [(handler, tensors, keys)] = c.server.get_batch(LIMIT * 1e3)
    assert keys == list(range(1, len(sizes) + 1))
    assert [t.numel() * 4 for t in tensors] == list(sizes)
    assert all(bool((t == fill).all()) for t in tensors)
    c.server.respond([], handler)
    c.worker.wait(h, LIMIT * 1e3)


def test_a_refusal_leaves_nothing_behind(way: MakeCluster) -> None:
    c = way()
    c.server.register_recv_buffer(torch.zeros(4), [0], [2])
    answer(c, push(c, 4096, fill=1.0), 4096, fill=1.0)
    for fill in (2.0, 3.0):
        with pytest.raises(fserver.ShapeError, match=r"20 bytes for key 2 .* 16 bytes"):
            c.worker.wait(push(c, 8192, 20), LIMIT * 1e3)
        answer(c, push(c, 4096, fill=fill), 4096, fill=fill)
    answer(c, push(c, 8192, 16, fill=4.0), 8192, 16, fill=4.0)


def test_a_refusal_while_another_is_under_way(way: MakeCluster) -> None:
    c = way()
    c.server.register_recv_buffer(torch.zeros(8), [0, 0], [2, 3])
    answer(c, push(c, 4096, fill=1.0), 4096, fill=1.0)
    first = push(c, 4096, fill=2.0)
    refused = push(c, 8192, 20, 24)
    last = push(c, 4096, fill=3.0)
    answer(c, first, 4096, fill=2.0)
    with pytest.raises(fserver.ShapeError, match="20 bytes for key 2"):
        c.worker.wait(refused, LIMIT * 1e3)
    answer(c, last, 4096, fill=3.0)


def test_a_server_refuses_a_request(way: MakeCluster) -> None:
    c = way()
    for text, reason in [
        ("no room for expert 3", "no room for expert 3"),
        ("two\n  lines", "two lines"),
        ("", ""),
        ("ä" * 1000, "ä" * 250),
        ("\udc80", "\\udc80"),
        ("a\0b", "a?b"),
    ]:
        y = torch.zeros(4)
        h = c.worker.push_pull([torch.ones(4)], [1], [y], [1])
        [(handler, _, _)] = c.server.get_batch(LIMIT * 1e3)
        c.server.fail(handler, text)
        for _ in range(2):  # it is raised each time
            with pytest.raises(fserver.RefusedError, match="server 0 refused") as e:
                c.worker.wait(h, LIMIT * 1e3)
            assert (e.value.rank, e.value.reason) == (0, reason)
            assert reason in str(e.value)
        again = pickle.loads(pickle.dumps(e.value))
        assert (str(again), again.rank, again.reason) == (str(e.value), 0, reason)
        assert y.sum() == 0
        with pytest.raises(fserver.ShapeError, match=f"fail handler {handler}: no such request"):
            c.server.fail(handler, text)
        answer(c, push(c, 16), 16)  # its key is free


def test_arguments_of_fail(pair: Cluster) -> None:
    h = push(pair, 16)
    [(handler, _, _)] = pair.server.get_batch(LIMIT * 1e3)
    wrong: Any
    for wrong, says in [(7, "int"), (b"no", "bytes"), (None, "NoneType")]:
        with pytest.raises(fserver.ConfigError, match=f"fail: text is of type {says}, want a str"):
            pair.server.fail(handler, wrong)
    for wrong in ("0", -1, None):
        with pytest.raises(fserver.ConfigError, match="fail: handler"):
            pair.server.fail(wrong, "no")
    pair.server.fail(handler=handler, text="no")
    with pytest.raises(fserver.RefusedError):
        pair.worker.wait(h, LIMIT * 1e3)
    pair.worker.close()
    with pytest.raises(fserver.PeerLostError):
        pair.server.get_batch(LIMIT * 1e3)


def test_fail_for_a_worker_that_is_gone(pair: Cluster) -> None:
    push(pair, 16)
    [(handler, tensors, _)] = pair.server.get_batch(LIMIT * 1e3)
    del tensors
    pair.worker.close()
    with pytest.raises(fserver.PeerLostError):
        pair.server.get_batch(LIMIT * 1e3)
    with pytest.raises(fserver.PeerLostError, match="worker 0"):
        pair.server.fail(handler, "no")


def ended(worker: fserver.Worker, handler: int) -> bool:
    try:
        return bool(worker.fetch_trace(handler))
    except fserver.ShapeError:  # a server may still have it
        return False


def test_one_of_two_servers_refuses(cluster: MakeCluster) -> None:
    c = cluster(servers=2)
    pulls = [torch.zeros(4), torch.zeros(4)]
    h = c.worker.push_pull([torch.ones(4)], [1], pulls, [1])
    [(handler, _, _)] = c.servers[1].get_batch(LIMIT * 1e3)
    c.servers[1].fail(handler, "not I")
    with pytest.raises(fserver.RefusedError, match="server 1 refused the request: not I"):
        c.worker.wait(h, LIMIT * 1e3)
    eventually(lambda: ended(c.worker, h))  # server 0 has given it back
    assert c.servers[0].get_batch(0) == []
    h = c.worker.push_pull([torch.ones(4)], [1], pulls, [1])
    for i, server in enumerate(c.servers):
        [(handler, _, _)] = server.get_batch(LIMIT * 1e3)
        server.respond([torch.full((4,), float(i))], handler)
    c.worker.wait(h, LIMIT * 1e3)
    assert [int(y[0]) for y in pulls] == [0, 1]


def test_a_wait_says_what_it_waits_for(pair: Cluster) -> None:
    handlers = [pair.worker.push_pull([torch.ones(4)], [key], [], []) for key in (0, 1, 0, 2)]

    def says(h: int) -> str:
        with pytest.raises(fserver.TimeoutError) as e:
            pair.worker.wait(h, 50)
        text = re.fullmatch(
            rf"wait: handler {h} has not completed within .* ms: (.*); "
            "wait again, the handler stays valid",
            str(e.value),
        )
        assert text, str(e.value)
        return text[1]

    # Both are delivered, and key 0 is not answered.
    batches = [pair.server.get_batch(LIMIT * 1e3)[0] for _ in range(2)]
    pair.server.respond([], batches[1][0])
    pair.worker.wait(handlers[1], LIMIT * 1e3)
    assert says(handlers[0]) == "server 0 has not answered it (key 0)"
    unsent = "it is not sent to server 0 yet"
    assert says(handlers[2]) == f"{unsent} (key 0): it waits for handler 0"
    assert says(handlers[3]) == f"{unsent} (key 2): it waits for handler 2"
    pair.server.fail(batches[0][0], "not now")
    with pytest.raises(fserver.RefusedError, match="not now"):
        pair.worker.wait(handlers[0])
    for h in handlers[2:]:
        pair.server.respond([], pair.server.get_batch(LIMIT * 1e3)[0][0])
        pair.worker.wait(h, LIMIT * 1e3)


def test_a_blocked_wait_ends_with_the_refusal(pair: Cluster) -> None:
    h = push(pair, 16)
    waiting = in_thread(pair.worker.wait, h, LIMIT * 1e3)
    pair.server.fail(pair.server.get_batch(LIMIT * 1e3)[0][0], "no")
    with pytest.raises(fserver.RefusedError):
        waiting.result(LIMIT)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (("a", True), "include_server", "'a'"),
        ((True, None), "include_client", "None"),
        ((True, True, 5000), "instance_barrier", "5000"),
        ((True, True, 1.0), "instance_barrier", "1.0"),
    ],
)
def test_flags_of_a_barrier(cluster: MakeCluster, flags: Any, name: str, value: str) -> None:
    node = cluster().worker
    with pytest.raises(fserver.ConfigError, match=f"^barrier: {name} is {value}, want True or"):
        node.barrier(*flags)
    node.barrier(0, torch.tensor(True))
    node.barrier(include_server=False, include_client=1)  # type: ignore[arg-type]
