"""The layout of a loader that does not collate: a micro-batch is a list of samples."""

from collections.abc import Sequence
from dataclasses import dataclass

from evenstep.reorder_buffer.item_counts import Counts
from evenstep.reorder_buffer.layout import MicroBatch
from evenstep.serialize import FlatSample, flatten_nested, unflatten_nested

__all__ = ["SAMPLE_LIST", "SampleListLayout"]


@dataclass(frozen=True, slots=True)
class SampleListLayout:
    """A list of per-sample nested dicts, whose values have no batch dim and are never joined.

    Samples may have any keys, dtypes and shapes. Merged samples hold the very tensors they were
    given, so those that came from another rank are views of the received buffer.
    """

    def split(self, batch: list[MicroBatch], *, counts: Counts | None = None) -> list[FlatSample]:
        """Return the samples with dotted keys, in order.

        Args:
            batch: The samples.
            counts: Must be None: each sample holds its own items already.

        Raises:
            ValueError: If ``batch`` is no list of dicts or is empty, or counts are given.
        """
        if counts is not None:
            raise ValueError(
                "counts of items are given for a list of samples, where each sample holds its own "
                "items; drop image_count_of or cu_img."
            )
        if type(batch) is not list or not batch:
            raise ValueError(
                f"the micro-batch is a {type(batch).__name__}{'' if batch else ' without samples'}:"
                " must be a list of at least one dict per sample."
            )
        for index, sample in enumerate(batch):
            if type(sample) is not dict:
                raise ValueError(
                    f"sample {index} is a {type(sample).__name__}: must be a plain dict; convert "
                    "it with dict(...)."
                )
        return [flatten_nested(sample) for sample in batch]

    def merge(self, flats: Sequence[FlatSample]) -> list[MicroBatch]:
        """Return the samples as nested dicts, in order.

        Raises:
            ValueError: If ``flats`` is empty.
        """
        if not flats:
            raise ValueError("flats is empty: a micro-batch needs at least one sample to merge.")
        return [dict(unflatten_nested(flat)) for flat in flats]


SAMPLE_LIST = SampleListLayout()
"""The one instance that anyone needs."""
