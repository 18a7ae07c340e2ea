"""`fserver bench verify`: is what arrives what was sent?"""

import argparse
import secrets
import sys
import time

from . import report
from .crew import Member, Nodes, start
from .errors import WrongDataError
from .options import choose_cores, parser, positive, size

CHUNK = 20  # steps between two looks at the clock


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns 1 at the first difference."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    row = {
        "transport": options.transport,
        "seed": seed,
        "workers": options.workers,
        "servers": options.servers,
        "steps": 0,
        "requests": 0,
        "tensors": 0,
        "bytes": 0,
        "difference": None,
    }
    try:
        _play(options, cores, nodes, row)
    except WrongDataError as error:
        row["difference"] = str(error)
    report.finish(options, "verify", facts, [row])
    if row["difference"]:
        print(f"bench: {row['difference']}", file=sys.stderr)
        return 1
    print(
        "{requests} requests of {workers} workers to {servers} servers over {transport}, "
        "{tensors} tensors, {bytes} bytes: no difference".format(**row)
    )
    return 0


def _play(
    options: argparse.Namespace, cores: tuple[int, int] | None, nodes: Nodes, row: dict
) -> None:
    worker_core, server_core = cores or (None, None)
    members = [
        Member("workers", "randoms.RandomWorkers", "worker", worker_core, options.workers),
        Member("servers", "randoms.RandomServers", "server", server_core, options.servers),
    ]
    with (
        start(members, nodes) as crew,
        crew.cluster(options.transport),
        report.Progress(options.steps or options.seconds, "verify", "") as bar,
    ):
        row["transport"] = "+".join(crew.workers("links")[0])
        start_time = seen = time.monotonic()
        while True:
            count = min(CHUNK, options.steps - row["steps"]) if options.steps else CHUNK
            (moved,) = crew.workers("play", row["seed"], row["steps"], count, options.max_bytes)
            row["steps"] += count
            for name, value in moved.items():
                row[name] += value
            now = time.monotonic()
            bar.step(count if options.steps else now - seen)
            seen = now
            if options.steps:
                over = row["steps"] == options.steps
            else:
                over = now - start_time >= options.seconds
            if over:
                return


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "verify",
        "Moves tensors of random types, shapes (0 to 10 dimensions, also of no rows), sizes and "
        "counts between several workers and servers, up to three requests of each worker at a "
        "time, and compares keys, types, shapes and all bytes at both ends; answers arrive in "
        "poisoned memory. Keys are few, so the tensors of each grow, shrink and change type. "
        "Everything follows from the seed. Ends with status 1 at the first difference, which it "
        "describes. Workers are in one process and servers in another.",
        seconds=(10.0, "how long in all"),
        plot=False,
    )
    add = made.add_argument
    add("--seed", type=int, help="that of an earlier run (default: random)")
    add("--steps", type=positive, help="so many steps, not --seconds")
    add("--workers", type=positive, default=2, help="worker groups (default 2)")
    add("--servers", type=positive, default=2, help="server groups (default 2)")
    add("--max-bytes", type=size, default="1M", help="of a tensor (default 1M)")
    return made
