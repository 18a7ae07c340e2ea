"""Where Worker and Server are stricter than StepMesh: whose memory a pull tensor is, types, where
the limit of wait begins, and when respond sends. The functions of fserver_lib keep StepMesh's."""

from __future__ import annotations

import inspect
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nodes import LIMIT, Child, Cluster, Parent, eventually, in_thread, open_cluster

import fserver
from fserver import _loader, fserver_lib
from fserver._stepmesh import Fast

MakeChild = Callable[..., Child]
MakeCluster = Callable[..., Cluster]


def ask(pair: Cluster, *pull: torch.Tensor) -> int:
    """Pulls into tensors; the server learns their sizes."""
    keys = list(range(len(pull)))
    sizes = [torch.tensor([t.numel()]) for t in pull]
    return pair.worker.push_pull(sizes, keys, list(pull), keys)


def answer(pair: Cluster, value: float = 1.0) -> None:
    """Answers the next request of ask()."""
    [(handler, sizes, _)] = pair.server.get_batch(LIMIT * 1e3)
    pair.server.respond([torch.full((int(n),), float(value)) for n in sizes], handler)


def completed(pair: Cluster, handler: int) -> bool:
    try:
        return bool(pair.worker.fetch_trace(handler))
    except fserver.ShapeError:  # it is under way
        return False


# Whose memory a pull tensor is


def test_a_pull_tensor_belongs_to_one_request(pair: Cluster) -> None:
    y = torch.zeros(4)
    first = ask(pair, y)
    for _ in range(4):
        with pytest.raises(
            fserver.ConfigError,
            match=rf"^push_pull: pull_tensors\[1\] shares memory .* handler {first}, which has not "
            rf"completed .call wait\({first}\) first",
        ):
            ask(pair, torch.zeros(4), y)
    answer(pair, 2)
    pair.worker.wait(first, LIMIT * 1e3)
    assert y.tolist() == [2] * 4
    second = ask(pair, y)
    assert second == first + 2, "a refused call gives no handlers"
    answer(pair, 3)
    pair.worker.wait(second, LIMIT * 1e3)
    assert y.tolist() == [3] * 4


def test_a_request_ends_without_being_waited_for(pair: Cluster) -> None:
    y = torch.zeros(4)
    for _ in range(3):
        handler = ask(pair, y)
        answer(pair)
        eventually(lambda handler=handler: completed(pair, handler))


def test_what_counts_is_memory(pair: Cluster) -> None:
    """Slices of one storage are apart unless they overlap, and two storages can be one memory."""
    whole = torch.zeros(100)
    handlers = [ask(pair, whole[10:20], whole[40:50])]
    again = torch.from_numpy(whole.numpy())
    for bad in (whole, whole[:11], whole[19:], whole[12:13], whole[5:60], whole[49:], again[45:46]):
        with pytest.raises(fserver.ConfigError, match=f"handler {handlers[0]}, "):
            ask(pair, bad)
    for fine in (whole[:10], again[20:40], whole[50:], whole[15:15]):
        handlers.append(ask(pair, fine))
    with pytest.raises(fserver.ConfigError, match=f"handler {handlers[2]}, "):
        ask(pair, whole[30:35])
    for handler in handlers:
        answer(pair)
        pair.worker.wait(handler, LIMIT * 1e3)
    assert whole.tolist() == [1] * 100
    handler = ask(pair, again)
    answer(pair, 2)
    pair.worker.wait(handler, LIMIT * 1e3)
    assert whole.tolist() == [2] * 100


def test_a_call_that_fails_claims_nothing(pair: Cluster) -> None:
    y = torch.zeros(4)
    with pytest.raises(fserver.ShapeError, match="4096 pull tensors|more than 4096"):
        many = [torch.zeros(1) for _ in range(4097)]
        pair.worker.push_pull([], [], [y, *many], [0] * 4098)
    handler = ask(pair, y)
    answer(pair)
    pair.worker.wait(handler, LIMIT * 1e3)


@pytest.mark.parametrize("seed", range(3))
def test_claims_against_a_model(pair: Cluster, seed: int) -> None:
    """Random slices, of which some requests are open: refused are those that overlap one of
    these, and no others."""
    choose = random.Random(seed)
    whole = torch.zeros(400)
    under_way: list[tuple[int, list[tuple[int, int]]]] = []
    refused = taken = 0
    for _ in range(1500):
        if under_way and choose.random() < 0.4:  # requests are answered in their order
            handler, _ = under_way.pop(0)
            answer(pair)
            if choose.random() < 0.5:
                pair.worker.wait(handler, LIMIT * 1e3)
            else:
                eventually(lambda handler=handler: completed(pair, handler))
            continue
        spans: list[tuple[int, int]] = []
        for _ in range(choose.randint(1, 3)):
            begin = choose.randrange(400)
            span = begin, min(400, begin + choose.choice([0, 1, 5, 30]))
            if not any(b < span[1] and span[0] < e for b, e in spans):
                spans.append(span)
        owners = {
            h
            for h, theirs in under_way
            for b, e in theirs
            for c, d in spans
            if max(b, c) < min(d, e)
        }
        try:
            handler = ask(pair, *(whole[b:e] for b, e in spans))
        except fserver.ConfigError as error:
            assert any(f"handler {h}, " in str(error) for h in owners)
            refused += 1
        else:
            assert not owners
            under_way.append((handler, [(b, e) for b, e in spans if b < e]))
            taken += 1
    assert refused > 200 and taken > 200


def test_two_threads_and_one_tensor(pair: Cluster) -> None:
    """What is pushed is large, so that others run while it is handed over: one call has the
    tensor."""
    y = torch.zeros(1)
    x = [torch.ones(4 << 20) for _ in range(4)]

    def call(i: int) -> int | None:
        try:
            return pair.worker.push_pull([x[i]], [i], [y], [0])
        except fserver.ConfigError as error:
            assert "shares memory" in str(error)
            return None

    for _ in range(5):
        given = [f.result(LIMIT) for f in [in_thread(call, i) for i in range(4)]]
        [handler] = [h for h in given if h is not None]
        [(request, _, _)] = pair.server.get_batch(LIMIT * 1e3)
        pair.server.respond([torch.ones(1)], request)
        pair.worker.wait(handler, LIMIT * 1e3)


def test_after_a_failure_the_tensor_is_not_free_yet(cluster: MakeCluster) -> None:
    """The other server still has the request. What comes behind it there, by a push key, may pull
    into the same tensors."""
    c = cluster(servers=2)
    x, y = torch.ones(1), [torch.zeros(1), torch.zeros(1)]
    handler = c.worker.push_pull([x], [5], y, [0])
    [(first, _, _)] = c.servers[1].get_batch(LIMIT * 1e3)  # it does not answer yet
    c.servers[0].close()
    for _ in range(2):
        with pytest.raises(fserver.PeerLostError):
            c.worker.wait(handler, LIMIT * 1e3)
        for keys in ([], [6]):
            with pytest.raises(fserver.ConfigError, match="another one may still answer"):
                c.worker.push_pull([x] * len(keys), keys, y, [0])
        handler = c.worker.push_pull([x], [5], y, [0])
    c.servers[1].respond([torch.full((1,), 7.0)], first)
    with pytest.raises(fserver.PeerLostError):
        c.worker.wait(handler, LIMIT * 1e3)


# Types


TWO = [(torch.int32, torch.float32), (torch.float32, torch.int32), (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("wanted", "given"), TWO, ids=str)
def test_an_answer_of_another_type(pair: Cluster, wanted: torch.dtype, given: torch.dtype) -> None:
    """It has the right size and is refused, and the request can still be answered."""
    y = [torch.zeros(4), torch.zeros(4, dtype=wanted)]
    handler = pair.worker.push_pull([], [], y, [0, 1])
    [(request, _, _)] = pair.server.get_batch(LIMIT * 1e3)
    with pytest.raises(
        fserver.ShapeError,
        match=rf"respond to worker 0: tensor 1 is of type .*{given} for {wanted} .*to\({wanted}\)",
    ):
        pair.server.respond([torch.ones(4), torch.ones(4, dtype=given)], request)
    pair.server.respond([torch.ones(4), torch.ones(4, dtype=wanted)], request)
    pair.worker.wait(handler, LIMIT * 1e3)
    assert y[1].tolist() == [1] * 4


def test_a_type_that_changes_under_one_key(pair: Cluster) -> None:
    """The type is that of this request, whatever the last one of that key had."""
    for dtype in (torch.float32, torch.int32, torch.float32):
        y = torch.zeros(4, dtype=dtype)
        handler = pair.worker.push_pull([], [], [y], [0])
        [(request, _, _)] = pair.server.get_batch(LIMIT * 1e3)
        other = torch.int32 if dtype == torch.float32 else torch.float32
        with pytest.raises(fserver.ShapeError, match="is of type"):
            pair.server.respond([torch.ones(4, dtype=other)], request)
        pair.server.respond([torch.ones(4, dtype=dtype)], request)
        pair.worker.wait(handler, LIMIT * 1e3)
        assert y.tolist() == [1] * 4


def test_rows_of_another_type(pair: Cluster) -> None:
    y = torch.zeros(2, 4)
    handler = pair.worker.push_pull([], [], [y], [0])
    [(request, _, _)] = pair.server.get_batch(LIMIT * 1e3)
    with pytest.raises(fserver.ShapeError, match=r"torch\.int32 for torch\.float32"):
        pair.server.respond_vec(torch.ones(2, 4, dtype=torch.int32), [y], [request])
    pair.server.respond_vec(torch.ones(2, 4), [y], [request])
    pair.worker.wait(handler, LIMIT * 1e3)


# Time


def test_the_limit_of_wait_begins_with_wait(pair: Cluster) -> None:
    y = torch.zeros(4)
    handler = ask(pair, y)
    time.sleep(0.3)
    start = time.monotonic()
    with pytest.raises(
        fserver.TimeoutError, match=r"^wait: handler 0 .* within 200 ms: .*wait again"
    ):
        pair.worker.wait(handler, timeout_ms=200)
    assert 0.2 <= time.monotonic() - start < 5
    with pytest.raises(fserver.TimeoutError, match="within 0 ms"):
        pair.worker.wait(handler, 0)
    late = in_thread(answer, pair)
    pair.worker.wait(handler, LIMIT * 1e3)
    late.result(LIMIT)


# Streams


def test_respond_waits_for_the_stream_by_default() -> None:
    extension = _loader.load()

    def default(function: Any) -> Any:
        return inspect.signature(function).parameters["need_event"].default

    assert default(fserver.Worker.push_pull) is default(fserver.Server.respond) is True
    assert default(extension.Worker.push_pull) is default(extension.Server.respond) is True
    assert default(fserver_lib.push_pull) is default(extension.StepmeshWorker.push_pull) is True
    assert default(fserver_lib.respond) is default(extension.StepmeshServer.respond) is False


# StepMesh's


def drop_in(parent: Parent) -> None:
    f = fserver_lib
    parent.put("up")
    f.init()
    y = torch.zeros(4, dtype=torch.int32)
    handlers = [f.push_pull([torch.ones(1)], [i], [y], [0]) for i in range(5)]
    for handler in handlers:
        f.wait(handler)
    parent.put(y.tolist())
    handler = f.push_pull([torch.ones(1)], [0], [y], [0])
    time.sleep(3.2)
    start = time.monotonic()
    with pytest.raises(fserver.TimeoutError, match="within 3000 ms of its push_pull: .*wait again"):
        f.wait(handler, timeout_ms=3000)
    parent.put(time.monotonic() - start)
    f.wait(handler, 1e3 * LIMIT)
    parent.put("done")
    f.stop()


def drop_in_server(parent: Parent) -> None:
    f = fserver_lib
    parent.put("up")
    f.init()
    for i in range(6):
        [(handler, _, _)] = f.get_batch()
        if i == 5:
            assert parent.get() == "late"
        if i % 2:
            f.respond([torch.full((4,), 1.0)], handler)
        else:
            f.respond_vec(torch.full((4, 1), 1.0), [torch.ones(4)], [handler])
    parent.put("done")
    f.stop()


def test_a_method_that_is_put_back_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wraps a function of the drop-in and puts back what was there before, when that node is
    closed, does not keep the next node from its place."""
    space = {name: getattr(fserver_lib, name) for name in fserver_lib.__all__}
    fast = Fast([space])
    first, second = (open_cluster() for _ in range(2))
    fast.bind(first.worker)
    old, space["wait"] = space["wait"], lambda *_: None
    fast.unbind()
    first.close()
    space["wait"] = old
    fast.bind(second.worker)
    assert space["wait"] == second.worker.wait
    fast.unbind()
    assert space["wait"] is fserver_lib.wait
    second.close()


@pytest.mark.parametrize("role", ["worker", "server", "both"])
def test_the_functions_keep_to_stepmesh(
    child: MakeChild, cluster: MakeCluster, port: int, role: str
) -> None:
    """Whichever side uses them, types are not compared; a worker's tensors may belong to several
    requests, and its limit counts from the push_pull."""
    env = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "FSERVER_INIT_TIMEOUT": str(LIMIT),
        "FSERVER_LOG": "error",
    }
    at = {"scheduler": f"127.0.0.1:{port}", "backend": "CPU", "init_timeout": LIMIT}
    one = 0x3F800000  # 1.0 as an int
    worker = server = None
    if role != "server":
        worker = child(drop_in, DMLC_ROLE="worker", **env)
    if role != "worker":
        server = child(drop_in_server, DMLC_ROLE="server", **env)
    assert all(c.get() == "up" for c in (worker, server) if c)
    scheduler = fserver.Scheduler(**at, connect=False)
    joined = in_thread(scheduler.connect)
    if server is None:
        with fserver.Server(**at) as s:
            joined.result(LIMIT)
            for i in range(6):
                [(handler, _, _)] = s.get_batch(LIMIT * 1e3)
                if i == 5:
                    assert worker.get() == [one] * 4 and worker.get() < 2.5
                s.respond([torch.full((4,), 1.0)], handler)
            assert worker.get() == "done"
            stopped = in_thread(scheduler.stop)
    elif worker is None:
        with fserver.Worker(**at) as w:
            joined.result(LIMIT)
            y = torch.zeros(4, dtype=torch.int32)
            for i in range(6):
                handler = w.push_pull([torch.ones(1)], [0], [y], [0])
                if i == 5:
                    server.put("late")
                w.wait(handler, LIMIT * 1e3)
            assert y.tolist() == [one] * 4
            assert server.get() == "done"
            stopped = in_thread(scheduler.stop)
    else:
        joined.result(LIMIT)
        assert worker.get() == [one] * 4 and worker.get() < 2.5
        server.put("late")
        assert worker.get() == server.get() == "done"
        stopped = in_thread(scheduler.stop)
    stopped.result(LIMIT)


# What a program puts in the place of a method


def test_overrides_are_called(cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of methods that have a faster form."""
    calls: list[str] = []

    class Traced(fserver.Worker):
        def push_pull(self, *args: Any, **kwargs: Any) -> fserver.Handle:
            calls.append("push_pull")
            return super().push_pull(*args, **kwargs)

    monkeypatch.setattr(fserver, "Worker", Traced)
    inner = fserver.Server.respond

    def respond(self: fserver.Server, *args: Any) -> None:
        calls.append("respond")
        inner(self, *args)

    monkeypatch.setattr(fserver.Server, "respond", respond)
    pair = cluster()
    y = torch.zeros(4)
    handler = ask(pair, y)
    answer(pair, 2)
    pair.worker.wait(handler)
    assert (calls, y.tolist()) == (["push_pull", "respond"], [2] * 4)
    assert "push_pull" not in vars(pair.worker) and "wait" in vars(pair.worker)


def test_a_server_that_cannot_open_frees_its_port() -> None:
    """Also as long as somebody has the error, and with it the frames."""
    shape: dict[str, Any] = {"host_scheduler": True, "backend": "CPU", "connect": False}
    with fserver.Scheduler(scheduler="127.0.0.1:0", connect=False) as free:
        at = free.scheduler
    with pytest.raises(fserver.ConfigError):
        try:
            fserver.Server(scheduler=at, gpu=5, **shape)
        except fserver.ConfigError:
            fserver.Server(scheduler=at, **shape).close()
            raise


# Torch without GPUs


class Made(Exception):
    """What a node would have been made of."""


@pytest.mark.parametrize(
    ("built", "environment", "backend"),
    [
        (False, {}, ["CPU"]),
        (True, {}, []),
        (False, {"STEPMESH_BAKCEND": "GPU"}, []),
        (False, {"STEPMESH_BACKEND": "GPU"}, ["GPU"]),
    ],
)
def test_a_torch_without_gpus(
    monkeypatch: pytest.MonkeyPatch, built: bool, environment: dict[str, str], backend: list[str]
) -> None:
    """Its nodes use none, though the host has one, unless they are told to."""

    def make(_self: Any, _extension: Any, lines: list[str]) -> None:
        raise Made(lines)

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(fserver.Worker, "_make", make)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Made) as made:
        fserver.Worker(scheduler="127.0.0.1:1")
    given = dict(line.split("=", 1) for line in made.value.args[0])
    assert [v for k, v in given.items() if k == "STEPMESH_BACKEND"] == backend


def test_names_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no arguments, also where they are passed on: to the scheduler that a server hosts,
    and by a program that gives all of its environment."""
    for name in ("port", "DMLC_TRACKER_URI", "FSERVER_TRANPORT"):
        monkeypatch.setenv(name, "1")
    options: dict[str, Any] = {"backend": "CPU", "connect": False}
    fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, **options).close()
    fserver.Scheduler(scheduler="127.0.0.1:0", settings=dict(os.environ), **options).close()
    with pytest.raises(fserver.ConfigError, match="'port'"):
        fserver.Scheduler(scheduler="127.0.0.1:0", settings={"port": "2"}, **options)
