"""The errors of the benchmarks."""


class BenchError(RuntimeError):
    """The benchmark cannot run. `reason` says why in one line."""

    def __init__(self, text: str, reason: str | None = None):
        super().__init__(text)
        self.reason = (reason or text).strip().partition("\n")[0][:300]


class WrongDataError(BenchError):
    """The received data differs from the sent data. The text says where they differ first."""
