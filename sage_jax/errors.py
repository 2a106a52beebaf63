"""Every typed failure of the package, so that a crash is never mistaken for a wrong answer.

Three families: what the user can mend (`ConfigError`, `DataRootError`, `CheckpointError`), what the infrastructure
did (`InfrastructureError`: the episode is run again or quarantined, never scored) and what concerns one sampling
request alone (`SamplingError`). What the agent's own code does is not an exception: it is a field of `StepResult`.
"""


class SageError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(SageError, ValueError):
    """An unknown name or an impossible combination in a config; the message lists the valid choices."""


class DataRootError(SageError):
    """A missing, half-built or wrong AppWorld data root; the message says how to get one."""


class CheckpointError(SageError):
    """A checkpoint that is missing, damaged or does not fit; the message names it."""


class InfrastructureError(SageError):
    """A failure that is not the agent's doing. The episode is not a sample."""


class WorldOpenError(InfrastructureError):
    """A world could not be opened."""


class WorkerDied(InfrastructureError):
    """A worker process ended outside `execute`, or was ended from outside."""


class WorkerTimeout(InfrastructureError):
    """An operation other than `execute` ran past its limit."""


class JudgeError(InfrastructureError):
    """The judge could not score an episode."""


class SamplingError(SageError):
    """A request that the sampler refuses; other requests go on."""
