"""Every edge of the run's state table, legal and illegal."""

import itertools

import pytest

from hydra_ray.driver.states import FINAL, TRANSITIONS, IllegalTransitionError, RunState, advance

EDGES = list(itertools.product(RunState, RunState))


@pytest.mark.parametrize(("current", "following"), EDGES)
def test_each_edge_is_taken_or_refused_as_the_table_says(current, following):
    if following == current or following in TRANSITIONS[current]:
        assert advance(current, following) is following
    else:
        with pytest.raises(IllegalTransitionError, match=f"{current} to {following}"):
            advance(current, following)


def test_every_state_has_a_row_and_can_be_reached():
    assert set(TRANSITIONS) == set(RunState)
    reached, frontier = set(), {RunState.STARTING}
    while frontier:
        reached |= frontier
        frontier = set().union(*(TRANSITIONS[s] for s in frontier)) - reached
    assert reached == set(RunState)


def test_only_ends_are_final_and_every_other_state_can_end():
    assert {RunState.FINISHED, RunState.STOPPED, RunState.FAILED} == FINAL
    for state in set(RunState) - FINAL:
        assert TRANSITIONS[state] >= FINAL
