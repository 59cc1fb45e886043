"""The training loop with a fake crew: workers that come and go, and what is asked for."""

from hydra_ray.driver import growth
from hydra_ray.driver.settings import Timeouts
from hydra_ray.driver.states import RunState
from tests.hydra_ray.driver.fake_crew import FakeCrew, Fault, assert_history_is


def test_growing_and_shrinking_keep_processes_and_batches(bench, undisturbed):
    crew = FakeCrew(load_turns=2)
    wishes = {3: 6, 6: 2, 8: 5}

    def act(step):
        if step in wishes:
            bench.requests.scale(wishes[step])

    bench.after_each_step(act)
    bench.loop(crew).run()
    assert bench.ids() == undisturbed
    assert_history_is(crew, undisturbed)
    generations = bench.events("generation")
    assert [g["cause"] for g in generations] == ["start", "grow", "shrink", "grow"]
    assert [g["num_ranks"] for g in generations] == [4, 6, 2, 5]
    workers = [set(g["workers"]) for g in generations]
    assert workers[0] < workers[1]
    assert workers[2] < workers[1]
    assert workers[2] < workers[3]


def test_a_burst_of_requests_settles_on_the_last(bench):
    crew = FakeCrew(load_turns=2)

    def act(step):
        if step == 3:
            for target in (2, 6, 3, 7, 3):
                bench.requests.scale(target)

    bench.after_each_step(act)
    bench.loop(crew).run()
    assert [g["num_ranks"] for g in bench.events("generation")] == [4, 3]


def test_a_target_below_the_minimum_never_starves_the_run(bench, undisturbed):
    crew = FakeCrew([Fault(0, "run_step", 6)])

    def act(step):
        if step == 3:
            bench.requests.scale(1)

    bench.after_each_step(act)
    assert bench.loop(crew, min_units=2, wait_s=5.0).run() is RunState.FINISHED
    assert bench.ids() == undisturbed
    assert {step["num_ranks"] for step in bench.directory.steps()} == {4, 2}


def test_growth_that_cannot_be_met_is_given_up_whole(bench):
    crew = FakeCrew(capacity=5)

    def act(step):
        if step == 2:
            bench.requests.scale(7)

    bench.after_each_step(act)
    bench.loop(crew, timeouts=Timeouts(grow_s=0.0)).run()
    assert [g["num_ranks"] for g in bench.events("generation")] == [4]
    assert bench.events("growth_failed")[0]["wanted"] == 7
    assert bench.requests.wishes().target_units == 4


def test_replacements_and_standbys_that_find_no_place_leave_the_target(bench, undisturbed):
    crew = FakeCrew([Fault(1, "run_step", 5)], capacity=4)
    crew.num_loading = lambda: 1  # a standby, and then a replacement, that Ray cannot place

    def staff(num_units, keep):
        if not crew.commands:
            FakeCrew.staff(crew, num_units, keep)

    crew.staff = staff
    bench.loop(crew, standbys=1, timeouts=Timeouts(grow_s=0.0)).run()
    assert bench.ids() == undisturbed
    assert [g["num_ranks"] for g in bench.events("generation")] == [4, 3]
    assert not bench.events("growth_failed")
    assert bench.requests.wishes().target_units == 4


def test_one_replacement_of_two_joins_when_the_other_finds_no_place(
    bench, undisturbed, monkeypatch
):
    monkeypatch.setattr(growth, "REGROW_S", 0.0)
    crew = FakeCrew([Fault(0, "run_step", 4), Fault(1, "run_step", 4)])

    def act(_):
        crew.capacity = 3  # of the four

    bench.after_each_step(act)
    bench.loop(crew).run()
    assert bench.ids() == undisturbed
    assert [g["num_ranks"] for g in bench.events("generation")] == [4, 2, 3]


def test_a_standby_takes_a_lost_worker_s_place_at_once(bench, undisturbed):
    crew = FakeCrew([Fault(0, "run_step", 5)], load_turns=1)
    bench.loop(crew, standbys=1).run()
    assert bench.ids() == undisturbed
    assert [g["num_ranks"] for g in bench.events("generation")] == [4, 4]
    assert_history_is(crew, undisturbed)


def test_a_unit_asked_to_leave_leaves_and_is_replaced(bench, undisturbed):
    crew = FakeCrew()

    def act(step):
        if step == 4:
            bench.requests.retire(1)

    bench.after_each_step(act)
    bench.loop(crew).run()
    assert bench.ids() == undisturbed
    assert 1 not in crew.workers
    assert bench.directory.steps()[-1]["num_ranks"] == 4


def test_a_standby_asked_to_leave_is_ended_and_replaced(bench, undisturbed):
    crew = FakeCrew()

    def act(step):
        if step == 4:
            standby = next(unit for unit in crew.workers if unit not in crew.members)
            bench.requests.retire(standby)

    bench.after_each_step(act)
    bench.loop(crew, standbys=1).run()
    assert bench.ids() == undisturbed
    assert [g["cause"] for g in bench.events("generation")] == ["start"]
    (standby,) = set(crew.workers) - set(crew.members)
    assert standby not in bench.requests.wishes().leaving
