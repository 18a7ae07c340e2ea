"""Ours beside each baseline, from what one run left.

    python tools/gpu_table.py DIR

Reads baselines*.json (gpu_baselines.py), channel.json (bench_channel.py) and eager.json
(gpu_eager.py) in DIR, prints a line for each of ours and leaves the same as bench.json there. A
ratio is ours over theirs: below 1, ours is faster.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

KIB, MIB = 1 << 10, 1 << 20


def _row(who: str, mode: str, push: int, pull: int, times: dict[str, Any]) -> dict[str, Any]:
    p50, p99 = times["p50_us"], times["p99_us"]
    return {"who": who, "mode": mode, "push": push, "pull": pull, "p50_us": p50, "p99_us": p99}


def measured(channel: dict[str, Any], eager: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of bench_channel.py and gpu_eager.py in the terms of the baselines; raw programs are
    among them."""
    rows = []
    for row in channel.get("rows", []):
        who, _, how = row["work"].partition(", ")
        size = row.get("size", row.get("push"))
        if row.get("table") or size is None:
            continue
        work = how.split(" ")[0], row.get("push"), row.get("pull")
        if "one way" in row["work"]:
            work = "enqueued", size, 8
        elif "both ways" in row["work"]:
            work = "both ways", size, size
        who = re.sub(" (one way|both ways)", "", who)
        if flying := re.search(r"(\d+) in flight", how):
            who += f" x{flying[1]}"
        if (trips := re.search(r"graph x(\d+)", how)) and trips[1] != "20":
            who += f", {trips[1]} in it"
        rows.append(_row(who, *work, row))
    for row in eager.get("rows", []):
        names = {"gpu": "push_pull gpu", "gpu-caller": "push_pull gpu-caller", "floor": "raw C"}
        for key, who in names.items():
            rows.append(_row(who, "sync each", row["out"], row["back"], row[key]))
    return rows


def compare(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each of mine with each of theirs that did the same work the same way, and the wire. What was
    measured in several rounds is the median of them."""
    rounds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in theirs:
        if "p50_us" in row:
            key = (row["mode"], row["push"], row["pull"], row["baseline"])
            rounds.setdefault(key, []).append(row)
    rows = []
    for row in mine:
        against = []
        for (mode, push, pull, name), found in rounds.items():
            same = mode == row["mode"] or mode == "wire" and row["mode"] != "both ways"
            if not same or (push, pull) != (row["push"], row["pull"]):
                continue
            p50 = median(one["p50_us"] for one in found)
            entry = {"baseline": name, "p50_us": p50, "ratio": round(row["p50_us"] / p50, 3)}
            if all("p99_us" in one for one in found):
                entry["p99_us"] = median(one["p99_us"] for one in found)
                entry["p99_ratio"] = round(row["p99_us"] / entry["p99_us"], 3)
            against.append({**entry, "rounds": [one["p50_us"] for one in found]})
        rows.append({**row, "against": against})
    return sorted(rows, key=lambda row: (row["mode"], row["push"], row["pull"], row["who"]))


def _size(n: int) -> str:
    if n < KIB:
        return f"{n} B"
    return f"{n // KIB} KiB" if n < MIB else f"{n / MIB:g} MiB"


def main() -> int:
    folder = Path(sys.argv[1])

    def read(path: Path) -> dict[str, Any]:
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            print(f"no result: {error}", file=sys.stderr)
            return {}

    found = [read(path) for path in sorted(folder.glob("baselines*.json"))]
    theirs = [row for result in found for row in result.get("rows", [])]
    mine = measured(read(folder / "channel.json"), read(folder / "eager.json"))
    theirs += [{**row, "baseline": row["who"]} for row in mine if row["who"].startswith("raw")]
    rows = compare([row for row in mine if not row["who"].startswith("raw")], theirs)
    absent = [row for row in theirs if "skipped" in row]
    skipped = sorted({f"{row['baseline']}, {row['mode']}: {row['skipped']}" for row in absent})
    for row in rows:
        shape = f"{_size(row['push'])} + {_size(row['pull'])}"
        line = f"{row['mode']:10}{shape:20}{row['who']:22}"
        line += f"p50 {row['p50_us']:8.2f}  p99 {row['p99_us']:8.2f}"
        for one in row["against"]:
            line += f" | {one['baseline']} {one['p50_us']:.2f}"
            line += f" x{one['ratio']:.2f}" if one["ratio"] < 10 else ""
        print(line)
    for line in skipped:
        print("skipped", line)
    (folder / "bench.json").write_text(
        json.dumps({"rows": rows, "skipped": skipped}, indent=1) + "\n"
    )
    return 0 if any(row["against"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
