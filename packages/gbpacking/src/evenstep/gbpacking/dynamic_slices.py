"""Who cuts which part of which sample for whom under dynamic context parallelism: pure.

A context-parallel group of s ranks needs of each sample s different slices, one per rank, and no
rank needs the whole. So slices travel, not samples: each byte of a step moves at most once, where
whole samples would move once per rank of their group.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from evenstep.balance import DynamicCpPlan, Route
from evenstep.gbpacking.sample import Sample


class Slice(NamedTuple):
    """One rank's part of one sample.

    Attributes:
        source: Domain rank that cuts it.
        local_index: The sample's place among those that the source has read in this step.
        cp_size: Ranks of the sample's group.
        cp_rank: Which of them this slice is for.
        route: The micro-batch, the domain rank that computes it, and its place in the pack.
    """

    source: int
    local_index: int
    cp_size: int
    cp_rank: int
    route: Route


def planned_slices(
    plan: DynamicCpPlan, holders: Sequence[tuple[int, int]], *, cp_size: int
) -> list[Slice]:
    """Return every slice of a step, by source; the same list on every rank.

    A sample is read by all ranks of one data-parallel index. A rank of its group that has read it
    cuts its own slice; for the others, those that have read it take turns.

    Args:
        plan: The step.
        holders: `(data-parallel rank, local index)` of each sample, by global index.
        cp_size: The static context-parallel size: domain rank = data-parallel rank x this +
            context-parallel rank.
    """
    slices = []
    for microbatch, groups in enumerate(plan.microbatches):
        for group in groups:
            for place, index in enumerate(group.sequences):
                home, local_index = holders[index]
                for cp_rank in range(group.size):
                    owner = group.start + cp_rank
                    source = home * cp_size + owner % cp_size
                    route = Route(microbatch, owner, place)
                    slices.append(Slice(source, local_index, group.size, cp_rank, route))
    return sorted(slices)


def cut(sample: Sample, cp_size: int, cp_rank: int) -> Sample:
    """Return the chunks of each per-token field that one rank of a group of `cp_size` holds.

    They are the two that `zigzag_indices` gives a sample of its own: chunk r and its mirror image.
    Alone on its rank, a sample is not cut and not copied.
    """
    if cp_size == 1:
        return sample
    return {key: _two_chunks(row, cp_size, cp_rank) for key, row in sample.items()}


def _two_chunks(row: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    size, rest = divmod(len(row), 2 * cp_size)
    if rest:
        raise ValueError(
            f"a sample has {len(row)} tokens; a context-parallel group of {cp_size} needs a "
            f"multiple of {2 * cp_size}, pad samples with padding_multiple()"
        )
    mirror = 2 * cp_size - 1 - cp_rank
    return torch.cat([row.narrow(0, cp_rank * size, size), row.narrow(0, mirror * size, size)])
