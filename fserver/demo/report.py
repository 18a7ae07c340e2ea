"""The report that the demo prints at its end."""

import itertools
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from fserver.percentiles import percentile


def compare(
    tokenizer: Any, prompts: list[str], workers: list[dict[str, Any]], whole: list[dict[str, Any]]
) -> bool:
    """Prints both texts of each prompt side by side. Reports whether all token ids are equal."""
    split = {text["prompt"]: (i, text) for i, w in enumerate(workers) for text in w["texts"]}
    width = min(shutil.get_terminal_size().columns, 140)
    error = 0.0
    unequal = []
    for number, (prompt, right) in enumerate(zip(prompts, whole, strict=True)):
        worker, left = split[number]
        print(f"\nworker {worker}: {prompt}\n")
        texts = [tokenizer.decode(t["ids"], skip_special_tokens=True) for t in (left, right)]
        print(_side_by_side(("split", "unsplit"), texts, width))
        same = len(_common_prefix(left["ids"], right["ids"]))
        logits = zip(left["logits"][:same], right["logits"][:same], strict=True)
        error = max([error, *(abs(a - b) for a, b in logits)])
        if left["ids"] == right["ids"]:
            print(f"\n  token ids equal: yes, all {same}")
        else:
            unequal.append(number)
            print(f"\n  token ids equal: NO, only the first {same}", end="")
            # a narrow lead is a tie that rounding has decided, a wide one is a fault
            lead = "".join(f"{x:.1g}" for x in right["leads"][same : same + 1])
            print(f"; in the unsplit model the next token leads by {lead}" if lead else "")
    lead = min(lead for text in whole for lead in text["leads"])
    print(f"\nall token ids equal: {'NO' if unequal else 'yes'}")
    print(
        "  Sums are rounded differently, because the shapes differ. The logits of the chosen tokens"
        f"\n  differ by at most {error:.1g}. The smallest lead of a chosen token over the next "
        f"best is {lead:.1g}."
    )
    return not unequal


def table(
    workers: list[dict[str, Any]], servers: list[dict[str, Any]], whole: dict[str, Any]
) -> None:
    """Prints the weights, tokens, latencies and traffic of each process."""
    rows = [
        ("", "weights", "tokens", "tokens/s", "round trip of a layer", "network", "out", "back"),
        ("", "MB", "", "", "p50 / p99, us", "p50, us", "MB", "MB"),
    ]
    for i, w in enumerate(workers):
        trips = sorted((t[7] - t[0]) / 1e3 for t in w["traces"])
        network = sorted(((t[6] - t[1]) - (t[5] - t[2])) / 1e3 for t in w["traces"])
        moved = _mb(w["bytes"])
        rows.append(
            (
                f"worker {i}",
                *_speed(w),
                f"{_percentile(trips, 50)} / {_percentile(trips, 99)}",
                _percentile(network, 50),
                moved,
                moved,
            )
        )
    moved = _mb(sum(w["bytes"] for w in workers) // len(servers))
    rows += [
        (f"server {i}", _mb(s["weights"]), "", "", "", "", moved, moved)
        for i, s in enumerate(servers)
    ]
    texts = [text for w in workers for text in w["texts"]]
    every = {
        "weights": sum(process["weights"] for process in (*workers, *servers)),
        "seconds": max(w["seconds"] for w in workers),
        "texts": texts,
    }
    rows.append(("split, all", *_speed(every), "", "", "", ""))
    rows.append(("unsplit", *_speed(whole), "", "", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for name, *cells in rows:
        cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join((name.ljust(widths[0]), *cells)).rstrip())
    sizes = servers[0]["rows"]
    print(
        f"\n{len(sizes)} batches, each with one request of every worker: "
        f"{sum(sizes) / max(len(sizes), 1):.1f} rows on average, {max(sizes, default=0)} at most"
    )


def _common_prefix(a: list[int], b: list[int]) -> list[int]:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return [x for x, _ in pairs]


def _side_by_side(titles: Sequence[str], texts: Sequence[str], width: int) -> str:
    half = (width - 5) // 2
    columns = []
    for title, text in zip(titles, texts, strict=True):
        lines = (textwrap.wrap(line, half) or [""] for line in text.splitlines())
        columns.append([title, "-" * half, *itertools.chain.from_iterable(lines)])
    rows = itertools.zip_longest(*columns, fillvalue="")
    return "\n".join(f"  {a:<{half}} | {b}".rstrip() for a, b in rows)


def _speed(run: dict[str, Any]) -> tuple[str, str, str]:
    """Weights, tokens, and tokens per second."""
    tokens = sum(len(text["ids"]) for text in run["texts"])
    return _mb(run["weights"]), str(tokens), f"{tokens / run['seconds']:.1f}"


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"


def _percentile(ordered: list[float], percent: int) -> str:
    return f"{percentile(ordered, percent):.0f}" if ordered else "-"
