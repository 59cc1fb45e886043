"""A draft: a whole plan as the kernels hold it, before ranks are numbered."""

from typing import NamedTuple

import numpy as np

from planner.cost import FloatArray
from planner.opt.compiled import kernel
from planner.opt.deal import deal
from planner.opt.profile import falling_order, find_singles, pour
from planner.opt.singles import place_singles
from planner.opt.task import Task, on_rank
from planner.opt.wide import SINGLE, WideBins, pack_wide, top_up
from planner.pool import IntArray


class Draft(NamedTuple):
    """Groups with sequences and microbatch, no ranks yet.

    Args:
        num_microbatches: M.
        microbatch, degree: [groups] MB, and index into the task's degrees.
        load: [groups] seconds on each rank.
        group_of: [N] the group of each sequence, by place in the sorted batch.
        target_s: the load that was steered to.
        iteration_s: what it takes; infinite if there is no such plan.
    """

    num_microbatches: int
    microbatch: IntArray
    degree: IntArray
    load: FloatArray
    group_of: IntArray
    target_s: float
    iteration_s: float


@kernel
def pack(task: Task, target: float, num_microbatches: int) -> Draft:
    """Pack to a target, top up, fill the one-rank slots, deal. O(N + groups x degrees)."""
    slots_in_all = num_microbatches * task.num_ranks
    bins = pack_wide(task, target, slots_in_all)
    num_slots = slots_in_all - bins.width
    if num_slots < 0:
        return no_draft(task)
    order = falling_order(bins.load)
    water = pour(task, bins, order, find_singles(task, bins), num_slots, target)
    group_of = np.empty(len(task.lengths), np.int64)
    group_of[: task.num_long] = bins.bin_of
    group_of[task.num_long :] = SINGLE
    top_up(task, bins, order, group_of, water.fill)
    degree, load, complete = fill_slots(task, bins, group_of, num_slots, water.level)
    if not complete:
        return no_draft(task)
    microbatch = deal(task, degree, load, num_microbatches)
    if len(microbatch) < len(degree):
        return no_draft(task)
    iteration_s = draft_iteration_s(task, microbatch, load, num_microbatches)
    return Draft(num_microbatches, microbatch, degree, load, group_of, target, iteration_s)


@kernel
def no_draft(task: Task) -> Draft:
    """The draft that says there is none."""
    nothing = np.empty(0, np.int64)
    return Draft(task.fewest, nothing, nothing, np.empty(0), nothing, 0.0, np.inf)


@kernel
def fill_slots(
    task: Task, bins: WideBins, group_of: IntArray, num_slots: int, level: float
) -> tuple[IntArray, FloatArray, bool]:
    """Put whoever has no group into slots, numbered behind the bins; degrees and loads of all."""
    num_bins, num_alone = len(bins.load), 0
    alone = np.empty(len(group_of), np.int64)
    for place in range(len(group_of)):
        if group_of[place] == SINGLE:
            alone[num_alone] = place
            num_alone += 1
    num_slots = min(num_slots, num_alone)
    slots = place_singles(task, alone[:num_alone], num_slots, level)
    slot_of = slots.slot_of
    for place in range(num_alone):
        group_of[alone[place]] = num_bins + slot_of[place]
    degree, load = np.zeros(num_bins + num_slots, np.int64), np.empty(num_bins + num_slots)
    degree[:num_bins], load[:num_bins] = bins.degree, bins.load
    load[num_bins:] = slots.load
    return degree, load, slots.num_placed == num_alone


@kernel
def draft_iteration_s(
    task: Task, microbatch: IntArray, load: FloatArray, num_microbatches: int
) -> float:
    """`iteration_s` of the draft, the whole pool coupled."""
    height = np.zeros(num_microbatches)
    for group in range(len(load)):
        height[microbatch[group]] = max(height[microbatch[group]], load[group])
    fixed = (num_microbatches + task.bubble) * task.fixed_s
    return float(height.sum() + task.bubble * height.max() + fixed)


@kernel
def group_loads(task: Task, degree: IntArray, group_of: IntArray) -> FloatArray:
    """[groups] seconds on each rank. O(N)."""
    lengths, costs, degrees, pad_unit = task.lengths, task.costs, task.degrees, task.pad_unit
    load = np.zeros(len(degree))
    for place in range(len(lengths)):
        group = group_of[place]
        load[group] += on_rank(lengths[place], degree[group], costs, degrees, pad_unit)[0]
    return load
