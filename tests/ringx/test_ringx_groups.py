"""Who the ranks are: a process group, a DeviceMesh with one dimension, or all."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from exact import Problem, attend, errors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from world import GROUPS, Rank, World

from fserver.errors import ConfigError
from fserver.ringx import positions, ringx_attention, shard, unshard
from fserver.ringx.ranks import Ranks, ranks_of

ALL = (0, 1, 2, 3)


def mesh_of(me: Rank) -> DeviceMesh:
    return DeviceMesh.from_group(me.group, "cpu")


def sharded(me: Rank, layout: str, length: int, mesh: bool) -> bool:
    """The group's part, and the whole again."""
    group = mesh_of(me) if mesh else me.group
    whole = torch.arange(2 * length * 3, dtype=torch.float32).view(2, length, 3)
    part = shard(whole, layout, group=group)
    same = torch.equal(part, shard(whole, layout, me.rank, me.size))
    where = positions(length, layout, group=group)
    same &= torch.equal(part, whole[:, where])
    joined = unshard(part.requires_grad_(), layout, group=group)
    same &= torch.equal(joined, whole) and not joined.requires_grad
    parts = [shard(whole, layout, rank, 2).requires_grad_() for rank in range(2)]
    joined = unshard(parts, layout)
    return same and torch.equal(joined, whole) and not joined.requires_grad


@pytest.mark.parametrize("mesh", [False, True], ids=["group", "mesh"])
@pytest.mark.parametrize("members", GROUPS, ids=str)
def test_parts_of_a_group(world: World, members: tuple[int, ...], mesh: bool):
    assert all(world.run(members, sharded, "zigzag", 24, mesh))
    assert all(world.run(members, sharded, "contiguous", 7, mesh))


def everybody(me: Rank) -> bool:
    whole = torch.arange(16.0).view(1, 16)
    part = shard(whole, "zigzag")
    return torch.equal(unshard(part, "zigzag"), whole) and part.shape[1] == 4


def test_parts_of_all_ranks(world: World):
    assert all(world.run(ALL, everybody))


def by_mesh(me: Rank) -> list[bool]:
    """A mesh gives what its group gives, compiled too."""
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 1, 8, 2, 8, generator=torch.manual_seed(me.rank))
    how: dict[str, Any] = {"causal": True, "layout": "zigzag"}
    want = ringx_attention(q, k, v, group=me.group, **how)
    mesh = mesh_of(me)
    fast = torch.compile(ringx_attention, fullgraph=True, backend="eager")
    return [torch.equal(call(q, k, v, group=mesh, **how), want) for call in (ringx_attention, fast)]


def test_a_mesh_is_its_group(world: World):
    assert world.run((1, 2, 3), by_mesh) == [[True, True]] * 3


def wide(me: Rank) -> list[str]:
    """What a mesh with two dimensions is told; and a dimension of it works."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    said = []
    for call in (
        lambda: positions(8, "zigzag", group=mesh),
        lambda: ringx_attention(*[torch.zeros(1, 4, 1, 8)] * 3, causal=False, group=mesh),
    ):
        with pytest.raises(ConfigError) as raised:
            call()
        said.append(str(raised.value))
    assert len(positions(8, "zigzag", group=mesh["cp"])) == 4
    return said


def test_a_mesh_with_two_dimensions(world: World):
    for said in world.run(ALL, wide):
        assert all('2 dimensions: want one (such as mesh["cp"]' in text for text in said)


def half(me: Rank) -> list[str]:
    said = []
    for given in ({"rank": 0}, {"size": 2}, {"rank": 0, "size": 2, "group": me.group}):
        with pytest.raises(ConfigError) as raised:
            shard(torch.zeros(1, 8), "zigzag", **given)
        said.append(str(raised.value))
    return said


def test_half_a_place(world: World):
    for said in world.run((2, 3), half):
        assert all("want rank and size, or a group without them" in text for text in said)


def unlike(me: Rank) -> list[str]:
    """What each rank is told when one has another shape, dtype, or no such dimension."""
    said = []
    first = me.rank == 0
    for part, dim in (
        (torch.zeros(1, 4, 2 + first), 1),
        (torch.zeros(1, 4, dtype=torch.float64 if first else torch.float32), 1),
        (torch.zeros(1, 4), 5 if first else 1),
    ):
        with pytest.raises(ValueError) as raised:
            unshard(part, "contiguous", dim, group=me.group)
        said.append(str(raised.value))
    return said


def test_parts_that_do_not_fit_are_an_error_on_all(world: World):
    first, second = world.run((2, 3), unlike)
    assert all("want one dtype, shape and type of device" in text for text in (*first[:2], *second))
    assert "dim 5 of type int: want -2 to 1, as parts.shape is (1, 4)" in first[2]


def outside(me: Rank) -> list[str]:
    """A mesh of the last two ranks, on all ranks."""
    mesh, x = DeviceMesh("cpu", [2, 3]), torch.ones(1, 4, 2, 8)
    said = []
    for call in (lambda: positions(8, "zigzag", group=mesh),
                 lambda: ringx_attention(x, x, x, causal=True, group=mesh)):  # fmt: skip
        try:
            call()
        except ConfigError as error:
            said.append(str(error))
    return said


def test_a_mesh_without_this_process(world: World):
    want = "ringx: group: this process is not a member (call the function on members only)"
    assert world.run(ALL, outside) == [[want, want], [want, want], [], []]


def by_way_of_the_cpu(me: Rank) -> tuple[list[bool], float]:
    """On which devices gloo's tensors go by way of the CPU, and how far the ring's results are from
    the usual ones if all do."""
    ranks = ranks_of(me.group)
    staged = [ranks.staged(torch.device(kind)) for kind in ("cpu", "cuda")]
    usual = attend(me, Problem(), "ring")
    refused = mock.Mock(side_effect=AssertionError("a transfer between two ranks"))
    with (
        mock.patch.object(type(ranks), "staged", lambda self, device: True),
        mock.patch.object(dist, "batch_isend_irecv", refused),
    ):
        found = attend(me, Problem(), "ring")
    return staged, max(errors(found, usual).values())


def test_the_ring_over_gloo_on_gpus(world: World):
    """gloo's transfers between two ranks take no memory of a GPU, its collectives do."""
    for staged, error in world.run((1, 2, 3), by_way_of_the_cpu):
        assert staged == [False, True]
        assert error == 0


def test_nccl_sends_by_itself(monkeypatch: pytest.MonkeyPatch):
    found = mock.Mock(group=None)
    for config, want in (("cpu:gloo,cuda:nccl", False), ("cpu:gloo,cuda:gloo", True)):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, config=config: config)
        assert Ranks.staged(found, torch.device("cuda")) is want
