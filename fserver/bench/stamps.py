"""The parts of a round trip, from the 8 stamps of fetch_trace."""

import statistics
from collections.abc import Sequence

BUDGET_US = 273.0  # of a round trip: 61 layers x 3 stages at 20 tokens/s

# In the order in which they happen; that in the network is there and back. They add up to the
# whole of one round trip. Differences are taken within one process, so the clocks of the two need
# not agree.
PARTS = {
    "post": "worker: from push_pull to the post",
    "network": "network, both directions: (6 - 1) - (5 - 2)",
    "deliver": "server: from the receipt to get_batch's return",
    "serve": "server: the application, until it calls respond",
    "answer": "server: from respond to the post",
    "complete": "worker: from the receipt to the completion",
}


def parts(t: Sequence[int]) -> dict[str, int]:
    """Nanoseconds of each part."""
    return {
        "post": t[1] - t[0],
        "network": (t[6] - t[1]) - (t[5] - t[2]),
        "deliver": t[3] - t[2],
        "serve": t[4] - t[3],
        "answer": t[5] - t[4],
        "complete": t[7] - t[6],
    }


def medians(traces: Sequence[Sequence[int]]) -> dict[str, float]:
    """Of each part, in microseconds."""
    found = [parts(t) for t in traces]
    return {name: statistics.median(p[name] for p in found) / 1e3 for name in PARTS}
