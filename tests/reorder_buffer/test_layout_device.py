"""Moving micro-batches to a device; what needs CUDA is tested where there is some."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from evenstep.reorder_buffer import batch_to_cuda, record_stream_for_batch
from evenstep.reorder_buffer.device import map_tensors
from tests.reorder_buffer.microbatches import assert_same, numbers

BATCH = {"a": numbers(2), "b": {"c": [numbers(3), "x"], "d": (numbers(1), None)}, "e": 1}


def tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def test_every_tensor_is_reached_and_all_else_stays() -> None:
    doubled = map_tensors(BATCH, lambda tensor: tensor * 2)
    assert_same(
        doubled,
        {
            "a": numbers(2) * 2,
            "b": {"c": [numbers(3) * 2, "x"], "d": (numbers(1) * 2, None)},
            "e": 1,
        },
    )
    assert [
        tensor.device.type for tensor in tensors(map_tensors([BATCH], lambda t: t.to("meta")))
    ] == ["meta"] * 3


class OnCuda(torch.Tensor):
    """A tensor that says it is on a CUDA device, and remembers its streams."""

    recorded: list[object]
    is_cuda = True

    def record_stream(self, stream: object) -> None:
        self.recorded = [*getattr(self, "recorded", []), stream]


def test_every_cuda_tensor_is_tied_to_the_stream() -> None:
    first, second = numbers(2).as_subclass(OnCuda), numbers(3).as_subclass(OnCuda)
    stream: Any = object()
    record_stream_for_batch({"a": first, "b": [{"c": second}, numbers(1), "x", None]}, stream)
    assert (first.recorded, second.recorded) == ([stream], [stream])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_micro_batch_moves_to_the_current_device_and_between_streams() -> None:
    moved = batch_to_cuda(BATCH)
    assert all(tensor.is_cuda for tensor in tensors(moved))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here
    record_stream_for_batch(moved, stream)
    torch.cuda.synchronize()
    assert_same(map_tensors(moved, lambda tensor: tensor.cpu()), BATCH)
