"""Settings that save processor time in all tests."""

import gc
import os

from fserver.bench import processes

# OpenMP's threads would spin while they wait, on cores that the tests share with their children.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Children import the modules of the tests, which import it.
processes.PRELOAD.append("pytest")


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from looking at torch and at the list of tests each time."""
    gc.collect()
    gc.freeze()
