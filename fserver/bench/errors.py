"""What a benchmark raises."""


class BenchError(RuntimeError):
    """The benchmark cannot run.

    Attributes:
        reason: the same in one line.
    """

    def __init__(self, text: str, reason: str | None = None):
        super().__init__(text)
        self.reason = reason or text


class WrongDataError(BenchError):
    """What was moved is not what was sent. The text says where the first difference is."""


class GaveUpError(BenchError):
    """One of those that are compared can do no more; the others go on."""
