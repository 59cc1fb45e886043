"""Megatron's DDP and optimizers over the whole pool, and where each parameter's state lives."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import Float16Module

from workers.cpu_shim import cuda_type_names
from workers.megatron.config import DTYPES
from workers.megatron.naming import NamedParameter
from workers.protocol import TrainingSpec

_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ()}


def wrap_in_ddp(chunks: list[GPTModel], training: TrainingSpec) -> list[DistributedDataParallel]:
    """Each chunk in Megatron's DDP, whose gradient buffer is summed over the whole pool.

    CP is never a static axis here, so Megatron's data-parallel group is all HDP ranks. Gradients
    are scaled once, by the global token count, when they are finalised.
    """
    config = chunks[0].config
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=training.dtype == "bfloat16",
        use_distributed_optimizer=training.distributed_optimizer,
        overlap_grad_reduce=False,
    )
    config.finalize_model_grads_func = _finalize
    modules = [Float16Module(config, c) if config.bf16 else c for c in chunks]
    return [
        DistributedDataParallel(config, ddp, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]


def _finalize(
    modules: list[DistributedDataParallel], num_tokens: torch.Tensor, **kwargs: Any
) -> None:
    """Megatron's finalisation with the token count in float64.

    It scales by `1.0 / num_tokens`, which for an integer tensor is rounded to float32.
    """
    finalize_model_grads(modules, num_tokens.to(torch.float64), **kwargs)


def learning_rate(step: int, training: TrainingSpec) -> float:
    """The rate of optimizer step `step` (1 is the first): linear warm-up, then cosine decay.

    Without `decay_steps` the rate stays at `lr` after the warm-up.
    """
    if step <= training.warmup_steps:
        return training.lr * step / training.warmup_steps
    if not training.decay_steps:
        return training.lr
    span = max(1, training.decay_steps - training.warmup_steps)
    progress = min(1.0, (step - training.warmup_steps) / span)
    share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return training.min_lr + share * (training.lr - training.min_lr)


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """A contiguous part of one flattened parameter's weight or moment, held by this process."""

    start: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Main:
    """What the inner torch optimizer holds for one parameter."""

    inner: torch.optim.Optimizer
    tensor: torch.Tensor
    start: int


class PoolOptimizer:
    """Megatron's optimizer, split where the pool must agree: before anything is changed.

    Args:
        modules: the DDP-wrapped chunks.
        parameters: their canonical parameters.
        training: which optimizer, and its constants.
    """

    def __init__(
        self,
        modules: list[DistributedDataParallel],
        parameters: list[NamedParameter],
        training: TrainingSpec,
    ) -> None:
        self._clip = training.clip_grad
        self._moments = _MOMENTS[training.optimizer]
        self.is_sharded = training.distributed_optimizer
        with cuda_type_names():
            self._megatron = get_megatron_optimizer(
                _config(training), modules, use_gloo_process_groups=False
            )
        self._mains = self._find_mains(parameters)
        self.set_step(0)

    def forget_gradients(self) -> None:
        """Must come before each step's forward.

        `prepare` makes each parameter's `grad` its main gradient; were it still there, backward
        would add to it, and DDP's hook add that to itself.
        """
        self._megatron.zero_grad()

    def prepare(self) -> float:
        """Hand the finalised gradients to the optimizer; return their global norm."""
        self._megatron.prepare_grads()
        return float(self._megatron.get_grad_norm())

    def apply(self, lr: float, grad_norm: float) -> None:
        """Clip to the global norm and update the weights with learning rate `lr`."""
        for group in self._megatron.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        if self._clip > 0:
            for part in self._megatron.chained_optimizers:
                parameters = [] if part.is_stub_optimizer else part.get_parameters()
                clip_grads.clip_grad_by_total_norm_fp32(parameters, self._clip, grad_norm)
        self._megatron.step_with_ready_grads()

    def set_step(self, step: int) -> None:
        """Tell the inner optimizers how many steps they have applied (Adam's bias correction).

        Moments that do not exist yet are made, as zeros, so that state always has one shape.
        """
        for main in self._mains.values():
            state = main.inner.state[main.tensor]
            for moment in self._moments:
                state.setdefault(moment, torch.zeros_like(main.tensor))
            if self._moments:
                state["step"] = torch.tensor(float(step))
        for part in self._megatron.chained_optimizers:
            for group in [] if part.is_stub_optimizer else part.optimizer.param_groups:
                if "step" in group:
                    group["step"] = step

    def slots(self) -> tuple[str, ...]:
        """What is kept for every parameter: its weight and its moments."""
        return ("weight", *self._moments)

    def state_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        """The type its weight and moments are kept in: float32 where training is narrower."""
        return torch.promote_types(parameter.dtype, torch.float32)

    def slices(self, name: str) -> dict[str, Slice]:
        """This process's part of each slot of parameter `name`; views, so writing is allowed.

        With a sharded optimizer a process may hold a part of a parameter, or none of it.
        """
        main = self._mains.get(name)
        if main is None:
            return {}
        state = main.inner.state[main.tensor]
        values = {"weight": main.tensor.data, **{m: state[m] for m in self._moments}}
        return {slot: Slice(main.start, tensor.view(-1)) for slot, tensor in values.items()}

    def _find_mains(self, parameters: list[NamedParameter]) -> dict[str, _Main]:
        names = {item.parameter: item.name for item in parameters}
        mains: dict[str, _Main] = {}
        for part in self._megatron.chained_optimizers:
            if part.is_stub_optimizer:
                continue
            for parameter, main in _mains_of(part, names):
                mains[names[parameter]] = main
        return mains


def _mains_of(
    part: Any, names: dict[torch.nn.Parameter, str]
) -> list[tuple[torch.nn.Parameter, _Main]]:
    inner = part.optimizer
    if isinstance(part, DistributedOptimizer):
        found = []
        for parameter, (group, order) in part.model_param_group_index_map.items():
            tensor = inner.param_groups[group]["params"][order]
            start = part._get_model_param_range_map(parameter)["param"].start  # noqa: SLF001
            found.append((parameter, _Main(inner, tensor, start)))
        return found
    mine = {id(tensor) for group in inner.param_groups for tensor in group["params"]}
    pairs = [(p, getattr(p, "main_param", p)) for p in names]
    return [(p, _Main(inner, tensor, 0)) for p, tensor in pairs if id(tensor) in mine]


def _config(training: TrainingSpec) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer=training.optimizer,
        lr=training.lr,
        min_lr=training.min_lr,
        weight_decay=training.weight_decay,
        adam_beta1=training.beta1,
        adam_beta2=training.beta2,
        adam_eps=training.eps,
        sgd_momentum=0.0,
        clip_grad=training.clip_grad,
        bf16=training.dtype == "bfloat16",
        params_dtype=DTYPES[training.dtype],
        use_distributed_optimizer=training.distributed_optimizer,
    )
