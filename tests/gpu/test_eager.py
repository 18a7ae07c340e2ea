"""push_pull, get_batch and respond with tensors on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import eager
import peers
import pytest
from pair import at_once
from peers import Child

from fserver.bench.errors import BenchError

SIZES = [1, 4096, 65539, 128 * 7168, 2 * 128 * 7168, 16 << 20]

Make = Callable[..., Child]
Place = int | None

# Devices of worker and server; None: the CPU.
PLACES = [(0, 0), (0, 1), (1, 0), (None, 0), (0, None)]


def need(gpus: int, *devices: Place) -> None:
    most = max(d for d in devices if d is not None)
    if most >= gpus:
        pytest.skip(f"needs {most + 1} GPUs: this host has {gpus}")


def run(
    child: Make,
    worker: Callable[..., Any],
    devices: tuple[Place, Place],
    *args: Any,
    transport: str = "auto",
    env: dict[str, str] | None = None,
    **serve: Any,
) -> tuple[Any, dict[str, Any]]:
    """What the worker's function gives, and what the server has seen."""
    env = env or {}
    s = child(_serve, devices[1], transport, serve, **env)
    w = child(worker, s.get(), devices[0], *([transport, *args]), **env)
    try:
        return w.get(), s.get()
    except BenchError as error:
        raise AssertionError(f"{error}\nand {s.end()}") from None


def _serve(pipe: Any, device: Place, transport: str, options: dict[str, Any]) -> dict[str, Any]:
    return eager.serve(pipe, device, transport, **options)


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_values(child: Make, gpus: int, devices: tuple[Place, Place], transport: str) -> None:
    need(gpus, *devices)
    result, seen = run(child, eager.round_trips, devices, SIZES, 20, transport=transport)
    assert result["bad"] == []
    mapped = transport == "auto" and None not in devices
    how = "cudaipc" if mapped else "tcp" if transport == "tcp" else "cma"
    for said in (result["transport"], seen["transport"]):
        assert said.split("/")[0] == how  # cma may have to stage
    assert seen["requests"] == 20 * len(SIZES)
    assert seen["devices"] == {peers.place(devices[1])}


ODD = [1, 3, 17, 255, 4095, 4097, 65537, (1 << 20) - 1, (2 << 20) + 7, (5 << 20) - 1, (5 << 20) + 3]


@pytest.mark.parametrize("devices", PLACES[:3])
@pytest.mark.parametrize(
    ("transport", "how"), [("cma", "cudaipc"), (peers.UNMAPPED, "cma"), ("tcp", "tcp")]
)
def test_transports(
    child: Make, gpus: int, devices: tuple[Place, Place], transport: str, how: str
) -> None:
    """By each that can be asked for. cma maps the memory of GPUs unless it is told not to, and
    then nothing is mapped, neither way."""
    need(gpus, *devices)
    result, seen = run(child, eager.round_trips, devices, ODD, 5, transport=transport)
    assert result["bad"] == []
    assert seen["requests"] == 5 * len(ODD)
    for said in (result["transport"], seen["transport"]):
        assert said.split("/")[0] == how


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_pinned_memory(child: Make, gpus: int, transport: str) -> None:
    """Of the host, pushed, pulled and answered with, by its own name or as a tensor of the GPU."""
    bad, seen = run(child, eager.pinned, (0, gpus - 1), SIZES, 18, transport=transport, pinned=True)
    assert bad == []
    assert seen["devices"] == {peers.place(gpus - 1)}


def test_many(child: Make, gpus: int) -> None:
    """10^5 where the processes need not take turns."""
    rounds = 100_000 if at_once((0, gpus - 1)) else 1000
    wrong, seen = run(child, eager.many, (0, gpus - 1), 4096, rounds)
    assert wrong == 0
    assert seen["requests"] == rounds


def test_64_mib(child: Make, gpus: int) -> None:
    result, _ = run(child, eager.round_trips, (0, gpus - 1), [64 << 20], 10)
    assert result == {"bad": [], "transport": "cudaipc"}


def test_visible_devices_change_nothing(child: Make, gpus: int) -> None:
    """Each side sees one GPU alone, and calls it 0."""
    s = child(_serve, 0, "auto", {}, CUDA_VISIBLE_DEVICES=str(gpus - 1))
    w = child(eager.round_trips, s.get(), 0, "auto", SIZES, 5, CUDA_VISIBLE_DEVICES="0")
    assert w.get() == {"bad": [], "transport": "cudaipc"}


@pytest.mark.parametrize("devices", PLACES[:3])
@pytest.mark.parametrize("transport", ["auto", peers.UNMAPPED, "tcp"])
def test_interior_pointers(
    child: Make, gpus: int, devices: tuple[Place, Place], transport: str
) -> None:
    need(gpus, *devices)
    bad, seen = run(child, eager.interior, devices, transport=transport)
    assert bad == []
    assert seen["requests"] == 32


def test_blocks_that_are_used_again(child: Make, gpus: int) -> None:
    result, _ = run(child, eager.churn, (0, gpus - 1), 200)
    assert result == {"bad": [], "transport": "cudaipc"}


@pytest.mark.parametrize("worker", [eager.round_trips, eager.churn])
def test_expandable_segments(child: Make, gpus: int, worker: Callable[..., Any]) -> None:
    """Mapped by descriptors."""
    setting = "expandable_segments:True"
    env = {"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    assert child(peers.allocator, **env).get() == "expandable"
    args = (SIZES, 10) if worker is eager.round_trips else (100,)
    result, _ = run(child, worker, (0, gpus - 1), *args, env=env)
    assert result == {"bad": [], "transport": "cudaipc"}


def test_memory_pools(child: Make, gpus: int) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    assert child(peers.allocator, **env).get() == "cudaMallocAsync"
    result, _ = run(child, eager.round_trips, (0, gpus - 1), SIZES, 5, env=env)
    assert result["bad"] == []


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_the_stream_comes_first(child: Make, gpus: int, transport: str) -> None:
    bad, _ = run(child, eager.behind_kernels, (0, gpus - 1), transport=transport)
    assert bad == []


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_no_event(child: Make, gpus: int, transport: str) -> None:
    """need_event=False on both sides, which wait for their kernels themselves."""
    places = (0, gpus - 1)
    result, seen = run(
        child, eager.round_trips, places, SIZES, 20, False, transport=transport, need_event=False
    )
    assert result["bad"] == []
    assert seen["requests"] == 20 * len(SIZES)
    bad, _ = run(child, eager.beside_kernels, places, transport=transport, need_event=False)
    assert bad == []


def test_answers_wait_for_their_kernel(child: Make, gpus: int) -> None:
    result, _ = run(child, eager.round_trips, (0, gpus - 1), [4096, 1 << 20], 20, sleep=20_000_000)
    assert result["bad"] == []


@pytest.mark.parametrize("device", [0, None])
def test_own_receive_buffer(child: Make, gpus: int, device: Place) -> None:
    result, seen = run(child, eager.round_trips, (device, 0), [1 << 20], 10, fixed=1 << 20)
    assert result["bad"] == []
    assert seen["requests"] == 10 and seen["inside"]


def test_refused_by_name(child: Make, gpus: int) -> None:
    s = child(_serve, gpus - 1, "auto", {})
    w = child(eager.wrong, s.get(), 0)
    assert w.get() == []
    s.get()


def test_capture_refused_by_servers(child: Make, gpus: int) -> None:
    s = child(eager.wrong_server, gpus - 1)
    w = child(eager.round_trips, s.get(), 0, "auto", [4096], 2)
    assert w.get()["bad"] == []
    assert s.get() == []


def test_flags(child: Make, gpus: int) -> None:
    assert child(eager.flags, gpus - 1).get() == []


def test_streams_wait_for_requests(child: Make, gpus: int) -> None:
    bad, _ = run(child, eager.notified, (0, gpus - 1))
    assert bad == []


def test_simple_notify(child: Make, gpus: int) -> None:
    """Streams wait for requests and for batches, on nodes that init() opens."""
    s = child(eager.notified_server, gpus - 1, 50)
    w = child(eager.notified_worker, s.get(), 0, 50)
    assert w.get() == []
    assert s.get() == []


def test_threads(child: Make, gpus: int) -> None:
    """A poller of its own on both sides."""
    env = {"FSERVER_PROGRESS": "thread"}
    result, _ = run(child, eager.round_trips, (0, gpus - 1), SIZES, 20, env=env)
    assert result["bad"] == []


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("worker", [eager.round_trips, eager.behind_kernels])
def test_events_tell_where_a_stream_is(
    child: Make, gpus: int, worker: Callable[..., Any], transport: str
) -> None:
    """Not memory that the stream writes."""
    args = (SIZES, 20) if worker is eager.round_trips else ()
    env = {"STEPMESH_MEM_SYNC": "0"}
    result, _ = run(child, worker, (0, gpus - 1), *args, transport=transport, env=env)
    assert (result["bad"] if worker is eager.round_trips else result) == []


@pytest.mark.killed_at_work
def test_killed_worker(child: Make, gpus: int) -> None:
    """Another one takes its rank, and the device memory of the dead is back."""
    peers.Process.ready(2, **peers.FRESH)
    peers.Process.ready(3)
    watch = child(peers.free_memory, 0)
    s = child(_serve, gpus - 1, "auto", {})
    scheduler = s.get()
    free = []
    for _ in range(2):
        w = child(eager.until_killed, scheduler, 0, "auto", **peers.FRESH)
        assert w.get() == "running"
        w.kill()
        watch.put(True)
        free.append(watch.get())
    w = child(eager.round_trips, scheduler, 0, "auto", SIZES, 5)
    assert w.get()["bad"] == []
    s.get()
    watch.put(False)
    assert free[0] - free[1] < 64 << 20


@pytest.mark.killed_at_work
def test_killed_server(child: Make, gpus: int) -> None:
    """The worker goes on with the server's successors, and the device memory of the dead is back.
    The scheduler is a process of its own."""
    peers.Process.ready(2, **peers.FRESH)
    peers.Process.ready(4)
    watch = child(peers.free_memory, gpus - 1)
    scheduler = child(_schedule)
    address = scheduler.get()
    s = child(_serve, gpus - 1, "auto", {"again": address}, **peers.FRESH)
    w = child(eager.survives, address, 0, "auto", 5, 2)
    free = []
    for env in (peers.FRESH, {}):
        assert w.get() == "running"
        s.kill()
        assert w.get() == "lost"
        watch.put(True)
        free.append(watch.get())
        w.put(None)
        s = child(_serve, gpus - 1, "auto", {"again": address}, **env)
    assert w.get() == "running"
    assert w.get() == []
    s.kill()
    scheduler.put("over")
    watch.put(False)
    assert free[0] - free[1] < 64 << 20


def test_one_process(child: Make, gpus: int) -> None:
    """Two nodes in one, on two GPUs if there are."""
    for transport, how in (("auto", "cudaipc"), ("tcp", "tcp")):
        result, seen = child(eager.in_one, (0, gpus - 1), transport, SIZES, 10).get()
        assert result["bad"] == []
        assert result["transport"].startswith(how)
        assert seen["devices"] == {peers.place(gpus - 1)}


def _schedule(pipe: Any) -> None:
    import fserver

    s = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False)
    pipe.send(s.scheduler)
    pipe.recv()
    s.close()
