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


def main(folder: Path) -> None:
    took: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in folder.glob("*pu-*.json"):
        for row in json.loads(file.read_text())["rows"]:
            of = took[row["bytes_out"]]
            of[file.name[:3]].append(row["p50_us"])
            if row["baseline_p50_us"]:
                of["raw"].append(row["baseline_p50_us"])
    for file in folder.glob("copies-*.txt"):
        for line in file.read_text().splitlines():
            size, down, up = map(int, line.split())
            took[size]["down"].append(down / 1000)
            took[size]["up"].append(up / 1000)
    for file in folder.glob("floor-*.txt"):
        for line in file.read_text().splitlines():
            size, ns = map(int, line.split())
            took[size]["floor"].append(ns / 1000)
    names = ("gpu", "cpu", "raw", "down", "up", "floor")
    print(
        "us per round trip; raw: sockets in C; down and up: one copy from and to the GPU; "
        "floor: all of it in C"
    )
    print(
        f"{'bytes':>9}",
        *(f"{name:>10}" for name in names),
        " gpu/cpu  gpu/(cpu + 4 copies)  rate gpu/floor",
    )
    for size, of in sorted(took.items()):
        gpu, cpu, raw, down, up, floor = (median(of[name] or [float("nan")]) for name in names)
        slowest = max(raw / 2, down, up)  # one direction at the rate of the slower: socket or copy
        print(
            f"{size:9}",
            *(f"{x:10.1f}" for x in (gpu, cpu, raw, down, up, floor)),
            f"{gpu / cpu:8.2f} {gpu / (cpu + 2 * (down + up)):21.2f} {2 * slowest / gpu:5.2f}",
            f"{gpu / floor:9.2f}",
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
