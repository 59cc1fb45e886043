"""A live run's figures reach Ray's metrics port under the names docs/operations.md lists."""

import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray

from tests.integration.conftest import running

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
EXPORT_TIMEOUT_S = 90  # Ray collects every ten seconds or so
# Nothing is lost in the run below, and Ray exports a counter once it has counted.
NOT_SEEN = {"ray_hydra_workers_lost_total"}


def exported() -> str:
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def has_series(text: str, name: str) -> bool:
    """Whether a sample of the run "metered" (a histogram has several) is in the export."""
    return any(line.startswith(name) and 'run="metered"' in line for line in text.splitlines())


@pytest.mark.timeout(240)
def test_every_documented_metric_is_exported(cluster, recipe_of):
    documented = set(re.findall(r"`(ray_hydra_\w+)`", PAGE.read_text()))
    assert documented > NOT_SEEN
    with running(recipe_of(steps=100_000), "metered") as run:
        deadline = time.monotonic() + EXPORT_TIMEOUT_S
        missing = documented - NOT_SEEN
        while missing and time.monotonic() < deadline:
            time.sleep(1.0)
            text = exported()
            missing = {name for name in missing if f"{name}" not in text}
        assert missing == set()
        lines = [ln for ln in text.splitlines() if ln.startswith("ray_hydra_active_workers{")]
        mine = [line for line in lines if 'run="metered"' in line]
        assert [float(line.split()[-1]) for line in mine] == [2.0]
        ray.get(run.driver.stop.remote(), timeout=60)
