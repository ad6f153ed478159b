"""Plain values of a flat sample as one more tensor, so that below there are only tensors."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from evenstep.serialize.document import dumps, loads
from evenstep.serialize.errors import DecodeError
from evenstep.serialize.laid_out import is_laid_out
from evenstep.serialize.layout import TensorSample
from evenstep.serialize.nested import FlatSample, Leaf

VALUES_KEY = "\\values"
"""The key of the folded values. No nested key flattens to it: its backslash escapes nothing."""


def fold_values(flat: Mapping[str, Leaf]) -> Mapping[str, Tensor | None]:
    """Replace all plain values of a flat sample by one ``uint8`` tensor of their bytes.

    Args:
        flat: Flat key -> value.

    Returns:
        The tensors and ``None`` values in their order, then under ``VALUES_KEY`` the
        :func:`dumps` of a dict of the others, on the device of the first tensor. Where there are
        no others, ``flat`` itself.

    Raises:
        ValueError: If ``flat`` has the key ``VALUES_KEY``, or :func:`dumps` refuses a value.
    """
    if VALUES_KEY in flat:
        raise ValueError(f"sample has the key {VALUES_KEY!r} already; unfold it, or rename the key")
    if is_laid_out(flat):
        return flat
    values = {key: value for key, value in flat.items() if not _is_tensor_or_none(value)}
    if not values:
        return cast("TensorSample", flat)
    folded = {key: value for key, value in flat.items() if key not in values}
    data = torch.frombuffer(bytearray(dumps(values)), dtype=torch.uint8)
    device = next((value.device for value in folded.values() if isinstance(value, Tensor)), "cpu")
    return cast("TensorSample", {**folded, VALUES_KEY: data.to(device)})


def _is_tensor_or_none(value: Leaf) -> bool:
    return value is None or isinstance(value, Tensor)


def unfold_values(flat: Mapping[str, Tensor | None]) -> FlatSample:
    """Put the plain values back, the inverse of :func:`fold_values`.

    Args:
        flat: Flat key -> tensor or ``None``.

    Returns:
        A flat sample without ``VALUES_KEY``, the values behind the tensors; ``flat`` itself where
        it has no such key. Tensors inside lists are on the device of the field.

    Raises:
        DecodeError: If the field is damaged, or names a key that ``flat`` has too.
    """
    if VALUES_KEY not in flat:
        return cast("FlatSample", flat)
    unfolded = cast("FlatSample", {key: value for key, value in flat.items() if key != VALUES_KEY})
    field = flat[VALUES_KEY]
    if not isinstance(field, Tensor):
        raise DecodeError(f"field {VALUES_KEY!r} is None; it must be the bytes of the values")
    for key, value in loads(field).items():
        if key in unfolded:
            raise DecodeError(f"key {key!r} is both a field and a folded value")
        unfolded[key] = value if field.is_cpu else _moved(value, field.device)
    return unfolded


def _moved(value: Leaf, device: torch.device) -> Leaf:
    """Return ``value`` with the tensors in it on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    if isinstance(value, tuple):
        return tuple([_moved(item, device) for item in value])
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value
