"""The errors that users meet. Each message says what is wrong and what to do about it."""


class TersegradError(Exception):
    """Base of every error raised on purpose by this package."""


class BadConfiguration(TersegradError, ValueError):
    """A compressor, wrapper or text form was given parameters that make no sense; raised at construction."""


class BadCheckpoint(BadConfiguration):
    """A saved state that is damaged, or that does not fit the run that reads it; nothing was changed by reading it."""


class RanksDisagree(BadConfiguration):
    """Ranks that exchange with one another were set up differently; the message names the rank and the field."""


class RankLost(TersegradError, RuntimeError):
    """Another rank failed, died or fell silent while this one exchanged with it; torch's own error is the cause of this one."""

    def __init__(self, step: int, cause: BaseException) -> None:
        super().__init__(
            f"the exchange of step {step} broke off: another rank failed or left in this step, or said nothing until the process group's "
            f"timeout. Its own output says why; residuals are those before the step. torch says: {cause}"
        )


class CorruptMessage(TersegradError, ValueError):
    """Bytes that no encoder of ours wrote for this spec: truncated, mutated, or meant for another compressor."""


class MissingStatistics(TersegradError):
    """The compressor decides by a statistic of the gradient (the second moment) that the caller did not pass."""


class MissingExtra(TersegradError, ImportError):
    """An optional dependency is needed for this call; the message names the extra that installs it."""
