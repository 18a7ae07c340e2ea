"""`fserver scheduler`: the process that introduces the others to each other."""

import argparse
import os
import sys


def main(argv: list[str]) -> int:
    """Runs a scheduler until the cluster has ended; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="fserver scheduler",
        description="Runs the scheduler of a cluster until all workers and servers have left. The "
        "environment configures it, as it does workers and servers: DMLC_PS_ROOT_URI, "
        "DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER, DMLC_NUM_SERVER and DMLC_GROUP_SIZE (`fserver env` "
        "explains them). If DMLC_PS_ROOT_PORT is 0 or not set, the scheduler chooses a free port "
        "and prints its address.",
    )
    parser.parse_args(argv)
    os.environ["DMLC_ROLE"] = "scheduler"

    import fserver

    try:
        with fserver.Scheduler.from_env(connect=False) as scheduler:
            if os.environ.get("DMLC_PS_ROOT_PORT", "").strip() in ("", "0"):
                print(f"fserver scheduler: listening at {scheduler.scheduler}", flush=True)
            scheduler.connect()
            scheduler.stop()
    except fserver.Error as e:
        print(f"fserver scheduler: {e}", file=sys.stderr)
        return 0 if isinstance(e, fserver.PeerLostError) else 1  # a lost peer is its own failure
    return 0
