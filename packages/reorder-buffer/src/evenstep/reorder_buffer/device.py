"""Micro-batches and CUDA: the move to the device, and their memory between streams."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

__all__ = ["batch_to_cuda", "map_tensors", "record_stream_for_batch"]

T = TypeVar("T")


def map_tensors(value: T, function: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Return ``value`` with ``function`` applied to every tensor in its dicts, lists and tuples."""
    result: object = value
    if isinstance(value, torch.Tensor):
        result = function(value)
    elif isinstance(value, Mapping):
        result = {key: map_tensors(item, function) for key, item in value.items()}
    elif isinstance(value, list):
        result = [map_tensors(item, function) for item in value]
    elif isinstance(value, tuple):
        result = tuple(map_tensors(item, function) for item in value)
    return result  # type: ignore[return-value]  # of the same form as value


def batch_to_cuda(batch: T) -> T:
    """Return a micro-batch with all tensors on the current CUDA device.

    Copies from pinned memory do not wait: they are ordered on the current stream.

    Args:
        batch: A nested micro-batch, a flat sample, or a list of these.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def record_stream_for_batch(value: object, stream: torch.cuda.Stream) -> None:
    """Keep the memory of every CUDA tensor in ``value`` until ``stream`` has used it.

    Call before tensors that one stream made are handed to work on another: without it, the
    allocator may reuse their memory when they are freed, while ``stream`` still reads it.

    Args:
        value: A nested micro-batch, a flat sample, or a list of these.
        stream: The stream that will use the tensors.
    """

    def record(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor

    map_tensors(value, record)
