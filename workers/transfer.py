"""Copying train state between the workers of a generation.

The furthest step that is whole somewhere is the truth. With tensor, pipeline or expert ranks each
worker holds a part, and a worker that dies in the very collective by which a step is agreed can
leave a part of the pool ahead of the rest: then nobody may hold some part of a step.

Everyone tells everyone which keys it holds at which step and which it needs; then each missing
tensor goes from a process that has it to the one that lacks it, in one order that all ranks know,
so that blocking sends and receives cannot deadlock.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from workers.state import NO_STATE, TrainState


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
    state: TrainState, wanted: dict[str, torch.Tensor], device: torch.device
) -> TrainState:
    """Everything this rank needs, at the furthest step that the ranks have it of. A collective.

    Args:
        state: what this rank has.
        wanted: a tensor of the right shape and type for every key this rank needs.
        device: where tensors are received.

    Returns:
        A state of the same step on every rank; `NO_STATE` if they hold no applied step whole.

    Cost: one exchange of key lists, then each missing tensor once over the network.
    """
    cards = _exchange(_Card(state.step, frozenset(state.tensors), frozenset(wanted)))
    step = _furthest_whole_step(cards)
    if step == 0:
        return NO_STATE
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


def _furthest_whole_step(cards: list[_Card]) -> int:
    """The last step of which the ranks hold, between them, all they need; 0 if there is none."""
    wanted = frozenset[str]().union(*(card.wanted for card in cards))
    for step in sorted({card.step for card in cards}, reverse=True):
        held = frozenset[str]().union(*(card.held for card in cards if card.step == step))
        if wanted <= held:
            return step
    return 0


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
            sources = holders[key]
            transfers.append(_Transfer(key, sources[len(transfers) % len(sources)], target))
    return transfers
