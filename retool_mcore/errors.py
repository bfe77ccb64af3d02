"""The errors that users see. Each states the problem, the value, the rule and what to do."""

EXIT_USER_ERROR = 2  # exit code after a user's error
EXIT_RETRYABLE = 3  # exit code of RunError and RolloutError, such as a lost process or node


class ReToolError(Exception):
    """Base class of errors that a user can fix. The CLI prints them without a traceback."""


class ConfigError(ReToolError, ValueError):
    """A setting is unknown, has the wrong type, or conflicts with another."""


class DataError(ReToolError, ValueError):
    """A data file, row or conversation is missing, corrupt or has the wrong schema."""


class CheckpointError(ReToolError, RuntimeError):
    """A checkpoint or model directory is missing, incomplete, or belongs to another run."""


class PlatformError(ReToolError, RuntimeError):
    """The machine lacks what the platform needs, or a patch no longer fits its target."""


class RewardError(ReToolError, RuntimeError):
    """The reward could not be computed. Never raised for a wrong or hostile answer."""


class SandboxUnavailable(ReToolError, RuntimeError):
    """The sandbox itself failed: it is unreachable, crashed, or the kernel refused it.

    Never raised for what the executed code does; ``ExecResult`` reports that.
    """


class RolloutError(ReToolError, RuntimeError):
    """The rollout cannot continue: too many trajectories were dropped, or the engine died."""


class RunError(ReToolError, RuntimeError):
    """A process of the run died or failed. The run's log has its output."""
