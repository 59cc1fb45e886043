"""What this machine offers a worker: torch, accelerators, kernels, Megatron.

`python -m workers.facts` prints them as JSON, so that whoever asks survives a broken installation.
"""

import importlib.metadata
import importlib.util
import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from workers.attention.kernels.choose import kernel_report

PACKAGES = ("torch", "megatron-core", "flash-attn", "transformer-engine")


def machine_facts() -> dict[str, Any]:
    """Versions (None where absent), devices, communication backends, and the kernels chosen."""
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "cuda_version": torch.version.cuda,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "attention_kernels": kernel_report(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(machine_facts()) + "\n")
