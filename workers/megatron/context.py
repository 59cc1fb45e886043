"""The microbatch a layer runs in: one mechanism, captured by activation checkpoints.

A pipeline schedule interleaves microbatches, and each has its own CP group. A layer must never
ask "which group is current?" of shared mutable state: by the time a checkpoint re-runs the
layer, another microbatch is current. So the microbatch travels with Megatron's packed-sequence
parameters (`MicrobatchParams`), a layer makes it current while it runs (`entered`), and every
checkpoint captures it when it is made and reinstates it when it re-runs (`captured`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from workers.attention.counters import Counters
from workers.attention.layout import CPGroups


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """What layers must know of the microbatch they run.

    Args:
        index: its place in the step.
        groups: the CP group this rank works in, and its Ulysses and ring parts.
        padded_lengths: global padded tokens of each packed sequence.
        sequence_T: [T] int64, which packed sequence each local token belongs to.
        real_T: [T] bool, True where a local token is not padding.
        idle: True where this rank only joins the collectives, with a masked dummy.
        counters: what the engine measures in this microbatch.
    """

    index: int
    groups: CPGroups
    padded_lengths: tuple[int, ...]
    sequence_T: torch.Tensor
    real_T: torch.Tensor
    idle: bool
    counters: Counters


@dataclass
class MicrobatchParams(PackedSeqParams):
    """Megatron's packed-sequence parameters, carrying our microbatch along unchanged."""

    microbatch: Microbatch | None = None


_current: Microbatch | None = None


def current() -> Microbatch:
    """The microbatch of the layer that is running now."""
    if _current is None:
        raise RuntimeError("a layer asked for its microbatch outside of any layer's forward")
    return _current


@contextmanager
def entered(microbatch: Microbatch | None) -> Iterator[None]:
    """Make `microbatch` current for the block."""
    global _current  # noqa: PLW0603 - the one place that holds it
    previous, _current = _current, microbatch
    try:
        yield
    finally:
        _current = previous


def captured(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` bound to the microbatch that is current now, whenever it runs again."""
    microbatch = _current

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with entered(microbatch):
            return function(*args, **kwargs)

    return run
