"""Two peers joined by two links (DMLC_INTERFACE names two): both carry tensors, and nothing is lost
or comes twice while links go down and come back. LINKS_ROUNDS makes the tests longer."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import sub
from typing import Any, NamedTuple

import pytest
import torch
from nodes import LIMIT, Child, Parent, eventually, together
from test_containers import moved, needs, shell

import fserver

MakeChild = Callable[..., Child]
ROUNDS = int(os.environ.get("LINKS_ROUNDS", "60"))  # the tests do not keep settings of fserver
MIB = 1 << 20
DEADLY = MIB + 1
"""A server that gets so many bytes kills itself."""
LINKS = (0, 1)


def up(side: str, host: int, crossed: bool = False) -> None:
    """Sets up the ends of one host. With crossed, a0 is joined to b1 and a1 to b0, and a2 to b2,
    which have no network in common."""
    ends = {link: f"10.77.{link}.{host}" for link in LINKS}
    if crossed:
        ends = {peer(link, side == "b"): at for link, at in ends.items()}
        ends[2] = f"10.78.{host}.1"
    for end, at in ends.items():
        shell("ip", "addr", "add", f"{at}/24", "dev", f"{side}{end}")
        shell("ip", "link", "set", f"{side}{end}", "up")


def joined(side: str) -> None:
    """Waits until the kernel says that the ends of a host are: a node tells its peers that nothing
    can travel over an interface that has no carrier."""

    def ready() -> bool:
        ends = [json.loads(shell("ip", "-j", "link", "show", f"{side}{link}")) for link in LINKS]
        return all(about["operstate"] == "UP" for [about] in ends)

    eventually(ready)


def peer(link: int, crossed: bool) -> int:
    """The number of the server's end of a link."""
    return (1, 0, 2)[link] if crossed else link


def options(side: str, names: str) -> dict[str, Any]:
    """``tcp:-0,-1`` names the transport too."""
    transport, _, names = names.rpartition(":")
    settings = {"FSERVER_LOG": "error", "DMLC_INTERFACE": names.replace("-", side)}
    settings["FSERVER_TRANSPORT"] = transport or "auto"
    return {"backend": "CPU", "init_timeout": LIMIT, "settings": settings, "connect": False}


class Carried(NamedTuple):
    """Bytes that went there and back over a link, as its interface counts them, and ``sent`` of
    its member."""

    there: int
    back: int
    sent: int

    def both(self) -> int:
        return self.there + self.back


def carried(members: tuple[fserver.LinkMember, ...]) -> list[Carried]:
    totals = []
    for link in LINKS:
        [about] = json.loads(shell("ip", "-s", "-j", "link", "show", f"a{link}"))
        stats = about["stats64"]
        totals.append(Carried(stats["tx"]["bytes"], stats["rx"]["bytes"], members[link].sent))
    return totals


class Pair:
    """The worker's process, in which tests run; the server adds 1 in place and counts."""

    def __init__(self, worker: fserver.Worker) -> None:
        self.worker = worker
        self.rounds = 0

    def exchange(self, *sizes: int) -> float:
        """Round trips, compared byte by byte, at the same time; gives the seconds."""
        begin = time.monotonic()
        trips = []
        for key, size in enumerate(sizes):
            x = torch.randint(0, 255, (size,), dtype=torch.uint8)
            y = torch.empty_like(x)
            trips.append((self.worker.push_pull([x], [2 * key], [y], [2 * key + 1]), x, y))
        for handle, x, y in trips:
            self.worker.wait(handle, timeout_ms=int(LIMIT * 1000))
            assert torch.equal(x + 1, y), f"{x.numel()} bytes"
        self.rounds += len(sizes)
        return time.monotonic() - begin

    def members(self, count: int) -> None:
        """Waits until so many links are used."""
        end = time.monotonic() + LIMIT
        while len(self.worker.links()[0].transport.split("+")) != count:
            assert time.monotonic() < end, self.worker.links()
            self.exchange(64)

    def says(self, text: str) -> None:
        """Waits until the link has this reason."""
        end = time.monotonic() + LIMIT
        while text not in self.worker.links()[0].reason:
            assert time.monotonic() < end, self.worker.links()
            self.exchange(64)


def server_process(parent: Parent, names: str, crossed: bool = False) -> None:
    moved(parent)
    scheduler = parent.get()
    up("b", 2, crossed)
    joined("b")
    server = fserver.Server(scheduler=scheduler, **options("b", names))
    server.connect()
    rounds = 0
    try:
        while True:
            for handler, [x], _ in server.get_batch():
                if x.numel() == DEADLY:
                    os.kill(os.getpid(), signal.SIGKILL)
                x += 1
                server.respond([x], handler)
                rounds += 1
    except fserver.ClosedError:
        parent.put(rounds)
    server.stop()


def worker_process(
    parent: Parent, names: str, program: Callable[[Pair], Any], crossed: bool = False
) -> None:
    """The scheduler and the worker; it makes the links to the server's namespace."""
    moved(parent)
    other = str(parent.get())
    for link in (*LINKS, 2) if crossed else LINKS:
        ends = f"a{link} type veth peer name b{peer(link, crossed)}"
        shell("ip", *f"link add {ends} netns {other}".split())
    up("a", 1, crossed)
    scheduler = fserver.Scheduler(scheduler="10.77.0.1:0", **options("a", names))
    worker = fserver.Worker(scheduler=scheduler.scheduler, **options("a", names))
    parent.put(scheduler.scheduler)
    joined("a")  # when the server has set up its ends
    together([scheduler.connect, worker.connect])
    pair = Pair(worker)
    parent.put(program(pair))
    parent.put(pair.rounds)
    together([scheduler.stop, worker.stop])


def run(
    child: MakeChild,
    program: Callable[[Pair], Any],
    ours: str = "-0,-1",
    theirs: str = "-0,-1",
    crossed: bool = False,
) -> Any:
    """Runs the program in a worker that is joined to a server; gives what it returns."""
    needs("unshare", "ip")
    worker = child(worker_process, ours, program, crossed)
    server = child(server_process, theirs, crossed)
    worker.get()
    worker.put(server.get())
    server.put(worker.get())
    result = worker.get(LIMIT + ROUNDS)
    assert server.get() == worker.get(), "exchanges that the server has seen, and the worker"
    worker.end()
    server.end()
    return result


def sizes_program(pair: Pair) -> tuple[list[Carried], fserver.Link]:
    pair.members(2)
    before = carried(pair.worker.links()[0].members)
    for size in (1, 64, 4096, 65536, MIB - 1, MIB, 3 * MIB + 5, 16 * MIB, 64 * MIB):
        pair.exchange(size)
        pair.exchange(size, size)
    link = pair.worker.links()[0]
    after = carried(link.members)
    links = [Carried(*map(sub, now, then)) for then, now in zip(before, after, strict=True)]
    return links, link


def shared(links: list[Carried]) -> None:
    """Asserts that both links carry a good part of all bytes, and that ``sent`` of each member is
    what its interface has sent, less what TCP adds. The two directions are cut apart from each
    other, so a link may carry more of the one than of the other."""
    both = [link.both() for link in links]
    assert min(both) > 0.3 * sum(both), links
    for link in links:
        assert 0.9 * link.there < link.sent < link.there, links


def test_both_links_carry(child: MakeChild) -> None:
    links, link = run(child, sizes_program)
    assert link.transport == "tcp+tcp"
    shared(links)
    assert [m.interface for m in link.members] == ["a0", "a1"]
    assert [m.remote.split(":")[0] for m in link.members] == ["10.77.0.2", "10.77.1.2"]
    assert [(m.transport, m.reason) for m in link.members] == [("tcp", ""), ("tcp", "")]


@pytest.mark.parametrize("names", ["auto", "-0,-1"])
def test_crossed_links(child: MakeChild, names: str) -> None:
    """The networks of both sides say which interface goes with which, whatever their order. auto
    finds the interfaces, and does not use the third one, whose network the peer does not have."""
    links, link = run(child, sizes_program, names, names, crossed=True)
    assert link.transport == "tcp+tcp" and "members connected" not in link.reason
    shared(links)
    assert [m.interface for m in link.members] == ["a0", "a1", "a2"][: len(link.members)]
    assert [m.remote.split(":")[0] for m in link.members[:2]] == ["10.77.0.2", "10.77.1.2"]
    if names == "auto":
        assert (link.members[2].sent, link.members[2].transport) == (0, "")
        assert link.members[2].reason == "the peer has no interface in its network"


def both_program_of_names(pair: Pair) -> str:
    pair.members(2)
    return pair.worker.links()[0].transport


def test_tcp_by_name(child: MakeChild) -> None:
    names = "tcp:-0,-1"
    assert run(child, both_program_of_names, names, names) == "tcp+tcp"


def test_auto_and_a_lost_link(child: MakeChild) -> None:
    """Only those that can be used are missed."""
    link = run(child, lost_program, "auto", "auto", crossed=True)
    assert link.reason.endswith("members connected: 1 of 2 (interface a1 is down)")


def test_auto_and_names(child: MakeChild) -> None:
    """One side names the interfaces, in an order of its own, and the other one has auto."""
    assert run(child, both_program_of_names, "auto", "-1,-0", crossed=True) == "tcp+tcp"
    assert run(child, both_program_of_names, "-1,-0", "auto", crossed=True) == "tcp+tcp"


@pytest.mark.parametrize(("ours", "theirs"), [("auto", "-1"), ("-0", "auto")])
def test_auto_and_one(child: MakeChild, ours: str, theirs: str) -> None:
    """A connection to a peer that has one interface has no members."""
    link = run(child, one_program, ours, theirs, crossed=True)
    assert (link.transport, link.members) == ("tcp", ())
    assert ("is the address of one interface" in link.reason) == (ours == "auto")


def killed_program(pair: Pair) -> tuple[float, str]:
    pair.members(2)
    x = torch.zeros(DEADLY, dtype=torch.uint8)
    begin = time.monotonic()
    with pytest.raises(fserver.PeerLostError) as caught:
        pair.worker.wait(pair.worker.push_pull([x], [0], [x.clone()], [1]), timeout_ms=10000)
    return time.monotonic() - begin, str(caught.value)


def test_killed_server(child: MakeChild) -> None:
    """The worker's call ends in an error that names the server, long before its time is up."""
    needs("unshare", "ip")
    worker = child(worker_process, "-0,-1", killed_program)
    server = child(server_process, "-0,-1")
    worker.get()
    worker.put(server.get())
    server.put(worker.get())
    seconds, error = worker.get()
    print(f"{seconds:.2f} s: {error}")
    assert "server 0" in error


def lost_program(pair: Pair) -> fserver.Link:
    pair.members(2)
    shell("ip", "link", "set", "a1", "down")
    pair.members(1)
    pair.says("interface a1 is down")  # the peer may say first that nothing travels over its end
    return pair.worker.links()[0]


def test_a_lost_link_is_named(child: MakeChild) -> None:
    link = run(child, lost_program)
    assert link.reason.endswith("members connected: 1 of 2 (interface a1 is down)")
    assert link.members[1].reason == "interface a1 is down"
    assert link.members[1].transport == "" and link.members[0].transport == "tcp"


def timed_program(pair: Pair) -> list[tuple[float, float, float]]:
    """Of a large exchange in milliseconds: its usual time; its time with a link lost in the middle;
    the time from the loss until it is known."""
    x = torch.randint(0, 255, (128 * MIB,), dtype=torch.uint8)
    y = torch.empty_like(x)

    def trip(disturb: Callable[[], None]) -> float:
        y.zero_()
        begin = time.monotonic()
        handle = pair.worker.push_pull([x], [0], [y], [1])
        disturb()
        pair.worker.wait(handle, timeout_ms=int(LIMIT * 1000))
        seconds = time.monotonic() - begin
        assert torch.equal(x + 1, y)
        pair.rounds += 1
        return seconds

    def lose() -> None:
        nonlocal known
        time.sleep(usual / 3)
        begin = time.monotonic()
        shell("ip", "link", "set", "a1", "down")
        while not pair.worker.links()[0].members[1].reason:
            time.sleep(0.0005)
        known = time.monotonic() - begin

    times = []
    trip(lambda: None)
    for _ in range(5):
        pair.members(2)
        usual, known = sorted(trip(lambda: None) for _ in range(3))[1], 0.0
        times.append((1e3 * usual, 1e3 * trip(lose), 1e3 * known))
        shell("ip", "link", "set", "a1", "up")
    return times


@pytest.mark.long
def test_the_time_of_a_loss(child: MakeChild) -> None:
    """How much longer an exchange takes is printed, not judged."""
    for usual, lossy, known in run(child, timed_program):
        print(f"usual {usual:.1f} ms; with a loss {lossy:.1f} ms, known after {known:.1f} ms")


def one_program(pair: Pair) -> fserver.Link:
    pair.exchange(1, 4096, 4 * MIB)
    return pair.worker.links()[0]


@pytest.mark.parametrize(("ours", "theirs"), [("-0", "-0,-1"), ("-0,-1", "-0"), ("-1,-0", "-0,-1")])
def test_other_lists(child: MakeChild, ours: str, theirs: str) -> None:
    """One side has one interface, or they are named in another order."""
    assert run(child, one_program, ours, theirs).transport in ("tcp", "tcp+tcp")


@contextmanager
def flapping(act: Callable[[random.Random], None]) -> Iterator[None]:
    """Acts again and again, until the block is over."""
    over = threading.Event()
    seed = int(time.time())
    print(f"seed {seed}")
    chance = random.Random(seed)

    def loop() -> None:
        while not over.is_set():
            act(chance)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def down_and_up(links: tuple[int, ...], seconds: float) -> None:
    for link in links:
        shell("ip", "link", "set", f"a{link}", "down")
    time.sleep(seconds)
    for link in links:
        shell("ip", "link", "set", f"a{link}", "up")


def either(chance: random.Random) -> None:
    down_and_up((chance.choice(LINKS),), chance.uniform(0, 0.3))
    time.sleep(chance.uniform(0, 0.6))


def second(chance: random.Random) -> None:
    down_and_up((1,), 0.1)
    time.sleep(0.1)


def both(chance: random.Random) -> None:
    down_and_up((0, 1), chance.uniform(0, 0.3))
    time.sleep(chance.uniform(0.5, 1.5))


def flap_program(pair: Pair, act: Callable[[random.Random], None]) -> float:
    pair.members(2)
    chance, worst = random.Random(1), 0.0
    with flapping(act):
        for _ in range(ROUNDS):
            sizes = [1 << chance.randrange(22) for _ in range(chance.randrange(1, 5))]
            worst = max(worst, pair.exchange(*sizes, 4 * MIB))
    pair.members(2)
    return worst


def either_program(pair: Pair) -> float:
    return flap_program(pair, either)


def second_program(pair: Pair) -> float:
    return flap_program(pair, second)


def both_program(pair: Pair) -> float:
    return flap_program(pair, both)


@pytest.mark.parametrize("program", [either_program, second_program, both_program])
def test_links_go_down(child: MakeChild, program: Callable[[Pair], float]) -> None:
    worst = run(child, program)
    print(f"{ROUNDS} exchanges, of which the longest took {1000 * worst:.0f} ms")
