"""The paper's planner: closed-form targets, piggyback packing, idle ranks given away."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.cost import CostModel
from planner.layout import lay_out
from planner.lengths import checked_lengths, longest_first
from planner.microbatches import with_legal_count
from planner.packing import Packing, PackingRules, grow_scan, pack_scan, packing_rules
from planner.packing_heap import grow_sorted, pack_heap
from planner.plan import Plan, empty_plan
from planner.pool import IntArray, PoolShape
from planner.targets import closed_form_targets


@dataclass(frozen=True, slots=True)
class HydraPlanner:
    """HyDra's scheduler (paper section 5.1); its load is the sum of s^2 / cp.

    Args:
        name: what its plans are signed with.
        pack: Algorithm 1, as a scan or with heaps.
        grow: the rule that gives idle ranks away, as a scan or sorted.
    """

    name: str
    pack: Callable[[IntArray, PackingRules], Packing]
    grow: Callable[[Packing, PackingRules], IntArray]

    def plan(self, lengths: IntArray, pool: PoolShape, cost: CostModel) -> Plan:
        """Plan one step. O(N log N + N log G) with heaps; see `interface.Planner`."""
        lengths = checked_lengths(lengths, pool)
        if lengths.size == 0:
            return empty_plan(self.name, pool)
        places = longest_first(lengths)
        ordered = lengths[places]
        packing, target = self.packed(ordered, pool, cost)
        table = cost.table(pool)
        return lay_out(self.name, packing, places, lengths, pool, table, target)

    def packed(self, ordered: IntArray, pool: PoolShape, cost: CostModel) -> tuple[Packing, float]:
        """Groups without ranks, of lengths sorted longest first; and the target they keep."""
        targets = closed_form_targets(ordered, pool, cost)
        rules = packing_rules(targets, int(ordered[0]), pool)
        packing = with_legal_count(self.pack(ordered, rules), ordered, pool)
        return replace(packing, group_class=self.grow(packing, rules)), targets.load


def hydra() -> HydraPlanner:
    """The planner "hydra": with heaps, compiled."""
    return HydraPlanner("hydra", pack_heap, grow_sorted)


def hydra_scan() -> HydraPlanner:
    """Its specification: the same plans to the byte, by plain scans. For tests and study."""
    return HydraPlanner("hydra", pack_scan, grow_scan)
