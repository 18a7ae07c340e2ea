"""The errors of the benchmarks."""


class BenchError(RuntimeError):
    """The benchmark cannot run. `reason` says why in one line."""

    def __init__(self, text: str, reason: str | None = None):
        super().__init__(text)
        self.reason = reason or text


class WrongDataError(BenchError):
    """The received data differs from the sent data. The text says where they differ first."""


class GaveUpError(BenchError):
    """One of the compared libraries has failed. The comparison of the others goes on."""
