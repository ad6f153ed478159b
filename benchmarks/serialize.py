"""Time evenstep.serialize against a bare copy and against other serializers.

Prints the machine, then one line of JSON per figure. The peers safetensors and tensordict are in
the dependency group `bench` (`uv run --group bench python benchmarks/serialize.py`); a peer that is
not installed is named on standard error and left out.

A ratio is the median over rounds of (time of the one / time of the other), both timed in each
round, so that what else the machine does hits both. Buffers are written once before timing, except
in the cases called "fresh", where both sides allocate theirs.
"""

import importlib
import io
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import Row, report, row
from benchmarks.workloads import receipt_patches, receipts_samples
from evenstep.serialize import (
    dumps,
    loads,
    pack_samples,
    sample_layout,
    unpack_sample,
    unpack_samples,
)

Sample: TypeAlias = dict[str, Tensor | None]
RoundTrip: TypeAlias = Callable[[Sample], object]

SEED = 0
PATCH_FEATURES = 1176
RECEIPTS_LENGTH = 2048
RECEIPTS_MERGED_TOKENS = 256  # at most, per image: then 16 samples hold the 122 MB of the target
ROUNDS = 7
BATCH = 16


def receipts(n: int) -> list[Sample]:
    """Return `n` samples of the receipts workload: 2048 tokens and 0 to 3 images each."""
    patches = receipt_patches(max_merged_tokens=RECEIPTS_MERGED_TOKENS)
    images = receipts_samples(n, random.Random(SEED), patches)
    return [sample(RECEIPTS_LENGTH, counts) for counts in images]


def small(n: int) -> list[Sample]:
    """Return `n` samples of 7 fields and 81 KB: text of varied length, and few patches."""
    rng = random.Random(SEED)
    return [sample(rng.randint(900, 1900), [rng.randint(0, 8)]) for _ in range(n)]


def sample(length: int, image_patches: list[int]) -> Sample:
    """Return one flat sample as split from a micro-batch, with a batch dimension of 1."""
    total = sum(image_patches)
    grid = [[1, 1, patches] for patches in image_patches]
    return {
        "input_ids": torch.randint(32000, (1, length)),
        "labels": torch.randint(32000, (1, length)),
        "loss_mask": torch.ones(1, length),
        "attention_mask": torch.ones(1, length, dtype=torch.bool),
        "position_ids": torch.arange(length).repeat(3, 1, 1),
        "vision.hidden_states": torch.randn(total, PATCH_FEATURES),
        "vision.grid_thw": torch.tensor(grid, dtype=torch.int64).reshape(-1, 3),
    }


def ratio(work: Callable[[], object], against: Callable[[], object]) -> float:
    """Return the median over rounds of the time of `work` over that of `against`."""
    ratios = [seconds(work) / seconds(against) for _ in range(ROUNDS + 1)]
    return statistics.median(ratios[1:])  # the first round warms both up


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def packing() -> Iterator[Row]:
    yield from packing_of("16 receipts samples", receipts(16), target=1.15)
    yield from packing_of("1024 small samples", small(1024), target=3.0)


def packing_of(case: str, samples: list[Sample], *, target: float) -> Iterator[Row]:
    layouts = [sample_layout(flat) for flat in samples]
    nbytes = sum([layout.nbytes for layout in layouts])
    source, out = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))

    def line(how: str, value: float) -> Row:
        return row("pack / copy_", case + how, value, target=target, unit="ratio",
                   megabytes=round(nbytes / 1e6, 1), fields=sum(map(len, samples)))  # fmt: skip

    def copy() -> None:
        out.copy_(source)

    yield line("", ratio(lambda: pack_samples(samples, out=out), copy))
    given = ratio(lambda: pack_samples(samples, layouts=layouts, out=out), copy)
    yield line(", layouts given", given)
    yield line(", fresh", ratio(lambda: pack_samples(samples), source.clone))


def unpacking() -> Iterator[Row]:
    yield from unpacking_of("16 receipts samples", receipts(16))
    yield from unpacking_of("1024 small samples", small(1024))


def unpacking_of(case: str, samples: list[Sample]) -> Iterator[Row]:
    """Time batches of 16 samples, so that another process rarely interrupts one."""
    layouts = [sample_layout(flat) for flat in samples]
    offsets = list(accumulate([layout.nbytes for layout in layouts], initial=0))
    buffer = pack_samples(samples, layouts=layouts)
    fields_from = [sum(map(len, samples[i : i + BATCH])) for i in range(len(samples))]

    def line(how: str, unpack: Callable[[int], object], target: float | None = 3.0) -> Row:
        starts = range(0, len(samples), BATCH)
        times = [seconds(lambda: unpack(i)) for _ in range(ROUNDS) for i in starts]  # noqa: B023 - called at once
        per_field = statistics.median(times) * len(starts) / sum(map(len, samples))
        return row("unpack per field", case + how, per_field * 1e6, target=target, unit="us")

    def together(first: int) -> None:
        unpack_samples(buffer, layouts[first : first + BATCH], offsets[first])

    def one_by_one(first: int) -> None:
        for i in range(first, first + BATCH):
            unpack_sample(buffer, layouts[i], offsets[i])

    def operator_alone(first: int) -> None:
        base = buffer.view(torch.int64)
        _views = [base.as_strided((1, 2), (2, 1), i) for i in range(fields_from[first])]

    yield line("", together)
    yield line(", one by one", one_by_one)
    # What the machine takes today for as many views of nothing in particular.
    yield line(", as_strided alone", operator_alone, target=None)


def round_trips() -> dict[str, RoundTrip]:
    """Return, by name, functions that turn a sample into bytes and back."""
    trips: dict[str, RoundTrip] = {
        "evenstep": lambda flat: loads(dumps(dict(flat))),
        "pickle 5": lambda flat: pickle.loads(pickle.dumps(flat, protocol=5)),
        "torch.save": through_torch_save,
    }
    if (safetensors := peer("safetensors.torch")) is not None:
        trips["safetensors"] = lambda flat: safetensors.load(safetensors.save(flat))
    if (tensordict := peer("tensordict")) is not None:
        trips["tensordict"] = lambda flat: through_tensordict(tensordict, flat)
    return trips


def peer(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name} is not installed: uv sync --group bench", file=sys.stderr)
        return None


def through_torch_save(flat: Sample) -> object:
    stream = io.BytesIO()
    torch.save(flat, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def through_tensordict(tensordict: ModuleType, flat: Sample) -> object:
    """Consolidate into one storage, the fast way of tensordict, then pickle and unpickle that."""
    consolidated = tensordict.TensorDict(flat).consolidate()
    return pickle.loads(pickle.dumps(consolidated, protocol=5))


def self_describing() -> Iterator[Row]:
    trips = round_trips()
    for case, flat in (
        ("receipts sample with images", max(receipts(16), key=nbytes_of)),
        ("receipts sample without images", min(receipts(16), key=nbytes_of)),
        ("small sample", small(1)[0]),
    ):
        size = nbytes_of(flat)
        repeats = max(1, 2_000_000 // size)
        works = {name: repeated(trip, flat, repeats) for name, trip in trips.items()}
        for name, work in works.items():
            median = statistics.median([seconds(work) for _ in range(ROUNDS)]) / repeats
            yield row("both directions", f"{case}, {name}", median * 1e6, target=None, unit="us",
                      megabytes=round(size / 1e6, 2))  # fmt: skip
        if "safetensors" in works:
            value = ratio(works["evenstep"], works["safetensors"])
            yield row("both directions / safetensors", case, value, target=0.8, unit="ratio")


def nbytes_of(flat: Sample) -> int:
    return sum([value.nbytes for value in flat.values() if value is not None])


def repeated(trip: RoundTrip, flat: Sample, repeats: int) -> Callable[[], object]:
    return lambda: [trip(flat) for _ in range(repeats)]


if __name__ == "__main__":
    report(__doc__ or "", packing, unpacking, self_describing)
