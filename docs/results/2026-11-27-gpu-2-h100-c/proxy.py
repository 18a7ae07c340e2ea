"""A channel through the engine beside push_pull, GPU tensors, in turns of 300 round trips: medians.

    N=4 BYTES=4096 FSERVER_TRANSPORT=tcp fserver run --worker-gpus 0 --server-gpus 1 proxy.py

N is the number of cores of each process.
"""

import os
import time
from statistics import median

import torch

import fserver

COUNT, TURNS = 300, 5
bytes_, cores = int(os.environ["BYTES"]), int(os.environ["N"])
first = 1 if os.environ["DMLC_ROLE"] == "worker" else 16
os.sched_setaffinity(0, range(first, first + cores))


def serve() -> None:
    with fserver.Server.from_env() as s:
        y = torch.zeros(bytes_, dtype=torch.uint8, device=s.device)
        x = torch.zeros_like(y)
        with s.channel([0], [x], [0], mode="host") as ch:
            for _ in range(TURNS):
                for _ in range(COUNT):
                    for request, _, _ in s.get_batch():
                        s.respond([y], request, need_event=False)
                for _ in range(COUNT):
                    ch.recv()
                    ch.send()
                    torch.cuda.current_stream().synchronize()


def work() -> None:
    with fserver.Worker.from_env() as w:
        x = torch.zeros(bytes_, dtype=torch.uint8, device=w.device)
        y = torch.empty_like(x)
        with w.channel([x], [0], [y], [0], mode="host") as ch:

            def push_pull() -> None:
                w.wait(w.push_pull([x], [7], [y], [7], need_event=False))

            def message() -> None:
                ch.send()
                ch.recv()
                torch.cuda.current_stream().synchronize()

            took: dict[str, list[int]] = {"push_pull": [], "message": []}
            for _ in range(TURNS):
                for call in (push_pull, message):
                    for _ in range(COUNT):
                        begin = time.perf_counter_ns()
                        call()
                        took[call.__name__].append(time.perf_counter_ns() - begin)
            print(w.links()[0].transport, {k: median(v) / 1e3 for k, v in took.items()})


if __name__ == "__main__":
    {"server": serve, "worker": work}.get(os.environ["DMLC_ROLE"], lambda: None)()
