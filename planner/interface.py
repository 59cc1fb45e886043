"""The one interface every planner and every rival stands behind."""

from typing import Protocol

from planner.cost import CostModel
from planner.plan import Plan
from planner.pool import IntArray, PoolShape


class Planner(Protocol):
    """Makes plans. Deterministic: the same input gives the same bytes."""

    @property
    def name(self) -> str:
        """What its plans are signed with."""
        ...

    def plan(self, lengths: IntArray, pool: PoolShape, cost: CostModel) -> Plan:
        """Plan one step.

        Args:
            lengths: [N] tokens of each sequence, each > 0, in batch order.
            pool: the pool of this generation.
            cost: what a sequence costs a rank at each degree.

        Raises:
            InputError: a length is not a whole number above zero.
            InfeasibleError: a sequence does not fit the pool.
        """
        ...
