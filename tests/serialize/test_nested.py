"""Flattening to dotted keys and back."""

from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.serialize import NestedSample, flatten_nested, unflatten_nested
from tests.serialize.samples import keys, nested_samples, same


def test_the_spec_s_flat_keys_are_dotted_paths() -> None:
    image = torch.zeros(2, 3)
    nested: NestedSample = {"ids": image, "vision": {"hidden": image, "grid": None}, "n": 3}
    flat = flatten_nested(nested)
    assert list(flat) == ["ids", "vision.hidden", "vision.grid", "n"]
    assert flat["vision.hidden"] is image
    assert flat["vision.grid"] is None


def test_a_prefix_stands_in_front_of_every_key() -> None:
    assert flatten_nested({"a": 1, "b": {"c": 2}}, "batch.x") == {"batch.x.a": 1, "batch.x.b.c": 2}


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        ({"a.b": 1}, {"a\\.b": 1}),
        ({"a": {"b": 1}}, {"a.b": 1}),
        ({"a\\": {"b": 1}}, {"a\\\\.b": 1}),
        ({"a\\.b": 1}, {"a\\\\\\.b": 1}),
        ({"": {"": 1}}, {".": 1}),
        ({"": 1}, {"": 1}),
        ({".": 1}, {"\\.": 1}),
        ({"a": {}}, {"a": {}}),
        ({"a": {"b": {}, "c": None}}, {"a.b": {}, "a.c": None}),
        ({"a": [{"b": 1}], "c": ()}, {"a": [{"b": 1}], "c": ()}),
        ({}, {}),
    ],
)
def test_odd_keys_and_empty_dicts_survive(nested: NestedSample, flat: NestedSample) -> None:
    assert flatten_nested(nested) == flat
    assert unflatten_nested(flat) == nested


@given(nested_samples)
def test_flattening_is_reversible_for_every_sample(nested: NestedSample) -> None:
    assert same(unflatten_nested(flatten_nested(nested)), nested)


@given(st.recursive(st.none(), lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3)))
def test_different_paths_have_different_flat_keys(nested: NestedSample | None) -> None:
    if nested is not None:
        assert unflatten_nested(flatten_nested(nested)) == nested


def test_order_of_insertion_is_kept() -> None:
    nested: NestedSample = {"z": 1, "a": {"y": 1, "b": 2}, "c": 3}
    assert list(flatten_nested(nested)) == ["z", "a.y", "a.b", "c"]
    assert list(unflatten_nested(flatten_nested(nested))) == ["z", "a", "c"]


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ({"a": {3: 1}}, r"sample\['a'\] has the key 3; keys must be str"),
        ({None: 1}, "sample has the key None; keys must be str"),
        ({"a": OrderedDict(b=1)}, r"sample\['a'\] is a OrderedDict.*convert it with dict"),
        ({"a": {"b": defaultdict(int)}}, r"sample\['a.b'\] is a defaultdict"),
        (OrderedDict(b=1), "sample is a OrderedDict"),
        ([1], "sample is a list"),
    ],
)
def test_what_would_not_come_back_is_refused(nested: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flatten_nested(nested)


def test_a_sample_in_itself_is_refused() -> None:
    nested: NestedSample = {}
    nested["again"] = nested
    with pytest.raises(ValueError, match="nested deeper than 64, or in itself"):
        flatten_nested(nested)


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"a": 1, "a.b": 2}, "'a.b' needs a dict where a shorter key has a value"),
        ({"a.b": 1, "a": 2}, "'a' has a value where a longer key needs a dict"),
        ({"a": {}, "a.b": 2}, "'a.b' needs a dict where a shorter key has a value"),
        ({"a.b": 1, "a": {}}, "'a' has a value where a longer key needs a dict"),
        ({"a\\b": 1}, "backslash that escapes neither a dot nor a backslash"),
        ({"a\\": 1}, "backslash that escapes neither"),
        ({3: 1}, "flat sample has the key 3; keys must be str"),
    ],
)
def test_flat_keys_that_no_sample_has_are_refused(flat: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unflatten_nested(flat)
