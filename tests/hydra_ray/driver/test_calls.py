"""What becomes of each outcome a call on a worker may have; Ray itself is stood in for."""

import pytest
from ray import exceptions
from ray.core.generated.common_pb2 import ActorDiedErrorContext

from hydra_ray.driver import calls
from hydra_ray.driver.calls import gather


def actor_died(message):
    return exceptions.ActorDiedError(
        ActorDiedErrorContext(actor_id=b"a" * 16, error_message=message)
    )


@pytest.fixture
def outcomes(monkeypatch):
    """References stand for themselves: one in the dict raises what it maps to."""
    outcomes = {}

    def get(ref, timeout):
        if ref in outcomes:
            raise outcomes[ref]
        return ref

    monkeypatch.setattr(calls.ray, "get", get)
    monkeypatch.setattr(calls.ray, "wait", lambda refs, **_: (list(refs), []))
    return outcomes


@pytest.mark.parametrize(
    ("error", "is_culprit"),
    [
        (actor_died("The process was killed by SIGKILL."), True),
        (exceptions.OutOfMemoryError("killed for memory"), True),
        (actor_died("The actor died because its node has died. Node Id: 1"), False),
        (exceptions.ActorUnavailableError("unreachable", b"a" * 16), False),
        (exceptions.RuntimeEnvSetupError("no such package"), False),
        (exceptions.ActorUnschedulableError("its placement group is gone"), False),
        (exceptions.ObjectLostError("f" * 56, None, ""), False),
        (exceptions.OwnerDiedError("f" * 56, None, ""), False),
        (exceptions.GetTimeoutError("too slow"), False),
    ],
)
def test_any_error_of_ray_loses_its_worker_alone(outcomes, error, is_culprit):
    outcomes["b"] = error
    answers = gather({0: "a", 1: "b"}, timeout_s=5)
    assert answers.results == {0: "a"}
    assert set(answers.lost) == {1}
    assert answers.culprits == ({1} if is_culprit else set())


def test_whoever_raised_first_is_the_culprit_where_nobody_died(outcomes):
    outcomes["b"] = exceptions.RayTaskError("run_step", "traceback", ValueError("boom"))
    answers = gather({0: "a", 1: "b"}, timeout_s=5)
    assert answers.lost == {1: "ValueError: boom"}
    assert answers.culprits == {1}


def test_who_comes_back_too_late_is_lost_but_no_culprit(outcomes, monkeypatch):
    monkeypatch.setattr(calls.ray, "wait", lambda refs, **_: ([], list(refs)))
    answers = gather({0: "a"}, timeout_s=0)
    assert answers.lost == {0: "did not answer in time"}
    assert not answers.culprits
