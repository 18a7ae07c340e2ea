"""What the sides of a graph do for tests of memory and of the GPU's timeline; also on the CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fserver.bench.graph.traffic import Model, Traffic, ours
from fserver.bench.team import Teammate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "long"))

from soak import SoakActor, by_the_byte  # noqa: E402

__all__ = ("LIMITS", "CheckedSide", "by_the_byte", "memory", "zero_sm")

RESIDENT = ("VmRSS", "RssAnon")
# By how much two looks at a process may differ: pages touched for the first time, bytes that a
# collection left, objects of the looks themselves. GPUs and the engine's heap may not grow.
LIMITS = {
    **dict.fromkeys(RESIDENT, 1 << 20),
    **dict.fromkeys(("go_bytes", "malloc_bytes"), 16 << 10),
    "python_blocks": 100,
}


class CheckedSide(Teammate, SoakActor):
    """A side that knows what its process has in use."""

    def channel(self, *args: Any) -> Any:
        """Keeps the path of the last one."""
        made = super().channel(*args)
        self.path = made.path
        return made


def model(side: CheckedSide, mode: str, shape: tuple[int, ...]) -> Model:
    """The traffic of layers, stages, rows and width."""
    layers, stages, rows, width = shape
    return Model(side, ours(side, mode, [(rows * width, 2 * rows * width)] * stages), layers)


def _memory(side: CheckedSide) -> dict[str, Any]:
    """Bytes that the process and its GPU have in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    found: dict[str, Any] = {name: int(fields[name].split()[0]) << 10 for name in RESIDENT}
    if not side.on_gpu:
        return found
    free, total = torch.cuda.mem_get_info()
    found.update(gpu_used=total - free, torch_reserved=torch.cuda.memory_reserved())
    # In a container the numbers of processes may be others: this one is alone on its GPU.
    try:
        uuid = str(torch.cuda.get_device_properties(side.device).uuid)
        query = ["--query-compute-apps=gpu_uuid,used_memory", "--format=csv,noheader,nounits"]
        done = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, timeout=10, check=True
        )
        mine = [line.split(",")[1] for line in done.stdout.splitlines() if uuid in line]
        found["nvidia_smi"] = sum(int(mib) for mib in mine) << 20 if mine else None
    except (AttributeError, ValueError, IndexError, OSError, subprocess.SubprocessError) as error:
        found["nvidia_smi_error"] = repr(error)
    return found


def memory(
    side: CheckedSide, mode: str, shape: tuple[int, ...], exchanges: int, seconds: float
) -> dict[str, Any]:
    """What is in use after replays for so many exchanges, or seconds, beside what was after a tenth
    of that; five samples on the way."""
    t = model(side, mode, shape)
    t.capture()
    wrong = t.checked()
    replay_ms = max(side.exchange(median(t.timed(10))))
    count = max(5, min(math.ceil(exchanges / t.per), int(1e3 * seconds / replay_ms)))

    def go(replays: int) -> None:
        side.barrier()
        with torch.cuda.stream(t.main):
            for i in range(replays):
                t.replay()
                if i % 50 == 49:
                    side.sync()
        t.meet()

    for _ in range(3):  # what looks warms up too
        _memory(side)
        side.in_use()
    go(math.ceil(count / 10))
    used = [side.in_use()]
    samples = [_memory(side)]
    for _ in range(5):
        go(math.ceil(count / 5))
        samples.append(_memory(side))
    used.append(side.in_use())
    wrong += t.checked()
    t.close()
    numbers = [k for k, v in samples[0].items() if isinstance(v, int)]
    growth = {k: samples[-1][k] - samples[0][k] for k in numbers if samples[-1].get(k) is not None}
    growth.update({k: used[1][k] - used[0][k] for k in used[0]})
    return {"exchanges": 5 * math.ceil(count / 5) * t.per, "growth": growth, "wrong": wrong}


def _profiled(side: Teammate, run: Callable[[], Any]) -> dict[str, Any]:
    """What is on the GPU's timeline while run runs, by kind and name."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if side.on_gpu else kinds.CPU]) as seen:
        side.barrier()
        run()
        side.sync()
        side.barrier()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    found = {}
    for kind in ("kernel", "gpu_memcpy", "gpu_memset"):
        names = Counter(e["name"] for e in events if e.get("cat") == kind)
        found[kind] = dict(names.most_common(20))
    return found


def zero_sm(side: CheckedSide, kind: str, shape: tuple[int, ...], trips: int) -> dict[str, Any]:
    """Round trips under the profiler, after some without it."""
    # Else the profiler leaves CUDA after each use, and graphs do not survive that.
    os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")
    sample = torch.zeros(1024, device=side.device)
    control = _profiled(side, lambda: sample.add_(1))
    check = _eager if kind == "eager" else _channel
    return {**check(side, kind, shape, trips), "control": control["kernel"]}


def _eager(side: CheckedSide, kind: str, shape: tuple[int, ...], trips: int) -> dict[str, Any]:
    """Of push_pull."""
    _, _, rows, width = shape
    own = side.nodes[0]
    dtype = torch.int8 if side.is_worker else torch.bfloat16
    out = torch.ones(rows, width, dtype=dtype, device=side.device)
    back = torch.zeros(rows, width, dtype=torch.bfloat16, device=side.device)
    came = [back]
    side.sync()

    def run(count: int = trips) -> None:
        for _ in range(count):
            if side.is_worker:
                own.wait(own.push_pull([out], [0], [back], [0], need_event=True))
            else:
                [(handler, came[:], _)] = own.get_batch(timeout_ms=10000)
                own.respond([out], handler, need_event=True)

    run(5)
    out.fill_(3)
    side.sync()
    side.barrier()
    found = _profiled(side, run)
    wrong = sum(int((x != 3).sum()) for x in came)
    side.barrier()
    return {**found, "transport": "+".join(side.links()), "wrong": wrong}


def _channel(side: CheckedSide, kind: str, shape: tuple[int, ...], trips: int) -> dict[str, Any]:
    """Of a channel in a mode, or as a graph."""
    _, _, rows, width = shape
    ways = ours(side, kind.split()[0], [(rows * width, 2 * rows * width)])
    t = Traffic(side, ways, trips)
    t.capture()
    t.poison()
    side.sync()
    side.barrier()
    with torch.cuda.stream(t.main):
        found = _profiled(side, t.replay if kind == "copy graph" else t.body)
    wrong = t.wrong()
    t.close()
    return {**found, "transport": side.path, "wrong": wrong}
