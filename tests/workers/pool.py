"""Pools of real workers for tests: forked gloo ranks around a store, running real runtimes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from planner.cost import AttentionShape, CostModel
from planner.plan import Plan
from planner.pool import PoolShape
from planner.registry import get_planner
from tests.workers.launch import FORK, run_ranks
from workers.protocol import Membership, ModelSpec, StepCommand, StepPayload, TrainingSpec
from workers.rendezvous import start_store
from workers.runtime import WorkerRuntime

HOST = "127.0.0.1"

GQA = ModelSpec(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_heads=8,
    num_kv_heads=2,
    vocab_size=128,
    context=512,
)


@contextmanager
def running_store() -> Iterator[int]:
    """The port of a store in a process of its own, as the driver's is in another's."""
    reader, writer = FORK.Pipe(duplex=False)
    stop_reader, stop_writer = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_serve, args=(writer, stop_reader))
    process.start()
    try:
        yield int(reader.recv())
    finally:
        stop_writer.send(None)
        process.join(timeout=5)
        if process.is_alive():
            process.kill()


def _serve(writer: Any, stop: Any) -> None:
    store = start_store(HOST)
    writer.send(store.port)
    stop.recv()


def pool_shape(num_ranks: int, token_budget: int, training: TrainingSpec) -> PoolShape:
    """The pool as the recipe makes it: padding also divides by the tensor ranks under SP."""
    return PoolShape(
        num_ranks=num_ranks,
        token_budget=token_budget,
        stages=training.pipeline,
        chunks=training.chunks,
        expert_ranks=training.expert,
        pad_unit=2 * (training.tensor if training.sequence_parallel else 1),
    )


def tiny_cost(model: ModelSpec) -> CostModel:
    """Costs for a model that exists in tests only: its heads decide the factorisation."""
    head_dim = model.head_dim or model.hidden_size // model.num_heads
    qk_dim = model.qk_head_dim + model.qk_rope_dim or head_dim
    is_latent = model.attention == "mla"
    shape = AttentionShape(
        num_heads=model.num_heads,
        num_kv_heads=model.num_heads if is_latent else model.num_kv_heads,
        qk_dim=qk_dim,
        v_dim=model.v_head_dim or head_dim,
        bytes_per_element=4,
    )
    return CostModel(attention=shape, num_layers=model.num_layers)


def plan_with(planner: str, lengths: list[int], pool: PoolShape, model: ModelSpec = GQA) -> Plan:
    """A plan by one of the project's planners."""
    return get_planner(planner).plan(np.asarray(lengths), pool, tiny_cost(model))


def payload_of(plan: Plan, *, vocab_size: int = 128, seed: int = 0) -> StepPayload:
    """A payload whose tokens depend on the batch only, never on the plan."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate(([0], np.cumsum(plan.lengths)))
    return StepPayload(
        plan=plan,
        sequence_ids=np.arange(plan.num_sequences) + 100,
        tokens=rng.integers(0, vocab_size, int(offsets[-1])).astype(np.int32),
        token_offsets=offsets,
    )


def command_of(plan: Plan, step: int = 1, generation: int = 1) -> StepCommand:
    """The command that goes with a plan."""
    return StepCommand(step=step, generation=generation, plan_digest=plan.digest())


def membership_of(
    rank: int,
    world_size: int,
    port: int,
    training: TrainingSpec,
    *,
    generation: int = 1,
    timeout_s: float = 30.0,
) -> Membership:
    """The place of `rank` in a generation that meets at the store on `port`."""
    return Membership(
        generation=generation,
        rank=rank,
        world_size=world_size,
        num_ranks=world_size // (training.tensor * training.pipeline),
        store_host=HOST,
        store_port=port,
        timeout_s=timeout_s,
    )


def run_pool(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 90.0
) -> list[Any]:
    """Run `fn(rank, world_size, port, *args)` in forked processes that are in no group yet."""
    with running_store() as port:
        return run_ranks(world_size, fn, port, *args, timeout_s=timeout_s, in_group=False)


def joined(
    rank: int, world_size: int, port: int, model: ModelSpec, training: TrainingSpec
) -> WorkerRuntime:
    """A loaded runtime in generation 1."""
    runtime = WorkerRuntime(model, training)
    runtime.load()
    membership = membership_of(rank, world_size, port, training)
    runtime.join(membership, pool_shape(membership.num_ranks, 512, training))
    return runtime


@dataclass(frozen=True)
class Part:
    """One rank's part of a parameter's gradient or weight."""

    name: str
    values: np.ndarray
    split_dim: int | None
    tensor_rank: int


@dataclass(frozen=True)
class Outcome:
    """What one rank made of its steps: the first one's loss and gradients, the last weights."""

    loss: float
    token_count: int
    gradients: list[Part] = field(default_factory=list)
    weights: list[Part] = field(default_factory=list)


def trained(
    rank: int,
    world_size: int,
    port: int,
    model: ModelSpec,
    training: TrainingSpec,
    payloads: list[StepPayload],
) -> Outcome:
    """A step on each payload, by a real runtime."""
    runtime = joined(rank, world_size, port, model, training)
    outcomes = []
    for step, payload in enumerate(payloads, start=1):
        result = runtime.run_step(command_of(payload.plan, step), payload)
        assert result.applied
        gradients = parameter_parts(runtime, lambda parameter: parameter.main_grad)
        loss = result.loss_sum / result.token_count
        outcomes.append(Outcome(loss, result.token_count, gradients))
    weights = parameter_parts(runtime)
    runtime.leave()
    return replace(outcomes[0], weights=weights)


def parameter_parts(
    runtime: WorkerRuntime, of: Callable[[Any], torch.Tensor] = lambda parameter: parameter.data
) -> list[Part]:
    """This rank's part of every weight, or of what `of` finds on the parameter."""
    replica, _ = runtime._here()
    return [
        Part(
            item.name,
            of(item.parameter).detach().clone().to(torch.float64).numpy(),
            item.split_dim,
            replica.registry.place.tensor,
        )
        for item in replica.parameters
    ]


def assembled(parts: Iterable[Part], num_tensor_ranks: int = 1) -> dict[str, np.ndarray]:
    """Whole tensors by canonical name; every replica must hold the same bits."""
    found: dict[tuple[str, int], Part] = {}
    for part in parts:
        key = (part.name, part.tensor_rank if part.split_dim is not None else 0)
        first = found.setdefault(key, part)
        np.testing.assert_array_equal(first.values, part.values, err_msg=f"replicas of {key}")
    return {
        name: _joined_parts([found[name, r] for r in range(num_tensor_ranks)])
        if found[name, 0].split_dim is not None
        else found[name, 0].values
        for name in sorted({name for name, _ in found})
    }


def gradients_of(outcomes: list[Outcome], num_tensor_ranks: int = 1) -> dict[str, np.ndarray]:
    """Every gradient, whole."""
    return assembled((part for o in outcomes for part in o.gradients), num_tensor_ranks)


def weights_of(outcomes: list[Outcome], num_tensor_ranks: int = 1) -> dict[str, np.ndarray]:
    """Every weight, whole."""
    return assembled((part for o in outcomes for part in o.weights), num_tensor_ranks)


def relative_error(found: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> float:
    """The largest error of any tensor, relative to that tensor's largest element."""
    assert found.keys() == truth.keys()
    return max(float(np.abs(found[n] - truth[n]).max() / np.abs(truth[n]).max()) for n in truth)


def _joined_parts(parts: list[Part]) -> np.ndarray:
    dim = parts[0].split_dim
    if len(parts) > 1 and parts[0].name.endswith("linear_fc1.weight"):
        halves = [np.split(part.values, 2, dim) for part in parts]
        return np.concatenate([half[i] for i in (0, 1) for half in halves], dim)
    return np.concatenate([part.values for part in parts], dim)
