"""Stream channels of CPU tensors: the same calls as on GPUs, carried by the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from channels import MS, WAYS, MakeCluster, both, freed, patient
from nodes import LIMIT, Child, Cluster, Parent, eventually, in_thread, open_cluster, together

import fserver


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["kernel", "copy", "host"])
def test_exchange(cluster: MakeCluster, way: str, mode: str) -> None:
    pair = cluster(transport=way)
    x, y = torch.randn(7, 64), torch.empty(7, 128)
    w, s = both(pair, [x], [y], mode=mode)
    assert (w.path, s.path, w.mode) == ("host", "host", mode)
    for turn in range(5):
        x.fill_(turn)
        w.send()
        x.fill_(-1)  # what was sent has been read
        s.recv()
        [[seen]] = s.tensors
        assert bool((seen == turn).all()) and s.rows[0].tolist() == [7]
        s.outgoing[0].copy_(torch.cat([seen, seen * 2], 1))
        s.send()
        s.outgoing[0].fill_(-1)
        w.recv()
        assert bool((y[:, :64] == turn).all() and (y[:, 64:] == 2 * turn).all())
    w.check()
    s.check()


@pytest.mark.parametrize("way", WAYS)
def test_shapes_and_dtypes(cluster: MakeCluster, way: str) -> None:
    pair = cluster(transport=way)
    push = [
        torch.randn(3, 4),
        torch.arange(5),
        torch.tensor(7.0),
        torch.zeros(0, 8),
        torch.randn(300, 1000).to(torch.bfloat16),
        torch.tensor([True, False]),
    ]
    pull = [torch.empty_like(t) for t in push]
    w, s = both(pair, push, pull)
    w.send()
    s.recv()
    for mine, seen, out in zip(push, s.tensors[0], s.outgoing, strict=True):
        assert torch.equal(mine, seen)
        out.copy_(seen)
    s.send()
    w.recv()
    assert all(torch.equal(a, b) for a, b in zip(push, pull, strict=True))
    assert w.rows[0].tolist() == s.rows[0].tolist() == [3, 5, 1, 0, 300, 2]


def test_many_to_many(cluster: MakeCluster) -> None:
    """Two workers, three servers: tensors to all, answers of each to each."""
    c = cluster(workers=2, servers=3)
    xs = [torch.empty(4) for _ in c.workers]
    ys = [[torch.empty(2) for _ in c.servers] for _ in c.workers]
    zs = [[torch.empty(2) for _ in c.workers] for _ in c.servers]
    channels = together(
        [lambda i=i: c.workers[i].channel([xs[i]], [1], ys[i], [2]) for i in range(2)]
        + [lambda j=j: c.servers[j].channel([1], zs[j], [2]) for j in range(3)]
    )
    workers, servers = channels[:2], channels[2:]
    for turn in range(3):
        for i, w in enumerate(workers):
            xs[i].fill_(10 * turn + i)
            w.send()
        for j, s in enumerate(servers):
            s.recv()
            for i in range(2):
                assert s.tensors[i][0].tolist() == [10 * turn + i] * 4
                zs[j][i].fill_(100 * j + 10 * i + turn)
            s.send()
        for i, w in enumerate(workers):
            w.recv()
            assert [y[0].item() for y in ys[i]] == [100 * j + 10 * i + turn for j in range(3)]


def test_rows(pair: Cluster) -> None:
    x, y = torch.empty(16, 3), torch.full((16,), -1.0)
    w, s = both(pair, [x], [y])
    for there, back in [(16, 16), (3, 9), (0, 1), (16, 0)]:
        x.fill_(there)
        y.fill_(-1)
        w.send([there])
        s.recv()
        assert s.rows[0].tolist() == [there]
        assert bool((s.tensors[0][0][:there] == there).all())
        s.outgoing[0].fill_(back)
        s.send(rows=[back])
        w.recv()
        assert w.rows[0].tolist() == [back] and bool((y[:back] == back).all())
    for rows, text in [
        ([17], "rows[0] is 17, but the tensor has 16 rows"),
        ([1, 2], "2 numbers for 1"),
    ]:
        with pytest.raises(fserver.ShapeError, match=text.replace("[", r"\[")):
            w.send(rows)
    w.send()  # a refused call was not a turn


def test_one_way(pair: Cluster) -> None:
    x = torch.empty(1000)
    w, s = both(pair, [x], [])

    def send() -> None:
        for i in range(50):
            x.fill_(i)
            w.send()

    sender = in_thread(send)
    for i in range(50):
        s.recv()
        assert bool((s.tensors[0][0] == i).all())
    sender.result(LIMIT)
    y, z = torch.empty(9), torch.empty(9)
    w2, s2 = both(pair, [], [y], [z])
    for i in range(20):
        z.fill_(i)
        sent = in_thread(s2.send)
        w2.recv()
        sent.result(LIMIT)
        assert bool((y == i).all())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to", ["worker", "server"])
@pytest.mark.parametrize("operators", [False, True])
def test_one_way_with_both_calls(cluster: MakeCluster, way: str, to: str, operators: bool) -> None:
    """A step need not know which of its tensors there are: with nothing to send or to receive, a
    call does nothing."""
    out, into = torch.empty(9), torch.empty(9)
    pair = cluster(transport=way)
    w, s = both(pair, [out], []) if to == "server" else both(pair, [], [into], [out])
    [seen] = w.incoming + s.incoming

    def send(ch: Any) -> None:
        if operators:
            torch.ops.fserver.send(ch.number, ch.outgoing, ch.token)
        else:
            ch.send()

    def recv(ch: Any) -> None:
        if operators:
            torch.ops.fserver.recv(ch.number, ch.incoming, ch.token)
        else:
            ch.recv()

    def worker() -> None:
        for i in range(5):
            if to == "server":
                out.fill_(i)
            send(w)
            recv(w)
            assert to == "server" or seen.eq(i).all()

    def server() -> None:
        for i in range(5):
            recv(s)
            if to == "worker":
                out.fill_(i)
            send(s)
            assert to == "worker" or seen.eq(i).all()

    together([worker, server])
    sender, receiver = (w, s) if to == "server" else (s, w)
    with pytest.raises(fserver.ShapeError, match="rows has 1 numbers for 0 tensors"):
        receiver.send([1])
    receiver.close()
    sender.recv()
    sender.close()
    for call in (sender.recv, receiver.send):
        with pytest.raises(fserver.ClosedError):
            call()


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
def test_inference_mode(pair: Cluster, operators: bool, theirs: bool) -> None:
    """A channel that was opened in it is used outside of it, also with tensors that it has made."""
    with torch.inference_mode(theirs):
        x, y, z, got = (torch.ones(4) for _ in range(4))
    options = {"timeout_ms": MS, "name": "it"}

    def worker() -> Any:
        with torch.inference_mode():
            return pair.worker.channel([x], [0], [y], [0], **options)

    def server() -> Any:
        with torch.inference_mode():
            push = [got] if theirs else None
            return pair.server.channel([0], [z], [0], push=push, **options)

    w, s = together([worker, server])
    own = [w.token, s.token, *w.rows, *s.rows, *([] if theirs else s.incoming)]
    assert not any(t.is_inference() for t in own)
    for i in range(3):
        with torch.inference_mode():
            x.fill_(i)
        if operators:  # as compilers call them, with copies
            torch.ops.fserver.send(w.number, [x.clone()], w.token)
            back = got if theirs else torch.empty(4)
            torch.ops.fserver.recv(s.number, [back], s.token)
            with torch.inference_mode():
                torch.ops.fserver.send(s.number, [back + 1], s.token)
                back = torch.empty(4)
            torch.ops.fserver.recv(w.number, [back], w.token)
            assert back.eq(i + 1).all()
        else:
            w.send([3])
            s.recv()
            with torch.inference_mode():
                torch.add(s.incoming[0], 1, out=z)
            s.send([2])
            w.recv()
            assert (w.rows[0].item(), s.rows[0].item()) == (2, 3)
        assert y[:2].eq(i + 1).all()


def test_no_gradients(pair: Cluster) -> None:
    """Autograd sees nothing of what a channel copies, so nothing grows with the messages."""
    x, z = (torch.ones(4, requires_grad=True) for _ in range(2))
    y, got = torch.empty(4), torch.ones(4, requires_grad=True) * 1
    w, s = together(
        [
            lambda: pair.worker.channel([x], [0], [y], [0], timeout_ms=MS),
            lambda: pair.server.channel([0], [z], [0], push=[got], timeout_ms=MS),
        ]
    )
    before = got.grad_fn
    for i in range(4):
        if i % 2:
            w.send()
            s.recv()
            s.send()
        else:
            torch.ops.fserver.send(w.number, [x * 1], w.token)
            torch.ops.fserver.recv(s.number, [got], s.token)
            torch.ops.fserver.send(s.number, [z * 1], s.token)
        w.recv()
    ours = [*w._side._staged, *s._side._staged[0], y, *w.rows, *s.rows]
    assert not any(t.requires_grad or t.grad_fn for t in ours)
    assert got.grad_fn is before


def test_beside_push_pull(pair: Cluster) -> None:
    """The messages of a channel are in no batch, and requests in no channel."""
    x, y = torch.ones(4), torch.empty(4)
    w, s = both(pair, [x], [y])
    w.send()
    p, q = torch.full((4,), 2.0), torch.empty(4)
    h = pair.worker.push_pull([p], [7], [q], [7])
    [(handler, [seen], keys)] = pair.server.get_batch(MS)
    assert keys == [7] and seen.tolist() == [2] * 4
    pair.server.respond([seen], handler)
    pair.worker.wait(h, MS)
    assert pair.server.get_batch(50) == []
    s.recv()
    assert s.tensors[0][0].tolist() == [1] * 4
    s.send()
    w.recv()


def test_two_micro_batches(pair: Cluster) -> None:
    """Two channels, each in a thread of its own on both sides."""

    def run(number: int) -> None:
        x, y = torch.empty(64), torch.empty(64)
        z = torch.empty(64)
        w, s = together(
            [
                lambda: pair.worker.channel([x], [number], [y], [number], name=f"mb {number}"),
                lambda: pair.server.channel([number], [z], [number], name=f"mb {number}"),
            ]
        )

        def serve() -> None:
            for _ in range(100):
                s.recv()
                torch.mul(s.tensors[0][0], 2, out=z)
                s.send()

        served = in_thread(serve)
        for i in range(100):
            x.fill_(1000 * number + i)
            w.send()
            w.recv()
            assert bool((y == 2 * (1000 * number + i)).all())
        served.result(LIMIT)
        together([w.close, s.close])

    together([lambda: run(0), lambda: run(1)])


def test_again_and_again(nothing_left: None) -> None:
    """A name and its keys can be used again, and nothing is left of what is closed."""
    pair = open_cluster()
    for i in range(20):
        x, y = torch.full((8,), float(i)), torch.empty(8)
        w, s = both(pair, [x], [y], name="again")
        w.send()
        s.recv()
        s.outgoing[0].copy_(s.tensors[0][0])
        s.send()
        w.recv()
        assert y.tolist() == [i] * 8
        with w, s:
            pass
        assert w.closed and "closed" in repr(w)
        w.close()
    pair.close()
    del pair, w, s


@pytest.mark.parametrize("mode", ["kernel", "host"])
def test_reshaped_meanwhile(pair: Cluster, mode: str) -> None:
    """Its memory is the same: less of it would be sent, or it would in another order."""
    x, y = torch.arange(16.0).reshape(8, 2), torch.zeros(2, 2)
    w, s = both(pair, [x], [y], mode=mode)
    x.resize_(2, 2)
    with pytest.raises(fserver.ConfigError, match=r"^send: .* \[8, 2\] when .* \[2, 2\] with str"):
        w.send()
    x.resize_(8, 2)
    w.send()
    s.recv()
    s.send()
    for change in (lambda: y.t_(), lambda: setattr(y, "data", y.view(torch.int32))):
        change()
        with pytest.raises(fserver.ConfigError, match=r"^recv: .* and is now torch"):
            w.recv()
        if y.dtype == torch.float32:
            y.t_()
    y.data = y.view(torch.float32)
    w.recv()
    assert torch.equal(s.tensors[0][0], x)


@pytest.mark.parametrize("way", ["push", "pull"])
def test_freed_meanwhile(pair: Cluster, way: str) -> None:
    x, y = torch.ones(4), torch.zeros(4)
    w, _ = both(pair, [x], [y])
    freed(x if way == "push" else y)
    with pytest.raises(fserver.ConfigError, match="lost its memory"):
        w.send()


def test_bad_rows(pair: Cluster) -> None:
    w, s = both(pair, [torch.ones(8, 2)], [])
    for rows, kind, text in (
        (3, fserver.ConfigError, "rows is 3, want a list of ints"),
        ([1.5], fserver.ConfigError, r"rows\[0\] is 1.5, want an int from 0 to 8"),
        (["1"], fserver.ConfigError, r"rows\[0\] is '1'"),
        ([None], fserver.ConfigError, r"rows\[0\] is None"),
        ([True], fserver.ConfigError, r"rows\[0\] is True"),
        ([torch.tensor(1.5)], fserver.ConfigError, r"rows\[0\] is tensor"),
        ([-1], fserver.ShapeError, r"rows\[0\] is -1, but the tensor has 8 rows"),
        ([1, 2], fserver.ShapeError, "rows has 2 numbers for 1 tensors"),
    ):
        with pytest.raises(kind, match=f"^send: {text}"):
            w.send(rows)
    w.send(torch.tensor([3]))
    s.recv()
    assert s.rows[0].tolist() == [3]


def test_one_way_without_room(pair: Cluster) -> None:
    """The error is of the call that has waited, which can go on."""
    w, s = both(pair, [torch.ones(1)], [])
    w.send()
    text = r"^send: the peers did not .* call send\(\)"
    with patient(w, 200), pytest.raises(fserver.TimeoutError, match=text):
        w.send()
    s.recv()
    w.send()
    s.recv()
    text = r"^recv: no message came .* call recv\(\)"
    with patient(s, 200), pytest.raises(fserver.TimeoutError, match=text):
        s.recv()


def test_time_out(pair: Cluster) -> None:
    w, s = both(pair, [torch.ones(1)], [torch.empty(1)])
    text = "within timeout_ms=300"
    with patient(s, 300), pytest.raises(fserver.TimeoutError, match=text):
        s.recv()
    w.send()
    with patient(w, 300), pytest.raises(fserver.TimeoutError, match=text):
        w.recv()
    s.recv()
    s.send()
    w.recv()  # nothing was lost


@pytest.mark.parametrize("way", ["worker", "server", "one way"])
def test_two_threads(pair: Cluster, way: str) -> None:
    """One is in a call. The other is refused, and may close the channel."""
    w, s = both(pair, [torch.ones(2)], [] if way == "one way" else [torch.zeros(2)])
    if way != "server":
        w.send()
    one, call = {
        "worker": (w, w.recv),
        "server": (s, s.recv),
        "one way": (w, w.send),  # which waits until the first message is received
    }[way]
    waiting = in_thread(call)
    eventually(lambda: in_a_call(one))
    with pytest.raises(fserver.ConfigError, match="another thread is in a call of this channel"):
        call()
    one.close()
    with pytest.raises(fserver.ClosedError):
        waiting.result(1)  # close() has waited for it
    w.close()
    s.close()


def in_a_call(channel: fserver.Channel) -> bool:
    """Whether another thread is in a call of a channel of CPU tensors."""
    return "unlocked" not in repr(channel._side._caller.busy)  # to take it would be a call


def test_closed(pair: Cluster) -> None:
    w, s = both(pair, [torch.ones(1)], [torch.empty(1)])
    w.send()
    waiting = in_thread(w.recv)
    s.close()
    with pytest.raises(fserver.ClosedError, match="peer 0 has closed its side"):
        waiting.result(LIMIT)
    with pytest.raises(fserver.ClosedError, match="closed its side"):
        w.check()
    for call in (s.send, s.recv, s.check):
        with pytest.raises(fserver.ClosedError):
            call()
    w.close()
    with pytest.raises(fserver.ClosedError):
        w.send()
    pair.server.close()
    with pytest.raises(fserver.Error):
        pair.worker.channel([torch.ones(1)], [9], [], [], timeout_ms=1000)


def test_closed_by_one_of_two_servers(cluster: MakeCluster) -> None:
    """A server that has answered and closes its side ends no wait for the other one."""
    c = cluster(servers=2)
    y = [torch.zeros(1) for _ in range(2)]
    w, *s = together(
        [lambda: c.worker.channel([torch.ones(1)], [1], y, [2], timeout_ms=MS)]
        + [partial(n.channel, [1], [torch.ones(1)], [2], timeout_ms=MS) for n in c.servers]
    )
    w.send()
    for side in s:
        side.recv()
    waiting = in_thread(w.recv)
    s[0].send()
    closing = in_thread(s[0].close)
    with pytest.raises(TimeoutError):
        waiting.result(0.7)
    s[1].send()
    waiting.result(LIMIT)
    assert [t.item() for t in y] == [1, 1]
    with pytest.raises(fserver.ClosedError, match="peer 0 has closed its side"):
        w.send()
    w.close()
    closing.result(LIMIT)


def test_closed_by_one_of_two_workers(cluster: MakeCluster) -> None:
    """A worker that has sent its last message and closes its side ends no wait for the other."""
    c = cluster(workers=2)
    s, *w = together(
        [lambda: c.server.channel([1], [], [], timeout_ms=MS)]
        + [partial(n.channel, [torch.ones(1)], [1], [], [], timeout_ms=MS) for n in c.workers]
    )
    waiting = in_thread(s.recv)
    w[0].send()
    closing = in_thread(w[0].close)
    with pytest.raises(TimeoutError):
        waiting.result(0.7)
    w[1].send()
    waiting.result(LIMIT)
    w[1].send()
    with pytest.raises(fserver.ClosedError, match="peer 0 has closed its side"):
        s.recv()
    s.close()
    closing.result(LIMIT)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("first", ["server", "worker"])
def test_what_was_not_answered_holds_no_key(
    cluster: MakeCluster, way: str, taken: bool, first: str
) -> None:
    """A message that a closed channel has not answered, to one of two servers: another channel
    with the same keys works, and push_pulls do."""
    c = cluster(servers=2, transport=way)
    x, y = torch.ones(100), [torch.zeros(100) for _ in range(2)]
    for turn in range(1, 4):
        w, *s = together(
            [lambda: c.worker.channel([x], [1], y, [2], timeout_ms=MS)]
            + [partial(n.channel, [1], [torch.empty(100)], [2], timeout_ms=MS) for n in c.servers]
        )
        for i in range(1, 3):
            x.fill_(10 * turn + i)
            w.send()
            for k, side in enumerate(s):
                if k or i == 1 or taken:
                    side.recv()
                if k or i == 1:
                    torch.add(side.tensors[0][0], k, out=side.outgoing[0])
                    side.send()
            if i == 1:
                w.recv()
                assert [t.tolist() for t in y] == [[10 * turn + 1 + k] * 100 for k in range(2)]
        for side in (*s, w) if first == "server" else (w, *s):
            side.close()
    h = c.worker.push_pull([x], [1], y, [2])
    for n in c.servers:
        [(handler, [seen], _)] = n.get_batch(MS)
        n.respond([seen + 1], handler)
    c.worker.wait(h, MS)
    assert [t.tolist() for t in y] == [[33.0] * 100] * 2


# A peer that dies


def worker_process(parent: Parent, scheduler: str, way: str, name: str) -> None:
    with fserver.Worker(scheduler=scheduler, transport=way, settings={"FSERVER_LOG": "error"}) as w:
        parent.put("connected")
        x, y = torch.ones(1000), torch.empty(1000)
        ch = w.channel([x], [1], [y], [1], name=name)
        parent.put("open")
        while True:
            ch.send()
            ch.recv()


@pytest.mark.parametrize("way", WAYS)
def test_killed(child: Callable[..., Child], way: str) -> None:
    options = {"transport": way, "settings": {"FSERVER_LOG": "error"}, "connect": False}
    server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, **options)
    try:
        worker = child(worker_process, server.scheduler, way, "first")
        server.connect()
        ch = server.channel([1], [torch.empty(1000)], [1], timeout_ms=MS, name="first")
        assert [worker.get(), worker.get()] == ["connected", "open"]
        for i in range(200):
            ch.recv()
            ch.outgoing[0].copy_(ch.tensors[0][0])
            ch.send()
            if i == 100:
                worker.kill()
                break
        with pytest.raises(fserver.PeerLostError) as caught:
            while True:
                ch.recv()
                ch.send()
        assert (caught.value.role, caught.value.rank) == ("worker", 0)
        for call in (ch.send, ch.recv, ch.check):  # also that which is not in turn
            with pytest.raises(fserver.PeerLostError):
                call()
        ch.close()
        # It starts again, and both open another.
        worker = child(worker_process, server.scheduler, way, "second")
        assert worker.get() == "connected"
        with server.channel([1], [torch.zeros(1000)], [1], timeout_ms=MS, name="second") as ch:
            assert worker.get() == "open"
            for _ in range(10):
                ch.recv()
                assert bool((ch.tensors[0][0] == 1).all())
                ch.send()
        worker.kill()
    finally:
        server.close()


def server_process(parent: Parent, scheduler: str, way: str, name: str) -> None:
    options = {"transport": way, "settings": {"FSERVER_LOG": "error"}}
    with fserver.Server(scheduler=scheduler, **options) as s:
        with s.channel([1], [torch.empty(1000)], [1], timeout_ms=MS, name=name) as ch:
            parent.put("open")
            while True:
                ch.recv()
                torch.mul(ch.tensors[0][0], 2, out=ch.outgoing[0])
                ch.send()


@pytest.mark.parametrize("way", WAYS)
def test_killed_server(child: Callable[..., Child], way: str) -> None:
    """As test_killed, of the other side: the worker's channel ends, and it opens another with the
    server's successor."""
    options = {"transport": way, "settings": {"FSERVER_LOG": "error"}, "connect": False}
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", **options)
    worker = fserver.Worker(scheduler=scheduler.scheduler, **options)
    x, y = torch.ones(1000), torch.zeros(1000)

    def opened(name: str) -> Any:
        end = time.monotonic() + LIMIT
        while True:  # its successor may not have taken its rank yet
            try:
                return worker.channel([x], [1], [y], [1], timeout_ms=MS, name=name)
            except fserver.PeerLostError:
                assert time.monotonic() < end
                time.sleep(0.01)

    try:
        server = child(server_process, scheduler.scheduler, way, "first")
        together([scheduler.connect, worker.connect])
        ch = opened("first")
        assert server.get() == "open"
        with pytest.raises(fserver.PeerLostError) as caught:
            for i in range(1000000):
                ch.send()
                ch.recv()
                assert bool((y == 2).all())
                if i == 100:
                    server.kill()
        assert (caught.value.role, caught.value.rank) == ("server", 0)
        for call in (ch.send, ch.recv, ch.check):
            with pytest.raises(fserver.PeerLostError):
                call()
        ch.close()
        server = child(server_process, scheduler.scheduler, way, "second")
        with opened("second") as ch:
            for i in range(10):
                x.fill_(i)
                ch.send()
                ch.recv()
                assert bool((y == 2 * i).all())
        server.kill()
    finally:
        worker.close()
        scheduler.close()
