"""What `scale --wait` says and exits with, of a run that a script stands in for."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_ray.cli import connect, control
from hydra_ray.cli.app import run
from hydra_ray.driver.errors import DriverLostError


def facts(state: str, num_workers: int, target: int = 6) -> dict[str, Any]:
    return {"state": state, "num_workers": num_workers, "target_workers": target}


BEFORE = facts("running", 4)
LOST = DriverLostError("the run's driver died")


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        ([BEFORE, facts("resizing", 4), facts("running", 6)], 0),
        ([BEFORE, facts("finished", 6)], 0),
        ([BEFORE, facts("running", 4, target=4)], 1),
        ([BEFORE, facts("finished", 4)], 1),
        ([facts("recovering", 6), facts("failed", 6)], 1),
        ([BEFORE, LOST], 1),
        ([BEFORE], 1),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_scale_waits_and_exits_with_one_unless_the_run_got_there(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seen: list[Any],
    code: int,
    as_json: bool,
) -> None:
    answers = list(seen)

    def status() -> dict[str, Any]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    driver = SimpleNamespace(
        scale=SimpleNamespace(remote=lambda num_workers: 1), status=SimpleNamespace(remote=status)
    )

    @contextmanager
    def connected(*_: Any) -> Iterator[Any]:
        yield driver

    monkeypatch.setattr(connect, "connected_driver", connected)
    monkeypatch.setattr(control, "_answer", lambda answer: answer)
    monkeypatch.setattr(control, "LOOK_EVERY_S", 0.0)
    timeout_s = "0.1" if seen == [BEFORE] else "60"
    flags = ["--timeout-s", timeout_s, *(["--json"] if as_json else [])]
    assert run(["scale", "big", "6", "--wait", *flags]) == code
    said = capsys.readouterr().out
    if as_json:
        assert json.loads(said)["reached"] is (code == 0)
    else:
        assert (
            said == f"big: 6 workers {'reached' if code == 0 else 'not reached; see its events'}\n"
        )
