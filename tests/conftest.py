"""Settings that save processor time in all tests."""

import gc
import os

# OpenMP's threads would spin while they wait, on cores that the tests share with their children.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from looking at torch and at the list of tests each time."""
    gc.collect()
    gc.freeze()
