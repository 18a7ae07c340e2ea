"""Prints the lines of a folder of sources that ran in a build with --coverage, by file.

python tools/gcov_lines.py BUILD SOURCES
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path


def ran(build: Path, sources: Path) -> dict[Path, dict[int, bool]]:
    """For each file, its lines with code, and whether one of the programs ran them."""
    found: dict[Path, dict[int, bool]] = defaultdict(dict)
    for notes in sorted(build.rglob("*.gcda")):
        command = ["gcov", "--json-format", "--stdout", str(notes)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for report in map(json.loads, done.stdout.splitlines()):
            folder = Path(report["current_working_directory"])
            for file in report["files"]:
                path = (folder / file["file"]).resolve()
                if path.is_relative_to(sources):
                    lines = found[path.relative_to(sources)]
                    for line in file["lines"]:
                        number = line["line_number"]
                        lines[number] = lines.get(number, False) or line["count"] > 0
    return found


def main() -> None:
    build, sources = (Path(path).resolve() for path in sys.argv[1:])
    found = ran(build, sources)
    rows = [(str(path), len(lines), sum(lines.values())) for path, lines in sorted(found.items())]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    for name, lines, hit in rows:
        print(f"{name:40}{lines:6}{100 * hit / max(lines, 1):6.0f}%")


if __name__ == "__main__":
    main()
