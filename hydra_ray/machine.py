"""Examines the machine for the doctor: each finding is a value and, if need be, a remedy."""

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

import planner
from planner.errors import HydraError

GIB = 1 << 30
FACTS_TIMEOUT_S = 120
LEAST_MEMORY_BYTES = 4 * GIB
LEAST_SHM_BYTES = GIB
LEAST_OPEN_FILES = 4096
SOCKET_PATH_LIMIT = 107
RAY_SOCKET_PATH = "ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing the machine has ("ok"), could have ("note"), or must have ("lacking")."""

    name: str
    value: str
    state: Literal["ok", "note", "lacking"] = "ok"
    remedy: str = ""


def examine() -> list[Finding]:
    """Everything the doctor looks at. Imports torch in a process of its own: some seconds."""
    return [*_host(), *_workers(), *_ray(), _numba_cache()]


def worker_facts() -> dict[str, Any]:
    """What `workers.facts` prints.

    Raises:
        HydraError: torch or Megatron cannot be imported here, or hang.
    """
    command = [sys.executable, "-m", "workers.facts"]
    try:
        done = subprocess.run(  # noqa: S603  our own module
            command, capture_output=True, text=True, timeout=FACTS_TIMEOUT_S, check=True
        )
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise HydraError("the workers' libraries cannot be loaded", value=said[-1]) from error
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _host() -> list[Finding]:
    memory = psutil.virtual_memory()
    shm = Path("/dev/shm")  # noqa: S108  where Ray keeps its object store
    shm_bytes = shutil.disk_usage(shm).free if shm.exists() else 0
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [
        _python(),
        Finding("platform", platform.platform()),
        Finding("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        _at_least(
            "memory",
            memory.available,
            LEAST_MEMORY_BYTES,
            f"of {_gib(memory.total)} free",
            "A worker process holds about 1 GiB before its model.",
        ),
        _at_least(
            "shared memory",
            shm_bytes,
            LEAST_SHM_BYTES,
            f"free in {shm}, for Ray's object store",
            "Ray falls back to slow files; in a container, raise --shm-size.",
        ),
        Finding("disk", f"{_gib(shutil.disk_usage(Path.cwd()).free)} free here"),
        Finding("open files", str(open_files))
        if open_files >= LEAST_OPEN_FILES
        else Finding(
            "open files", str(open_files), "note", f"Many workers need ulimit -n {LEAST_OPEN_FILES}"
        ),
    ]


def _python() -> Finding:
    version = platform.python_version()
    if version.startswith("3.11."):
        return Finding("python", version)
    return Finding("python", version, "lacking", "Install Python 3.11.")


def _at_least(name: str, have: int, least: int, what: str, remedy: str) -> Finding:
    value = f"{_gib(have)} {what}"
    return Finding(name, value) if have >= least else Finding(name, value, "note", remedy)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _workers() -> list[Finding]:
    try:
        facts = worker_facts()
    except HydraError as error:
        remedy = "Install the project again: make install."
        return [Finding("torch and Megatron", str(error.value), "lacking", remedy)]
    versions = facts["versions"]
    gpus = facts["gpus"]
    names = ", ".join(f"{gpu['name']} ({_gib(gpu['memory_bytes'])})" for gpu in gpus)
    kernels = {k: v for k, v in facts["attention_kernels"].items() if k != "flash-attn package"}
    backends = [name for name in ("gloo", "nccl") if facts[name]]
    return [
        _package("torch", versions["torch"]),
        _package("megatron-core", versions["megatron-core"]),
        Finding("GPUs", names)
        if gpus
        else Finding("GPUs", "none; workers use CPU cores", "note", "Fine for a try-out."),
        Finding("CUDA", facts["cuda_version"] or "torch was built without"),
        Finding("communication", ", ".join(backends))
        if backends
        else Finding("communication", "none", "lacking", "Install torch with gloo or NCCL."),
        *(Finding(f"attention, {kind}", name) for kind, name in kernels.items()),
        *(_gpu_package(name, versions[name], has_gpu=bool(gpus)) for name in GPU_PACKAGES),
    ]


GPU_PACKAGES = ("flash-attn", "transformer-engine")


def _package(name: str, version: str | None) -> Finding:
    if version is not None:
        return Finding(name, version)
    return Finding(name, "absent", "lacking", "Install the project again: make install.")


def _gpu_package(name: str, version: str | None, *, has_gpu: bool) -> Finding:
    if version is not None:
        return Finding(name, version)
    if has_gpu:
        return Finding(name, "absent", "note", "Faster with it: pip install '.[gpu]'.")
    return Finding(name, "absent; only GPUs use it")


def _ray() -> list[Finding]:
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return [_package("ray", None)]
    addresses = [name for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS") if name in os.environ]
    return [
        Finding("ray", version),
        _socket_folder(),
        *(Finding(name, os.environ[name]) for name in addresses),
    ]


def _socket_folder() -> Finding:
    folder = tempfile.gettempdir()
    length = len(str(Path(folder, RAY_SOCKET_PATH)))
    if length <= SOCKET_PATH_LIMIT:
        return Finding("temporary folder", folder)
    value = f"{folder}: Ray's sockets would need {length} characters of {SOCKET_PATH_LIMIT}"
    return Finding("temporary folder", value, "lacking", "Set TMPDIR to a shorter path.")


def _numba_cache() -> Finding:
    """Where numba keeps compiled planners: the first of its places that can be written."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    places = [Path(chosen)] if chosen else [Path(planner.__file__).parent, Path.home()]
    for place in places:
        if os.access(place, os.W_OK):
            return Finding("planner cache", f"{place} is writable")
    remedy = "Set NUMBA_CACHE_DIR to a writable folder, or planners compile at every start."
    return Finding("planner cache", f"{places[0]} is not writable", "note", remedy)
