"""The last step of hydra-opt: put microbatches and the groups within them in order."""

import numpy as np

from planner.opt.draft import Draft
from planner.packing import Packing

# Loads are told apart to one part in so many of the highest.
LEVELS = np.uint16(65_535)


def in_order(draft: Draft) -> Packing:
    """Number microbatches and groups of a draft so that `lay_out` puts them in place.

    Microbatches by falling height: the pipeline fills with the heavy ones and drains with the
    light ones, and the heaviest is never last, where nothing is left to hide it. Groups of one
    width by falling load in even microbatches and by rising load in odd ones: neighbours, and so
    the ranks that share experts, are about as high as each other in a microbatch, and a block of
    ranks that is high in one is low in the next. O(groups): numpy sorts 16 bits by radix.
    """
    heights = np.zeros(draft.num_microbatches)
    np.maximum.at(heights, draft.microbatch, draft.load)
    place = np.empty(draft.num_microbatches, dtype=np.int64)
    place[np.argsort(-heights, kind="stable")] = np.arange(draft.num_microbatches)
    microbatch = place[draft.microbatch]
    level = (draft.load * (LEVELS / heights.max())).astype(np.uint16)
    order = np.argsort(np.where(microbatch % 2 == 0, LEVELS - level, level), kind="stable")
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    unused = np.zeros(len(order), dtype=np.int64)
    return Packing(
        num_microbatches=draft.num_microbatches,
        group_microbatch=microbatch[order],
        group_class=draft.degree[order],
        group_work=unused,
        group_shortest=unused,
        sequence_group=number[draft.group_of],
    )
