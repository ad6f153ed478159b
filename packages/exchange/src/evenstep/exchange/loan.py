"""Samples that stay where they lie, in another process, until their bytes are needed here."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import torch

from evenstep.exchange.errors import ExchangeError, PeerLostError
from evenstep.exchange.host_memory import HOST_MEMORY
from evenstep.exchange.node import VARIABLE, Node
from evenstep.exchange.peer_memory import read_memory
from evenstep.exchange.waiting import MOVING
from evenstep.serialize import (
    Copier,
    Copy,
    LaidOutSample,
    Part,
    SampleLayout,
    copies_of_part,
    is_laid_out,
    largest_memmove,
)

PART_BYTES = 16
"""Bytes that say where a tensor of a sample lies: two words, int64, a `Part`."""


def parts_to_lend(
    samples: Sequence[Mapping[str, object]], layouts: Sequence[SampleLayout]
) -> "array[int] | None":
    """Return where the tensors of samples lie, for other processes to copy them from there.

    Args:
        samples: Flat samples.
        layouts: Their layouts.

    Returns:
        The parts of all tensors, sample by sample; None if the samples are better packed here:
        they do not know their parts, other processes may be unable to read them, or they are so
        large that several threads copy faster.
    """
    lendable = [s for s in samples if is_laid_out(s) and s.is_cpu and s.is_pageable]
    limit = largest_memmove()
    if len(lendable) < len(samples) or any(layout.nbytes > limit for layout in layouts):
        return None
    parts = chain.from_iterable([sample.parts() for sample in lendable])
    return array("q", chain.from_iterable(parts))


class Loan:
    """Samples of another rank of the node, to be copied from its memory.

    Args:
        node: The node.
        rank: Whose samples they are.
        layouts: Their layouts.
        parts: uint8 [16 * number of tensors], as `parts_to_lend` returned there.
        holds: Returns whether they are still lent.
    """

    def __init__(
        self,
        node: Node,
        rank: int,
        layouts: Sequence[SampleLayout],
        parts: torch.Tensor,
        holds: Callable[[], bool],
    ) -> None:
        self._node, self._rank, self._holds = node, rank, holds
        self._place = node.ranks.index(rank)
        self._layouts = layouts
        words = iter(parts.view(torch.int64).tolist())
        self._parts: list[Part] = [*zip(words, words, strict=True)]

    def samples(self) -> Iterator["LentSample"]:
        """Yield the samples."""
        start = 0
        for layout in self._layouts:
            end = start + len(layout.placed)
            yield LentSample(self, layout, self._parts[start:end])
            start = end

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy bytes from the memory of the rank; a `Copier`.

        Raises:
            PeerLostError: If it is gone, or has given the samples up, so that other bytes may have
                been copied.
            ExchangeError: If its memory cannot be read.
        """
        failure: OSError | None = None
        try:
            read_memory(self._node.processes[self._place], copies)
        except OSError as error:
            failure = error
        # What was copied is what was lent if, after that, it still is. A process that ends has no
        # memory for a while before it has ended.
        gone = isinstance(failure, ProcessLookupError) or self._node.has_ended(self._place)
        if gone or not self._holds():
            raise PeerLostError(
                [self._rank], doing=MOVING, cause="it has ended, or given up its samples"
            ) from failure
        if failure is not None:
            raise ExchangeError(
                f"this rank cannot read the memory of rank {self._rank} any more ({failure}); "
                f"with {VARIABLE}=packed it need not"
            ) from failure


class LentSample(LaidOutSample):
    """A flat sample in another process; a tensor is a copy, made when it is asked for."""

    __slots__ = ("_layout", "_loan", "_parts")

    def __init__(self, loan: Loan, layout: SampleLayout, parts: list[Part]) -> None:
        self._loan, self._layout, self._parts = loan, layout, parts

    def __getitem__(self, key: str) -> torch.Tensor | None:
        place = self._layout.schema.places[key]
        if place is None:
            return None
        field = self._layout.placed[place]
        tensor = HOST_MEMORY.empty(field.shape, field.dtype)
        self._loan.copy(copies_of_part(tensor.data_ptr(), self._parts[place], field))
        return tensor

    @property
    def layout(self) -> SampleLayout:
        """The layout that the sample has once packed."""
        return self._layout

    @property
    def is_cpu(self) -> bool:
        """True: only what lies in host memory is lent."""
        return True

    def parts(self) -> Sequence[Part]:
        """Return where the tensor of each of ``layout.placed`` lies, in the other process."""
        return self._parts

    @property
    def copier(self) -> Copier:
        """What copies from there."""
        return self._loan.copy
