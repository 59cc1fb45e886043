"""Every change made to megatron-core, in one place, each with its reason and its version.

All are for megatron-core 0.16.1. Each says when it can go. `apply` is idempotent and is called
once, after the CPU shim.
"""

import functools
import types
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from workers.errors import WorkerError
from workers.megatron.context import captured

MEGATRON_VERSION = "0.16.1"
_applied = False


def apply() -> None:
    """Patch the loaded megatron-core; the second call does nothing.

    Raises:
        WorkerError: it is not the version that the patches were written for.
    """
    global _applied  # noqa: PLW0603 - a process is patched once
    if _applied:
        return
    installed = version("megatron-core")
    if installed != MEGATRON_VERSION:
        raise WorkerError(
            "megatron-core is not the version that hydra_ray patches",
            value=installed,
            limit=MEGATRON_VERSION,
            remedy=f"pip install megatron-core=={MEGATRON_VERSION}",
        )
    _applied = True
    _checkpoints_capture_the_microbatch()
    _run_without_transformer_engine()
    _splits_stay_on_the_host()
    _cross_entropy_keeps_float64()
    _routing_keeps_float64()


def _checkpoints_capture_the_microbatch() -> None:
    """A checkpoint re-runs its function while another microbatch is current.

    Megatron has no per-microbatch groups outside its hybrid-CP schedule, so its checkpoints have
    nothing to capture. Can go when a microbatch reaches the MoE router as an argument.
    """
    checkpoint = tensor_parallel_random.checkpoint

    def checkpoint_in_microbatch(function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(captured(function), *args)

    tensor_parallel_random.checkpoint = checkpoint_in_microbatch
    tensor_parallel.checkpoint = checkpoint_in_microbatch

    without_output = tensor_parallel_random.CheckpointWithoutOutput
    original = without_output.checkpoint

    def method_in_microbatch(self: Any, function: Callable[..., Any], *args: Any) -> Any:
        return original(self, captured(function), *args)

    without_output.checkpoint = method_in_microbatch


def _run_without_transformer_engine() -> None:
    """Two names are used although Transformer Engine is absent.

    The router's gating reads `te_general_gemm`, which its failed import never sets (NameError),
    and MLA tests `isinstance(x, TELinear)` with TELinear None (TypeError).
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def _splits_stay_on_the_host() -> None:
    """On the CPU the dispatcher's splits stay tensors, which all_to_all_single rejects.

    Megatron turns only CUDA tensors into numpy arrays. Does nothing to tensors on a GPU.
    """
    original = moe_utils.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: FBT001, FBT002
        moved = original(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _cross_entropy_keeps_float64() -> None:
    """The loss is computed in float32 whatever the logits are; float64 must stay float64.

    bfloat16 still goes to float32. `calculate_logits_max` is where the cast is.
    """

    def logits_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return wide, torch.max(wide, dim=-1)[0]

    VocabParallelCrossEntropy.calculate_logits_max = staticmethod(logits_max)


def _routing_keeps_float64() -> None:
    """The router's softmax is computed in float32 whatever the logits are, as the loss is.

    The cast is inside two long functions, so `moe_utils` is given a `torch` of its own.
    """
    base = moe_utils.torch

    class TorchOfRouting(types.ModuleType):
        """`torch`, but for one function."""

        def __getattr__(self, name: str) -> Any:
            return getattr(base, name)

        @staticmethod
        def softmax(logits: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
            """At least in `dtype`."""
            return torch.softmax(logits, dim=dim, dtype=torch.promote_types(logits.dtype, dtype))

    moe_utils.torch = TorchOfRouting("torch")
