"""What ends a run, as typed errors."""

from planner.errors import HydraError, InputError


class NonFiniteLossError(InputError):
    """A loss or gradient was not finite; no rank applied the step."""


class TooManyFailuresError(HydraError):
    """Workers failed more often than the recipe allows."""


class NotEnoughWorkersError(HydraError):
    """The run has fewer workers than its minimum, and waited for more in vain."""


class SuspectSequencesError(HydraError):
    """The same sequences were on workers that were lost, twice in one step."""


class CheckpointError(HydraError):
    """A checkpoint cannot be written or read."""


class DriverLostError(HydraError):
    """The driver of a run died, or does not answer."""


class RunNotFoundError(InputError):
    """No such run, or none that answers."""
