"""The pool a plan is made for: how many ranks, how much each holds, and the pipeline's shape."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from planner.errors import InputError

IntArray = npt.NDArray[np.int64]

COUNTS = ("num_ranks", "token_budget", "stages", "chunks", "expert_ranks", "pad_unit")


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """The hybrid-data-parallel pool of one generation.

    Args:
        num_ranks: G, the HDP ranks that CP groups are cut from.
        token_budget: B, the most padded tokens one rank may hold in one microbatch.
        stages: p, pipeline stages behind every HDP rank.
        chunks: v, virtual pipeline chunks a stage.
        expert_ranks: HDP ranks that share one set of experts (EP); 1 for a dense model.
        max_degree: C, the largest CP degree a plan may use; None leaves it to the planner.
        pad_unit: a sequence of degree k is padded to a multiple of `pad_unit * k` tokens:
            2 for the zigzag halves, times the tensor-parallel size under sequence parallelism.
    """

    num_ranks: int
    token_budget: int
    stages: int = 1
    chunks: int = 1
    expert_ranks: int = 1
    max_degree: int | None = None
    pad_unit: int = 2

    def __post_init__(self) -> None:
        capped = () if self.max_degree is None else ("max_degree",)
        for field in (*COUNTS, *capped):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{field} must be a whole number above zero",
                    value=value,
                    limit=">= 1",
                    remedy=f"Set {field} to at least 1.",
                )

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Legal CP degrees, ascending: powers of two up to G, and G itself."""
        powers = [1 << i for i in range(self.num_ranks.bit_length())]
        legal = [k for k in powers if k <= self.num_ranks]
        if legal[-1] != self.num_ranks:
            legal.append(self.num_ranks)
        cap = self.max_degree or self.num_ranks
        return tuple(k for k in legal if k <= cap)

    @property
    def longest_sequence(self) -> int:
        """The most tokens one sequence may have on this pool."""
        degree = self.degrees[-1]
        return self.token_budget // self.pad_unit * self.pad_unit * degree

    def padded(self, length: int, degree: int) -> int:
        """Tokens of a sequence once padded so that every rank of its group gets equal halves."""
        unit = self.pad_unit * degree
        return -(-length // unit) * unit

    def legal_num_microbatches(self, at_least: int) -> int:
        """The smallest MB count >= `at_least` that Megatron's schedules accept.

        Interleaved 1F1B (chunks > 1) wants a multiple of the number of stages; plain 1F1B and
        no pipeline take any count.
        """
        unit = self.stages if self.stages > 1 and self.chunks > 1 else 1
        return max(1, -(-at_least // unit)) * unit
