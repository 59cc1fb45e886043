"""The training loop with a fake crew: exactly-once whatever happens to the workers."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydra_ray.driver import loop as loop_module
from hydra_ray.driver.errors import (
    CheckpointError,
    NonFiniteLossError,
    NotEnoughWorkersError,
    SuspectSequencesError,
    TooManyFailuresError,
)
from hydra_ray.driver.saving import MOST_FAILURES
from hydra_ray.driver.states import RunState
from tests.hydra_ray.driver.fake_crew import FakeCrew, Fault, assert_history_is


def test_an_undisturbed_run_trains_every_step_once(bench, undisturbed):
    crew = FakeCrew()
    assert bench.loop(crew).run() is RunState.FINISHED
    steps = bench.directory.steps()
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert {step["num_ranks"] for step in steps} == {4}
    assert_history_is(crew, undisturbed)
    flat = [i for batch in bench.ids() for i in batch]
    assert sorted(flat[:40]) == list(range(1000, 1040))


@pytest.mark.parametrize("method", ["load", "join", "run_step", "sync_state", "start_save"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_in_any_call_changes_no_batch(bench, undisturbed, method, when):
    faults = [Fault(2, method, 5 if method == "run_step" else None, when)]
    if method == "sync_state":
        faults = [Fault(1, "run_step", 5, "before", applied_by=1), *faults]
    crew = FakeCrew(faults)
    assert bench.loop(crew, save_every=4).run() is RunState.FINISHED
    assert bench.ids() == undisturbed
    assert_history_is(crew, undisturbed)
    assert len(bench.events("worker_lost")) == len(faults)


@pytest.mark.parametrize("applied_by", [0, 1, 2, 3])
def test_survivors_take_the_furthest_applied_step(bench, undisturbed, applied_by):
    crew = FakeCrew([Fault(3, "run_step", 6, "before", applied_by=applied_by)])
    bench.loop(crew).run()
    assert bench.ids() == undisturbed
    assert_history_is(crew, undisturbed)
    assert [c.step for c in crew.commands].count(6) == 1


@pytest.mark.parametrize("save_every", [4, 0])
def test_a_state_that_no_workers_hold_whole_is_read_from_the_newest_checkpoint(
    bench, undisturbed, save_every
):
    """Units of several workers: a death amid the agreement left only parts of steps 5 and 6."""
    crew = FakeCrew([Fault(3, "run_step", 6, "before", applied_by=1)])
    real_sync = crew._sync_state

    def sync_nothing_whole(worker, workers):
        crew.workers[worker].applied, crew.workers[worker].history = 0, []
        if worker == workers[-1]:
            crew._sync_state = real_sync
        return 0

    crew._sync_state = sync_nothing_whole
    assert bench.loop(crew, save_every=save_every).run() is RunState.FINISHED
    assert bench.ids() == undisturbed
    assert_history_is(crew, undisturbed)
    assert [event["step"] for event in bench.events("state_lost")] == [6]
    assert [event["step"] for event in bench.events("restored")] == [save_every]
    assert len(bench.events("worker_lost")) == 1


def test_a_step_whose_every_report_was_lost_is_not_redone(bench, undisturbed):
    crew = FakeCrew()
    real_call = crew.call

    def call(workers, method, arguments, *, timeout_s):
        answers = real_call(workers, method, arguments, timeout_s=timeout_s)
        if method == "run_step" and arguments(workers[0])[0].step == 7 and answers.complete:
            answers.unblocked = dict.fromkeys(workers[1:], "report lost")
            answers.lost = {workers[0]: "report lost"}
            answers.results.clear()
        return answers

    crew.call = call
    bench.loop(crew).run()
    assert bench.ids() == undisturbed
    assert bench.directory.steps()[6]["loss"] is None
    assert [c.step for c in crew.commands].count(7) == 1


def test_losing_every_worker_goes_back_to_the_last_checkpoint(bench, undisturbed):
    faults = [Fault(w, "run_step", 7) for w in range(4)]
    crew = FakeCrew(faults)
    bench.loop(crew, save_every=5, wait_s=5.0).run()
    assert bench.ids() == undisturbed
    assert [step["step"] for step in bench.directory.steps()] == list(range(1, 13))
    assert bench.events("restored") == [
        {**bench.events("restored")[0], "step": 5, "steps_to_redo": 1}
    ]
    assert_history_is(crew, undisturbed)


def test_below_the_minimum_the_run_waits_and_then_fails(bench):
    crew = FakeCrew([Fault(w, "run_step", 3) for w in (0, 1)])
    crew_staff = crew.staff

    def staff(num_units, keep):
        if not crew.commands:
            crew_staff(num_units, keep)

    crew.staff = staff
    with pytest.raises(NotEnoughWorkersError, match=r"2 ready of 4 .* limit >= 3"):
        bench.loop(crew, min_units=3).run()
    assert bench.directory.steps()[-1]["step"] == 2


def test_too_many_failures_end_the_run(bench):
    crew = FakeCrew([Fault(w, "run_step") for w in range(12)])
    with pytest.raises(TooManyFailuresError, match=r"failures; limit elastic.max_failures = 2"):
        bench.loop(crew, max_failures=2).run()


def test_a_stop_ends_after_the_step_in_hand_with_a_checkpoint_and_resumes(bench, undisturbed):
    files = {}
    crew = FakeCrew(shared=files)

    def act(step):
        if step == 7:
            bench.requests.stop()

    bench.after_each_step(act)
    assert bench.loop(crew).run() is RunState.STOPPED
    assert bench.checkpoints.steps() == [7]
    bench.requests = type(bench.requests)(2)
    bench.journal = type(bench.journal)(bench.directory)
    crew = FakeCrew(shared=files)
    assert bench.loop(crew).run() is RunState.FINISHED
    assert bench.ids() == undisturbed
    assert_history_is(crew, undisturbed)


@pytest.mark.parametrize("num_lost", [1, 3])
def test_a_stop_during_recovery_saves_with_whoever_is_left_or_says_that_it_did_not(bench, num_lost):
    crew = FakeCrew([Fault(w, "run_step", 8) for w in range(num_lost)])
    real_call = crew.call

    def call(workers, method, arguments, *, timeout_s):
        answers = real_call(workers, method, arguments, timeout_s=timeout_s)
        if method == "run_step" and not answers.complete:
            bench.requests.stop()
        return answers

    crew.call = call
    assert bench.loop(crew, save_every=5, min_units=2).run() is RunState.STOPPED
    told = [(e["step"], e["newest_checkpoint"]) for e in bench.events("stopped_unsaved")]
    assert bench.checkpoints.steps() == ([5, 7] if num_lost == 1 else [5])
    assert told == ([] if num_lost == 1 else [(7, 5)])


def test_the_pause_of_a_failure_counts_the_step_that_was_lost(bench, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    crew = FakeCrew([Fault(0, "run_step", 5)])
    real_call = crew.call

    def call(workers, method, arguments, *, timeout_s):
        now[0] += 10.0 if method == "run_step" else 0.0
        return real_call(workers, method, arguments, timeout_s=timeout_s)

    crew.call = call
    bench.loop(crew, wait_s=5.0).run()
    start, failure, *_ = bench.events("generation")
    assert (start["cause"], start["pause_s"]) == ("start", 0.0)
    assert (failure["cause"], failure["pause_s"]) == ("failure", 10.0)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(bench, undisturbed):
    files = {}
    bench.loop(FakeCrew(shared=files), num_steps=8, save_every=4).run()
    newest = bench.directory.root / "checkpoints" / "step_000008" / "manifest.json"
    newest.write_text(newest.read_text()[:-40])
    bench.journal = type(bench.journal)(bench.directory)
    bench.loop(FakeCrew(shared=files), save_every=4).run()
    assert bench.ids() == undisturbed
    assert [e["step"] for e in bench.events("checkpoint_damaged")] == [8]
    assert bench.events("restored")[-1]["step"] == 4


@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_storage_that_fails_is_tried_again_after_another_step(
    bench, undisturbed, monkeypatch, num_failures
):
    prepared = []
    real_prepare = bench.checkpoints.prepare

    def prepare(step):
        prepared.append(step)
        if len(prepared) <= num_failures:
            raise CheckpointError("the storage is away")
        real_prepare(step)

    monkeypatch.setattr(bench.checkpoints, "prepare", prepare)
    loop = bench.loop(FakeCrew(), save_every=4)
    if num_failures == MOST_FAILURES:
        with pytest.raises(CheckpointError, match="checkpoints cannot be written"):
            loop.run()
        assert prepared == [4, 5, 6]
    else:
        assert loop.run() is RunState.FINISHED
        assert prepared[: num_failures + 1] == [4, 5, 6][: num_failures + 1]
        assert bench.ids() == undisturbed


def test_no_readable_checkpoint_is_an_error(bench):
    bench.loop(FakeCrew(), num_steps=4).run()
    (bench.directory.root / "checkpoints" / "step_000004" / "manifest.json").write_text("{")
    bench.journal = type(bench.journal)(bench.directory)
    with pytest.raises(CheckpointError, match="no checkpoint of the run can be read"):
        bench.loop(FakeCrew()).run()


def test_a_nonfinite_loss_names_step_and_sequences_and_applies_nothing(bench):
    seen = []

    def loss_of(payload):
        seen.append(payload.sequence_ids)
        return math.nan if len(bench.directory.steps()) == 3 else 1.0

    crew = FakeCrew(loss_of=loss_of)
    with pytest.raises(NonFiniteLossError, match=r"step 4 is not finite") as caught:
        bench.loop(crew).run()
    assert str(seen[-1][0]) in str(caught.value)
    assert caught.value.exit_code == 2
    assert {worker.applied for worker in crew.workers.values()} == {3}


FAULTS = st.lists(
    st.builds(
        Fault,
        worker=st.integers(0, 9),
        method=st.sampled_from(
            ["load", "join", "sync_state", "run_step", "start_save", "finish_save"]
        ),
        step=st.none(),
        when=st.sampled_from(["before", "after"]),
        applied_by=st.integers(0, 6),
    ),
    max_size=8,
)
SCALES = st.dictionaries(st.integers(1, 11), st.integers(1, 8), max_size=4)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(faults=FAULTS, scales=SCALES, standbys=st.integers(0, 2), save_every=st.integers(0, 5))
def test_any_faults_and_scales_leave_the_training_as_it_was(
    make_bench, undisturbed, faults, scales, standbys, save_every
):
    bench = make_bench()
    crew = FakeCrew(faults, load_turns=2)

    def act(step):
        if step in scales:
            bench.requests.scale(scales[step])

    bench.after_each_step(act)
    loop = bench.loop(crew, standbys=standbys, save_every=save_every, max_failures=100, wait_s=10.0)
    assert loop.run() is RunState.FINISHED
    assert bench.ids() == undisturbed
    assert [s["step"] for s in bench.directory.steps()] == list(range(1, 13))
    assert_history_is(crew, undisturbed)


def test_sequences_on_a_worker_that_dies_twice_in_one_step_are_named(bench):
    crew = FakeCrew()
    real_call = crew.call

    def call(workers, method, arguments, *, timeout_s):
        if method == "run_step":
            crew.faults.append(Fault(workers[0], "run_step", 4))
        return real_call(workers, method, arguments, timeout_s=timeout_s)

    crew.call = call
    with pytest.raises(SuspectSequencesError, match=r"step 4 lost its workers twice") as caught:
        bench.loop(crew, num_steps=6).run()
    assert bench.directory.steps()[-1]["step"] == 3
    assert "sequence ids [1" in str(caught.value)


def test_lost_nodes_and_late_workers_are_not_blamed_on_sequences(bench, undisturbed):
    crew = FakeCrew()
    real_call, tries = crew.call, []

    def call(workers, method, arguments, *, timeout_s):
        if method == "run_step" and arguments(workers[0])[0].step == 4 and len(tries) < 3:
            tries.append(workers[0])
            crew.faults.append(Fault(workers[0], "run_step", 4))
            answers = real_call(workers, method, arguments, timeout_s=timeout_s)
            answers.culprits.clear()
            return answers
        return real_call(workers, method, arguments, timeout_s=timeout_s)

    crew.call = call
    assert bench.loop(crew).run() is RunState.FINISHED
    assert len(tries) == 3
    assert bench.ids() == undisturbed
