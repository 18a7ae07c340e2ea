"""What a benchmark raises."""


class BenchError(RuntimeError):
    """The benchmark cannot run."""


class WrongDataError(BenchError):
    """What was moved is not what was sent. The text says where the first difference is."""
