"""Who keeps what alive, and for how long."""

from __future__ import annotations

import gc
import random
import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nodes import LIMIT, Cluster, eventually, in_thread, open_cluster

import fserver

MakeCluster = Callable[..., Cluster]


class Owner:
    """Memory of a tensor that tells when it goes."""

    def __init__(self, size: int, value: int):
        self.memory = bytearray([value]) * size


def owned(size: int, value: int = 0) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """A tensor, and a weak reference to what owns its memory."""
    import numpy as np

    class Array(np.ndarray[Any, Any]):
        pass

    array = np.full(size, value, dtype=np.uint8).view(Array)
    return torch.from_numpy(array), weakref.ref(array)


def answer(pair: Cluster, *tensors: torch.Tensor) -> None:
    pair.server.respond(list(tensors), pair.server.get_batch(LIMIT * 1e3)[0][0])


def test_tensors_live_until_the_request_has_completed(pair: Cluster) -> None:
    (x, x_alive), (y, y_alive) = owned(64), owned(64)
    h = pair.worker.push_pull([x], [0], [y], [0])
    del x, y
    gc.collect()
    assert x_alive() is not None and y_alive() is not None
    answer(pair, torch.ones(64, dtype=torch.uint8))
    assert y_alive() is not None
    pair.worker.wait(h)
    assert x_alive() is None and y_alive() is None


def test_shared_memory_meanwhile(pair: Cluster) -> None:
    """A tensor that is sent to another process gets other memory, which cannot be resized."""
    x, y, z = torch.ones(1000), torch.zeros(1000), torch.full((1000,), 3.0)
    h = pair.worker.push_pull([x], [0], [y], [0])
    answer(pair, z)
    for tensor in (x, z):
        tensor.share_memory_()
    pair.worker.wait(h)
    eventually(lambda: (pair.worker.describe(), pair.server.describe()) and y.eq(3).all())
    again, _ = x.clone(), pair.worker.push_pull([x], [0], [], [])
    answer(pair)
    assert again.eq(1).all()


def refuses_to_resize(tensor: torch.Tensor) -> None:
    t = tensor.detach()  # torch has changed the shape by then
    size = t.untyped_storage().nbytes()
    for resize in (
        lambda: t.untyped_storage().resize_(0),
        lambda: t.resize_(100 * t.numel()),
        lambda: torch.ones(100 * t.numel(), out=t),
    ):
        with pytest.raises(RuntimeError, match="not resizable"):
            resize()
    assert t.untyped_storage().nbytes() == size


def test_memory_under_way_cannot_be_resized(pair: Cluster) -> None:
    """Not before the last who uses it is done; also what is answered with, and in part."""
    x, y, z = torch.ones(8), torch.zeros(64), torch.full((16,), 3.0)
    first = pair.worker.push_pull([x], [0], [y[:32]], [0])
    second = pair.worker.push_pull([x], [1], [y[32:48]], [1])
    refuses_to_resize(x)
    refuses_to_resize(y)
    answer(pair, torch.full((32,), 5.0))
    pair.worker.wait(first)
    refuses_to_resize(x)
    refuses_to_resize(y)
    [(handler, _, _)] = pair.server.get_batch(LIMIT * 1e3)
    pair.server.respond([z], handler)
    pair.worker.wait(second)
    assert y.tolist() == [5] * 32 + [3] * 16 + [0] * 16

    def lets_go() -> bool:  # the server's next calls look whether the answer has gone
        h = pair.worker.push_pull([torch.ones(1)], [0], [], [])
        answer(pair)
        pair.worker.wait(h)
        return z.untyped_storage().resizable()

    eventually(lets_go)
    for t in (x, y, z):
        assert t.resize_(1000).numel() == 1000


def test_much_memory_under_way_cannot_be_resized(pair: Cluster) -> None:
    """Whatever goes first."""
    chance = random.Random(5)
    tensors = [torch.ones(1) for _ in range(400)]
    users = dict.fromkeys(range(400), 0)
    under_way = {}
    for _ in range(100):
        picked = chance.sample(range(400), 8)
        h = pair.worker.push_pull([tensors[i] for i in picked], list(range(8)), [], [])
        under_way[h] = picked
        for i in picked:
            users[i] += 1
    for _ in range(100):
        answer(pair)
    while under_way:
        h = chance.choice(list(under_way))
        pair.worker.wait(h)
        for i in under_way.pop(h):
            users[i] -= 1
        resizable = [t.untyped_storage().resizable() for t in tensors]
        kept = sum(not r for r in resizable)
        assert kept <= sum(u > 0 for u in users.values())  # some calls let go of others too
        assert all(r for r, u in zip(resizable, users.values(), strict=True) if not u)
    assert all(t.untyped_storage().resizable() for t in tensors)


class Shrinks:
    """An int that takes a tensor its memory when it is read, as another thread may do then."""

    def __init__(self, value: int, tensor: torch.Tensor) -> None:
        self.value, self.tensor = value, tensor

    def __index__(self) -> int:
        self.tensor.untyped_storage().resize_(0)
        return self.value


def test_memory_that_goes_within_a_call(pair: Cluster) -> None:
    x, y = torch.ones(8), torch.zeros(8)
    with pytest.raises(fserver.ConfigError, match=r"pull_tensors\[0\] has lost its memory"):
        pair.worker.push_pull([], [], [y], [Shrinks(0, y)])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="not resizable"):
        pair.worker.push_pull([x], [Shrinks(0, x)], [], [])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="not resizable"):
        pair.server.register_recv_buffer(x, [0], [Shrinks(9, x)])  # type: ignore[list-item]
    y = torch.zeros(8)
    h = pair.worker.push_pull([x], [0], [y], [0])
    handler = pair.server.get_batch(LIMIT * 1e3)[0][0]
    z = torch.ones(8)
    with pytest.raises(RuntimeError, match="not resizable"):
        pair.server.respond_vec(z, [z], [Shrinks(handler, z)])  # type: ignore[list-item]
    pair.server.respond_vec(z, [z], [handler])
    pair.worker.wait(h)
    assert bool((y == 1).all())
    for t in (x, z):
        eventually(lambda t=t: pair.server.get_batch(timeout_ms=0) == [] and resizable(t))


def test_the_buffer_of_respond_vec_cannot_be_resized(pair: Cluster) -> None:
    """Until its answers have been sent."""
    y = torch.empty(1 << 22)
    h = pair.worker.push_pull([torch.ones(8)], [0], [y], [0])
    handler = pair.server.get_batch(LIMIT * 1e3)[0][0]
    z = torch.ones(1 << 22)
    pair.server.respond_vec(z, [z], [handler])
    refuses_to_resize(z)  # what is over is let go by the next call
    pair.worker.wait(h)
    assert bool((y == 1).all())
    eventually(lambda: pair.server.get_batch(timeout_ms=0) == [] and resizable(z))


def resizable(t: torch.Tensor) -> bool:
    return t.untyped_storage().resizable()


def test_refused_memory_can_be_resized(pair: Cluster) -> None:
    x = torch.ones(8)
    with pytest.raises(fserver.ConfigError):
        pair.worker.push_pull([x, 1], [0, 1], [], [])  # type: ignore[list-item]
    with pytest.raises(fserver.Error):
        pair.server.respond([x], 12345)
    assert x.resize_(1000).numel() == 1000


def test_what_torch_does_not_resize_stays_so(pair: Cluster) -> None:
    x, _ = owned(64)
    h = pair.worker.push_pull([x], [0], [], [])
    answer(pair)
    pair.worker.wait(h)
    assert not x.untyped_storage().resizable()


def test_a_registered_buffer_cannot_be_resized_until_it_is_let_go(pair: Cluster) -> None:
    buffer = torch.zeros(64)
    pair.server.register_recv_buffer(buffer, [0], [0])
    refuses_to_resize(buffer)
    pair.server.close()
    del pair.servers[:]
    gc.collect()
    assert buffer.resize_(1000).numel() == 1000


def test_tensors_go_without_a_wait(pair: Cluster) -> None:
    x, alive = owned(64)
    pair.worker.push_pull([x], [0], [], [])
    del x
    answer(pair)
    for _ in range(100):
        pair.worker.push_pull([torch.ones(1)], [1], [], [])
        answer(pair)
        if alive() is None:
            return
    raise AssertionError("still alive")


def test_answers_live_until_they_are_sent(pair: Cluster) -> None:
    """32 MiB do not fit into the buffers of a socket."""
    size = 32 << 20
    y = torch.empty(size, dtype=torch.uint8)
    h = pair.worker.push_pull([], [], [y], [0])
    x, alive = owned(size, 7)
    answer(pair, x)
    del x
    pair.worker.wait(h, LIMIT * 1e3)
    assert bool((y == 7).all())
    eventually(lambda: pair.server.get_batch(timeout_ms=0) == [] and alive() is None)
    assert pair.server._node.held == 0


def test_temporaries(pair: Cluster) -> None:
    """What is freed right after the call, and its memory given to others, arrives as it was."""
    size = 4 << 20
    y = torch.empty(size, dtype=torch.uint8)
    for i in range(1, 9):
        h = pair.worker.push_pull([torch.full((size,), i, dtype=torch.uint8)], [0], [y], [0])
        gc.collect()
        poison = [torch.full((size,), 255, dtype=torch.uint8) for _ in range(4)]
        [(handler, [seen], _)] = pair.server.get_batch()
        assert bool((seen == i).all())
        pair.server.respond([seen.clone()], handler)
        poison += [torch.full((size,), 255, dtype=torch.uint8) for _ in range(4)]
        pair.worker.wait(h)
        assert bool((y == i).all())


def test_a_storage_that_is_swapped_under_a_tensor(pair: Cluster) -> None:
    x = torch.zeros(4 << 20, dtype=torch.uint8)
    h = pair.worker.push_pull([x], [0], [], [])
    x.data = torch.ones(3, dtype=torch.uint8)
    [(handler, [seen], _)] = pair.server.get_batch()
    assert not seen.any()
    pair.server.respond([], handler)
    pair.worker.wait(h)


def test_failed_requests_let_go(pair: Cluster) -> None:
    x, alive = owned(64)
    h = pair.worker.push_pull([x], [0], [], [])
    del x
    pair.server.close()
    with pytest.raises(fserver.PeerLostError):
        pair.worker.wait(h)

    def lets_go() -> bool:  # a later call
        h = pair.worker.push_pull([torch.ones(1)], [0], [], [])
        with pytest.raises(fserver.PeerLostError):
            pair.worker.wait(h)
        return alive() is None

    eventually(lets_go)


def test_refused_requests_let_go(pair: Cluster) -> None:
    x, alive = owned(64)
    with pytest.raises(fserver.ConfigError):
        pair.worker.push_pull([x, 1], [0, 1], [], [])  # type: ignore[list-item]
    with pytest.raises(fserver.Error):
        pair.server.respond([x], 12345)
    del x
    assert alive() is None


def test_close_lets_go(pair: Cluster) -> None:
    x, alive = owned(64)
    pair.worker.push_pull([x], [0], [], [])
    del x
    pair.worker.close()
    assert alive() is None


def test_a_registered_buffer_lives_until_close(pair: Cluster) -> None:
    buffer, alive = owned(64)
    pair.server.register_recv_buffer(buffer, [0], [0])
    del buffer
    pair.worker.push_pull([torch.full((64,), 3, dtype=torch.uint8)], [0], [], [])
    [(handler, [seen], _)] = pair.server.get_batch()
    pair.server.respond([], handler)
    pair.server.close()
    assert bool((seen == 3).all())  # the tensor keeps the memory
    assert alive() is not None
    del seen
    assert alive() is None


def test_received_tensors_outlive_their_node(nothing_left: None) -> None:
    pair = open_cluster()
    pair.worker.push_pull([torch.full((1000,), 3.0)], [0], [], [])
    [(_, [seen], _)] = pair.server.get_batch()
    view = seen[10:20]
    del seen
    pair.close()
    del pair
    gc.collect()
    assert view.tolist() == [3] * 10


def test_old_receive_buffers_live_as_long_as_their_tensors(nothing_left: None) -> None:
    pair = open_cluster()
    kept = []
    for i in range(5):  # each is too large for the buffer before
        h = pair.worker.push_pull([torch.full((5000 * 4**i,), float(i))], [0], [], [])
        [(handler, [seen], _)] = pair.server.get_batch()
        kept.append(seen)
        pair.server.respond([], handler)
        pair.worker.wait(h)
    assert [t[-1].item() for t in kept] == [0, 1, 2, 3, 4]
    pair.close()
    assert [t.sum().item() / len(t) for t in kept] == [0, 1, 2, 3, 4]


def test_nodes_that_are_dropped_are_closed(nothing_left: None) -> None:
    pair = open_cluster()
    batch = in_thread(pair.server.get_batch)
    pair.workers.clear()
    with pytest.raises(fserver.Error):
        batch.result(LIMIT)
    del pair, batch
    gc.collect()


def test_a_node_that_never_connected_leaves_nothing(nothing_left: None) -> None:
    for _ in range(3):
        with pytest.raises(fserver.TimeoutError):
            fserver.Worker(scheduler="127.0.0.1:1", init_timeout=0.05)


def test_new_pull_tensors_each_time_leave_nothing_behind(pair: Cluster) -> None:
    """Freed allocations are forgotten; new ones at their address are told apart."""
    for i in range(3000):
        y = torch.empty(1000 + i % 7)
        h = pair.worker.push_pull([], [], [y], [0])
        answer(pair, torch.full((1000 + i % 7,), float(i)))
        pair.worker.wait(h)
        assert y[0] == i and y[-1] == i
        del y


def test_a_resized_pull_tensor(pair: Cluster) -> None:
    y = torch.empty(4)
    for size in (4, 100_000, 8):
        y.resize_(size)
        h = pair.worker.push_pull([], [], [y], [0])
        answer(pair, torch.full((size,), float(size)))
        pair.worker.wait(h)
        assert bool((y == size).all())


def test_handlers_that_nobody_waits_for_take_no_memory(pair: Cluster) -> None:
    x = torch.ones(64)

    def run(n: int) -> None:
        for _ in range(n):
            pair.worker.push_pull([x], [0], [], [])
            answer(pair)

    run(5000)
    before = resident()
    run(15000)
    assert resident() - before < 2 << 20  # 140 B a call
    assert pair.worker._node.held < 16 and pair.server._node.held < 16


def test_old_handlers_are_forgotten_in_the_end(pair: Cluster) -> None:
    first = pair.worker.push_pull([torch.ones(1)], [0], [], [])
    answer(pair)
    pair.worker.wait(first)
    old = pair.worker.push_pull([], [], [torch.empty(1)], [9])  # answered at the very end
    [(handler, _, _)] = pair.server.get_batch()
    for _ in range(4200):
        pair.worker.push_pull([torch.ones(1)], [0], [], [])
        answer(pair)
    with pytest.raises(fserver.ConfigError, match=f"handler {first} is not known"):
        pair.worker.wait(first)
    pair.server.respond([torch.ones(1)], handler)
    pair.worker.wait(old, LIMIT * 1e3)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
