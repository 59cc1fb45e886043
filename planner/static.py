"""Static context parallelism: one CP degree for every sequence of the step.

What Megatron's `dp_balanced` packer does with a fixed mesh of DP x CP ranks, in our padding:
the rival that dynamic context parallelism sets out to beat.
"""

from dataclasses import dataclass

import numpy as np

from planner.cost import CostModel
from planner.layout import first_ranks
from planner.lengths import checked_lengths
from planner.plan import Plan, empty_plan
from planner.pool import IntArray, PoolShape


@dataclass(frozen=True, slots=True)
class StaticPlanner:
    """Packs sequences in batch order into a mesh of G / CP replicas of CP ranks each."""

    name: str = "static"

    def plan(self, lengths: IntArray, pool: PoolShape, cost: CostModel) -> Plan:
        """Plan one step. O(N); see `interface.Planner`.

        CP is the least legal degree that divides G and holds the longest sequence. Packs are
        filled next-fit to the token budget; then single sequences leave the last packs for new
        ones until every replica has a pack in a legal number of microbatches. Where sequences
        run out first, replicas stay idle.
        """
        lengths = checked_lengths(lengths, pool)
        if lengths.size == 0:
            return empty_plan(self.name, pool)
        degree = _mesh_degree(int(lengths.max()), pool)
        tokens = -(-lengths // (pool.pad_unit * degree)) * pool.pad_unit
        packs = _next_fit(tokens, pool.token_budget)
        replicas = pool.num_ranks // degree
        num_microbatches = pool.legal_num_microbatches(-(-len(packs) // replicas))
        _spread(packs, num_microbatches * replicas)
        return _plan(self.name, packs, degree, num_microbatches, lengths, pool, cost)


def _mesh_degree(longest: int, pool: PoolShape) -> int:
    holds = [k for k in pool.degrees if pool.padded(longest, k) <= pool.token_budget * k]
    return next((k for k in holds if pool.num_ranks % k == 0), holds[-1])


def _next_fit(tokens: IntArray, token_budget: int) -> list[list[int]]:
    """Places of each pack: a pack closes when the next sequence would exceed the budget."""
    packs: list[list[int]] = []
    used = token_budget
    for place, needed in enumerate(tokens.tolist()):
        if used + needed > token_budget:
            packs.append([])
            used = 0
        packs[-1].append(place)
        used += needed
    return packs


def _spread(packs: list[list[int]], wanted: int) -> None:
    """Move the last sequence of a pack to a pack of its own, from the last pack backwards."""
    donor = len(packs) - 1
    while len(packs) < wanted and donor >= 0:
        if len(packs[donor]) > 1:
            packs.append([packs[donor].pop()])
        else:
            donor -= 1


def _plan(
    name: str,
    packs: list[list[int]],
    degree: int,
    num_microbatches: int,
    lengths: IntArray,
    pool: PoolShape,
    cost: CostModel,
) -> Plan:
    replicas = pool.num_ranks // degree
    table = cost.table(pool)
    sizes = np.full(len(packs), degree, dtype=np.int64)
    microbatch = np.arange(len(packs), dtype=np.int64) // replicas
    members = np.array([place for pack in packs for place in pack], dtype=np.int64)
    offsets = np.cumsum([0] + [len(pack) for pack in packs])
    return Plan(
        planner=name,
        pool=pool,
        num_microbatches=num_microbatches,
        lengths=lengths,
        group_microbatch=microbatch,
        group_start=first_ranks(microbatch, sizes),
        group_size=sizes,
        group_ulysses=np.full_like(sizes, table.ulysses[pool.degrees.index(degree)]),
        group_offsets=offsets,
        members=members,
        target_s=float(
            np.square(lengths, dtype=np.float64).sum() / (pool.num_ranks * num_microbatches)
        ),
    )
