"""``python -m fserver._torch``: compiles the adapter for the torch of this Python, also if there is
one, and prints where it is. The loader takes it before the one that the package has."""

from __future__ import annotations

import sys
from pathlib import Path

from fserver._torch import cache


def main() -> int:
    import torch

    try:
        print(cache.compiled(torch.__version__, Path(torch.__file__).parent, again=True))
    except cache.CompileError as error:
        print(f"fserver: torch {torch.__version__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
