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


@pytest.mark.timeout(240)
def test_every_documented_metric_is_exported(cluster, recipe_of):
    documented = set(re.findall(r"`(ray_hydra_\w+)`", PAGE.read_text()))
    assert documented > NOT_SEEN
    with running(recipe_of(steps=100_000), "metered") as run:
        deadline = time.monotonic() + EXPORT_TIMEOUT_S
        missing, workers = documented - NOT_SEEN, []
        while (missing or not workers) and time.monotonic() < deadline:
            time.sleep(1.0)
            lines = [line for line in exported().splitlines() if 'run="metered"' in line]
            missing = {name for name in missing if not any(ln.startswith(name) for ln in lines)}
            workers = [ln for ln in lines if ln.startswith("ray_hydra_active_workers{")]
        assert missing == set()
        assert [float(line.split()[-1]) for line in workers] == [2.0]
        ray.get(run.driver.stop.remote(), timeout=60)
