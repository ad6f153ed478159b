"""Nested samples as flat ones, and back.

A nested key path becomes one key, joined with dots. Dots and backslashes inside a key are escaped
with a backslash, so every path has its own flat key, and the way back is exact.
"""

import re
from collections.abc import Mapping
from typing import TypeAlias, cast

from torch import Tensor

from evenstep.serialize.limits import MAX_DEPTH

Leaf: TypeAlias = (
    Tensor | bool | int | float | str | bytes
    | list["Leaf"] | tuple["Leaf", ...] | dict[str, "Leaf"] | None
)  # fmt: skip
"""A value of a flat sample. A dict occurs as an empty one, or inside a list or tuple."""

FlatSample: TypeAlias = dict[str, Leaf]
"""Dotted key -> value."""

NestedSample: TypeAlias = dict[str, Leaf]
"""Key -> value or nested sample."""

# A part of a flat key: no dot and no backslash, unless escaped.
_PART = re.compile(r"(?:[^.\\]|\\[.\\])*", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def flatten_nested(nested: Mapping[str, Leaf], prefix: str = "") -> FlatSample:
    """Flatten a nested sample to dotted keys; every value that is not a dict stays as it is.

    The order of the keys is kept. An empty dict inside the sample is a value of its own, so that
    it survives. Values other than dicts are neither checked nor copied.

    Args:
        nested: The sample.
        prefix: A flat key to put in front of every key, if not empty.

    Returns:
        The flat sample, from which :func:`unflatten_nested` rebuilds ``nested``.

    Raises:
        ValueError: If a key is not a ``str``, a dict is of a subclass (it would come back as a
            plain dict), or dicts are nested deeper than ``MAX_DEPTH``.
    """
    flat: FlatSample = {}
    _flatten_into(flat, nested, f"{prefix}." if prefix else "", 1)
    return flat


def _flatten_into(flat: FlatSample, nested: Mapping[str, Leaf], path: str, depth: int) -> None:
    if type(nested) is not dict:
        raise ValueError(
            f"sample{_at(path)} is a {type(nested).__name__}, which would come back as a plain "
            "dict; convert it with dict(...)"
        )
    if depth > MAX_DEPTH:
        raise ValueError(f"sample{_at(path)} is nested deeper than {MAX_DEPTH}, or in itself")
    for key, value in nested.items():
        if type(key) is not str:
            raise ValueError(f"sample{_at(path)} has the key {key!r}; keys must be str")
        flat_key = path + _escape(key)
        if isinstance(value, dict) and (value or type(value) is not dict):
            _flatten_into(flat, value, f"{flat_key}.", depth + 1)
        else:
            flat[flat_key] = value


def _at(path: str) -> str:
    return f"[{path[:-1]!r}]" if path else ""


def _escape(key: str) -> str:
    return key.replace("\\", "\\\\").replace(".", "\\.") if "." in key or "\\" in key else key


def unflatten_nested(flat: Mapping[str, Leaf]) -> NestedSample:
    """Rebuild the nested sample from dotted keys, the inverse of :func:`flatten_nested`.

    Args:
        flat: Dotted key -> value.

    Returns:
        The nested sample; values are the same objects.

    Raises:
        ValueError: If a key is not a ``str`` or ends in the middle of an escape, or if one key
            needs a dict where another has a value.
    """
    nested: NestedSample = {}
    branches = {id(nested)}  # the dicts made here; an empty dict of ``flat`` is a value
    for key, value in flat.items():
        *parents, last = _split(key)
        node = nested
        for parent in parents:
            if parent not in node:
                node[parent] = {}
                branches.add(id(node[parent]))
            elif id(node[parent]) not in branches:
                raise ValueError(f"key {key!r} needs a dict where a shorter key has a value")
            node = cast("NestedSample", node[parent])
        if last in node:
            raise ValueError(f"key {key!r} has a value where a longer key needs a dict")
        node[last] = value
    return nested


def _split(key: str) -> list[str]:
    """Return the path of a flat key, without escapes."""
    if type(key) is not str:
        raise ValueError(f"flat sample has the key {key!r}; keys must be str")
    if "\\" not in key:
        return key.split(".")
    parts = []
    position = 0
    while True:
        match = _PART.match(key, position)
        assert match is not None  # the pattern matches the empty string
        parts.append(_ESCAPED.sub(r"\1", match.group()))
        position = match.end() + 1
        if match.end() == len(key):
            return parts
        if key[match.end()] != ".":
            raise ValueError(
                f"key {key!r} has a backslash that escapes neither a dot nor a backslash"
            )
