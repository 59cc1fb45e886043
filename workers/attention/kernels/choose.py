"""Which kernel runs where: a rule anybody can read off, that never takes the slow one silently.

- CPU: torch-cpu-flash.
- CUDA, float16 or bfloat16: flash-attn where it is installed, else torch-cuda-flash.
- CUDA, float32 or float64: refused, for no fused kernel exists.
- A kernel asked for by name: that kernel.
"""

import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from planner.errors import InputError
from workers.attention.kernels.cpu import CpuFlash
from workers.attention.kernels.cuda import FlashAttn, TorchCudaFlash
from workers.attention.kernels.interface import Kernel
from workers.attention.kernels.reference import Reference

KERNELS: dict[str, type[Kernel]] = {
    kernel.name: kernel for kernel in (FlashAttn, TorchCudaFlash, CpuFlash, Reference)
}
HALF_PRECISIONS = (torch.bfloat16, torch.float16)


@cache
def choose_kernel(device_type: str, dtype: torch.dtype, name: str | None = None) -> Kernel:
    """The kernel for tensors of this kind; the same one, each time.

    Args:
        device_type: "cpu" or "cuda".
        dtype: of queries, keys and values.
        name: a kernel of `KERNELS` to take whatever the rule says.

    Raises:
        InputError: no kernel has this name, or the rule has no fused kernel to offer.
    """
    if name is None:
        name = _by_rule(device_type, dtype)
    if name not in KERNELS:
        raise InputError("No attention kernel has this name", value=name, limit=", ".join(KERNELS))
    return KERNELS[name]()


def kernel_report() -> dict[str, str]:
    """What this machine would run, by kind of tensor: a kernel's name, or why there is none."""
    kinds = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
    if torch.cuda.is_available():
        kinds += [("cuda", torch.bfloat16), ("cuda", torch.float32)]
    report = {"flash-attn package": _flash_attn_version()}
    for device_type, dtype in kinds:
        label = f"{device_type} {str(dtype).removeprefix('torch.')}"
        try:
            report[label] = choose_kernel(device_type, dtype).name
        except InputError as error:
            report[label] = f"none: {error}"
    return report


def _by_rule(device_type: str, dtype: torch.dtype) -> str:
    if device_type == "cpu":
        return CpuFlash.name
    if device_type == "cuda" and dtype in HALF_PRECISIONS:
        has_package = importlib.util.find_spec("flash_attn") is not None
        return FlashAttn.name if has_package else TorchCudaFlash.name
    raise InputError(
        "No fused attention kernel takes these tensors",
        value=f"{str(dtype).removeprefix('torch.')} on {device_type}",
        limit="bfloat16 or float16 on cuda, anything on cpu",
        remedy=f'Train in bfloat16, or ask for the slow "{Reference.name}" kernel by name.',
    )


def _flash_attn_version() -> str:
    try:
        return version("flash-attn")
    except PackageNotFoundError:
        return "not installed"
