"""Runs megatron-core 0.16 on a machine without a GPU; does nothing where there is one.

megatron-core names CUDA directly: `torch.cuda.current_device()`, `device="cuda"`, streams, and
tensor type names. Rather than patching torch, which other code in the process also uses, every
`megatron.core` module gets a stand-in for its global `torch` that answers these from the CPU.
The few places that go round that global are replaced by name at the bottom.
"""

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Modules the runtime uses: they must be loaded before their global `torch` can be replaced.
_MEGATRON_MODULES = (
    "megatron.core.distributed",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.multi_latent_attention",
)
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


class _Event:
    """A CUDA event of a device whose work is always finished."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        """Nothing is queued, so there is nothing to mark."""

    def wait(self, *_: object) -> None:
        """Nothing is queued, so there is nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing is queued, so there is nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True


class _Stream:
    """A CUDA stream of a device that runs everything in order."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        """Work on the CPU is already in order."""

    def wait_event(self, _: object) -> None:
        """Work on the CPU is already in order."""

    def record_event(self, event: _Event | None = None) -> _Event:
        """Mark nothing."""
        return event or _Event()

    def synchronize(self) -> None:
        """Work on the CPU is already done."""


class _Nvtx:
    """Profiler ranges, ignored."""

    def range_push(self, *_: object) -> None:
        """Ignored."""

    def range_pop(self) -> None:
        """Ignored."""

    def range(self, *_: object) -> contextlib.nullcontext[None]:
        """Ignored."""
        return contextlib.nullcontext()


class _CpuCuda(types.ModuleType):
    """Stands in for `torch.cuda`: one device, called "cpu", with nothing in flight."""

    Event = _Event
    Stream = _Stream
    nvtx = _Nvtx()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> str:
        """The only device."""
        return "cpu"

    def synchronize(self, *_: object) -> None:
        """Work on the CPU is already done."""

    def current_stream(self, *_: object) -> _Stream:
        """The only stream."""
        return _Stream()

    def default_stream(self, *_: object) -> _Stream:
        """The only stream."""
        return _Stream()

    def stream(self, _: object) -> contextlib.nullcontext[None]:
        """Run the block on the only stream."""
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU generator, which is the only one."""
        torch.manual_seed(seed)

    def get_rng_state(self, *_: object) -> torch.Tensor:
        """State of the CPU generator."""
        return torch.get_rng_state()


class _CpuTorch(types.ModuleType):
    """Stands in for `torch`: factories that are asked for "cuda" make CPU tensors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _cpu_torch() -> types.ModuleType:
    stand_in = _CpuTorch("torch")
    stand_in.cuda = _CpuCuda("torch.cuda")  # type: ignore[attr-defined]
    for name in _FACTORIES:
        setattr(stand_in, name, _on_cpu(getattr(torch, name)))
    return stand_in


def install() -> bool:
    """Make the loaded megatron-core run on the CPU; idempotent.

    Returns:
        True if the shim is in place, False where a GPU makes it unnecessary.
    """
    if torch.cuda.is_available():
        return False
    for name in _MEGATRON_MODULES:
        importlib.import_module(name)
    # Megatron's small fused functions: compiling them costs each worker seconds and gains nothing.
    torch._dynamo.config.disable = True  # noqa: SLF001
    stand_in = _cpu_torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = stand_in  # type: ignore[attr-defined]
    _use_cpu_generator()
    _clip_without_type_check()
    return True


def _use_cpu_generator() -> None:
    """Checkpoints and dropout save and restore "the CUDA generator": here, the CPU's."""
    random = sys.modules["megatron.core.tensor_parallel.random"]

    def get_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    random._get_cuda_rng_state = get_state  # type: ignore[attr-defined]  # noqa: SLF001
    random._set_cuda_rng_state = set_state  # type: ignore[attr-defined]  # noqa: SLF001


def _clip_without_type_check() -> None:
    """Megatron's clipping asserts `torch.cuda.FloatTensor`; the arithmetic is the same."""

    def clip(
        parameters: list[torch.nn.Parameter],
        max_norm: float,
        total_norm: float,
        use_decoupled_grad: bool = False,  # noqa: ARG001, FBT001, FBT002 - Megatron's signature
    ) -> None:
        coefficient = max_norm / (total_norm + 1e-6)
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads and coefficient < 1.0:
            torch._foreach_mul_(grads, coefficient)

    for name in ("megatron.core.optimizer.clip_grads", "megatron.core.optimizer.optimizer"):
        sys.modules[name].clip_grad_by_total_norm_fp32 = clip  # type: ignore[attr-defined]


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Within the block, `Tensor.type()` names CPU tensors as if they were on a GPU.

    Megatron's optimizers sort parameters by these names when they are built, and only then.
    """
    if torch.cuda.is_available():
        yield
        return
    original = torch.Tensor.type

    def cuda_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = cuda_name  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]
