"""Memory, descriptors, goroutines and threads of a worker and a server over many push_pulls.

    python tests/long/soak.py --transport cma --warmup 1000000 --count 1000000 --limit 65536

The exit status is 1 if the engine's heap, the descriptors or the goroutines grow at all, or other
memory grows by more than --limit bytes. There are four figures of memory: what the engine has
allocated and still uses; the same with what Go's runtime has for its threads and for waiting
goroutines; what malloc and Python have in use, a part of it for the threads that Go starts; and
resident memory, which also grows when pages are touched for the first time. To read them takes
memory too, so the last column shows the growth in the same time and with as many readings, but
without push_pulls. The number in every answer is checked. After each tenth of the push_pulls, all
bytes of an exchange are compared.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from fserver import _loader
from fserver.bench.actors import Actor, ServerActor, WorkerActor
from fserver.bench.crew import Case, Crew, members
from fserver.bench.errors import BenchError
from fserver.bench.options import one_of, parser, positive, size
from fserver.bench.report import show_size
from fserver.bench.run import choose_cores, need_gpu

CHECKS = 12  # before the first count
PARTS = 10  # the counts are read after each, so that the results show when they grew
COUNTS = {
    "resident_bytes": "resident bytes",
    "descriptors": "descriptors",
    "goroutines": "goroutines",
    "threads": "threads",
}
IN_USE = {  # counted at both ends only, since that touches pages
    "engine_bytes": "engine's heap",
    "go_bytes": "with Go's own",
    "malloc_bytes": "malloc",
    "python_blocks": "Python's blocks",
    "gpu_bytes": "GPU",
}
EXACT = ("engine_bytes", "descriptors", "goroutines")  # may not grow, whatever the limit
BY_THE_BYTE = {  # Go records each allocation; malloc keeps nothing back for a thread
    "GODEBUG": ("memprofilerate=1", ","),
    "GLIBC_TUNABLES": ("glibc.malloc.tcache_count=0", ":"),
}

Looks = list[list[dict[str, int]]]  # one after the other, of worker and server


class Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
        )
    )


def malloc_bytes() -> int:
    """Bytes that malloc has given and not got back; -1 if the C library does not tell (glibc does
    from 2.33 on)."""
    try:
        info = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return -1
    info.restype = Mallinfo2
    now = info()
    return int(now.uordblks + now.hblkhd)


def resident() -> int:
    """Anonymous memory of this process in bytes, after a collection. Pages of files that happen to
    be mapped, the code above all, are the kernel's to keep or drop.

    From smaps_rollup, which counts pages; what statm and status say, which psutil reads, is off by
    up to 32 pages per core.
    """
    gc.collect()
    with open("/proc/self/smaps_rollup") as rollup:
        (found,) = (line for line in rollup if line.startswith("Anonymous:"))
    return int(found.split()[1]) * 1024


class SoakActor(Actor):
    """Counts what must not grow in its process."""

    def counts(self) -> dict[str, int]:
        """COUNTS. Go may start a thread when it likes, up to a number."""
        process = psutil.Process()
        return {
            "resident_bytes": resident(),
            "descriptors": process.num_fds(),
            "goroutines": _loader.load().live()[2],
            "threads": process.num_threads(),
        }

    def in_use(self) -> dict[str, int]:
        """IN_USE; of the GPU what all processes have. To count Go's takes collections, which touch
        pages."""
        gc.collect()
        go, engine = _loader.load().heap()
        found = {
            "engine_bytes": engine,
            "go_bytes": go,
            "malloc_bytes": malloc_bytes(),
            "python_blocks": sys.getallocatedblocks(),
        }
        gpu = self.places[0].gpu
        if gpu is not None:
            free, total = torch.cuda.mem_get_info(gpu)
            found["gpu_bytes"] = total - free
        return found

    def freeze(self) -> None:
        """Later collections leave out the objects that exist now: what torch has imported, most
        of all."""
        gc.collect()
        gc.freeze()


class SoakWorker(SoakActor, WorkerActor):
    def work(self, count: int) -> None:
        """Runs `count` exchanges; the times of all of them would take memory."""
        for done in range(0, count, 100):
            self.run(min(100, count - done))


class SoakServer(SoakActor, ServerActor):
    work = ServerActor.run


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    options = PARSER.parse_args(argv)
    if options.device == "gpu":
        need_gpu()
    kinds = {"worker": SoakWorker, "server": SoakServer}
    both = members(choose_cores(None), **kinds, variables=by_the_byte())
    with Crew(both) as two, two.cluster(options.transport, device=options.device):
        links = two.transport()
        case = Case("push_pull", (options.size,), (options.size,), device=options.device)
        two.all("prepare", case)
        two.all("verify", 0)
        limit = 60 + options.count / 100
        two.all("work", options.warmup, limit=limit)
        two.all("freeze")
        for part in range(CHECKS):  # what looks warms up too: 11 looks took up to 24 KiB
            two.all("verify", part)
            two.all("in_use")
            two.all("counts")
        begun = time.monotonic()
        looks = watch(two, lambda each: two.all("work", each, limit=limit), options.count)
        seconds = time.monotonic() - begun
        idle = watch(two, lambda _: time.sleep(seconds / PARTS))
    print(
        f"{options.count} push_pulls of {show_size(options.size)} each way over {links} in "
        f"{seconds:.1f} s, after {options.warmup} to warm up"
    )
    rows = [row(role, number, looks, idle) for number, role in enumerate(("worker", "server"))]
    if options.json:
        with open(options.json, "w") as out:
            json.dump({"links": links, "count": options.count, "rows": rows}, out, indent=1)
    return int(options.limit is not None and grown(rows, options.limit))


def by_the_byte() -> dict[str, str]:
    """The variables with which what is in use is exact, beside what they hold."""
    return {
        name: between.join(filter(None, (os.environ.get(name), setting)))
        for name, (setting, between) in BY_THE_BYTE.items()
    }


def watch(two: Crew, work: Callable[[int], object], count: int = 0) -> tuple[Looks, Looks]:
    """Work in parts, of count in all, with a look after each: what is counted, what is in use."""
    in_use = [two.all("in_use")]
    counts = [two.all("counts")]
    for part in range(PARTS):
        work(count * (part + 1) // PARTS - count * part // PARTS)
        two.all("verify", part + 1)
        counts.append(two.all("counts"))
    in_use.append(two.all("in_use"))
    return counts, in_use


def row(
    role: str, number: int, looks: tuple[Looks, Looks], idle: tuple[Looks, Looks]
) -> dict[str, Any]:
    """What was counted in one process; prints it."""
    titles = "after warm-up", "half way", "at the end", "growth", "while idle"
    print(f"{role:<24}" + "".join(f"{title:>15}" for title in titles))
    found: dict[str, Any] = {"role": role, "growth": {}, "idle": {}}
    for names, now, still in zip((COUNTS, IN_USE), looks, idle, strict=True):
        for key, title in names.items():
            if key not in now[0][number]:
                continue
            values = [look[number][key] for look in now]
            half = values[PARTS // 2] if len(values) > PARTS else ""
            growth = values[-1] - values[0]
            without = still[-1][number][key] - still[0][number][key]
            cells = values[0], half, values[-1], growth, without
            print(f"  {title:<22}" + "".join(f"{cell:>15}" for cell in cells))
            found[key] = values
            found["growth"][key], found["idle"][key] = growth, without
    return found


def grown(rows: list[dict[str, Any]], limit: int) -> bool:
    """Says what has grown by more than it may."""
    failed = False
    for key, title in {**COUNTS, **IN_USE}.items():
        worst = max(row["growth"].get(key, 0) for row in rows)
        most = 0 if key in EXACT else limit
        if worst > most:
            print(f"soak: {title} grew by {worst}, but the limit is {most}", file=sys.stderr)
            failed = True
    return failed


PARSER = parser(
    "soak.py",
    __doc__,
    ("--count", positive, 200_000, "push_pulls"),
    ("--warmup", positive, 50_000, "push_pulls before it measures"),
    ("--size", size, 4096, "bytes in each direction"),
    ("--transport", str, "auto", "the transport"),
    ("--device", one_of("cpu", "gpu"), "cpu", "where the tensors are: cpu or gpu"),
    ("--limit", positive, None, "the exit status is 1 if memory grows by more bytes"),
    formatter_class=argparse.RawDescriptionHelpFormatter,
)


if __name__ == "__main__":
    try:
        os.environ.setdefault("FSERVER_LOG", "warn")
        sys.exit(main(sys.argv[1:]))
    except BenchError as error:
        sys.exit(f"soak: {error}")
