"""Round trips of a channel of path "host" beside push_pulls. Settings: PIN=A,B first cores of the
worker and the server, N cores of each, BYTES, TRIPS of each kind in each of ROUNDS."""

import os
import statistics
import time

import torch

import fserver

WORKER = os.environ["DMLC_ROLE"] == "worker"
CORES = int(os.environ.get("N", "1"))
TRIPS, ROUNDS = int(os.environ.get("TRIPS", "200")), int(os.environ.get("ROUNDS", "3"))
BYTES = int(os.environ.get("BYTES", "4096"))
now = time.perf_counter_ns


def pin() -> None:
    first = int(os.environ["PIN"].split(",")[0 if WORKER else 1])
    os.sched_setaffinity(0, range(first, first + CORES))


def graph_of(trip):
    trip()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trip()
    return graph


def done() -> None:
    torch.cuda.current_stream().synchronize()


def serve(server) -> None:
    torch.cuda.set_device(server.device)
    y = torch.zeros(BYTES, dtype=torch.uint8, device=server.device)
    z = torch.zeros_like(y)
    with server.channel([0], [z], [0], mode="host") as ch:

        def trip() -> None:
            ch.recv()
            ch.send()

        graph = graph_of(trip)
        for _ in range(ROUNDS):
            for _ in range(TRIPS):
                for handler, _, _ in server.get_batch():
                    server.respond([y], handler, need_event=False)
            for call, ahead in ((trip, False), (graph.replay, False), (trip, True)):
                for _ in range(TRIPS):
                    call()
                    if not ahead:
                        done()
                done()
        time.sleep(0.3)


def work(worker) -> None:
    torch.cuda.set_device(worker.device)
    x = torch.zeros(BYTES, dtype=torch.uint8, device=worker.device)
    y = torch.empty_like(x)
    took = {k: [] for k in ("push_pull", "channel", "send()", "recv()", "graph", "ahead")}
    with worker.channel([x], [0], [y], [0], mode="host") as ch:

        def trip() -> None:
            ch.send()
            ch.recv()

        graph = graph_of(trip)
        for _ in range(ROUNDS):
            for _ in range(TRIPS):
                start = now()
                worker.wait(worker.push_pull([x], [7], [y], [7], need_event=False))
                took["push_pull"].append(now() - start)
            for _ in range(TRIPS):
                start = now()
                ch.send()
                sent = now()
                ch.recv()
                received = now()
                done()
                took["channel"].append(now() - start)
                took["send()"].append(sent - start)
                took["recv()"].append(received - sent)
            for _ in range(TRIPS):
                start = now()
                graph.replay()
                done()
                took["graph"].append(now() - start)
            start = now()
            for _ in range(TRIPS):
                trip()
            done()
            took["ahead"].append((now() - start) / TRIPS)
        p50 = {k: round(statistics.median(v) / 1e3, 1) for k, v in took.items()}
        print("RESULT", BYTES, worker.links()[0].transport, ch.path, p50, flush=True)


pin()
if WORKER:
    with fserver.Worker.from_env() as node:
        work(node)
elif os.environ["DMLC_ROLE"] == "server":
    with fserver.Server.from_env() as node:
        serve(node)
