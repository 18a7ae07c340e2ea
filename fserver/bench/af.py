"""`fserver bench af`: the traffic between attention and FFN processes, layer by layer."""

import argparse
import contextlib
import statistics
from typing import Any

from . import report
from .baseline import baseline_of
from .crew import Case, Member, Nodes, start
from .options import choose_cores, open_baseline, parser, positive, size
from .stamps import BUDGET_US, PARTS
from .turns import CrewPlayer, take_turns

TRACES = 4096  # push_pulls whose stamps a worker remembers
COLUMNS = (
    report.Column("transport", -9, "transport", str),
    report.Column("W x S", 7, "shape", str),
    *report.MOVED,
    *report.TIMES,
    report.Column("of 273 µs", 9, "of_budget", "{:.2f}".format),
    report.Column("tokens/s", 9, "tokens_per_s", "{:.1f}".format),
    report.Column("step ms", 9, "step_ms", "{:.2f}".format),
    report.Column("raw p50", 11, "baseline_p50_us", "{:.1f}".format),
    report.RATIO,
)


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    made = _parser()
    options = made.parse_args(argv)
    if options.in_flight > options.stages:
        made.error(f"--in-flight {options.in_flight}: want at most --stages {options.stages}")
    if options.layers * options.stages > TRACES:
        made.error(f"--layers {options.layers} x --stages {options.stages}: want at most {TRACES}")
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    table = report.Table(COLUMNS)
    print(table.header(), flush=True)
    with report.Progress(options.rounds, "af") as bar:
        row = _measure(options, cores, nodes, bar)
        bar.print(table.line(row))
    print(f"\n{'median time of each part of a round trip':<52}{'µs':>9}")
    for name, text in PARTS.items():
        print(f"  {text:<50}{row['parts_us'][name]:>9.1f}")
    report.finish(options, "af", facts, [row], budget_us=BUDGET_US)
    return 0


def _measure(
    options: argparse.Namespace,
    cores: tuple[int, int] | None,
    nodes: Nodes,
    bar: report.Progress,
) -> dict[str, Any]:
    worker_core, server_core = cores or (None, None)
    members = [
        Member(f"worker {i}", "layers.LayersPart", "worker", worker_core)
        for i in range(options.workers)
    ]
    members += [
        Member(f"server {i}", "peers.ServerPart", "server", server_core)
        for i in range(options.servers)
    ]
    case = Case(
        "pull",
        (options.bytes,) * options.tensors,
        (options.back_bytes,) * options.back_tensors,
        stages=options.stages,
        unit=options.layers * options.stages,
    )
    # What one worker moves in one exchange.
    out = sum(case.out) * options.servers
    back = sum(case.back) * options.servers
    with contextlib.ExitStack() as stack:
        crew = stack.enter_context(start(members, nodes))
        stack.enter_context(crew.cluster(options.transport))
        transport = "+".join(crew.workers("links")[0])
        raw, says = open_baseline(stack, options, baseline_of(transport), cores)
        player = CrewPlayer(crew)
        for worker in members[: options.workers]:
            crew.one(worker.name, "plan", options.layers, options.in_flight)
        player.prepare(case)
        if raw:
            raw.prepare(out, back)
        *baseline, measured = take_turns(
            [raw, player] if raw else [player],
            options.rounds,
            options.seconds,
            options.iters,
            done=bar.step,
        )
    row = report.row(transport, "af", out, back, measured, baseline[0] if raw else [], **says)
    medians = {
        name: round(statistics.median(r["parts_us"][name] for r in measured), 3) for name in PARTS
    }
    return {
        **row,
        "shape": f"{options.workers} x {options.servers}",
        "workers": options.workers,
        "servers": options.servers,
        "layers": options.layers,
        "stages": options.stages,
        "in_flight": options.in_flight,
        "tensors": options.tensors,
        "tensor_bytes": options.bytes,
        "back_tensors": options.back_tensors,
        "back_tensor_bytes": options.back_bytes,
        "tokens_per_s": round(1e6 / (case.unit * row["p50_us"]), 3),
        "of_budget": round(row["p50_us"] / BUDGET_US, 3),
        "step_ms": round(statistics.median(r["step_ms"] for r in measured), 3),
        "parts_us": medians,
    }


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "af",
        "Measures the traffic of a disaggregated model. In each layer and for each stage "
        "(micro-batch), every worker pushes its tensors to all servers and waits for all answers. "
        "The benchmark prints the round trip of a stage in a layer. It also prints the tokens/s "
        "that this round trip allows, 1 / (layers x stages x round trip), and its share of the "
        "273 µs that are available with 61 layers, 3 stages and 20 tokens/s. The time stamps of "
        "fetch_trace show where the time goes (with several servers, those of the last answer). "
        "With --in-flight above 1, a round trip includes the wait for earlier stages. Every "
        "worker and every server is a process. The workers share one core and the servers "
        "another. The baseline is a raw round trip of the bytes of one worker. The number in "
        "every answer is checked. Between rounds, all bytes of an exchange of each stage are "
        "compared.",
        seconds=(1.0, "approximate length of a round"),
        rounds=5,
    )
    add = made.add_argument
    for name, default, what in (
        ("workers", 1, "number of worker groups"),
        ("servers", 1, "number of server groups"),
        ("layers", 61, "number of layers"),
        ("stages", 3, "number of stages (micro-batches) in a layer"),
        ("in-flight", 1, "number of stages that are in flight at a time"),
        ("tensors", 7, "number of tensors in a push"),
        ("back-tensors", 7, "number of tensors in the answer of each server"),
    ):
        shown = f"{what} (default {default})"
        add(f"--{name}", type=positive, metavar="N", default=default, help=shown)
    add("--bytes", type=size, default="128K", help="bytes of each pushed tensor (default 128K)")
    add("--back-bytes", type=size, default="256K", help="bytes of each answer (default 256K)")
    return made
