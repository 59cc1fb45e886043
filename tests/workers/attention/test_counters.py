"""What is measured is what happened."""

import time

import torch

from workers.attention.counters import Counters

CPU = torch.device("cpu")


def test_spans_add_up_by_kind():
    counters = Counters()
    started_s = time.perf_counter()
    for kind in ("kernel", "wait", "kernel"):
        with counters.span(kind, "a block", CPU):
            sum(range(1000))
    assert counters.kernel_s > 0
    assert counters.exposed_wait_s > 0
    assert counters.kernel_s + counters.exposed_wait_s <= time.perf_counter() - started_s


def test_bytes_add_up_by_kind():
    counters = Counters()
    for num_bytes in (3, 4):
        counters.sent("ring", num_bytes)
    assert counters.bytes_sent == {"ring": 7}


def test_a_log_is_kept_only_on_demand():
    silent, talkative = Counters(), Counters(keep_events=True)
    for counters in (silent, talkative):
        counters.mark("a moment")
        with counters.span("kernel", "a block", CPU):
            pass
    assert silent.events == []
    assert [event.name for event in talkative.events] == ["a moment", "a block"]
    moment, block = talkative.events
    assert moment.start_s == moment.end_s <= block.start_s <= block.end_s
