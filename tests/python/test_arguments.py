"""Wrong arguments and settings: each error is typed, and has the argument, its value and what to
do. Nothing wrong reaches a peer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nodes import LIMIT, Cluster, open_cluster

import fserver
from fserver import _loader, env
from fserver._stepmesh import StepmeshServer
from fserver.settings import merged

X = torch.zeros(4, 6)


@pytest.fixture(scope="module")
def kept() -> Iterator[list[Cluster]]:
    """The nodes that tests share, if there are any."""
    found: list[Cluster] = []
    yield found
    for c in found:
        c.close()


@pytest.fixture
def pair(kept: list[Cluster], request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A worker and a server. A test that fails may leave a request behind, for which the next one
    would wait: it ends the nodes."""
    if not kept:
        kept.append(open_cluster())
    failed = request.session.testsfailed
    yield kept[0]
    if request.session.testsfailed > failed:
        kept.pop().close()


@pytest.fixture(scope="module")
def two_servers() -> Iterator[Cluster]:
    c = open_cluster(servers=2)
    yield c
    c.close()


def refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """The call raises, and the text has all the parts, in this order."""
    with pytest.raises(error) as raised:
        call()
    assert isinstance(raised.value, fserver.Error)
    pattern = ".*".join(re.escape(part) for part in text.split(" ... "))
    assert re.search(pattern, str(raised.value), re.DOTALL), str(raised.value)


def shrunk() -> torch.Tensor:
    """A tensor of 96 bytes, of which there are 8."""
    t = torch.zeros(4, 6)
    t.untyped_storage().resize_(8)
    return t


def push(tensor: Any, keys: Any = (0,)) -> tuple[Any, ...]:
    return [tensor], keys, [], []


def pull(tensor: Any, keys: Any = (0,)) -> tuple[Any, ...]:
    return [], [], [tensor], keys


PUSH_PULL: list[tuple[str, type[Exception], str, Callable[[], tuple[Any, ...]]]] = [
    (
        "not a tensor",
        fserver.ConfigError,
        "push_pull: push_tensors[0] is of type list, want a torch.Tensor",
        lambda: push([1.0]),
    ),
    (
        "none",
        fserver.ConfigError,
        "push_pull: pull_tensors[0] is of type NoneType, want a torch.Tensor",
        lambda: pull(None),
    ),
    (
        "lone tensor",
        fserver.ConfigError,
        "push_pull: push_tensors is a tensor, want a list of tensors: pass [push_tensors]",
        lambda: (X, [0], [], []),
    ),
    (
        "not a sequence",
        fserver.ConfigError,
        "push_pull: pull_tensors is 3, want a sequence of tensors",
        lambda: ([X], [0], 3, []),
    ),
    (
        "not contiguous",
        fserver.ShapeError,
        "push_pull: push_tensors[0] ... shape [6, 4] ... strides [1, 6] ... not contiguous: make "
        "it contiguous first",
        lambda: push(X.t()),
    ),
    (
        "pull not contiguous",
        fserver.ShapeError,
        "push_pull: pull_tensors[0] ... [4, 3] ... [6, 2] ... not contiguous: make",
        lambda: pull(X[:, ::2]),
    ),
    (
        "expanded",
        fserver.ShapeError,
        "pull_tensors[0] ... [3, 4] ... [0, 1] ... not contiguous: make",
        lambda: pull(torch.zeros(4).expand(3, 4)),
    ),
    (
        "meta",
        fserver.ConfigError,
        "push_tensors[0] is on device meta ... pass a CPU tensor",
        lambda: push(X.to("meta")),
    ),
    (
        "sparse",
        fserver.ConfigError,
        "push_tensors[0] has layout sparse: pass push_tensors[0].to_dense()",
        lambda: push(X.to_sparse()),
    ),
    (
        "conjugate",
        fserver.ConfigError,
        "push_tensors[0] is a conjugate view: pass push_tensors[0].resolve_conj()",
        lambda: push(torch.zeros(2, dtype=torch.complex64).conj()),
    ),
    (
        "negated",
        fserver.ConfigError,
        "pull_tensors[0] is a negated view: pass pull_tensors[0].resolve_neg()",
        lambda: pull(torch.zeros(2, dtype=torch.complex64).conj().imag.clone()._neg_view()),
    ),
    (
        "fake",
        fserver.ConfigError,
        "push_tensors[0] ... pass a plain tensor",
        lambda: push(torch._efficientzerotensor(3)),
    ),
    (
        "leaf with grad",
        fserver.ConfigError,
        "pull_tensors[0] is a leaf that requires grad ... pull_tensors[0].detach() ... no_grad",
        lambda: pull(torch.zeros(3, requires_grad=True)),
    ),
    (
        "more than 64 dimensions",
        fserver.ShapeError,
        "push tensor 0 has 65 dimensions (at most 64",
        lambda: push(torch.zeros((1,) * 65)),
    ),
    (
        "a part of its memory is gone",
        fserver.ConfigError,
        "push_pull: push_tensors[0] has lost its memory (untyped_storage().resize_): pass a",
        lambda: push(shrunk()),
    ),
    (
        "negative key",
        fserver.ConfigError,
        "push_pull: push_keys[0] is -1, want an int from 0 to 2**64-1",
        lambda: push(X, [-1]),
    ),
    (
        "large key",
        fserver.ConfigError,
        "push_pull: pull_keys[0] is 18446744073709551616, want an int from 0 to 2**64-1",
        lambda: pull(X, [2**64]),
    ),
    (
        "float key",
        fserver.ConfigError,
        "push_pull: push_keys[0] is 1.0, want an int",
        lambda: push(X, [1.0]),
    ),
    (
        "bool as key",
        fserver.ConfigError,
        "push_pull: push_keys[0] is True, want an int",
        lambda: push(X, [True]),
    ),
    (
        "text as keys",
        fserver.ConfigError,
        "push_pull: push_keys is '0', want a sequence of ints",
        lambda: push(X, "0"),
    ),
    (
        "int as keys",
        fserver.ConfigError,
        "push_pull: push_keys is 0, want a sequence of ints",
        lambda: push(X, 0),
    ),
    (
        "dict as keys",
        fserver.ConfigError,
        "push_pull: push_keys is {0: 0}, want a sequence of ints",
        lambda: push(X, {0: 0}),
    ),
    (
        "key count",
        fserver.ShapeError,
        "push_pull: push_keys has 2 keys for 1 push_tensors: give one for each",
        lambda: push(X, [0, 1]),
    ),
    (
        "pull key count",
        fserver.ShapeError,
        "push_pull: pull_keys has 0 keys for 1 pull_tensors ... give one for each tensor (1)",
        lambda: pull(X, []),
    ),
    (
        "key twice",
        fserver.ConfigError,
        "push_pull: push_keys contains 7 twice: give each tensor of a call a different key",
        lambda: ([X, X, X], [7, 8, 7], [], []),
    ),
    (
        "nothing",
        fserver.ShapeError,
        "push_pull: push_tensors and pull_tensors are both empty: give at least one",
        lambda: ([], [], [], []),
    ),
    (
        "pull twice",
        fserver.ConfigError,
        "push_pull: pull_tensors[0] and pull_tensors[1] share memory: pass tensors that",
        lambda: ([], [], [X, X], [0, 1]),
    ),
    (
        "pulls that overlap",
        fserver.ConfigError,
        "push_pull: pull_tensors[0] and pull_tensors[2] share memory",
        lambda: ([], [], [X[1:3], X[3], X[2]], [0, 1, 2]),
    ),
]


@pytest.mark.parametrize(
    ("error", "text", "arguments"), [c[1:] for c in PUSH_PULL], ids=[c[0] for c in PUSH_PULL]
)
def test_push_pull(
    pair: Cluster, error: type[Exception], text: str, arguments: Callable[[], tuple[Any, ...]]
) -> None:
    refused(error, text, lambda: pair.worker.push_pull(*arguments()))


def test_nothing_of_that_has_reached_the_server(pair: Cluster) -> None:
    assert pair.server.get_batch(timeout_ms=50) == []
    assert pair.worker._node.held == 0


def test_pulls_that_only_touch_are_fine(pair: Cluster) -> None:
    y = torch.zeros(4, 6)
    h = pair.worker.push_pull([y[3:]], [0], [y[0], y[1:3], y[3]], range(3))
    pair.server.respond(
        [torch.ones(6), torch.ones(2, 6), torch.ones(6)], pair.server.get_batch()[0][0]
    )
    pair.worker.wait(h)
    assert y.sum() == 24


def test_a_leaf_may_be_pulled_without_grad(pair: Cluster) -> None:
    y = torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        h = pair.worker.push_pull([], [], [y], [0])
    pair.server.respond([torch.ones(3)], pair.server.get_batch()[0][0])
    pair.worker.wait(h)
    assert y.sum() == 3


def test_pulls_that_servers_do_not_divide(two_servers: Cluster) -> None:
    y = [torch.zeros(1) for _ in range(3)]
    refused(
        fserver.ShapeError,
        "push_pull: pull_tensors has 3 tensors, want a multiple of the number of servers (2)",
        lambda: two_servers.worker.push_pull([X], [0], y, range(3)),
    )


def test_pull_keys_for_two_servers(two_servers: Cluster) -> None:
    y = [torch.zeros(1) for _ in range(4)]
    refused(
        fserver.ShapeError,
        "push_pull: pull_keys has 3 keys for 4 pull_tensors of 2 servers: ... (4) ... (2)",
        lambda: two_servers.worker.push_pull([X], [0], y, range(3)),
    )


def test_pull_into_what_is_pushed_to_two_servers(two_servers: Cluster) -> None:
    refused(
        fserver.ConfigError,
        "push_pull: pull_tensors[1] and push_tensors[0] share memory",
        lambda: two_servers.worker.push_pull([X], [0], [torch.zeros(1), X[0]], [0]),
    )


def test_pull_into_what_is_pushed_to_one_server(pair: Cluster) -> None:
    x = torch.ones(3)
    h = pair.worker.push_pull([x], [0], [x], [0])
    [(handler, [seen], _)] = pair.server.get_batch()
    pair.server.respond([seen + 1], handler)
    pair.worker.wait(h)
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (10**6, "wait: handler 1000000 is not known: push_pull has returned 0 to"),
        (-1, "wait: handler is -1, want an int from 0"),
        ("0", "wait: handler is '0', want an int"),
        (None, "wait: handler is None, want an int"),
    ],
)
def test_handlers_of_wait(pair: Cluster, handler: Any, text: str) -> None:
    refused(fserver.ConfigError, text, lambda: pair.worker.wait(handler))


@pytest.mark.parametrize("method", ["get_all_handlers", "fetch_trace"])
def test_unknown_handlers(pair: Cluster, method: str) -> None:
    refused(
        fserver.ConfigError,
        f"{method}: handler 99999 is not known",
        lambda: getattr(pair.worker, method)(99999),
    )


@pytest.mark.parametrize("timeout_ms", [-1, float("nan"), "1"])
def test_time_limits(pair: Cluster, timeout_ms: Any) -> None:
    h = pair.worker.push_pull([X], [0], [], [])
    pair.server.respond([], pair.server.get_batch()[0][0])
    text = f"timeout_ms is {timeout_ms!r}, want a number of milliseconds, 0 or more"
    refused(fserver.ConfigError, f"wait: {text}", lambda: pair.worker.wait(h, timeout_ms))
    refused(fserver.ConfigError, f"get_batch: {text}", lambda: pair.server.get_batch(timeout_ms))
    refused(
        fserver.ConfigError,
        f"barrier: {text}",
        lambda: pair.server.barrier(True, True, timeout_ms=timeout_ms),
    )
    pair.worker.wait(h)


def test_trace_of_a_request_under_way(pair: Cluster) -> None:
    h = pair.worker.push_pull([X], [0], [], [])
    refused(fserver.ShapeError, "is under way", lambda: pair.worker.fetch_trace(h))
    pair.server.respond([], pair.server.get_batch()[0][0])
    pair.worker.wait(h)


@pytest.mark.parametrize(
    ("error", "text", "answer"),
    [
        (fserver.ShapeError, "0 tensors, want 1", lambda: []),
        (fserver.ShapeError, "2 tensors, want 1", lambda: [X, X]),
        (fserver.ShapeError, "tensor 0 has 96 bytes, want 24", lambda: [X]),
        (fserver.ShapeError, "tensor 0 has 20 bytes, want 24", lambda: [torch.zeros(5)]),
        (fserver.ShapeError, "respond: tensors[0] ... not contiguous: make", lambda: [X[:, 0]]),
        (fserver.ConfigError, "respond: tensors[0] is of type int", lambda: [1]),
        (fserver.ConfigError, "respond: tensors is a tensor ... pass [tensors]", lambda: X),
        (fserver.ConfigError, "respond: tensors is None, want a sequence", lambda: None),
        (fserver.ConfigError, "respond: tensors[0] is on device meta", lambda: [X.to("meta")]),
        (fserver.ConfigError, "respond: tensors[0] has lost its memory", lambda: [shrunk()]),
    ],
)
def test_respond(
    pair: Cluster, error: type[Exception], text: str, answer: Callable[[], Any]
) -> None:
    y = torch.zeros(6)
    h = pair.worker.push_pull([X], [0], [y], [0])
    handler = pair.server.get_batch()[0][0]
    refused(error, text, lambda: pair.server.respond(answer(), handler))
    pair.server.respond([torch.ones(6)], handler)  # it can still be answered
    pair.worker.wait(h)
    assert y.sum() == 6


def test_respond_twice_and_to_nobody(pair: Cluster) -> None:
    h = pair.worker.push_pull([X], [0], [], [])
    handler = pair.server.get_batch()[0][0]
    pair.server.respond([], handler)
    for wrong in (handler, 2**64 - 1, 12345):
        refused(
            fserver.ShapeError,
            f"respond to handler {wrong}: no such request",
            lambda wrong=wrong: pair.server.respond([], wrong),
        )
    refused(
        fserver.ConfigError,
        "respond: handler is -1, want an int",
        lambda: pair.server.respond([], -1),
    )
    pair.worker.wait(h)


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (
            fserver.ShapeError,
            "respond_vec: handler_vec has 0 handlers for 1 items of tensors_vec: give one for each",
            lambda h: (X, [[X]], []),
        ),
        (
            fserver.ShapeError,
            "respond_vec: ret_buffer has no dimensions",
            lambda h: (torch.tensor(1.0), [[X]], [h]),
        ),
        (
            fserver.ShapeError,
            "respond_vec: tensors_vec[0] has no dimensions",
            lambda h: (X, [[torch.tensor(1.0)]], [h]),
        ),
        (
            fserver.ShapeError,
            "respond_vec: tensors_vec[0] is empty",
            lambda h: (X, [[]], [h]),
        ),
        (
            fserver.ShapeError,
            "respond_vec: tensors_vec[0] has 5 rows, but ret_buffer has 4",
            lambda h: (X, [[torch.zeros(5)]], [h]),
        ),
        (
            fserver.ShapeError,
            "respond_vec: ret_buffer ... not contiguous: make",
            lambda h: (X.t(), [[X]], [h]),
        ),
        (
            fserver.ConfigError,
            "respond_vec: ret_buffer is of type list",
            lambda h: ([X], [[X]], [h]),
        ),
        (
            fserver.ConfigError,
            "respond_vec: tensors_vec[0] is of type int",
            lambda h: (X, [[1]], [h]),
        ),
        (
            fserver.ConfigError,
            "respond_vec: handler_vec[0] is 'a', want an int",
            lambda h: (X, [[X]], ["a"]),
        ),
        (
            fserver.ShapeError,
            "tensor 0 has 48 bytes, want 96",
            lambda h: (X, [[X[:2]]], [h]),
        ),
    ],
)
def test_respond_vec(
    pair: Cluster,
    error: type[Exception],
    text: str,
    arguments: Callable[[int], tuple[Any, ...]],
) -> None:
    y = torch.zeros(4, 6)
    h = pair.worker.push_pull([X], [0], [y], [0])
    handler = pair.server.get_batch()[0][0]
    refused(error, text, lambda: pair.server.respond_vec(*arguments(handler)))
    pair.server.respond_vec(X, [[X]], [handler])
    pair.worker.wait(h)


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (
            fserver.ShapeError,
            "register_recv_buffer: worker_ranks is empty",
            lambda: (X, [], []),
        ),
        (
            fserver.ShapeError,
            "register_recv_buffer: push_keys has 1 keys for 2 worker_ranks: give one for each",
            lambda: (X, [0, 0], [1]),
        ),
        (
            fserver.ShapeError,
            "register_recv_buffer: tensor has 96 bytes, want a multiple of the number of worker",
            lambda: (X, [0] * 5, range(5)),
        ),
        (
            fserver.ShapeError,
            "register_recv_buffer: tensor has 0 bytes",
            lambda: (torch.zeros(0), [0], [0]),
        ),
        (
            fserver.ShapeError,
            "register_recv_buffer: tensor ... not contiguous: make",
            lambda: (X.t(), [0], [0]),
        ),
        (
            fserver.ConfigError,
            "register_recv_buffer: tensor is of type list",
            lambda: ([X], [0], [0]),
        ),
        (
            fserver.ConfigError,
            "register_recv_buffer: tensor has lost its memory",
            lambda: (shrunk(), [0], [0]),
        ),
        (
            fserver.ConfigError,
            "register_recv_buffer: worker_ranks[0] is -1",
            lambda: (X, [-1], [0]),
        ),
        (
            fserver.ConfigError,
            "register_recv_buffer: push_keys[0] is 'a'",
            lambda: (X, [0], ["a"]),
        ),
    ],
)
def test_register_recv_buffer(
    pair: Cluster, error: type[Exception], text: str, arguments: Callable[[], tuple[Any, ...]]
) -> None:
    refused(error, text, lambda: pair.server.register_recv_buffer(*arguments()))


def test_memory_is_registered_once(pair: Cluster) -> None:
    buffer = torch.zeros(8)
    pair.server.register_recv_buffer(buffer, [0], [100])
    refused(
        fserver.ConfigError,
        "register_recv_buffer: tensor shares memory with a tensor that is already registered",
        lambda: pair.server.register_recv_buffer(buffer[4:], [0], [101]),
    )
    for ranks, keys, text in (
        ([0], [100], "slice 0, key 100 of worker 0: the key has memory already"),
        ([0, 0], [101, 101], "slice 1, key 101 of worker 0: the key has memory already"),
        ([0, 9], [101, 101], "slice 1, key 101 of worker 9: this server has no such worker"),
    ):
        refused(
            fserver.ShapeError,
            f"register_recv_buffer: {text}",
            lambda ranks=ranks, keys=keys: pair.server.register_recv_buffer(
                torch.zeros(8), ranks, keys
            ),
        )
    # Nothing was left behind, to be written to when it is freed.
    h = pair.worker.push_pull([torch.full((8,), 3.0)], [101], [], [])
    [(handler, [seen], _)] = pair.server.get_batch()
    assert seen.tolist() == [3] * 8  # half of it would fit into a slice
    pair.server.respond([], handler)
    pair.worker.wait(h)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: p.worker.push_pull([X], [0], []), r"\(\) is missing the argument 'pull_keys'"),
        (lambda p: p.worker.wait(), r"wait\(\) is missing the argument 'handler'"),
        (lambda p: p.worker.wait(0, timeout=1), r"wait\(\) got an unexpected argument 'timeout'"),
        (lambda p: p.worker.wait(0, handler=1), r"\(\) got multiple values for argument 'handler'"),
        (lambda p: p.worker.wait(0, 1, 2), r"wait\(\) takes at most 2 arguments \(3 given\)"),
        (lambda p: p.server.get_batch(1, 1, 2), r"get_batch\(\) takes at most 2 arguments"),
    ],
)
def test_signatures(pair: Cluster, call: Callable[[Cluster], Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call(pair)


# Settings


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("scheduler is 'nowhere', want \"host:port\"", {"scheduler": "nowhere"}),
        ("scheduler is '::1:7000', want \"host:port\"", {"scheduler": "::1:7000"}),
        ("scheduler is 'h:p', want", {"scheduler": "h:p"}),
        ("DMLC_NUM_WORKER ... 0 ... 1 to", {"workers": 0}),
        ("DMLC_NUM_SERVER ... two", {"servers": "two"}),
        ("DMLC_GROUP_SIZE ... -1", {"group_size": -1}),
        ("STEPMESH_GPU ... 5", {"gpu": 5, "group_size": 2}),
        ("FSERVER_TRANSPORT ... pigeon ... tcp", {"transport": "pigeon"}),
        ("STEPMESH_BACKEND ... TPU ... CPU", {"backend": "TPU"}),
        ("FSERVER_INIT_TIMEOUT ... soon ... seconds", {"init_timeout": "soon"}),
        ("FSERVER_SPIN_US ... fast", {"settings": {"FSERVER_SPIN_US": "fast"}}),
        ("FSERVER_HOST_SCHEDULER", {"host_scheduler": True}),
    ],
)
def test_settings(text: str, options: dict[str, Any]) -> None:
    options = {"scheduler": "127.0.0.1:1", "connect": False, **options}
    refused(fserver.ConfigError, text, lambda: fserver.Worker(**options))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("s3cret\0", "FSERVER_SECRET contains a zero byte"),
        ("s3cret\udcff", "FSERVER_SECRET is not UTF-8"),
    ],
)
def test_a_setting_that_is_no_text(monkeypatch: pytest.MonkeyPatch, value: str, text: str) -> None:
    """It is neither cut short nor shown."""
    for call in (
        lambda: fserver.Scheduler(secret=value, connect=False),
        lambda: fserver.Worker(secret=value, connect=False),
        lambda: fserver.Server(secret=value, connect=False),
        lambda: env.settings({"FSERVER_SECRET": value}),
        lambda: _loader.load().host([f"FSERVER_SECRET={value}"]),
        lambda: _loader.load().probe([f"FSERVER_SECRET={value}"], 0),
    ):
        with pytest.raises(fserver.ConfigError, match=text) as raised:
            call()
        assert "s3cret" not in str(raised.value)
    monkeypatch.setenv("DMLC_NODE_HOST", os.fsdecode(b"\xff"))  # as any program may
    with pytest.raises(fserver.ConfigError, match="DMLC_NODE_HOST is not UTF-8"):
        fserver.Scheduler(connect=False)


def test_an_empty_group_size_is_none() -> None:
    for size in ("", " "):
        settings = {"DMLC_GROUP_SIZE": size}
        server = StepmeshServer(scheduler="127.0.0.1:1", settings=settings, connect=False)
        assert server._group_size == 1
        server.close()


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="wrokers"):
        fserver.Worker(wrokers=2)  # type: ignore[call-arg]


def test_keywords_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_NUM_WORKER", "3")
    monkeypatch.setenv("DMLC_NUM_SERVER", "4")
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", "0")
    monkeypatch.setenv("DMLC_ROLE", "worker")
    node = fserver.Scheduler.from_env(connect=False)
    assert (node.workers, node.servers) == (3, 4)
    node.close()
    node = fserver.Scheduler(workers=2, settings={"DMLC_NUM_SERVER": 5}, connect=False)
    assert (node.workers, node.servers) == (2, 5)
    node.close()


def test_scheduler_port_in_use(port: int) -> None:
    first = fserver.Scheduler(scheduler=f"127.0.0.1:{port}", connect=False)
    soon = {"FSERVER_INIT_TIMEOUT": 0.1}  # for as long it waits for the port
    with pytest.raises(fserver.Error, match=rf"127.0.0.1:{port}.*address already in use"):
        fserver.Scheduler(scheduler=f"127.0.0.1:{port}", settings=soon, connect=False)
    first.close()


def test_scheduler_that_never_comes(port: int) -> None:
    with pytest.raises(fserver.TimeoutError, match=rf"127.0.0.1:{port}.*refused"):
        fserver.Worker(scheduler=f"127.0.0.1:{port}", init_timeout=3)


def test_cluster_that_is_never_complete() -> None:
    server = fserver.Server(
        scheduler="127.0.0.1:0", host_scheduler=True, init_timeout=3, connect=False
    )
    with pytest.raises(fserver.TimeoutError, match="not complete after 3s: .* missing"):
        server.connect()
    assert server.closed


def test_interface_that_does_not_exist() -> None:
    with pytest.raises(fserver.Error, match="none0"):
        fserver.Server(scheduler="10.0.0.1:7000", interface="none0", connect=False)


def test_an_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an interface before the address that the environment names."""
    monkeypatch.setenv("DMLC_NODE_HOST", "192.0.2.7")
    with fserver.Server(scheduler="127.0.0.1:7000", interface="lo", connect=False) as server:
        assert server.address.startswith("127.0.0.1")
    with pytest.raises(fserver.Error, match=r"192\.0\.2\.7"):
        fserver.Server(scheduler="127.0.0.1:7000", connect=False)


@pytest.mark.parametrize(
    ("environment", "arguments", "effect"),
    [
        ("DMLC_INTERFACE=auto", {"DMLC_NODE_HOST": "10.0.0.1"}, "DMLC_INTERFACE="),
        ("DMLC_NODE_HOST=10.0.0.1", {"DMLC_INTERFACE": "eth0"}, "DMLC_NODE_HOST="),
        ("DMLC_INTERFACE=auto", {"DMLC_NODE_HOST": ""}, "DMLC_INTERFACE=auto"),
        ("DMLC_INTERFACE=auto", {"DMLC_PS_ROOT_URI": "10.0.0.2"}, "DMLC_INTERFACE=auto"),
        ("DMLC_LOCAL=1", {"DMLC_PS_ROOT_URI": "10.0.0.2"}, "DMLC_LOCAL="),
        ("DMLC_LOCAL=1", {"DMLC_NODE_HOST": "me"}, "DMLC_LOCAL="),
        ("DMLC_LOCAL=1", {"DMLC_PS_ROOT_URI": "127.0.0.1"}, "DMLC_LOCAL=1"),
        ("DMLC_LOCAL=1", {"DMLC_PS_ROOT_URI": "10.0.0.2", "DMLC_LOCAL": "1"}, "DMLC_LOCAL=1"),
        ("DMLC_LOCAL=1", {"DMLC_NUM_WORKER": "2"}, "DMLC_LOCAL=1"),
        ("FSERVER_SECRET=12345678", {"FSERVER_SECRET_FILE": "/x"}, "FSERVER_SECRET="),
        ("FSERVER_SECRET=12345678", {"FSERVER_SECRET_FILE": ""}, "FSERVER_SECRET=12345678"),
        ("FSERVER_TRANSPORT=tcp", {"DMLC_ENABLE_RDMA": "ibverbs"}, "FSERVER_TRANSPORT="),
        ("FSERVER_TRANSPORT=tcp", {"DMLC_ENABLE_RDMA": "0"}, "FSERVER_TRANSPORT=tcp"),
        ("FSERVER_TRANSPORT=tcp", {"DMLC_ENABLE_UCX": "off"}, "FSERVER_TRANSPORT=tcp"),
        ("FSERVER_LOG=debug", {"PS_VERBOSE": "0"}, "FSERVER_LOG="),
        ("DMLC_ENABLE_RDMA=ibverbs", {"FSERVER_TRANSPORT": "tcp"}, "FSERVER_TRANSPORT=tcp"),
    ],
)
def test_an_argument_has_effect(
    monkeypatch: pytest.MonkeyPatch, environment: str, arguments: dict[str, str], effect: str
) -> None:
    """Another setting of the environment does not take it away."""
    monkeypatch.setenv(*environment.split("="))
    name, _, value = effect.partition("=")
    assert merged(arguments).get(name, "") == value


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"transport": "tcp"}, "'transport'.*did you mean FSERVER_TRANSPORT"),
        ({"fserver_transport": "tcp"}, "'fserver_transport'.*did you mean FSERVER_TRANSPORT"),
        ({"FSERVER_TRANPORT": "tcp"}, "'FSERVER_TRANPORT'.*did you mean FSERVER_TRANSPORT"),
        ({1: "tcp"}, "settings has the name 1: want text"),
        (["FSERVER_SECRET=12345678"], "settings is a list, want names and values, as {[^1]*$"),
        ("FSERVER_SECRET=12345678", "settings is a str, want names and values, as {[^1]*$"),
    ],
)
def test_settings_of_no_name(settings: Any, error: str) -> None:
    with pytest.raises(fserver.ConfigError, match=error):
        fserver.Scheduler(scheduler="127.0.0.1:0", settings=settings, connect=False)


def test_settings_that_are_none_or_of_somebody_else() -> None:
    others = {"PATH": "/bin", "http_proxy": "", "FSERVER_ARCHIVE": "x", "FSERVER_CLUSTER": None}
    settings = {**others, "FSERVER_SECRET": None, "DMLC_PS_VAN_TYPE": "zmq"}
    with fserver.Scheduler(scheduler="127.0.0.1:0", settings=settings, connect=False) as node:
        assert node.address
        node.close()


def test_a_scheduler_that_is_no_text() -> None:
    with pytest.raises(fserver.ConfigError, match=r"scheduler is \('127.0.0.1', 0\), want"):
        fserver.Scheduler(scheduler=("127.0.0.1", 0), connect=False)  # type: ignore[arg-type]


def test_a_host_goes_before_an_interface_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DMLC_INTERFACE", "auto")
    with pytest.raises(fserver.Error, match=r"192\.0\.2\.7"):
        fserver.Server(scheduler="127.0.0.1:7000", host="192.0.2.7", connect=False)


def test_address_that_is_not_of_this_host() -> None:
    with pytest.raises(fserver.Error, match=r"192\.0\.2\.1.*DMLC_NODE_HOST"):
        fserver.Server(scheduler="192.0.2.2:7000", host="192.0.2.1", connect=False)


def test_methods_before_connect() -> None:
    worker = fserver.Worker(scheduler="127.0.0.1:1", connect=False)
    for call in (
        lambda: worker.push_pull([X], [0], [], []),
        lambda: worker.wait(0),
        lambda: worker.barrier(True, True),
    ):
        refused(fserver.ClosedError, "the node is not connected: call connect()", call)
    worker.close()
    refused(fserver.ClosedError, "connect: the node is closed", worker.connect)


def test_a_server_without_a_scheduler_has_none_to_name() -> None:
    server = fserver.Server(scheduler="127.0.0.1:1", connect=False)
    refused(fserver.ClosedError, "hosts no scheduler", lambda: server.scheduler)
    server.close()


@pytest.mark.parametrize("connection", ["wrong cluster", "wrong secret", "no secret"])
def test_strangers(port: int, connection: str) -> None:
    """A node of another cluster, or without the secret, is refused, and says so."""
    ours = {"cluster": "a", "secret": "s"}
    theirs = {
        "wrong cluster": {"cluster": "b", "secret": "s"},
        "wrong secret": {"cluster": "a", "secret": "t"},
        "no secret": {"cluster": "a"},
    }[connection]
    scheduler = fserver.Scheduler(scheduler=f"127.0.0.1:{port}", connect=False, **ours)
    with pytest.raises(fserver.Error, match=f"(?i){connection.split()[1]}"):
        fserver.Worker(scheduler=scheduler.scheduler, init_timeout=LIMIT, **theirs)
    scheduler.close()
