"""The errors a user can meet. Each names the value, the rule, its origin and what to do."""

EXIT_USER_ERROR = 2  # exit code after an error in one line
EXIT_RETRYABLE = 3  # the same, where a new start may go well: a part of the run was lost (launch/nodes.py: supervise)


class ReToolError(Exception):
    """Base of all errors that a user can fix. The command line prints them without a traceback."""


class ConfigError(ReToolError, ValueError):
    """A setting is unknown, has the wrong type, or conflicts with another."""


class DataError(ReToolError, ValueError):
    """A data file, row or conversation is missing, corrupt or not of the documented schema."""


class CheckpointError(ReToolError, RuntimeError):
    """A checkpoint or model directory is missing, incomplete, or belongs to another run."""


class PlatformError(ReToolError, RuntimeError):
    """The machine lacks what the platform needs, or a patch no longer fits its target."""


class RewardError(ReToolError, RuntimeError):
    """The reward could not be computed. Never raised for a wrong or hostile answer."""


class SandboxUnavailable(ReToolError, RuntimeError):
    """The sandbox itself failed (unreachable, crashed, refused by the kernel).

    Never raised for what the executed code does: that is an ``ExecResult``.
    """


class RolloutError(ReToolError, RuntimeError):
    """A rollout cannot go on: too many trajectories were dropped, or the engine is gone."""


class RunError(ReToolError, RuntimeError):
    """A process of the run has died or failed. The run's log has all that it said."""
