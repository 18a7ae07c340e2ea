"""2 workers x 2 servers over verbs, through the Python package: workers on rxe0, servers on rxe1.

torch is imported once, because that takes a minute in the emulated machine. The processes are
forked after it, and each imports fserver itself.

    mesh.py [TRANSPORT]
"""

import os
import sys
import time
from collections.abc import Callable

import torch

PAIRS = 2
SIZES = (1, 7, 48, 4096, 65537, 1 << 20, 16 << 20)
ROUNDS = 2
TRANSPORT = sys.argv[1] if len(sys.argv) > 1 else "verbs"
DEADLINE = 200  # seconds, for all processes


def pattern(size: int, mark: int) -> torch.Tensor:
    return ((torch.arange(size, dtype=torch.int64) * 7 + mark) % 251).to(torch.uint8)


def work() -> None:
    import fserver

    with fserver.Worker.from_env() as worker:
        compared = 0
        for mark in range(ROUNDS):
            for key, size in enumerate(SIZES):
                x = pattern(size, mark + 10 * worker.rank)
                ys = [torch.empty_like(x) for _ in range(worker.servers)]
                worker.push_pull([x], [key], ys, [key]).wait(timeout_ms=30000)
                for rank, y in enumerate(ys):
                    assert torch.equal(y, x + (rank + 1)), f"{size} bytes: server {rank} is wrong"
                    compared += size
        transports = {link.transport for link in worker.links()}
        assert transports == {TRANSPORT}, transports
        print(f"worker {worker.rank}: {compared} bytes compared; transport: {transports}")


def serve() -> None:
    import fserver

    with fserver.Server.from_env() as server:
        try:
            while True:
                for request, (x,), _ in server.get_batch():
                    server.respond([x + (server.rank + 1)], request)
        except fserver.ClosedError:
            pass  # the workers have left


def schedule() -> None:
    from fserver.cli import main

    sys.exit(main(["scheduler"]))


def start(run: Callable[[], None], **settings: str) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update(settings)
    try:
        run()
    except SystemExit as e:
        os._exit(int(e.code or 0))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    took = time.process_time()
    print(f"torch {torch.__version__} is imported after {took:.0f} s of processor time")
    torch.set_num_threads(1)
    os.environ.update(
        DMLC_NUM_WORKER=str(PAIRS),
        DMLC_NUM_SERVER=str(PAIRS),
        DMLC_PS_ROOT_URI="127.0.0.1",
        DMLC_PS_ROOT_PORT="17778",
        DMLC_NODE_HOST="127.0.0.1",
        FSERVER_TRANSPORT=TRANSPORT,
        FSERVER_SPIN_US="0",
        FSERVER_LOG="warn",
        STEPMESH_BACKEND="CPU",
    )
    children = {start(schedule, DMLC_ROLE="scheduler"): "scheduler"}
    for role, run, device in (("server", serve, "rxe1"), ("worker", work, "rxe0")):
        for rank in range(PAIRS):
            child = start(run, DMLC_ROLE=role, DMLC_NODE_RANK=str(rank), FSERVER_RDMA_DEVICE=device)
            children[child] = f"{role} {rank}"
    failed = 0
    end = time.monotonic() + DEADLINE
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            name = children.pop(child)
            failed += status != 0
            print(f"{name} has ended with status {os.waitstatus_to_exitcode(status)}")
        elif time.monotonic() > end:
            print(f"not done in {DEADLINE} s: {', '.join(children.values())}", file=sys.stderr)
            for left in children:
                os.kill(left, 9)
            return 1
        else:
            time.sleep(0.1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
