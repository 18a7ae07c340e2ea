"""`fserver bench af`: pingpong with the tensors, stages and layers of a large model."""

from . import pingpong

MODEL = "--layers 61 --stages 3 --tensors 7 --sizes 128K:256K --ops push_pull"
USUAL = "--rounds 5 --seconds 1"


def main(argv: list[str]) -> int:
    """Runs the benchmark; returns the exit status."""
    return pingpong.main([*MODEL.split(), *USUAL.split(), *argv])
