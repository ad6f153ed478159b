"""What a tensor must be to be packed, and what it is told if it is not."""

import contextlib
from collections.abc import Mapping

from torch import Tensor

from evenstep.serialize.layout import is_supported, meta_refusal, refusal, sample_layout
from evenstep.serialize.placement import place_fields
from evenstep.serialize.schema import SampleLayout, SampleSchema


def check_layout(index: int, flat: Mapping[str, Tensor | None], layout: SampleLayout) -> None:
    """Compare a layout with its sample: its places are about to be used."""
    with contextlib.suppress(ValueError):  # a sample without a layout: told below
        if sample_layout(flat) is layout:  # as a rule, since layouts are kept
            return
    for key, dtype, shape, *_ in layout.placed:
        tensor = flat.get(key)
        if type(tensor) is not Tensor or tensor.dtype is not dtype or tensor.shape != shape:
            raise ValueError(
                f"sample {index}, field {key!r} is {describe(tensor)}, its layout has a tensor "
                f"of {dtype} {list(shape)}; take the sample_layout of this very sample"
            )
    if not has_keys(flat, layout.schema):
        raise ValueError(f"sample {index} has other keys than its layout: {list(flat)}")


def has_keys(flat: Mapping[str, object], schema: SampleSchema) -> bool:
    """Tell whether a sample that has the tensors of a schema has its ``None`` and no more."""
    return len(flat) == len(schema.places) and all(
        flat.get(key, key) is None for key in schema.none_keys
    )


def checked_tensor(key: str, value: object) -> Tensor:
    """Return a value that is a tensor as a layout may have it."""
    if not is_supported(value):
        raise ValueError(refusal(key, value))
    place_fields([(key, value.dtype, value.shape)])  # refuses sizes that are too large
    return value


def resolved(tensor: Tensor) -> Tensor:
    """Return ``tensor``, materialized where it is a lazy conjugate, negative or zero."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    made_up = tensor.numel() > 0 and not tensor.data_ptr()  # zeros of autograd have no memory
    return tensor.clone() if made_up else tensor


def device_rule(key: str, tensor: Tensor, device: str) -> str:
    """Return why a tensor that is not on ``device`` cannot be packed there."""
    if tensor.is_meta:
        return meta_refusal(key)
    return (
        f"field {key!r} is on {tensor.device}, the buffer is on {device}; move the whole batch to "
        "one device first"
    )


def describe(value: object) -> str:
    """Return type, dtype and shape of ``value`` for a message."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a {type(value).__name__} of {value.dtype} {list(value.shape)}"
