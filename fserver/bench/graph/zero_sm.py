"""`fserver bench graph zero-sm`: the kernels that run on the GPU during round trips."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..sides import Side
from .traffic import Traffic, ours

KINDS = ("eager", "copy", "copy graph", "kernel")


def _profiled(side: Side, run: Callable[[], Any]) -> dict[str, Any]:
    """What is on the GPU's timeline while run runs, by kind and name."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU if side.dry else activity.CUDA]) as seen:
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


def zero_sm(side: Side, kind: str, shape: tuple[int, ...], trips: int) -> dict[str, Any]:
    """Round trips under the profiler, after some without it."""
    # Else the profiler leaves CUDA after each use, and graphs do not survive that.
    os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")
    _, _, rows, width = shape
    at = side.device.index or 0
    gpu = {} if side.dry else {"backend": "GPU", "gpu": at, "rank_offset": -at}
    sample = torch.zeros(1024, device=side.device)
    control = _profiled(side, lambda: sample.add_(1))
    with side.node(**(gpu if kind == "eager" else {})) as own:
        if kind == "eager":
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
            how = "+".join(link.transport for link in own.links())
            wrong = sum(int((x != 3).sum()) for x in came)
            side.barrier()
        else:
            shape = (trips, 1, rows, width)
            t = Traffic(side, ours(side, own, kind.split()[0], shape), shape, compute=False)
            t.capture()
            t.poison()
            for tensor in t.out:
                tensor.fill_(1)
            side.sync()
            side.barrier()
            with side.on(t.main):
                found = _profiled(side, t.replay if kind == "copy graph" else t.body)
            how, wrong = t.channels[0].path, sum(int((x != 1).sum()) for x in t.incoming)
            t.close()
    return {**found, "control": control["kernel"], "transport": how, "wrong": wrong}
