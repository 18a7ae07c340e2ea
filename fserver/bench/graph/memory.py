"""`fserver bench graph memory`: what processes and GPUs have in use before and after exchanges."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..peers import in_use
from ..sides import Side
from .traffic import Traffic, ours

RESIDENT = ("VmRSS", "RssAnon")


def _memory(side: Side) -> dict[str, Any]:
    """Bytes that the process and its GPU have in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    found: dict[str, Any] = {name: int(fields[name].split()[0]) << 10 for name in RESIDENT}
    if side.dry:
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
    side: Side, mode: str, shape: tuple[int, ...], exchanges: int, seconds: float
) -> dict[str, Any]:
    """Replays for so many exchanges, or seconds, after a tenth of that; five samples on the way."""
    with side.node() as own:
        t = Traffic(side, ours(side, own, mode, shape), shape)
        t.capture()
        wrong = t.checked()
        replay_ms = max(side.share(median(t.timed(10))))
        count = max(5, min(math.ceil(exchanges / t.per), int(1e3 * seconds / replay_ms)))

        def go(replays: int) -> None:
            side.barrier()
            with side.on(t.main):
                for i in range(replays):
                    t.replay()
                    if i % 50 == 49:
                        side.sync()
            side.sync()
            t.check()

        for _ in range(3):  # what looks warms up too
            _memory(side)
            in_use(None)
        go(math.ceil(count / 10))
        used = [in_use(None)]
        samples = [_memory(side)]
        for _ in range(5):
            go(math.ceil(count / 5))
            samples.append(_memory(side))
        used.append(in_use(None))
        wrong += t.checked()
        t.close()
    done = 5 * math.ceil(count / 5) * t.per
    numbers = [k for k, v in samples[0].items() if isinstance(v, int)]
    growth = {k: samples[-1][k] - samples[0][k] for k in numbers if samples[-1].get(k) is not None}
    growth.update({k: used[1][k] - used[0][k] for k in used[0]})
    return {"exchanges": done, "growth": growth, "samples": samples, "used": used, "wrong": wrong}
