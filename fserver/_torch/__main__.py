"""``python -m fserver._torch``: compiles the adapter for the installed torch, even if there is one
already, and prints its path. The loader prefers it to the adapter of the package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fserver import _loader
from fserver._torch import cache


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fserver._torch", description=__doc__)
    parser.parse_args()
    try:
        torch, version = _loader._torch()
    except _loader.LoadError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        print(cache.compiled(version, Path(str(torch.__file__)).parent, again=True))
    except cache.CompileError as error:
        print(f"fserver: adapter for torch {version}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
