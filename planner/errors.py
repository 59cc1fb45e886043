"""The project's typed errors: what is wrong, the value, the limit, and the remedy."""

from typing import Any


class HydraError(Exception):
    """Base of every error this project raises on purpose.

    Args:
        what: what is wrong, as a sentence without its full stop.
        value: the offending value, shown as it is; None leaves it out.
        limit: what would have been accepted; None leaves it out.
        remedy: what the user can do about it.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, value: object = None, limit: object = None, remedy: str = ""
    ) -> None:
        self.what, self.value, self.limit, self.remedy = what, value, limit, remedy
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.what]
        if self.value is not None:
            parts.append(f"got {self.value}")
        if self.limit is not None:
            parts.append(f"limit {self.limit}")
        text = "; ".join(parts) + "."
        return f"{text} {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross process boundaries, so pickling keeps every field."""
        return _rebuild, (type(self), self.what, self.value, self.limit, self.remedy)


def _rebuild(
    kind: type[HydraError], what: str, value: object, limit: object, remedy: str
) -> HydraError:
    return kind(what, value=value, limit=limit, remedy=remedy)


class InputError(HydraError, ValueError):
    """A value the caller gave cannot be used; nothing was changed."""

    exit_code = 2


class InfeasibleError(InputError):
    """No plan exists: a sequence or a batch exceeds what the pool can hold."""


class PlanError(HydraError):
    """A plan breaks one of its invariants."""
