"""Stream channels of CPU tensors: the same calls as on GPUs, carried by the engine."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nodes import LIMIT, Child, Cluster, Parent, eventually, in_thread, open_cluster, together

import fserver
from fserver import _loader
from fserver.channel import channel, describe, nvrtc, opener, plan, tune

MakeCluster = Callable[..., Cluster]
MS = LIMIT * 1e3
WAYS = ["tcp", "cma"]
COMPILER = os.environ.get("CC", "cc")

needs_compiler = pytest.mark.skipif(
    not shutil.which(COMPILER), reason=f"no C compiler ({COMPILER})"
)


def both(
    pair: Cluster,
    push: list[torch.Tensor],
    pull: list[torch.Tensor],
    back: list[torch.Tensor] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """A channel between a worker and a server; ``back`` is what the server sends."""
    push_keys, pull_keys = list(range(len(push))), list(range(100, 100 + len(pull)))
    back = [torch.empty_like(t) for t in pull] if back is None else back
    options = {"timeout_ms": MS, **options}
    return tuple(
        together(
            [
                lambda: pair.worker.channel(push, push_keys, pull, pull_keys, **options),
                lambda: pair.server.channel(push_keys, back, pull_keys, **options),
            ]
        )
    )


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


# Sides that do not fit


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


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


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
    monkeypatch.setattr(opener, "_place", lambda device: "cuda@here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    w, s = both(pair, [x], [])
    assert (w.path, s.path, s.incoming[0].device) == ("host", "host", torch.device("cpu"))


def test_devices_of_a_node_with_a_gpu(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channels are of that GPU or of the CPU, whichever GPU is the current one."""
    x, y = torch.ones(8), torch.ones(8).as_subclass(OfGpu)  # on cuda:1
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(opener, "_gpu_of", lambda node: gpu)
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
    assert opener._gpu_of(pair.worker._node) is None
    assert opener._gpu_of(SimpleNamespace(device=3)) == torch.device("cuda", 3)


def test_no_memory_for_what_is_pushed() -> None:
    theirs = {"out": [(1, "float32", [1 << 50])]}
    text = r"shape \[1125899906842624\] and torch.float32 on cpu for the pushes of worker 3: .*free"
    with pytest.raises(fserver.Error, match=f"^channel: cannot allocate a tensor of {text}"):
        opener._as_pushed(3, theirs, [1], "cpu")


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
    w, s = both(pair, [torch.ones(1)], [], timeout_ms=200)
    w.send()
    with pytest.raises(fserver.TimeoutError, match=r"^send: the peers did not .* call send\(\)"):
        w.send()
    s.recv()
    w.send()
    s.recv()
    with pytest.raises(fserver.TimeoutError, match=r"^recv: no message came .* call recv\(\)"):
        s.recv()


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


def test_two_threads_have_one_opener(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    both_inside = threading.Barrier(2)

    class Slow(opener.Opener):
        def __init__(self, node: Any) -> None:
            super().__init__(node)
            both_inside.wait(LIMIT)

    monkeypatch.setattr(opener, "Opener", Slow)
    a, b = together([pair.worker._opener] * 2)
    assert a is b is pair.worker._opener()


def test_time_out(pair: Cluster) -> None:
    w, s = both(pair, [torch.ones(1)], [torch.empty(1)], timeout_ms=300)
    with pytest.raises(fserver.TimeoutError, match="within timeout_ms=300"):
        s.recv()
    w.send()
    with pytest.raises(fserver.TimeoutError, match="within timeout_ms=300"):
        w.recv()
    s.recv()
    s.send()
    w.recv()  # nothing was lost


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
    one = opener.Opener.__new__(opener.Opener)
    one._node = SimpleNamespace(channel_tell=lambda handle, peer, text: got.append(peer))
    one._refuse(1, "kernel", [0, 1, 2], error)
    assert got == told


class FakeSide:
    """In place of GpuSide; made for threads whose `local.gpu` is true."""

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self.abort_word = ctypes.addressof(self._word)
        self.at_close: int | None = None
        self.at_finish: BaseException | None = None

    def describe(self, peer: int) -> dict[str, Any]:
        return {}

    def attach(self, descriptions: Any) -> None:
        pass

    def rows(self) -> list[torch.Tensor]:
        return []

    def send(self, rows: Any = None) -> None:
        pass

    recv = explain = send

    def finish(self) -> None:
        if self.at_finish:
            raise self.at_finish

    def close(self) -> None:
        if self.at_close is None:
            self.at_close, self._word.value = self._word.value, 7

    @property
    def word(self) -> int:
        """What the engine has set since the side was closed; 7: nothing."""
        return self._word.value


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[FakeSide]]:
    local, made = threading.local(), []
    monkeypatch.setattr(opener, "_direct", lambda mode, device: getattr(local, "gpu", False))
    monkeypatch.setattr(opener, "_gpu", lambda *_: made.append(FakeSide()) or made[-1])
    return local, made


@pytest.mark.parametrize("call", ["stop", "close"])
def test_all_channels_of_a_node_end_at_once(
    pair: Cluster,
    on_gpu: tuple[Any, list[FakeSide]],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """Every peer is told before any is waited for, and they are waited for once: one that closes
    its sides when it is told keeps nobody waiting, one that does not costs the time of one."""
    local, _ = on_gpu
    limit, count = 1.0, 4
    monkeypatch.setattr(channel, "_PARTING_S", limit)

    def opens(open_: Callable[..., Any], i: int) -> Any:
        local.gpu = True
        return open_(name=f"{i}", timeout_ms=MS)

    x, y = torch.ones(8), [torch.empty(8) for _ in range(count)]
    kept = []
    for i in range(count):
        kept += together(
            [
                partial(opens, partial(pair.worker.channel, [x], [i], [y[i]], [i]), i),
                partial(opens, partial(pair.server.channel, [i], [y[i]], [i]), i),
            ]
        )
    mine, theirs = ([ch._side for ch in side] for side in (kept[::2], kept[1::2]))
    start = time.monotonic()
    ended = in_thread(getattr(pair.worker, call))
    eventually(lambda: all(side.word for side in theirs))
    assert time.monotonic() - start < limit, "the last one was told after another was waited for"
    eventually(lambda: all(side.at_close is not None for side in mine))
    assert time.monotonic() - start < 2 * limit
    for ch in kept[1::2]:
        ch.close()
    if call == "stop":
        together([pair.server.stop, pair.scheduler.stop])
    ended.result(LIMIT)


def test_the_engine_lets_go_of_a_side_that_is_closed(
    pair: Cluster, on_gpu: tuple[Any, list[FakeSide]], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, made = on_gpu
    zeros = torch.zeros
    x, y = torch.ones(8), torch.empty(8)

    def call(gpu: bool, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        local.gpu = gpu
        return call(*args, timeout_ms=MS, **options)

    def opened(name: str, *gpu: bool) -> list[Any]:
        ask = ([x], [1], [y], [1])
        answer = ([1], [y], [1])
        return together(
            [
                lambda: call(gpu[0], pair.worker.channel, *ask, name=name),
                lambda: call(gpu[1], pair.server.channel, *answer, name=name),
            ]
        )

    # The other side does not come.
    local.gpu = True
    with pytest.raises(fserver.TimeoutError, match="has not opened"):
        pair.worker.channel([x], [1], [y], [1], name="alone", timeout_ms=50)
    assert [side.at_close for side in made] == [1]
    # It has no GPU.
    for ch in opened("mixed", True, False):
        assert ch.path == "host"
        in_thread(ch.close)
    assert [side.at_close for side in made] == [1, 0]
    # Nobody closes it; then its name and its keys are free.
    for _ in range(2):
        w, s = opened("dropped", True, True)
        assert (w.path, s.path) == ("kernel", "kernel")
        del w, s
        gc.collect()
    # Somebody does.
    w, s = opened("closed", True, True)
    together([w.close, s.close])
    assert [side.at_close for side in made[2:]] == [1] * 6
    # Ctrl-C while it waits for what is enqueued.
    w, s = opened("interrupted", True, True)
    made[-1].at_finish = made[-2].at_finish = KeyboardInterrupt()
    for ch in (w, s):
        with pytest.raises(KeyboardInterrupt):
            ch.close()
    # No memory for the last that is needed.
    with monkeypatch.context() as patch:

        def none_left(*args: Any, **options: Any) -> torch.Tensor:
            if "device" in options:
                raise torch.OutOfMemoryError("out of memory")
            return zeros(*args, **options)

        patch.setattr(torch, "zeros", none_left)

        def fails(channel: Callable[..., Any], *args: Any, **options: Any) -> None:
            with pytest.raises(torch.OutOfMemoryError):
                call(True, channel, *args, name="token", **options)

        together(
            [
                lambda: fails(pair.worker.channel, [x], [1], [y], [1]),
                lambda: fails(pair.server.channel, [1], [y], [1], push=[torch.empty(8)]),
            ]
        )
    together([ch.close for ch in opened("token", True, True)])
    assert [side.at_close for side in made[8:12]] == [1] * 4
    pair.worker.close()
    pair.server.close()
    assert [side.word for side in made] == [7] * len(made)


@pytest.mark.parametrize("kind", [fserver.Error, fserver.ConfigError])
@pytest.mark.parametrize("which", ["worker", "server"])
def test_a_side_that_cannot_be_made_says_so(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch, which: str, kind: type[fserver.Error]
) -> None:
    """The other one does not wait for it, and has an error of the same kind. Who has said so is
    told nothing: it may have opened the channel again."""
    local, opened = threading.local(), threading.Event()
    begin, refuse = opener.Opener._begin, opener.Opener._refuse
    told = {}

    def refused(self: Any, handle: int, mode: str, peers: Any, error: BaseException) -> None:
        told[local.role] = list(peers)
        refuse(self, handle, mode, told[local.role], error)

    def begun(self: Any, *args: Any) -> Any:
        found = begin(self, *args)
        if local.role == "server":
            opened.set()
        return found

    def made(*_: Any) -> FakeSide:
        assert opened.wait(LIMIT)
        if local.role == which:
            raise kind("no memory for it")
        return FakeSide()

    monkeypatch.setattr(opener.Opener, "_begin", begun)
    monkeypatch.setattr(opener.Opener, "_refuse", refused)
    monkeypatch.setattr(opener, "_direct", lambda mode, device: True)
    monkeypatch.setattr(opener, "_gpu", made)
    x, y = torch.ones(8), torch.empty(8)

    def call(role: str) -> str:
        local.role = role
        node = getattr(pair, role)
        args = ([x], [1], [y], [1]) if role == "worker" else ([1], [y], [1])
        with pytest.raises(kind) as caught:
            node.channel(*args, timeout_ms=MS, name="none")
        assert type(caught.value) is kind
        return str(caught.value)

    worker, server = together([lambda: call("worker"), lambda: call("server")])
    reason = "no memory for it"
    refusal = f"channel: {which} 0 refuses: {reason}"
    assert (worker, server) == ((reason, refusal) if which == "worker" else (refusal, reason))
    assert told == {which: [0], ({"worker", "server"} - {which}).pop(): []}


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

    monkeypatch.setattr(opener, "_direct", lambda *_: getattr(local, "fails", False))
    monkeypatch.setattr(opener, "_gpu", fails)
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


def test_capture(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are refused there, and the channel goes on."""
    x, y = torch.ones(8), torch.empty(8)
    w, s = both(pair, [x], [y])
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for call, name in ((w.send, "send"), (s.recv, "recv")):
            with pytest.raises(
                fserver.ConfigError, match=f"^{name}: .*captured.*: call it outside"
            ):
                call()
    w.send()
    s.recv()
    s.outgoing[0].copy_(s.tensors[0][0] * 2)
    s.send()
    w.recv()
    assert y.tolist() == [2] * 8


def test_opening_in_a_capture(
    pair: Cluster, on_gpu: tuple[Any, list[FakeSide]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before anything is made, or told to a peer."""
    _, made = on_gpu
    x, y, z = torch.ones(8), torch.empty(8), torch.ones(8)
    w, s = (
        lambda **more: pair.worker.channel([x], [0], [y], [100], timeout_ms=MS, **more),
        lambda **more: pair.server.channel([0], [z], [100], timeout_ms=MS, **more),
    )
    text = "^channel: the current stream is being captured .*: open the channel before the capture"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(opener, "_direct", lambda mode, device: True)
        patch.setattr(opener, "_like", lambda tensors: pytest.fail("it has allocated"))
        patch.setattr(opener.Opener, "_begin", lambda *_: pytest.fail("it has begun"))
        for call in (w, s):
            for more in ({}, {"mode": "copy"}, {"mode": "host"}, {"tune": True}):
                with pytest.raises(fserver.ConfigError, match=text):
                    call(**more)
    assert made == []
    together([w, s])  # its number and its keys are free


class OfGpu(torch.Tensor):
    """Memory of the CPU that is said to be of another GPU than the current one."""

    device = torch.device("cuda", 1)


def test_opening_in_a_capture_on_another_gpu(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tensors' device captures counts too, and it is the current one as before."""
    current = [0]

    @contextlib.contextmanager
    def on(device: Any) -> Iterator[None]:
        before, current[0] = current[0], torch.device(device).index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == captured)
    monkeypatch.setattr(torch.cuda, "device", on)
    begun = fserver.Error("it has begun")

    def begin(*_: Any) -> Any:
        raise begun

    monkeypatch.setattr(opener.Opener, "_begin", begin)
    x = torch.ones(8).as_subclass(OfGpu)
    for captured in range(3):
        for call in (
            lambda: pair.worker.channel([x], [0], [], []),
            lambda: pair.worker.channel([], [], [x], [0]),
            lambda: pair.server.channel([], [x], [0]),
            lambda: pair.server.channel([0], [], [], push=[x]),
            lambda: pair.server.channel([0], [], [], device="cuda:1"),
        ):
            with pytest.raises(fserver.Error) as caught:
                call()
            if captured < 2:
                assert "open the channel before the capture" in str(caught.value)
            else:
                assert caught.value is begun
            assert current == [0]


# torch.ops


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_operators(pair: Cluster, backend: str) -> None:
    import torch._dynamo

    x, y, z = torch.empty(8), torch.empty(8), torch.empty(8)
    w, s = both(pair, [x], [y], [z])

    def step(value: torch.Tensor) -> torch.Tensor:
        x.copy_(value * 2)
        torch.ops.fserver.send(w.number, w.outgoing, w.token)
        torch.ops.fserver.recv(w.number, w.incoming, w.token)
        return y + 1

    def serve(n: int) -> None:
        for _ in range(n):
            torch.ops.fserver.recv(s.number, s.incoming, s.token)
            z.copy_(s.tensors[0][0] + 3)
            torch.ops.fserver.send(s.number, s.outgoing, s.token)

    served = []

    def compile(*graph: Any) -> Any:
        """The server begins when this is done: it may take longer than the server waits."""
        made = torch._dynamo.lookup_backend(backend)(*graph)
        served.append(in_thread(serve, 6))
        return made

    compiled = torch.compile(step, backend=compile, fullgraph=True)
    for i in range(3):
        assert compiled(torch.full((8,), float(10 + i))).tolist() == [2 * (10 + i) + 4] * 8
        assert step(torch.full((8,), float(i))).tolist() == [2 * i + 4] * 8
    [once] = served
    once.result(LIMIT)
    for call in (torch.ops.fserver.send, torch.ops.fserver.recv):
        with pytest.raises(fserver.ShapeError, match=r"tensor 0 has shape \[1\], but the channel"):
            call(w.number, [torch.ones(1)], w.token)
    with pytest.raises(fserver.ShapeError, match="0 tensors given, but the channel has 1"):
        torch.ops.fserver.send(w.number, [], w.token)
    with pytest.raises(fserver.ClosedError, match="no open channel has number 999999"):
        torch.ops.fserver.recv(999999, [y], w.token)


def test_operators_are_what_they_say(pair: Cluster) -> None:
    """By what torch finds out about them."""
    import torch._dynamo  # which takes seconds; later the server waits

    x, y, z = torch.randn(8), torch.empty(8), torch.randn(8)

    def until_closed(call: Callable[[], None]) -> None:
        with contextlib.suppress(fserver.ClosedError):
            while True:
                call()

    w, s = both(pair, [x], [], name="there")
    served = in_thread(until_closed, s.recv)
    torch.library.opcheck(torch.ops.fserver.send.default, (w.number, w.outgoing, w.token))
    w.close()
    served.result(LIMIT)
    assert torch.equal(s.tensors[0][0], x)
    w, s = both(pair, [], [y], [z], name="back")
    served = in_thread(until_closed, s.send)
    torch.library.opcheck(torch.ops.fserver.recv.default, (w.number, w.incoming, w.token))
    w.close()
    served.result(LIMIT)
    assert torch.equal(y, z)


# What a peer tells


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{", '{"v": 1}', '{"v": 2}',
        describe.text("kernel", "cpu", [[1, "float32", [-1]]], []),
        describe.text("kernel", "cpu", [[1, "storage", [1]]], []),
        describe.text("kernel", "cpu", [[1.5, "int8", [1]]], []),
        describe.text("kernel", "cpu", [[1, "int8", [1 << 60]]], []),
        describe.text("kernel", "cpu", [[1, "int8", [1] * 65]], []),
        describe.text("kernel", "cpu", [[1, "int8"]], []),
        describe.text("kernel", "cpu", [[1, "int8", [1]]] * 257, []),
        describe.text("no", "cpu", [], []), "[" * 5000,
    ],
)  # fmt: skip
def test_described_badly(text: str) -> None:
    with pytest.raises(fserver.Error, match="channel: peer 3 describes"):
        describe.read(3, text)


class Memory:
    """A GPU for plans: gives out addresses, and keeps what it is asked to enqueue."""

    room = iter(range(1 << 40, 1 << 60, 1 << 32))

    def __init__(self, exportable: bool = True) -> None:
        self.exportable = exportable
        self.steps: dict[bool, Any] = {}
        self.own: set[int] = set()

    def allocate(self, bytes: int) -> int:
        address = next(Memory.room)
        self.own.add(address)
        return address

    def share(self, address: int) -> tuple[bytes, int, int]:
        base = address >> 32 << 32
        if base not in self.own and not self.exportable:
            return b"", 0, 0
        return base.to_bytes(64, "little"), 1 << 32, address - base

    def map(self, handle: bytes, owner: str) -> tuple[int, int]:
        return int.from_bytes(handle, "little"), 1 << 32

    def reach(self, device: int) -> None:
        pass

    def plan(self, sends: bool, steps: list[Any], counts: int, dead: int) -> None:
        self.steps[sends] = [s for group, _ in steps for s in group]
        assert all(len(group) <= plan.MOST_SEGMENTS for group, _ in steps)

    def plan_copies(self, sends: bool, segments: list[Any]) -> None:
        self.steps[sends] = segments

    def begin(self, in_turn: bool, send_first: bool, flags: int, bytes: int) -> None:
        self.turns, self.flags = in_turn, (flags, bytes)


def pieces(sizes: list[int]) -> list[plan.Piece]:
    return [plan.Piece(next(Memory.room) + 4096, n, 1) for n in sizes]


@pytest.mark.parametrize("mode", ["kernel", "copy"])
@pytest.mark.parametrize("exportable", [True, False])
@pytest.mark.parametrize("one_way", [True, False])
@pytest.mark.parametrize("table", tune.CANDIDATES, ids=str)
def test_plan(mode: str, exportable: bool, one_way: bool, table: plan.Table) -> None:
    """Both sides' plans say the same of each tensor, and no two pieces of memory overlap."""
    sizes = [0, 1, 4096, 256 << 10, (256 << 10) + 1, 1 << 20, 64 << 20] * 6
    back = [] if one_way else [16, 3 << 20]
    a, b = Memory(exportable), Memory(exportable)
    out, into = pieces(sizes), pieces(sizes)
    w = plan.Plan(a, 0, mode, [out], [pieces(back)], True)
    s = plan.Plan(b, 1, mode, [pieces(back)], [into], False, table)
    s.attach(0, w.describe(0))
    w.attach(0, s.describe(0))
    w.install()
    s.install()
    assert a.turns is b.turns is not one_way
    used = []
    for n, sent, got in zip(sizes, a.steps[True], b.steps[False], strict=True):
        kind, to, flags, blocks = sent[2], sent[4], sent[5], sent[12]
        assert kind == got[2]
        if mode == "kernel":
            assert flags == got[5]
            assert blocks == (got[10] if kind == plan.PLACE else got[12]) <= plan.MOST_BLOCKS
            assert bool(sent[6]) == bool(got[6]) == one_way
        assert to == (got[4] if kind == plan.PLACE else got[3])
        if kind != plan.PLACE:
            size = 16 * (math.ceil(n / 8) + 1 + sent[10]) if kind == plan.PACKETS else n
            used.append((to, to + size))
        used.append((got[7], got[7] + 8))
    for side in (a, b):
        flags, size = side.flags
        used.append((flags, flags + size))
        words = [got[5] for got in side.steps[False]] + [sent[6] for sent in side.steps[True]]
        assert all(flags <= at <= flags + size - 4 for at in words if at)
        assert mode == "kernel" or size % plan.FILL == 0
    used.sort()
    assert all(end <= begin for (_, end), (begin, _) in zip(used, used[1:], strict=False))


@pytest.mark.parametrize("best", range(len(tune.CANDIDATES)))
def test_tune(best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each trial one side has the table that H200 have; each takes its own best."""
    opened: dict[bool, list[tuple[str, plan.Table]]] = {True: [], False: []}

    class Trial(contextlib.AbstractContextManager[Any]):
        path = "kernel"

        def __init__(self, side: bool, name: str, table: plan.Table) -> None:
            opened[side].append((name, table))
            self.table = table

        def __exit__(self, *error: object) -> None:
            pass

    def seconds(trial: Any, send_first: bool) -> float:
        return 1.0 if trial.table == tune.CANDIDATES[best] else 1.2

    monkeypatch.setattr(tune, "_seconds", seconds)
    for side in opened:
        table = tune.tuned(partial(Trial, side), side)  # type: ignore[arg-type]
        assert table == tune.CANDIDATES[best]
    for (name, ours), (same, theirs) in zip(opened[True], opened[False], strict=True):
        assert name == same and plan.TABLE in (ours, theirs)
    assert [sum(table == c for _, table in opened[True]) for c in tune.CANDIDATES[1:]] == [1] * 5


def test_tune_takes_what_is_measured_for_noise() -> None:
    count = len(tune.CANDIDATES)
    assert tune.choose([1.0] + [0.98] * (count - 1)) == plan.TABLE
    assert tune.choose([1.0] * (count - 1) + [0.9]) == tune.CANDIDATES[-1]


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
    x, y, options = torch.ones(4), torch.empty(4), {"timeout_ms": 500}

    def caught(name: str, *arguments: Any) -> str:
        with pytest.raises(fserver.TimeoutError) as error:
            getattr(pair, name).channel(*arguments, **options, tune=name == side)
        return str(error.value)

    texts = together(
        [
            lambda: caught("worker", [x], [0], [y], [0]),
            lambda: caught("server", [0], [y], [0]),
        ]
    )
    assert "tune=True on all sides" in texts[side == "server"]
    assert "same name" in texts[side != "server"]
    w, s = both(pair, [x], [y], name="again")  # its keys are free
    together([w.close, s.close])


def test_tune_and_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that goes during a trial ends the opening, and the trial's channel is closed."""
    closed = []

    class Trial(contextlib.AbstractContextManager[Any]):
        path = "kernel"

        def __exit__(self, *error: object) -> None:
            closed.append(self)

    def lost(trial: Any, send_first: bool) -> float:
        raise fserver.PeerLostError("server 0 is gone")

    monkeypatch.setattr(tune, "_seconds", lost)
    with pytest.raises(fserver.PeerLostError):
        tune.tuned(lambda name, table: Trial(), True)  # type: ignore[arg-type, return-value]
    assert len(closed) == 1


def test_plan_of_a_liar() -> None:
    """No description makes a side use memory that the peer has not named."""
    random.seed(7)
    sizes = [100, 1 << 20]
    s = plan.Plan(Memory(), 1, "kernel", [[]], [pieces(sizes)], False)
    honest = s.describe(0)
    for _ in range(500):
        theirs = {**honest, "proof": "", "in": [dict(e) for e in honest["in"]]}
        entry = random.choice(theirs["in"])
        field = random.choice(list(entry))
        lie: Any = random.choice([-1, 1 << 33, 1 << 70, None, "x", [0], [9, 0], 3.5, [0, -4]])
        entry[field] = lie
        w = plan.Plan(Memory(), 0, "kernel", [pieces(sizes)], [[]], True)
        try:
            w.attach(0, theirs)
        except fserver.Error:
            continue
        assert field in ("stride", "bytes", "blocks", "kind") or lie in ([0], 0)
    for field in ("mode", "turn", "memory", "in", "out"):
        w = plan.Plan(Memory(), 0, "kernel", [pieces(sizes)], [[]], True)
        with pytest.raises(fserver.Error):
            w.attach(0, {**honest, field: 99})


@pytest.mark.parametrize("mode", ["kernel", "copy"])
@pytest.mark.parametrize("worker", [True, False])
def test_plan_numbers_the_row_counts(mode: str, worker: bool) -> None:
    """A worker gives one for each of its tensors, which go to all servers; a server one for each
    tensor of each worker."""
    ours = pieces([100, 1 << 20])
    memory = Memory()
    mine = plan.Plan(memory, 0, mode, [ours, ours], [[], []], worker)
    for peer in range(2):
        into = pieces([100, 1 << 20])
        theirs = plan.Plan(Memory(), peer, mode, [[]], [into], not worker)
        mine.attach(peer, theirs.describe(0))
    mine.install()
    numbers = [segment[0] for segment in memory.steps[True]]
    assert sorted(numbers) == ([0, 0, 1, 1] if worker else [0, 1, 2, 3])


def test_plan_takes_no_address_of_another_process() -> None:
    """Two nodes of one process use each other's memory as it is; who repeats what they have told,
    and a process that was forked from theirs, name it by handles."""

    class Own(Memory):
        mapped = False

        def map(self, handle: bytes, owner: str) -> tuple[int, int]:
            self.mapped = True
            return super().map(handle, owner)

    def mapped(theirs: Any) -> bool:
        memory = Own()
        plan.Plan(memory, 0, "kernel", [pieces([100])], [[]], True).attach(0, theirs)
        return memory.mapped

    server = plan.Plan(Memory(), 1, "kernel", [[]], [pieces([100])], False)
    honest = json.loads(json.dumps(server.describe(0)))
    assert not mapped(honest)
    assert mapped({**honest, "memory": [[h, 1 << 61, at] for h, _, at in honest["memory"]]})
    assert mapped({**honest, "proof": "x"})
    theirs = plan.Plan(Memory(), 0, "kernel", [pieces([100])], [[]], True).describe(0)
    assert mapped({**honest, "proof": theirs["proof"]})
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, json.dumps(server.describe(0)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert mapped(json.loads(os.read(read, 1 << 16)))
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("mine", "theirs"), [(0, 0), (0, 1), (1, 0), (0, 7)])
def test_plan_and_the_numbers_of_gpus(own: bool, mine: int, theirs: int) -> None:
    """What a peer's process calls its GPU says nothing here, where CUDA_VISIBLE_DEVICES may have
    given the numbers to others: its memory is named by handles. In one process the numbers are the
    same."""

    class Asked(Memory):
        def __init__(self) -> None:
            super().__init__()
            self.reached: list[int] = []
            self.owners: list[str] = []

        def reach(self, device: int) -> None:
            self.reached.append(device)

        def map(self, handle: bytes, owner: str) -> tuple[int, int]:
            self.owners.append(owner)
            return super().map(handle, owner)

    memory = Asked()
    ours, into = pieces([1 << 20]), pieces([1 << 20])
    server = plan.Plan(Memory(), theirs, "kernel", [[]], [into], False)
    told = server.describe(0)
    worker = plan.Plan(memory, mine, "kernel", [ours], [[]], True)
    worker.attach(0, told if own else {**told, "proof": ""})
    worker.install()
    assert memory.reached == ([theirs] if own else [])
    assert memory.owners == (
        [] if own else [f"gpu {theirs} of peer 0, as its process counts"] * len(told["memory"])
    )
    [segment] = memory.steps[True]
    assert segment[3:5] == (ours[0].address, into[0].address)


@pytest.mark.parametrize("own", ["12.9", "13.2", "14.0"])
def test_compiler_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str) -> None:
    """That of the CUDA which torch was built with comes before all others, wherever they are."""
    major = own.partition(".")[0]
    for place in ("cu12/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13", "cu14/lib/libnvrtc.so.14"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.version, "cuda", own)
    majors = [path.rpartition(".")[2] for path in nvrtc._candidates()]
    assert majors[:2] == [major] * 2
    assert major not in majors[2:]
    assert {"12", "13"} <= set(majors)


def test_kernels_compile() -> None:
    """NVRTC needs no GPU."""
    source = _loader.load().lane_source()
    try:
        nvrtc._library()
    except fserver.ConfigError as error:
        pytest.skip(str(error))
    for arch in (80, 90):
        assert nvrtc.image(source, arch)[:4] == b"\x7fELF"
    with pytest.raises(fserver.ConfigError, match="compute capability"):
        nvrtc.image(source, 60)


def test_no_driver() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(fserver.ConfigError, match="cannot use a GPU: .*install an NVIDIA driver"):
        _loader.load().Lane(0, b"", 1000.0, True)
    text = r"^map_pinned_tensor: cannot use a GPU: .*libcuda.so.1.*\(install an NVIDIA driver"
    with pytest.raises(fserver.ConfigError, match=text):
        fserver.map_pinned_tensor(torch.zeros(1), 0)


def over_driver(tmp_path: Path, source: str, program: str) -> list[str]:
    """What a program says over a CUDA driver of such a source, by line."""
    command = [COMPILER, "-shared", "-fPIC", "-x", "c", "-o", tmp_path / "libcuda.so.1", "-"]
    subprocess.run(command, input=source.encode(), check=True)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done
    return done.stdout.splitlines()


OLD_DRIVER = """
import fserver
from fserver import _loader

for call in (
    lambda: _loader.load().Lane(0, b"", 1000.0, True),
    lambda: fserver.Worker(scheduler="127.0.0.1:9", backend="GPU", gpu=0),
):
    try:
        call()
    except fserver.ConfigError as error:
        print(error)
"""


# One that says what it has by version (since 11.3), and has not what is called LACKS.
DRIVER_OF = """
#include <string.h>

static int good(void) { return 0; }
static int version(int *out) { return *out = VERSION, 0; }

int LOOKUP(const char *name, void **function, int since) {
  *function = since > VERSION || strcmp(name, LACKS) == 0  ? 0
              : strcmp(name, "cuDriverGetVersion") == 0 ? (void *)version
                                                        : (void *)good;
  return *function ? 0 : 500;
}
"""


def driver_of(version: int, lacks: str = "") -> str:
    lookup = "cuGetProcAddress" if version < 12000 else "cuGetProcAddress_v2"
    names = {"VERSION": version, "LACKS": f'"{lacks}"', "LOOKUP": lookup}
    return "".join(f"#define {k} {v}\n" for k, v in names.items()) + DRIVER_OF


@needs_compiler
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("int none;", r"libcuda.so.1 has no function cu\w+, which CUDA \d+\.\d added \(install an"),
        (
            driver_of(12040, "cuMemAlloc"),
            "no function cuMemAlloc_v2, which CUDA 3.2 added; this driver supports CUDA 12.4 ",
        ),
        (
            driver_of(10010),
            "no .* CUDA 1[01].[02] added; this driver supports CUDA 10.1 .install an NVIDIA",
        ),
        *(
            (
                driver_of(v),
                f"supports CUDA 11.{v // 10 % 100}, want 11.7 or later "
                r"\(install an? (newer NVIDIA driver\)|NVIDIA driver for CUDA 11.7 or later, or s)",
            )
            for v in (11030, 11040, 11060)
        ),
    ],
    ids=["none", "12.4 without", "10.1", "11.3", "11.4", "11.6"],
)
def test_driver_without_what_is_needed(tmp_path: Path, source: str, says: str) -> None:
    """Channels and nodes say what it lacks, since when drivers have it, what it is, and what to
    do."""
    said = over_driver(tmp_path, source, OLD_DRIVER)
    assert len(said) == 2, said
    for text in said:
        assert re.search(says, text), text
        assert text.count("install") == 1, text  # what to do, once


COUNTED_CONTEXTS = """
#include <stdlib.h>
#include <string.h>

int contexts;

static int good(void) { return 0; }
static int one(int *gpus) { return *gpus = 1, 0; }
static int made(void) { return contexts++, 0; }
static int host(void **p, size_t n) { return !(*p = calloc(1, n)); }

int cuGetProcAddress_v2(const char *name, void **function) {
  *function = strcmp(name, "cuDeviceGetCount") == 0           ? (void *)one
              : strcmp(name, "cuDevicePrimaryCtxRetain") == 0 ? (void *)made
              : strncmp(name, "cuCtxCreate", 11) == 0         ? (void *)made
              : strcmp(name, "cuMemHostAlloc") == 0           ? (void *)host
                                                              : (void *)good;
  return 0;
}
"""

ON_THE_CPU = """
import ctypes, torch, nodes, test_channel
from fserver import _loader

driver = ctypes.CDLL("libcuda.so.1")
count = lambda: ctypes.c_int.in_dll(driver, "contexts").value

for way in test_channel.WAYS:
    pair = nodes.open_cluster(transport=way)
    x, y = torch.ones(1 << 20), torch.empty(1 << 20)
    h = pair.worker.push_pull([x], [0], [y], [0])
    [(handler, tensors, _)] = pair.server.get_batch()
    pair.server.respond(tensors, handler)
    pair.worker.wait(h)
    assert torch.equal(x, y)
    nodes.together([node.stop for node in pair.nodes])
print("exchanged", count())
_loader.load().Lane(0, b"", 1000.0, True).close()
print("a channel of a GPU", count())
"""


@needs_compiler
def test_no_context_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of backend CPU make none on a host that has GPUs."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    said = over_driver(tmp_path, COUNTED_CONTEXTS, ON_THE_CPU)
    assert said == ["exchanged 0", "a channel of a GPU 1"]
