"""A worker that prints how long a push_pull takes, or the server that answers it (run.sh)."""

import os
import sys
import time

import torch

import fserver


def serve() -> None:
    with fserver.Server.from_env() as server:
        try:
            while True:
                for request, (x,), _ in server.get_batch():
                    server.respond([x], request)
        except fserver.ClosedError:
            pass


def measure(worker: fserver.Worker, size: int) -> str:
    """Lowest tenth and median, in microseconds."""
    x = torch.ones(size // 4, device=worker.device)
    y = torch.empty_like(x)
    count = 4000 if size <= 65536 else max(20, min(4000, int(2.5e8 / size)))
    times = []
    for _ in range(count + count // 5 + 5):
        begin = time.perf_counter_ns()
        worker.wait(worker.push_pull([x], [0], [y], [1]))
        times.append((time.perf_counter_ns() - begin) / 1e3)
    times = sorted(times[-count:])
    return f"{times[count // 10]:.1f}/{times[count // 2]:.1f}"


if os.environ["DMLC_ROLE"] == "server":
    serve()
else:
    with fserver.Worker.from_env() as worker:
        figures = [measure(worker, int(size)) for size in sys.argv[1].split(",")]
        [link] = worker.links()
        sent = [(m.interface, m.sent >> 20) for m in link.members]
        print(" ".join(figures), sent, link.transport, flush=True)
