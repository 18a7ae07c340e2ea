"""Ranks that the scheduler assigns."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fserver


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
