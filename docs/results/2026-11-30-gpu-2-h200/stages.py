"""Medians of the intervals of fetch_trace for a push_pull of a CPU tensor, in microseconds.

    STEPMESH_BACKEND=CPU FSERVER_TRANSPORT=cma python stages.py

All processes are of one host, so all stamps are of one clock.
"""

import statistics
import subprocess
import sys

AT = "127.0.0.1:7741"
NAMES = "posted received delivered respond answered arrived completed"


def main(role: str) -> None:
    if not role:
        roles = ("scheduler", "server", "worker")
        processes = [subprocess.Popen([sys.executable, __file__, role]) for role in roles]
        sys.exit(max(process.wait() for process in processes))
    import torch

    import fserver

    if role == "scheduler":
        with fserver.Scheduler(scheduler=AT):
            return
    if role == "server":
        with fserver.Server(scheduler=AT) as server:
            for _ in range(16000):
                for handler, tensors, _ in server.get_batch():
                    server.respond(tensors, handler)
        return
    with fserver.Worker(scheduler=AT) as worker:
        for key, n in enumerate((16, 1024)):
            x, y, handles = torch.ones(n), torch.empty(n), []
            for _ in range(8000):
                handles.append(worker.push_pull([x], [key], [y], [0]))
                worker.wait(handles[-1])
            rows = [worker.fetch_trace(handle) for handle in handles[-3000:]]
            took = [statistics.median((t[i + 1] - t[i]) / 1e3 for t in rows) for i in range(7)]
            whole = statistics.median((t[7] - t[0]) / 1e3 for t in rows)
            shown = "  ".join(
                f"{name} {us:.2f}" for name, us in zip(NAMES.split(), took, strict=True)
            )
            print(f"{4 * n} bytes: {shown}  in all {whole:.2f}", flush=True)


main(sys.argv[1] if len(sys.argv) > 1 else "")
