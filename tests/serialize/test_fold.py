"""Plain values as one tensor field."""

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from evenstep.serialize import (
    VALUES_KEY,
    DecodeError,
    FlatSample,
    NestedSample,
    flatten_nested,
    fold_values,
    pack_samples,
    sample_layout,
    unflatten_nested,
    unfold_values,
    unpack_sample,
)
from tests.serialize.samples import nested_samples, same


@given(nested_samples)
def test_every_sample_travels_as_tensors_only(nested: NestedSample) -> None:
    folded = fold_values(flatten_nested(nested))
    assert all(value is None or isinstance(value, Tensor) for value in folded.values())
    received = unpack_sample(pack_samples([folded]), sample_layout(folded))
    assert same(unflatten_nested(unfold_values(received)), nested)


def test_a_sample_without_values_stays_the_same_object() -> None:
    flat: FlatSample = {"x": torch.zeros(2), "n": None}
    assert fold_values(flat) is flat
    folded = fold_values(flat)
    assert unfold_values(folded) is folded


def test_values_lie_in_one_field() -> None:
    flat: FlatSample = {"a": 1, "x": torch.zeros(2), "e": {}, "l": [torch.ones(1)], "n": None}
    folded = fold_values(flat)
    assert list(folded) == ["x", "n", VALUES_KEY]
    assert folded["x"] is flat["x"]
    assert folded[VALUES_KEY].dtype is torch.uint8  # type: ignore[union-attr]  # a tensor
    assert same(unfold_values(folded), flat)


def test_the_key_of_the_values_is_nobody_else_s() -> None:
    assert list(flatten_nested({VALUES_KEY: 1})) != [VALUES_KEY]
    with pytest.raises(ValueError, match=r"has the key .* already"):
        fold_values({VALUES_KEY: 1})
    with pytest.raises(ValueError, match="backslash that escapes neither"):
        unflatten_nested({VALUES_KEY: 1})


def test_what_would_not_come_back_is_refused_by_name() -> None:
    bad: Any = {"x": torch.zeros(1), "a.b": {1, 2}}
    with pytest.raises(ValueError, match=r"field 'a\.b' is a builtins.set"):
        fold_values(bad)


def test_damaged_values_are_refused() -> None:
    folded = fold_values({"a": 1})
    field = folded[VALUES_KEY]
    assert isinstance(field, Tensor)
    cases: list[tuple[Any, str]] = [
        ({VALUES_KEY: None}, "is None; it must be the bytes of the values"),
        ({VALUES_KEY: field[:-8]}, "document declares 40 bytes, the buffer has 32"),
        ({**folded, "a": torch.zeros(1)}, "key 'a' is both a field and a folded value"),
    ]
    for flat, message in cases:
        with pytest.raises(DecodeError, match=message):
            unfold_values(flat)
