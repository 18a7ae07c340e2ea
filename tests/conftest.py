"""What takes time in every process of the tests, and tests nothing."""

import gc
import os

# OpenMP's threads would spin while they wait, on cores that the tests share with their children.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_finish() -> None:
    """Lets later collections look at what the tests make, and not at torch and at all tests."""
    gc.collect()
    gc.freeze()
