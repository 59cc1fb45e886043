"""How far a run is: the last applied step, where the next batch starts, the step in flight."""

from dataclasses import dataclass, field

from hydra_ray.data.batches import DataCursor
from hydra_ray.driver.generation import Generation
from hydra_ray.driver.preparation import PreparedStep, StepKey


@dataclass(slots=True)
class Progress:
    """Steps are applied one after the other; `in_flight` is sent out and not known to be."""

    applied: int = 0
    cursor: DataCursor = field(default_factory=DataCursor)
    in_flight: PreparedStep | None = None

    def next_key(self, generation: Generation) -> StepKey:
        """What decides the plan of the next step."""
        return StepKey(
            step=self.applied + 1,
            cursor=self.cursor,
            pool=generation.pool,
            generation=generation.number,
        )

    def key_after_next(self, generation: Generation) -> StepKey:
        """What decides the plan of the step after the one in flight, if nothing comes between."""
        flying = self._flying()
        return StepKey(
            step=flying.key.step + 1,
            cursor=flying.batch.cursor_after,
            pool=generation.pool,
            generation=generation.number,
        )

    def land(self) -> None:
        """The step in flight is applied: the next batch is due."""
        flying = self._flying()
        self.applied, self.cursor = flying.key.step, flying.batch.cursor_after
        self.in_flight = None

    def rewind(self, applied: int, cursor: DataCursor) -> None:
        """Go on from an earlier step."""
        self.applied, self.cursor, self.in_flight = applied, cursor, None

    def _flying(self) -> PreparedStep:
        if self.in_flight is None:
            raise RuntimeError("no step is in flight")
        return self.in_flight
