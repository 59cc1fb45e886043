"""A run's figures as Ray metrics: on the dashboard's metrics port, for Prometheus.

Ray labels every series with the process that wrote it, so only the driver writes: one series a
run. docs/operations.md lists the names as Prometheus sees them.
"""

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from hydra_ray.driver.journal import Line

SECONDS = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
GAUGES: Mapping[str, tuple[str, str]] = {
    "step": ("hydra_step", "The last applied step."),
    "loss": ("hydra_loss", "Mean loss per token of the last step."),
    "tokens_per_s": ("hydra_tokens_per_second", "Tokens of the last step over its wall time."),
    "load_max_over_mean": ("hydra_load_max_over_mean", "Heaviest rank's load over the mean."),
    "idle_ranks": ("hydra_idle_ranks", "Rank slots of the last plan without a group."),
    "num_ranks": ("hydra_pool_ranks", "HDP ranks of the pool."),
    "generation": ("hydra_generation", "The generation that trained the last step."),
}


class RunMetrics:
    """Turns a run's journal into metrics, tagged with the run's name."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._num_workers = 0
        keys = ("run",)
        self._gauges = {
            field: Gauge(name, text, tag_keys=keys) for field, (name, text) in GAUGES.items()
        }
        self._workers = Gauge("hydra_active_workers", "Workers of the pool.", tag_keys=keys)
        self._tokens = Counter("hydra_tokens", "Tokens trained on.", tag_keys=keys)
        self._step_s = Histogram(
            "hydra_step_seconds", "Wall time of a step.", boundaries=SECONDS, tag_keys=keys
        )
        self._plan_s = Histogram(
            "hydra_plan_seconds", "Time to plan a step.", boundaries=SECONDS, tag_keys=keys
        )
        self._changes = Counter(
            "hydra_generations", "Membership changes by cause.", tag_keys=("run", "cause")
        )
        self._pause_s = Histogram(
            "hydra_pause_seconds",
            "Training pause of a membership change.",
            boundaries=SECONDS,
            tag_keys=("run", "cause"),
        )
        self._lost = Counter("hydra_workers_lost", "Workers lost.", tag_keys=keys)

    def observe(self, line: Line) -> None:
        """Record one line of the journal."""
        if line.kind == "step":
            self._observe_step(line.record)
        elif line.record["event"] == "generation":
            self._observe_generation(line.record)
        elif line.record["event"] == "worker_lost":
            self._lost.inc(1.0, tags=self._tags)

    def _observe_step(self, record: Mapping[str, Any]) -> None:
        for field, gauge in self._gauges.items():
            if record[field] is not None:
                gauge.set(float(record[field]), tags=self._tags)
        # Every step, as it is a fact that lasts: Ray drops a gauge that is not set again.
        self._workers.set(float(self._num_workers), tags=self._tags)
        self._tokens.inc(float(record["tokens"]), tags=self._tags)
        self._step_s.observe(float(record["wall_s"]), tags=self._tags)
        self._plan_s.observe(float(record["plan_s"]), tags=self._tags)

    def _observe_generation(self, record: Mapping[str, Any]) -> None:
        tags = self._tags | {"cause": str(record["cause"])}
        self._num_workers = len(record["workers"])
        self._changes.inc(1.0, tags=tags)
        self._pause_s.observe(float(record["pause_s"]), tags=tags)
