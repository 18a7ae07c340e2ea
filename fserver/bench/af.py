"""`fserver bench af`: the traffic between attention and FFN processes, layer by layer."""

import statistics
from typing import Any

from . import report
from .crew import Case, Member, Nodes, connected, members, serve
from .options import TWO_HOSTS, check_hosts, parser, positive, seconds_of, size, transport_of
from .run import Run
from .turns import Way

BUDGET_US = 273.0  # of a round trip: 61 layers x 3 stages at 20 tokens/s
TRACES = 4096  # push_pulls whose stamps a worker remembers

# The parts of a round trip, from the 8 stamps of fetch_trace, in the order in which they happen;
# that in the network is there and back. They add up to the whole. Differences are taken within one
# process, so the clocks of the two need not agree.
PARTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "post": ("worker: from push_pull to the post", (1, 0)),
    "network": ("network, both directions: (6 - 1) - (5 - 2)", (6, 1, 2, 5)),
    "deliver": ("server: from the receipt to get_batch's return", (3, 2)),
    "serve": ("server: the application, until it calls respond", (4, 3)),
    "answer": ("server: from respond to the post", (5, 4)),
    "complete": ("worker: from the receipt to the completion", (7, 6)),
}
COLUMNS = (
    report.Column("transport", -9, "transport"),
    report.Column("W x S", 7, "shape"),
    *report.MOVED,
    *report.TIMES,
    report.number("of 273 µs", 9, "of_budget", 2),
    report.number("tokens/s", 9, "tokens_per_s"),
    report.number("step ms", 9, "step_ms", 2),
    report.RAW_P50,
    report.RATIO,
)
PARSER = parser(
    "af",
    "Measures the traffic of a disaggregated model. In each layer and for each stage "
    "(micro-batch), every worker pushes its tensors to all servers and waits for all answers. The "
    "table shows the round trip of a stage in a layer, its share of the 273 µs that are available "
    "with 61 layers, 3 stages and 20 tokens/s, and the tokens/s that it allows; then where the "
    "time goes. The workers share one core and the servers another. The baseline is a raw round "
    "trip of the bytes of one worker.",
    ("--workers", positive, 1, "number of worker groups"),
    ("--servers", positive, 1, "number of server groups"),
    ("--layers", positive, 61, "number of layers"),
    ("--stages", positive, 3, "number of stages (micro-batches) in a layer"),
    ("--tensors", positive, 7, "number of tensors in a push"),
    ("--back-tensors", positive, 7, "number of tensors in the answer of each server"),
    ("--bytes", size, "128K", "bytes of each pushed tensor"),
    ("--back-bytes", size, "256K", "bytes of each answer"),
    seconds_of(1.0),
    transport_of("tcp"),
    *TWO_HOSTS,
    rounds=5,
)


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = PARSER.parse_args(argv)
    if options.layers * options.stages > TRACES:
        shape = f"--layers {options.layers} x --stages {options.stages}"
        PARSER.error(f"{shape}: want at most {TRACES}")
    check_hosts(PARSER, options)
    if options.role and (options.workers, options.servers) != (1, 1):
        PARSER.error("--role: want --workers 1 and --servers 1")
    with Run("af", options, nodes, COLUMNS, options.rounds) as run:
        hosts = {"host": options.host, "scheduler": options.scheduler}
        cluster = connected(_members(run), nodes, options.transport, **hosts)
        if options.role == "server":
            serve(cluster, options.scheduler)
            return 0
        run.table([_measure(run, run.ours(run.enter_context(cluster)))])
        print(f"\n{'median time of each part of a round trip':<52}{'µs':>9}")
        for name, (text, _) in PARTS.items():
            print(f"  {text:<50}{run.rows[0]['parts_us'][name]:>9.1f}")
    return 0


def _members(run: Run) -> list[Member]:
    options, cores = run.options, run.cores
    if options.role:
        return members(cores, options.role, "layers.FarLayersActor")
    workers, servers = range(options.workers), range(options.servers)
    found = [Member(f"worker {i}", "layers.LayersActor", "worker", cores[0]) for i in workers]
    found += [Member(f"server {i}", "actors.ServerActor", "server", cores[1]) for i in servers]
    return found


def _measure(run: Run, way: Way) -> dict[str, Any]:
    options = run.options
    out = (options.bytes,) * options.tensors
    back = (options.back_bytes,) * options.back_tensors
    unit = options.layers * options.stages
    # What one worker moves in one exchange.
    whole = Case("af", out * options.servers, back * options.servers)
    run.measure([way], Case("pull", out, back, stages=options.stages, unit=unit), whole)
    found, measured = way.row(whole), way.rounds
    median = statistics.median
    times = {name: median(one["parts_us"][name] for one in measured) for name in PARTS}
    return {
        **found,
        "shape": f"{options.workers} x {options.servers}",
        "tokens_per_s": round(1e6 / (unit * found["p50_us"]), 3),
        "of_budget": round(found["p50_us"] / BUDGET_US, 3),
        "step_ms": round(median(one["step_ms"] for one in measured), 3),
        "parts_us": {name: round(us, 3) for name, us in times.items()},
    }
