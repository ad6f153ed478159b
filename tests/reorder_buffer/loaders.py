"""Loaders of numbered samples: a plain one, and one by torchdata's convention of resuming."""

from collections.abc import Iterator
from typing import Any

import torch


def numbered_batches(count: int, *, size: int = 2, first: int = 0) -> list[dict[str, Any]]:
    """`count` micro-batches; sample i has `input_ids` [i] and i % 7 real tokens of 8."""
    batches = []
    for start in range(first, first + count * size, size):
        numbers = torch.arange(start, start + size)
        mask = torch.arange(8) < (numbers % 7).unsqueeze(1)
        batches.append({"input_ids": numbers.unsqueeze(1), "attention_mask": mask})
    return batches


def numbers_of(batch: dict[str, Any]) -> list[int]:
    """The numbers of a micro-batch's samples, in order."""
    numbers: list[int] = batch["input_ids"].flatten().tolist()
    return numbers


class PlainLoader:
    """Yields the same micro-batches in each pass, and counts passes."""

    def __init__(self, batches: list[dict[str, Any]]) -> None:
        self.batches = batches
        self.passes = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.passes += 1
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class StatefulLoader(PlainLoader):
    """Resumes itself as `StatefulDataLoader` does; its state is live, as a module's may be.

    Once an iterator is exhausted its state says so, and `iter()` after loading that begins anew.
    """

    def __init__(self, batches: list[dict[str, Any]]) -> None:
        super().__init__(batches)
        self._live: dict[str, object] = {}
        self._next: dict[str, object] | None = None
        self.read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        begin, self._next = self._next, None
        start = 0 if begin is None or begin["finished"] else begin["yielded"]
        assert isinstance(start, int)
        self._live = {"yielded": start, "finished": False}
        return self._iterate(start, self._live)

    def _iterate(self, start: int, live: dict[str, object]) -> Iterator[dict[str, Any]]:
        for index in range(start, len(self.batches)):
            live["yielded"] = index + 1
            self.read += 1
            yield self.batches[index]
        live["finished"] = True

    def state_dict(self) -> dict[str, object]:
        return self._live

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self._next = state_dict
