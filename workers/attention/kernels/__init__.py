"""Kernels of attention over packed sequences, behind one interface that returns (out, lse)."""

from workers.attention.kernels.choose import choose_kernel, kernel_report
from workers.attention.kernels.interface import Kernel

__all__ = ["Kernel", "choose_kernel", "kernel_report"]
