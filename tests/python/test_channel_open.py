"""Opening stream channels of CPU tensors: arguments, names, and sides that do not fit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from channels import MS, MakeCluster, OfGpu, both, freed
from nodes import LIMIT, Cluster, in_thread, together

import fserver
from fserver.channel import describe, opener, opening, plan


def refused(pair: Cluster, worker: Callable[[], Any], server: Callable[[], Any]) -> list[Any]:
    errors = []
    for future in (in_thread(worker), in_thread(server)):
        with pytest.raises(fserver.Error) as caught:
            future.result(LIMIT)
        errors.append(caught.value)
    # What failed is closed: the same name and keys are free.
    both(pair, [torch.ones(1)], [], name="afterwards")
    return errors


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"keys": [4]}, fserver.ShapeError, "push_keys are [4] here, but worker 0 pushes [1]"),
        ({"keys": [1, 2]}, fserver.ShapeError, "push_keys are [1, 2] here"),
        ({"pull": torch.empty(9)}, fserver.ShapeError, "float32 [9] here, but key 2, float32 [8]"),
        ({"pull": torch.empty(8, dtype=torch.int32)}, fserver.ShapeError, "int32 [8] here"),
        ({"push": [torch.empty(5)]}, fserver.ShapeError, "incoming tensor 0 is key 1, float32 [5]"),
        ({"mode": "copy"}, fserver.ConfigError, "mode is 'copy' here and 'kernel' at peer 0"),
    ],
)  # fmt: skip
def test_mismatch(pair: Cluster, change: dict[str, Any], kind: Any, text: str) -> None:
    x, y = torch.empty(4), torch.empty(8)

    def server() -> Any:
        return pair.server.channel(
            change.get("keys", [1]), [change.get("pull", y)], [2], push=change.get("push"),
            mode=change.get("mode", "kernel"), timeout_ms=5000,
        )  # fmt: skip

    worker, served = refused(
        pair, lambda: pair.worker.channel([x], [1], [y.clone()], [2], timeout_ms=5000), server
    )
    assert type(served) is kind and text in str(served)
    assert "server 0 refuses" in str(worker) or "at peer 0" in str(worker)


def test_bad_arguments(pair: Cluster) -> None:
    x = torch.empty(4, 4)
    leaf = torch.empty(4, requires_grad=True)
    channel: Any = pair.worker.channel
    serve: Any = pair.server.channel
    for call, kind, text in [
        (lambda: channel(x, [1], [], []), fserver.ConfigError, "push is a tensor"),
        (lambda: channel([x.t()], [1], [], []), fserver.ShapeError, "push[0] of shape [4, 4]"),
        (lambda: channel([x], [1, 2], [], []), fserver.ShapeError, "1 push tensors: give one"),
        (lambda: channel([x, x], [1, 1], [], []), fserver.ConfigError, "push_keys has key 1 twice"),
        (lambda: channel([x], [-1], [], []), fserver.ConfigError, "key 0 of push is -1"),
        (lambda: channel([], [], [], []), fserver.ShapeError, "both empty"),
        (lambda: channel([x], [1], [], [], mode="fast"), fserver.ConfigError, "mode is 'fast'"),
        (lambda: channel([x], [1], [], [], name=""), fserver.ShapeError, "channel name"),
        (lambda: channel([x], [1], [], [], name="a" * 65), fserver.ShapeError, "channel name"),
        (lambda: channel([], [], [leaf], [1]), fserver.ConfigError, "requires grad"),
        (lambda: channel([x.to("meta")], [1], [], []), fserver.ConfigError, "on meta"),
        (lambda: channel([x.to_sparse()], [1], [], []), fserver.ConfigError, "sparse"),
        (lambda: channel([None], [1], [], []), fserver.ConfigError, "NoneType"),
        (lambda: channel([freed(x.clone())], [1], [], []), fserver.ConfigError, "has no memory"),
        (lambda: channel(None, [1], [], []), fserver.ConfigError, "push is None, want a list of t"),
        (lambda: channel([x], [1], 5, []), fserver.ConfigError, "pull is 5, want a list of t"),
        (lambda: channel([x], 0, [], []), fserver.ConfigError, "push_keys is 0, want a list of i"),
        (lambda: channel([x], [1], [], None), fserver.ConfigError, "pull_keys is None"),
        (lambda: channel([x], [1], [], [], name=3), fserver.ConfigError, "name is 3, want text"),
        (lambda: channel([x], [1], [], [], name="\udc80"), fserver.ConfigError, "'\\udc80': give"),
        (lambda: channel([x], [1], [], [], name="a\0b"), fserver.ConfigError, "'a\\x00b': give"),
        (lambda: serve([1], [], [], push=x), fserver.ConfigError, "push is a tensor"),
        (lambda: serve(None, [], []), fserver.ConfigError, "push_keys is None"),
        (lambda: serve([1], x, [1]), fserver.ConfigError, "pull is a tensor"),
        (lambda: serve([1], [], [], device=1 << 70), fserver.ConfigError, 'want "cpu", "cuda"'),
        (lambda: serve([1], [], [], device="tape"), fserver.ConfigError, "device is 'tape', want"),
        (lambda: serve([1], [], [], device="meta"), fserver.ConfigError, "device is 'meta', want"),
        (
            lambda: serve([1], [x], [1], device="cuda"),
            fserver.ConfigError,
            "device is 'cuda', but torch sees 0 GPUs here: give",
        ),
        (
            lambda: channel([], [], [x[:1], x[2:], x[:3]], [1, 2, 3]),
            fserver.ConfigError,
            "pull[0] and pull[2] share memory",
        ),
        (
            lambda: serve([1, 2], [], [], push=[x[1:], x[:2]]),
            fserver.ConfigError,
            "push[0] and push[1] share memory",
        ),
    ]:
        with pytest.raises(kind) as caught:
            call()
        assert text in str(caught.value)
    w, other = both(pair, [x], [])
    with pytest.raises(fserver.ConfigError, match="another open channel of this node has key 0"):
        channel([x], [0], [], [], name="other")
    together([w.close, other.close])
    w, s = both(pair, [x], [torch.empty(1)], name="both")
    w.send()
    for call in (w.send, s.send):
        with pytest.raises(fserver.ConfigError, match=r"^send: call recv\(\) first"):
            call()


def test_wrong_devices(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, with what they are; "cuda" is the current GPU; and where the workers have GPUs and
    the server none, it has CPU tensors."""
    x, y = torch.ones(8), torch.ones(8).as_subclass(OfGpu)
    channel: Any = pair.worker.channel
    serve: Any = pair.server.channel
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "device", contextlib.nullcontext)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        for call, text in [
            (
                lambda: channel([x, x, y], [1, 2, 3], [], []),
                r"push\[0\] .*cpu and push\[2\] .*cuda:1",
            ),
            (lambda: channel([y], [1], [x], [1]), r"push\[0\] .*cuda:1 and pull\[0\] .*cpu"),
            (lambda: serve([1], [x], [1], push=[y]), r"push\[0\] .*cuda:1 and pull\[0\] .*cpu"),
            (lambda: serve([1], [x], [1], device="cuda"), r"is 'cuda' and pull\[0\] is on cpu"),
            (lambda: serve([1], [y], [1], device="cuda:0"), r"'cuda:0' and pull\[0\] is on cuda:1"),
            (lambda: serve([1], [y], [1], device="cpu"), r"is 'cpu' and pull\[0\] is on cuda:1"),
            (lambda: serve([1], [], [], device="cuda:2"), r"device is 'cuda:2', but torch sees 2"),
        ]:
            with pytest.raises(fserver.ConfigError, match=f"^channel: .*{text}"):
                call()
        cuda = describe.device("cuda")
        assert describe.of_one_device({}, cuda) == torch.device("cuda", 1)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        assert describe.of_one_device({"pull": [y]}, cuda) == y.device
        assert describe.device("cpu:0") == x.device
    monkeypatch.setattr(opening, "_place", lambda device: "cuda@here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    w, s = both(pair, [x], [])
    assert (w.path, s.path, s.incoming[0].device) == ("host", "host", torch.device("cpu"))


def test_devices_of_a_node_with_a_gpu(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channels are of that GPU or of the CPU, whichever GPU is the current one."""
    x, y = torch.ones(8), torch.ones(8).as_subclass(OfGpu)  # on cuda:1
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(opener, "gpu_of", lambda node: gpu)
    channel: Any = pair.worker.channel
    serve: Any = pair.server.channel
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "device", contextlib.nullcontext)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        own = r"cuda:1, but this node's GPU is cuda:0 \(STEPMESH_GPU\): "
        for call, text in [
            (
                lambda: channel([y], [1], [], []),
                rf'push\[0\] is on {own}pass push\[0\].to\("cuda:0"\)',
            ),
            (lambda: channel([], [], [y], [2]), rf"pull\[0\] is on {own}pass"),
            (lambda: serve([1], [y], [1]), rf"pull\[0\] is on {own}pass"),
            (lambda: serve([1], [y], [1], device="cuda"), rf"pull\[0\] is on {own}pass"),
            (lambda: serve([1], [], [], device="cuda:1"), rf"device is {own}give"),
            (lambda: serve([1], [y], [1], device="cuda:1"), rf"{own}"),
        ]:
            with pytest.raises(fserver.ConfigError, match=f"^channel: .*{text}"):
                call()
        for given in ("cuda", "cuda:0"):
            assert describe.of_one_device({}, describe.device(given), gpu) == gpu
        assert opener._like_theirs([{"device": "cuda@here"}], gpu) == gpu
        assert opener._like_theirs([{"device": "cpu"}], gpu) == x.device
        assert describe.of_one_device({"pull": [x]}, None, gpu) == x.device
    w, s = both(pair, [x], [])  # CPU tensors
    w.send()
    s.recv()
    assert s.incoming[0].tolist() == [1] * 8


def test_device_of_a_node(pair: Cluster) -> None:
    assert pair.worker.device == pair.server.device == "cpu"
    assert opening.gpu_of(pair.worker._node) is None
    assert opening.gpu_of(SimpleNamespace(device=3)) == torch.device("cuda", 3)


def test_no_memory_for_what_is_pushed() -> None:
    theirs = {"out": [(1, "float32", [1 << 50])]}
    text = r"shape \[1125899906842624\] and torch.float32 on cpu for the pushes of worker 3: .*free"
    with pytest.raises(fserver.Error, match=f"^channel: cannot allocate a tensor of {text}"):
        opener._as_pushed(3, theirs, [1], "cpu")


def test_nobody_opens(pair: Cluster) -> None:
    with pytest.raises(fserver.TimeoutError, match="peer 0 has not opened its side within 200 ms"):
        pair.worker.channel([torch.ones(1)], [1], [], [], timeout_ms=200)
    with pytest.raises(fserver.TimeoutError):
        pair.server.channel([2], [], [], name="never", timeout_ms=100)
    w, s = both(pair, [torch.ones(3)], [], name="later")
    w.send()
    s.recv()


@pytest.mark.parametrize("late", ["worker", "server"])
@pytest.mark.parametrize("tune", [False, True])
def test_retried_without_a_name(pair: Cluster, late: str, tune: bool) -> None:
    """What has failed does not count: not a time-out, nor that only one side tunes."""
    x, y = torch.ones(3), torch.empty(3)

    def side(who: str, ms: float, tune: bool = False) -> Any:
        if who == "worker":
            return pair.worker.channel([x], [1], [y], [2], timeout_ms=ms, tune=tune)
        return pair.server.channel([1], [x], [2], timeout_ms=ms, tune=tune)

    early = "server" if late == "worker" else "worker"
    for count in range(2):
        for _ in range(3):
            called = f"'{count}~0'" if tune else f"'{count}'"
            text = rf"within 0 ms: this side has named the channel {called}: .* same name="
            with pytest.raises(fserver.TimeoutError, match=text):
                side(early, 0, tune)
        follow(pair, name="between")
        opened = together([lambda: side(early, MS), lambda: side(late, MS)])
        assert [ch.name for ch in opened] == [str(count)] * 2
        together([ch.close for ch in opened])


def test_refused_without_a_name(
    pair: Cluster, without_memory: Callable[[Callable[[], Any]], Any]
) -> None:
    """The number is free again on both sides, and what the refusal has left behind is used up."""

    def worker() -> Any:
        return pair.worker.channel([torch.ones(4)], [1], [], [], timeout_ms=MS)

    def server() -> Any:
        return pair.server.channel([1], [], [], timeout_ms=MS)

    with pytest.raises(fserver.ConfigError, match="no memory"):
        without_memory(worker)
    follow(pair, name="between")
    with pytest.raises(fserver.ConfigError, match="worker 0 refuses: no memory"):
        server()
    assert [ch.name for ch in together([worker, server])] == ["0", "0"]


def test_two_threads_without_a_name(pair: Cluster) -> None:
    """Each has a number of its own, and what one gives back is the next one's."""
    made = opener.Opener(None)
    with made.called(None) as a, made.called(None) as b:
        assert (a, b) == ("0", "1")
        with contextlib.suppress(fserver.TimeoutError), made.called(None) as c:
            raise fserver.TimeoutError(c)
        with made.called("0"), made.called(None) as again:
            assert again == c == "2"
    with made.called(None) as after:
        assert after == "3"


def test_two_threads_with_one_key() -> None:
    """One that opens a channel has its keys at once, and after an error no longer."""
    inside, go = threading.Event(), threading.Event()

    def channel_open(name: str) -> int:
        inside.set()
        assert go.wait(LIMIT)
        raise fserver.ClosedError(name)

    made = opener.Opener(SimpleNamespace(channel_open=channel_open))
    how: Any = SimpleNamespace(mode="host", name="it", timeout_ms=1000)
    first = in_thread(made._begin, how, [1, 2])
    assert inside.wait(LIMIT)
    with pytest.raises(fserver.ConfigError, match="another open channel of this node has key 2"):
        made._begin(how, [2, 3])
    go.set()
    for keys in ([1, 2], [2, 3]):  # they are free again
        with pytest.raises(fserver.ClosedError):
            first.result(LIMIT)
        first = in_thread(made._begin, how, keys)
    with pytest.raises(fserver.ClosedError):
        first.result(LIMIT)


def test_two_threads_have_one_opener(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    both_inside = threading.Barrier(2)

    class Slow(opener.Opener):
        def __init__(self, node: Any) -> None:
            super().__init__(node)
            both_inside.wait(LIMIT)

    monkeypatch.setattr(opener, "Opener", Slow)
    a, b = together([pair.worker._opener] * 2)
    assert a is b is pair.worker._opener()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (fserver.PeerLostError("gone", "server", 1), [0, 2]),
        (fserver.PeerLostError("gone", "scheduler", 0), [0, 1, 2]),
        (fserver.Error("no memory"), [0, 1, 2]),
    ],
)
def test_a_successor_is_not_told(error: fserver.Error, told: list[int]) -> None:
    """It opens its side for the first time, and would take it for the answer to that."""
    got: list[int] = []
    node = SimpleNamespace(channel_tell=lambda handle, peer, text: got.append(peer))
    how = SimpleNamespace(mode="kernel")
    opening.Opening(node, 1, how, None, 3).refuse(error)  # type: ignore[arg-type]
    assert got == told


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Makes a call whose side of a channel cannot be made."""
    local = threading.local()

    def fails(*_: Any) -> Any:
        raise fserver.ConfigError("no memory for it")

    def call(work: Callable[[], Any]) -> Any:
        local.fails = True
        try:
            return work()
        finally:
            local.fails = False

    monkeypatch.setattr(opening, "_direct", lambda *_: getattr(local, "fails", False))
    monkeypatch.setattr(opening, "_gpu", fails)
    return call


def follow(c: Cluster, name: str | None = None) -> None:
    """Comes back when all that nodes have told each other has come."""
    sides = [partial(n.channel, [torch.ones(1)], [9], [], []) for n in c.workers]
    sides += [partial(n.channel, [9], [], []) for n in c.servers]
    opened = together([partial(side, timeout_ms=MS, name=name) for side in sides])
    together([ch.close for ch in opened])


@pytest.mark.parametrize(
    ("who", "kind"), [("worker", fserver.ConfigError), ("server", fserver.ShapeError)]
)
def test_refused_before_a_server_opens(
    cluster: MakeCluster, without_memory: Callable[[Callable[[], Any]], Any], who: str, kind: Any
) -> None:
    """By the worker, or by another server: the next opening of that name says so, no other does,
    and the worker can open it again."""
    c = cluster(servers=2)
    x, y = torch.ones(4), [torch.zeros(4) for _ in range(2)]

    def worker() -> Any:
        return c.worker.channel([x], [1], y, [2], name="it", timeout_ms=MS)

    def server(i: int, rows: int = 4) -> Any:
        return c.servers[i].channel([1], [torch.zeros(rows)], [2], name="it", timeout_ms=MS)

    def refuse() -> str:
        first = None if who == "worker" else in_thread(server, 0, 5)
        with pytest.raises(kind, match="no memory" if who == "worker" else "server 0") as caught:
            without_memory(worker) if who == "worker" else worker()
        if first:
            with pytest.raises(kind):
                first.result(LIMIT)
        follow(c)
        return str(caught.value)

    def meet(*calls: Callable[[], Any]) -> None:
        opened = together(list(calls))
        together([ch.close for ch in opened])

    def tried_twice(i: int) -> Any:
        with contextlib.suppress(kind):
            return server(i)
        return server(i)

    reason = refuse()
    for i in range(2) if who == "worker" else [1]:
        with pytest.raises(kind) as caught:
            server(i)
        assert str(caught.value) == f"channel: worker 0 refuses: {reason}"
    meet(worker, lambda: server(0), lambda: server(1))
    refuse()
    meet(worker, lambda: tried_twice(0), lambda: tried_twice(1))


def test_refused_by_another_server(cluster: MakeCluster) -> None:
    """A server whose side is open then learns why it has ended."""
    c = cluster(servers=2)
    y = [torch.zeros(4) for _ in range(2)]

    def worker() -> None:
        with pytest.raises(fserver.ShapeError):
            c.worker.channel([torch.ones(4)], [1], y, [2], timeout_ms=MS)

    def server() -> None:
        with pytest.raises(fserver.ShapeError):
            c.servers[1].channel([1], [torch.zeros(5)], [2], timeout_ms=MS)

    *_, ch = together(
        [
            worker,
            server,
            lambda: c.servers[0].channel([1], [torch.zeros(4)], [2], name="0", timeout_ms=MS),
        ]
    )
    text = r"^channel '0': worker 0 has closed its side: channel: server 1 refuses: .*\(close this"
    for call in (ch.recv, ch.check):
        with pytest.raises(fserver.ClosedError, match=text):
            call()


def test_late_before_a_server_opens(pair: Cluster) -> None:
    """A worker that waits no longer may come again: a server waits for that."""

    def worker(ms: float) -> Any:
        return pair.worker.channel([torch.ones(4)], [1], [], [], name="it", timeout_ms=ms)

    def server(ms: float) -> Any:
        return pair.server.channel([1], [], [], name="it", timeout_ms=ms)

    with pytest.raises(fserver.TimeoutError):
        worker(0)
    follow(pair)
    with pytest.raises(fserver.TimeoutError, match="peer 0 has not opened its side within"):
        server(0)
    follow(pair)
    together([lambda: worker(MS), lambda: server(MS)])


def test_refused_by_one_of_two_workers(
    cluster: MakeCluster, without_memory: Callable[[Callable[[], Any]], Any]
) -> None:
    """The server tells the other one."""
    c = cluster(workers=2)

    def worker(i: int) -> Any:
        with pytest.raises(fserver.ConfigError) as caught:
            c.workers[i].channel([torch.ones(4)], [1], [], [], name="it", timeout_ms=MS)
        return str(caught.value)

    def server() -> Any:
        with pytest.raises(fserver.ConfigError) as caught:
            c.server.channel([1], [], [], name="it", timeout_ms=MS)
        return str(caught.value)

    first = without_memory(lambda: worker(0))
    assert first == "no memory for it"
    told = f"channel: worker 0 refuses: {first}"
    assert together([lambda: worker(1), server]) == [f"channel: server 0 refuses: {told}", told]


def test_tune_without_kernels(cluster: MakeCluster) -> None:
    """Through the engine there is nothing to choose, and the names are those of before."""
    pair = cluster(transport="cma")
    x, y = torch.ones(4), torch.empty(4)
    for number in range(2):
        w, s = both(pair, [x], [y], tune=True)
        assert (w.path, w.name, s.name, w.table) == ("host", str(number), str(number), plan.TABLE)
        w.send()
        s.recv()
        s.outgoing[0].copy_(s.tensors[0][0] + number)
        s.send()
        w.recv()
        assert y.tolist() == [1.0 + number] * 4
        together([w.close, s.close])
    with pytest.raises(fserver.Error, match="push"):
        pair.worker.channel([3], [0], [y], [0], tune=True, timeout_ms=MS)


@pytest.mark.parametrize("side", ["worker", "server"])
def test_tune_on_one_side(cluster: MakeCluster, side: str) -> None:
    pair = cluster(transport="cma")
    x, y = torch.ones(4), torch.empty(4)

    def caught(ms: float, name: str, *arguments: Any) -> str:
        with pytest.raises(fserver.TimeoutError) as error:
            getattr(pair, name).channel(*arguments, timeout_ms=ms, tune=name == side)
        return str(error.value)

    for ms in (500, 10_000):  # what a side says depends on whether it has heard of the other
        texts = together(
            [
                partial(caught, ms, "worker", [x], [0], [y], [0]),
                partial(caught, ms, "server", [0], [y], [0]),
            ]
        )
        if "tune=True on all sides" in texts[side == "server"]:
            break
    assert "tune=True on all sides" in texts[side == "server"]
    assert "same name" in texts[side != "server"]
    w, s = both(pair, [x], [y], name="again")  # its keys are free
    together([w.close, s.close])
