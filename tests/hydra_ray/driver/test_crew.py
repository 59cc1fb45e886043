"""The crew's own bookkeeping; Ray and its processes are stood in for."""

from types import SimpleNamespace

import pytest

from hydra_ray.driver import crew as crew_module
from hydra_ray.driver.calls import Answers
from hydra_ray.driver.crew import RayCrew, Unit, WorkerNeeds
from hydra_ray.driver.placement import UnitShape
from hydra_ray.driver.worker import Worker


@pytest.fixture
def crew(monkeypatch):
    """Unit 0 is loaded on node a; units 1 and 2 are starting on nodes a and b."""
    nodes = {1: "a", 2: "b"}

    def gather(refs, *, timeout_s):
        return Answers(results={w: {"pid": 7, "node_id": nodes[w]} for w in refs})

    everything = SimpleNamespace(wait=lambda refs, **_: (list(refs), []))
    monkeypatch.setattr(crew_module, "gather", gather)
    monkeypatch.setattr(crew_module, "ray", everything)
    monkeypatch.setattr(crew_module, "end_process", lambda worker: None)
    needs = WorkerNeeds(run="run", model=None, training=None, shape=UnitShape())
    crew = RayCrew(needs, heartbeat_s=3600.0)
    loaded = Worker(worker_id=0, actor=None, pid=7, node_id="a")
    crew._units[0] = Unit([loaded], [], None, 0.0)
    crew._next_unit = 3
    for unit in nodes:
        crew._units[unit] = Unit([Worker(worker_id=unit, actor=None)], [f"load {unit}"], None, 0.0)
    yield crew
    crew.close()


def test_units_starting_on_a_drained_node_are_ended_when_they_arrive_and_count_as_no_loss(crew):
    assert crew.units_at("a") == {0: [0]}
    crew.drain_node("a")
    assert crew.watch(0) == {}
    assert crew.ready() == (0, 2)  # the loaded one leaves by the loop's own hand
    assert crew.num_loading() == 0


def test_units_starting_elsewhere_arrive(crew):
    assert crew.watch(0) == {}
    assert set(crew.ready()) == {0, 1, 2}


class Starts:
    """Stands in for Ray's actors and placement groups: notes where each may start."""

    def __init__(self, monkeypatch):
        self.selectors, self.bundles = [], []
        monkeypatch.setattr(crew_module, "WorkerActor", self)
        monkeypatch.setattr(crew_module, "placement_group", self.group)
        monkeypatch.setattr(crew_module, "remove_placement_group", lambda group: None)

    def options(self, *, label_selector, **_):
        self.selectors.append(label_selector)
        load = SimpleNamespace(remote=lambda: f"load {len(self.selectors)}")
        return SimpleNamespace(remote=lambda *_: SimpleNamespace(load=load))

    def group(self, bundles, *, strategy, bundle_label_selector):
        self.bundles.append(bundle_label_selector)
        return object()


def test_what_waits_for_room_is_asked_for_anew_without_the_drained_nodes(crew, monkeypatch):
    starts = Starts(monkeypatch)
    crew.staff(3, keep=(0,))
    assert starts.selectors == []
    crew.drain_node("b")
    crew.drain_node("a")
    crew.staff(3, keep=(0,))
    assert starts.selectors == [{"ray.io/node-id": "!in(a,b)"}] * 2
    assert crew.num_loading() == 2
    assert crew.ready() == (0,)


def test_the_workers_of_a_unit_are_placed_by_their_group(monkeypatch):
    starts = Starts(monkeypatch)
    needs = WorkerNeeds(run="run", model=None, training=None, shape=UnitShape(tensor=2))
    crew = RayCrew(needs, heartbeat_s=3600.0)
    crew.drain_node("a")
    monkeypatch.setattr(crew_module, "PlacementGroupSchedulingStrategy", lambda *_, **__: "group")
    monkeypatch.setattr(crew_module, "end_process", lambda worker: None)
    crew.staff(1, keep=())
    crew.close()
    assert starts.bundles == [[{"ray.io/node-id": "!in(a)"}] * 2]
    assert starts.selectors == [None, None]
