"""The command line of `fserver`, for processes that start it."""

import sys
from pathlib import Path


def command(*words: str) -> list[str]:
    """Returns the command line that runs a subcommand of this very package. ``python -m fserver``
    takes the package of the current directory, if there is one."""
    return [sys.executable, str(Path(__file__).with_name("__main__.py")), *words]
