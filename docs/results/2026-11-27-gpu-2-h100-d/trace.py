"""Stamps of push_pulls of GPU tensors: medians of the times between them, and of their sum, in us.

    EV=1 BYTES=4096 FSERVER_TRANSPORT=tcp fserver run --worker-gpus 0 --server-gpus 1 trace.py

EV says whether push_pull and respond wait for the current stream. Each process has one core.
"""

import os
from statistics import median

import torch

import fserver

ROUNDS, WARM = 2500, 500
event, bytes_ = os.environ["EV"] == "1", int(os.environ["BYTES"])
os.sched_setaffinity(0, {4 if os.environ["DMLC_ROLE"] == "worker" else 6})


def serve() -> None:
    with fserver.Server.from_env() as s:
        y = torch.zeros(bytes_, dtype=torch.uint8, device=s.device)
        try:
            while True:
                for request, _, _ in s.get_batch():
                    s.respond([y], request, need_event=event)
        except fserver.ClosedError:
            pass  # the worker has left


def work() -> None:
    with fserver.Worker.from_env() as w:
        x = torch.zeros(bytes_, dtype=torch.uint8, device=w.device)
        y = torch.empty_like(x)
        rows = []
        for i in range(WARM + ROUNDS):
            h = w.push_pull([x], [0], [y], [1], need_event=event)
            w.wait(h)
            if i >= WARM:
                rows.append(list(w.fetch_trace(h)))
        steps = [[b - a for a, b in zip(r, r[1:], strict=False)] for r in rows]
        print([f"{median(s) / 1e3:.1f}" for s in zip(*steps, strict=True)])
        print(f"total {median(r[-1] - r[0] for r in rows) / 1e3:.1f} us")


if __name__ == "__main__":
    {"server": serve, "worker": work}.get(os.environ["DMLC_ROLE"], lambda: None)()
