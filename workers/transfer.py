"""Copying train state between the workers of a generation.

The furthest applied step is the truth. Everyone tells everyone which keys it holds at which step
and which it needs; then each missing tensor goes from a process that has it to the one that
lacks it, in one order that all ranks know, so that blocking sends and receives cannot deadlock.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from workers.errors import StateError
from workers.state import TrainState


@dataclass(frozen=True, slots=True)
class _Card:
    """What one rank tells the others."""

    step: int
    held: frozenset[str]
    wanted: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Transfer:
    key: str
    source: int
    target: int


def furthest_state(
    state: TrainState, wanted: dict[str, torch.Tensor], source_rank: int, device: torch.device
) -> TrainState:
    """Everything this rank needs, at the step that `source_rank` applied. A collective.

    Args:
        state: what this rank has.
        wanted: a tensor of the right shape and type for every key this rank needs.
        source_rank: a rank that holds the furthest state.
        device: where tensors are received.

    Raises:
        StateError: no rank holds a tensor that some rank needs; raised on every rank.

    Cost: one exchange of key lists, then each missing tensor once over the network.
    """
    cards = _exchange(_Card(state.step, frozenset(state.tensors), frozenset(wanted)))
    step = cards[source_rank].step
    me = dist.get_rank()
    tensors = {k: t for k, t in state.tensors.items() if k in wanted and state.step == step}
    for transfer in _transfers(cards, step):
        if transfer.source == me:
            dist.send(state.tensors[transfer.key].detach().contiguous(), transfer.target)
        elif transfer.target == me:
            tensors[transfer.key] = torch.empty_like(wanted[transfer.key], device=device)
            dist.recv(tensors[transfer.key], transfer.source)
    return TrainState(step=step, tensors=tensors)


def _exchange(card: _Card) -> list[_Card]:
    cards: list[_Card | None] = [None] * dist.get_world_size()
    dist.all_gather_object(cards, card)
    return [card for card in cards if card is not None]


def _transfers(cards: list[_Card], step: int) -> list[_Transfer]:
    """Who sends what to whom. Holders of a key take turns, so that none sends everything."""
    holders: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        if card.step == step:
            for key in card.held:
                holders.setdefault(key, []).append(rank)
    transfers: list[_Transfer] = []
    for target, card in enumerate(cards):
        missing = card.wanted - card.held if card.step == step else card.wanted
        for key in sorted(missing):
            sources = holders.get(key)
            if not sources:
                raise StateError(
                    "no worker holds a part of the train state",
                    value=key,
                    remedy="Resume from the last checkpoint.",
                )
            transfers.append(_Transfer(key, sources[len(transfers) % len(sources)], target))
    return transfers
