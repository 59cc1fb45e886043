"""Process groups of one generation: made once, eagerly, in the same order everywhere.

This registry and Megatron's parallel state, which it opens and closes, are the only holders of a
process group. A dead group whose reference survives keeps its sockets open, and then a peer that
waits on it is not freed; so `close` drops every reference there is.

Ranks in a generation follow Megatron's order: tensor fastest, then HDP, then pipeline.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from planner.errors import InputError
from planner.pool import PoolShape
from workers.attention.layout import CPGroups
from workers.errors import GenerationError
from workers.protocol import Membership, TrainingSpec
from workers.rendezvous import connect

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one process stands in the pool: rank = (stage * num_ranks + hdp) * tensor + tp."""

    hdp: int
    tensor: int
    stage: int


def place_of(rank: int, *, num_ranks: int, tensor: int) -> Place:
    """The place of process `rank` in a pool of `num_ranks` HDP ranks."""
    rest, tensor_rank = divmod(rank, tensor)
    stage, hdp = divmod(rest, num_ranks)
    return Place(hdp=hdp, tensor=tensor_rank, stage=stage)


def pool_subsets(pool: PoolShape) -> list[Ranks]:
    """Every set of two or more HDP ranks that a plan may need a group for, sorted, each once.

    For each legal degree all aligned chunks, and for each way to write the degree as u * r the
    runs of u consecutive ranks (Ulysses) and the strided sets of r (ring).
    """
    subsets: set[Ranks] = set()
    for degree in pool.degrees:
        for start in range(0, pool.num_ranks - degree + 1, degree):
            subsets.update(_parts_of_chunk(start, degree))
    subsets = {ranks for ranks in subsets if len(ranks) > 1}
    return sorted(subsets, key=lambda ranks: (len(ranks), ranks))


def _parts_of_chunk(start: int, degree: int) -> Iterator[Ranks]:
    for ulysses in (u for u in range(1, degree + 1) if degree % u == 0):
        for first in range(start, start + degree, ulysses):
            yield tuple(range(first, first + ulysses))
        for first in range(start, start + ulysses):
            yield tuple(range(first, start + degree, ulysses))


class GroupRegistry:
    """All process groups of one generation.

    Args:
        membership: this process's place, and where the workers meet.
        pool: the degrees that plans of this generation may use.
        training: the parallel sizes.

    Raises:
        InputError: the sizes do not go together.

    Cost: one `new_group` per subset and per (tensor rank, stage); about 17 subsets at 8 HDP
    ranks, 49 at 16, 321 at 64.
    """

    def __init__(self, membership: Membership, pool: PoolShape, training: TrainingSpec) -> None:
        _check_sizes(membership, training)
        self.place = place_of(
            membership.rank, num_ranks=membership.num_ranks, tensor=training.tensor
        )
        self.num_ranks = membership.num_ranks
        self._groups: dict[Ranks, dist.ProcessGroup] = {}
        self._splits: dict[tuple[int, int, int], CPGroups] = {}
        timeout = timedelta(seconds=membership.join_timeout_s)
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=connect(membership),
            rank=membership.rank,
            world_size=membership.world_size,
            timeout=timeout,
        )
        try:
            _open_parallel_state(training, membership.join_timeout_s)
            # Megatron's CP group has one rank, for here CP belongs to each microbatch.
            self._groups[(self.place.hdp,)] = parallel_state.get_context_parallel_group()
            self._open_pool_groups(pool, training, timeout)
            self._allow(timedelta(seconds=membership.timeout_s))
        except BaseException:
            self.close()
            raise

    def _open_pool_groups(
        self, pool: PoolShape, training: TrainingSpec, timeout: timedelta
    ) -> None:
        subsets = pool_subsets(pool)
        for stage in range(training.pipeline):
            for tensor_rank in range(training.tensor):
                is_mine = (stage, tensor_rank) == (self.place.stage, self.place.tensor)
                for subset in subsets:
                    ranks = [
                        (stage * self.num_ranks + hdp) * training.tensor + tensor_rank
                        for hdp in subset
                    ]
                    group = dist.new_group(ranks, timeout=timeout)
                    if is_mine and self.place.hdp in subset:
                        self._groups[subset] = group

    def _allow(self, timeout: timedelta) -> None:
        """From now on a collective of any group may take `timeout`."""
        world = dist.distributed_c10d
        for group in world._world.pg_map:  # noqa: SLF001 - torch has no public list
            world._set_pg_timeout(timeout, group)  # noqa: SLF001 - nor a public setter

    def of(self, start: int, size: int, ulysses: int) -> CPGroups:
        """The groups of this rank inside the CP group [start, start + size).

        Args:
            start: first HDP rank of the group.
            size: its degree.
            ulysses: u, the inner Ulysses degree; the ring has size / u ranks.

        Raises:
            GenerationError: this generation has no such group, or this rank is not in it.
        """
        key = (start, size, ulysses)
        if key not in self._splits:
            self._splits[key] = self._split(start, size, ulysses)
        return self._splits[key]

    def _split(self, start: int, size: int, ulysses: int) -> CPGroups:
        whole = tuple(range(start, start + size))
        if whole not in self._groups or size % ulysses:
            raise GenerationError(
                "the plan uses a group this generation does not have",
                value=f"HDP ranks {start} to {start + size - 1} with Ulysses degree {ulysses}",
                limit=f"aligned groups of {self.num_ranks} HDP ranks that hold {self.place.hdp}",
                remedy="Plan for the pool of this generation.",
            )
        block, inner_rank = divmod(self.place.hdp - start, ulysses)
        first = start + block * ulysses
        inner = tuple(range(first, first + ulysses))
        ring = tuple(range(start + inner_rank, start + size, ulysses))
        return CPGroups(
            cp=self._groups[whole],
            inner=self._groups[inner] if ulysses > 1 else None,
            ring=self._groups[ring] if len(ring) > 1 else None,
            degree=size,
            ulysses=ulysses,
            rank=self.place.hdp - start,
        )

    def close(self) -> None:
        """Drop every group of this generation; safe after a failure, and twice."""
        self._groups.clear()
        self._splits.clear()
        close_all_groups()


def close_all_groups() -> None:
    """Destroy Megatron's parallel state and every process group, and what refers to them."""
    parallel_state.destroy_model_parallel()
    parallel_state._global_process_group_list = None  # noqa: SLF001 - Megatron never clears it
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()  # a cache on the class, keyed by module and group
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _open_parallel_state(training: TrainingSpec, timeout_s: float) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=training.tensor,
        pipeline_model_parallel_size=training.pipeline,
        virtual_pipeline_model_parallel_size=training.chunks if training.chunks > 1 else None,
        expert_model_parallel_size=training.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,
    )


def _check_sizes(membership: Membership, training: TrainingSpec) -> None:
    expected = membership.num_ranks * training.tensor * training.pipeline
    if membership.world_size != expected:
        raise InputError(
            "the generation's size is not num_ranks * tensor * pipeline",
            value=membership.world_size,
            limit=expected,
            remedy="Form the generation from whole scale units.",
        )
    if membership.num_ranks * training.tensor % training.expert:
        raise InputError(
            "the pool cannot be cut into blocks of expert ranks",
            value=f"{membership.num_ranks} HDP ranks of {training.tensor} processes",
            limit=f"a multiple of {training.expert} processes",
            remedy="Use a number of workers that is a multiple of the expert size.",
        )
