"""Ranks that the scheduler assigns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from nodes import LIMIT, Cluster

import fserver
from fserver import fserver_lib


def test_assigned_ranks() -> None:
    with contextlib.ExitStack() as stack:

        def opened(node: fserver.Node) -> fserver.Node:
            stack.callback(node.close)
            return node

        common = {"workers": 2, "servers": 2, "backend": "CPU", "connect": False}
        scheduler = opened(fserver.Scheduler(scheduler="127.0.0.1:0", **common))
        common["scheduler"] = scheduler.address.removeprefix("tcp:")
        workers = [opened(fserver.Worker(**common)) for _ in range(2)]
        servers = [opened(fserver.Server(node_rank=rank, **common)) for rank in (-1, 0)]
        assert [(w.rank, w.group) for w in workers] == [(-1, -1)] * 2
        nodes = [scheduler, *workers, *servers]
        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(lambda node: node.connect(), nodes))
        assert sorted(w.rank for w in workers) == [0, 1]
        assert [s.rank for s in servers] == [1, 0]
        for worker in workers:
            assert worker.group == worker.rank == worker.describe()["rank"]
            assert f" {worker.rank}: " in repr(worker)

        handles, answers = [], [torch.zeros(2) for _ in range(4)]
        for i, worker in enumerate(workers):
            x = torch.full((1,), float(worker.rank))
            handles.append(worker.push_pull([x], [0], answers[2 * i : 2 * i + 2], [1, 2]))
        for server in servers:
            for rank, (request, (x,), _) in enumerate(server.get_batch()):
                assert x.item() == rank
                server.respond([torch.tensor([float(rank), float(server.rank)])], request)
        for i, worker in enumerate(workers):
            worker.wait(handles[i])
            got = [answers[2 * i].tolist(), answers[2 * i + 1].tolist()]
            assert got == [[worker.rank, 0], [worker.rank, 1]]
        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(lambda node: node.stop(), nodes))


def test_ranks_of_groups_of_several_are_not_assigned() -> None:
    with pytest.raises(fserver.ConfigError, match="want 0 to 1"):
        fserver.Worker(scheduler="127.0.0.1:1", workers=2, group_size=2, node_rank=-1)


def test_stepmesh_counts_groups(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """register_recv_buffer of fserver_lib takes ranks of worker groups: each server gets what the
    workers of its rail push."""
    monkeypatch.setattr(fserver, "Server", fserver_lib.StepmeshServer)
    both = cluster(workers=3, group_size=2)
    assert [server.rank for server in both.servers] == [0, 1]
    rows = [torch.zeros(3, 4), torch.zeros(3, 4)]
    for server, own in zip(both.servers, rows, strict=True):
        server.register_recv_buffer(own, [2, 0, 1], [7, 7, 7])
        with pytest.raises(fserver.ShapeError, match="this server has no such worker"):
            server.register_recv_buffer(torch.zeros(4), [3], [8])
        with pytest.raises(fserver.ConfigError, match=r"worker_ranks\[0\] is 'a'"):
            server.register_recv_buffer(torch.zeros(4), ["a"], [8])  # type: ignore[list-item]
    for worker in both.workers:
        worker.push_pull([torch.full((4,), float(worker.rank))], [7], [], [])
    for server, own in zip(both.servers, rows, strict=True):
        assert len(server.get_batch(LIMIT * 1e3)) == 3
        assert own[:, 0].tolist() == [4.0 + server.rank, server.rank, 2.0 + server.rank]
