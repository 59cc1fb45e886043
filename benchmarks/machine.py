"""What a measurement was made on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine() -> dict[str, object]:
    """CPU, cores, memory and the versions that matter for planning times."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "numba", "megatron-core")},
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
