"""Reproducible measurements; what they gave is recorded in `results/`."""
