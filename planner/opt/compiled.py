"""How hydra-opt's kernels are compiled and cached on disk.

numba's disk cache notices a change in the file of a cached function, not in the files of the
functions it calls. So only entry points are cached, everything they call is compiled into them,
and each entry point closes over a digest of the package's sources: what a function closes over
is part of its cache key.

Two habits keep the kernels fast. In loops they take arrays out of the task first and hand single
arrays on, since numba counts references whenever an array is taken out of a tuple. And errors
follow numpy, which spares a test at every division.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def kernel(function: Function) -> Function:
    """Compile a function into the entry points that call it."""
    compiled: Function = njit(error_model="numpy")(function)
    return compiled


def entry_point(function: Function) -> Function:
    """Compile a function that Python calls, and keep the result on disk.

    It lets go of Python's lock, so that the caller's other threads run while it does.
    """
    compiled: Function = njit(cache=True, error_model="numpy", nogil=True)(function)
    return compiled


def sources_digest() -> str:
    """A digest of the sources of this package that define kernels, and of how they compile."""
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source = path.read_bytes()
        if b"\n@kernel\n" in source or path == Path(__file__):
            state.update(source)
    return state.hexdigest()
