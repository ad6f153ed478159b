"""Generated micro-batches, what they must be equal to, and a plain way to gather their samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from evenstep.serialize import flatten_nested

ENCODERS = (
    "modality_inputs.images.clip",
    "modality_inputs.images.siglip",
    "modality_inputs.audio.w",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A nested micro-batch of ``size`` samples and, by encoder, the items of each sample."""

    batch: dict[str, Any]
    size: int
    counts: dict[str, list[int]]


@st.composite
def mimo_cases(draw: st.DrawFn, *, min_size: int = 1) -> Case:
    """Micro-batches of 1 to 6 samples with up to three encoders, lists, None and shared values."""
    size = draw(st.integers(min_size, 6))
    length = draw(st.integers(1, 5))
    batch: dict[str, Any] = {
        "input_ids": numbers(size, length),
        "loss_mask": numbers(size, length).to(torch.float32),
        "attention_mask": numbers(size, length) % 3 > 0,
        "position_ids": draw(
            st.sampled_from(
                [numbers(size, length), numbers(3, size, length), numbers(size, length)]
            )
        ),
        "modality_inputs": {},
    }
    counts = {}
    for path in draw(st.lists(st.sampled_from(ENCODERS), unique=True)):
        counts[path] = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        _, modality, encoder = path.split(".")
        inputs = draw(encoder_inputs(sum(counts[path])))
        batch["modality_inputs"].setdefault(modality, {})[encoder] = inputs
    extras = {
        "names": [f"sample {i}" for i in range(size)],
        "tags": tuple([i, f"{i}"] for i in range(size)),
        "images": [torch.full((i, 2), i) for i in range(size)],
        "dotted.key": {"a.b\\c": numbers(size)},
        "nothing": None,
        "empty": {},
        "step": 7,
        "scale": float("nan"),
        "source": "trace",
        "scalar": torch.tensor(2.5),
        "flags": numbers(size) > 1,
        "narrow": numbers(size, 0),
    }
    for key in draw(st.lists(st.sampled_from(sorted(extras)), unique=True)):
        batch[key] = extras[key]
    return Case(batch=batch, size=size, counts=counts)


@st.composite
def encoder_inputs(draw: st.DrawFn, items: int) -> dict[str, torch.Tensor | None]:
    """An encoder's inputs for ``items`` items, some of them without patches, or nulled."""
    if draw(st.integers(0, 4)) == 0:
        return {"hidden_states": None, "grid_thw": None}
    sides = st.integers(0, 3)
    rows = draw(st.lists(st.tuples(sides, sides, sides), min_size=items, max_size=items))
    grid = torch.tensor(rows, dtype=draw(st.sampled_from([torch.int64, torch.int32]))).view(-1, 3)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return {"hidden_states": numbers(int(grid.prod(1).sum()), 2).to(dtype), "grid_thw": grid}


def numbers(*shape: int) -> torch.Tensor:
    """Return consecutive integers, all different, in a tensor of ``shape``."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


def gather(case: Case, indices: list[int]) -> dict[str, Any]:
    """Gather samples of a case one by one, in the plainest way that can be right."""
    flat: dict[str, Any] = {}
    for key, value in case.batch.items():
        if key == "modality_inputs":
            flat[key] = {
                modality: {
                    encoder: _gather_encoder(
                        inputs, case.counts[f"{key}.{modality}.{encoder}"], indices
                    )
                    for encoder, inputs in encoders.items()
                }
                for modality, encoders in value.items()
            }
        elif key == "position_ids" and value.ndim == 3:
            flat[key] = torch.stack([value[:, i] for i in indices], dim=1)
        elif isinstance(value, torch.Tensor) and value.ndim:
            flat[key] = torch.stack([value[i] for i in indices])
        elif isinstance(value, list | tuple):
            flat[key] = type(value)(value[i] for i in indices)
        elif isinstance(value, dict):
            flat[key] = {name: torch.stack([t[i] for i in indices]) for name, t in value.items()}
        else:
            flat[key] = value
    return flat


def _gather_encoder(
    inputs: dict[str, torch.Tensor | None], counts: list[int], indices: list[int]
) -> dict[str, torch.Tensor | None]:
    hidden, grid = inputs["hidden_states"], inputs["grid_thw"]
    if hidden is None or grid is None:
        return dict(inputs)
    sizes = [int(row[0] * row[1] * row[2]) for row in grid]
    items = [i for s in indices for i in range(sum(counts[:s]), sum(counts[: s + 1]))]
    patches = [p for i in items for p in range(sum(sizes[:i]), sum(sizes[: i + 1]))]
    return {
        "hidden_states": hidden[torch.tensor(patches, dtype=torch.int64)],
        "grid_thw": grid[torch.tensor(items, dtype=torch.int64)],
    }


def assert_same(found: object, expected: object, path: str = "batch") -> None:
    """Assert equality in types, keys, dtypes, shapes, devices and every value; NaN equals NaN."""
    assert type(found) is type(expected), path
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape, found.device) == (
            expected.dtype,
            expected.shape,
            expected.device,
        ), path
        assert torch.equal(found, expected), path
    elif isinstance(expected, dict):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_same(found[key], value, f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple)
        assert len(found) == len(expected), path
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{path}[{index}]")
    else:
        assert repr(found) == repr(expected), path  # NaN too


def share_memory(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of tensors that lie in one and the same storage, with bytes in it."""
    others = flatten_nested({**other})
    found = []
    for key, value in flatten_nested({**one}).items():
        same = others[key]
        if isinstance(value, torch.Tensor) and isinstance(same, torch.Tensor):
            places = value.untyped_storage().data_ptr(), same.untyped_storage().data_ptr()
            if places[0] == places[1] != 0:
                found.append(key)
    return found
