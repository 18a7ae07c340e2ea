"""Compares GPU tensors over TCP with CPU tensors over TCP, with copies between a GPU and pinned
host memory, and with a program in C that does the same, from what `tools/gpu_check.sh staged` has
measured in turn: medians over its rounds.

    python3 tools/gpu_staged.py FOLDER
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

NAMES = ("gpu", "cpu", "raw", "down", "up", "floor")


def main(folder: Path) -> None:
    took: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in folder.glob("*pu-*.json"):
        for row in json.loads(file.read_text())["rows"]:
            of = took[row["bytes_out"]]
            of[file.name[:3]].append(row["p50_us"])
            if row["baseline_p50_us"]:
                of["raw"].append(row["baseline_p50_us"])
    for pattern, names in ("copies-*.txt", ("down", "up")), ("floor-*.txt", ("floor",)):
        for line in "".join(file.read_text() for file in folder.glob(pattern)).splitlines():
            size, *times = map(int, line.split())
            for name, ns in zip(names, times, strict=True):
                took[size][name].append(ns / 1000)
    print("us per round trip; raw: sockets in C; down and up: one copy from and to the GPU;")
    print("floor: all of it in C")
    heads = " gpu/cpu  gpu/(cpu + 4 copies)  rate gpu/floor"
    print(f"{'bytes':>9}", *(f"{name:>10}" for name in NAMES), heads)
    for size, of in sorted(took.items()):
        values = [median(of[name] or [float("nan")]) for name in NAMES]
        gpu, cpu, raw, down, up, floor = values
        slowest = max(raw / 2, down, up)  # one direction at the rate of the slower: socket or copy
        ratios = f"{gpu / cpu:8.2f} {gpu / (cpu + 2 * (down + up)):21.2f} {2 * slowest / gpu:5.2f}"
        print(f"{size:9}", *(f"{x:10.1f}" for x in values), ratios, f"{gpu / floor:9.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
