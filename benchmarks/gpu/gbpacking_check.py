"""Check packing on one GPU: `python benchmarks/gpu/gbpacking_check.py`. Takes about a minute.

- The real GPT on the GPU, over a NCCL group of one rank and over two ranks that share the GPU
  (Gloo): loss and gradients of packed steps against unpacked ones.
- Packs, slices and masks on the GPU against those on the CPU; slices against Transformer Engine's
  `thd_get_partitioned_indices` where that is installed.
- How long assembling a pack takes, against a copy of as many bytes.

Prints the machine, then one line of JSON per figure, and exits with 1 if a check fails.
`--device cpu` runs what a machine without a GPU can.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from benchmarks._report import Row, machine, median_s, row
from evenstep.gbpacking import (
    build_unpacked_sample,
    pack_microbatch,
    padding_mask,
    slice_for_cp,
    zigzag_indices,
)
from evenstep.gbpacking.sample import TOKEN_KEYS
from tests.gbpacking.gpt_steps import NUM_MICROBATCHES, Layout, packed_steps, unpacked_steps
from tests.harness import spawn

LENGTHS = [4096, 30000, 17, 1000, 250, 60000, 8, 12345]
CP_SIZE = 4
MULTIPLE = 2 * CP_SIZE


def main() -> None:
    """Run all checks; the exit code says whether they hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is available; --device cpu runs what needs none")
    name = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    print(json.dumps({**machine(), "device": name, "torch": torch.__version__}), flush=True)
    failed = False
    for figure in chain(pieces(device), assembly(device), parity(device)):
        print(json.dumps(figure), flush=True)
        failed |= not _within(figure)
    sys.exit(failed)


def parity(device: str) -> Iterator[Row]:
    """Compare loss and gradients of packed steps with unpacked ones."""
    cases = [("2 ranks that share the device, gloo", 2, gloo_packed, gloo_unpacked)]
    if device == "cuda":
        cases.insert(0, ("1 rank, nccl", 1, nccl_packed, nccl_unpacked))
    for case, num_ranks, packed, unpacked in cases:
        expected = _first(unpacked, num_ranks, num_ranks * NUM_MICROBATCHES, device)
        for scheduler in ("evenstep_balanced", "dp_balanced"):
            found = _first(packed, num_ranks, scheduler, device)
            pairs = list(zip(found["losses"], expected["losses"], strict=True))
            yield row(
                f"loss, {scheduler}: relative difference",
                case,
                max(abs(a - b) / b for a, b in pairs),
                target=1e-5,
                unit="ratio",
            )
            yield row(
                f"gradients, {scheduler}: largest difference / largest gradient",
                case,
                max(
                    abs(found["gradients"][key] - gradient).max() / abs(gradient).max()
                    for key, gradient in expected["gradients"].items()
                ),
                target=1e-3,  # the GPU sums in another order for other shapes
                unit="ratio",
            )


def pieces(device: str) -> Iterator[Row]:
    """Compare packs, slices and masks with the CPU's, and slices with Transformer Engine's."""
    on_cpu, on_device = _pack(torch.device("cpu")), _pack(torch.device(device))
    borders = on_cpu["cu_seqlens_padded"]
    wrong = {"pack": 0, "slices": 0, "padding mask": 0}
    for key in TOKEN_KEYS:
        wrong["pack"] += not torch.equal(on_cpu[key], on_device[key].cpu())
    for rank in range(CP_SIZE):
        there, here = (slice_for_cp(p, cp_size=CP_SIZE, cp_rank=rank) for p in (on_device, on_cpu))
        wrong["slices"] += sum(not torch.equal(there[k].cpu(), here[k]) for k in TOKEN_KEYS)
        masks = [
            padding_mask(
                on_cpu["cu_seqlens"].to(place), borders.to(place), cp_size=CP_SIZE, cp_rank=rank
            ).cpu()
            for place in (device, "cpu")
        ]
        wrong["padding mask"] += not torch.equal(*masks)
    for name, count in wrong.items():
        yield row(f"{name}: differences from the CPU's", device, count, target=0, unit="count")
    if device == "cuda":
        yield from _transformer_engine(borders)


def _transformer_engine(borders: torch.Tensor) -> Iterator[Row]:
    try:
        engine = importlib.import_module("transformer_engine_torch")
    except ImportError:
        return
    wrong = 0
    for rank in range(CP_SIZE):
        theirs = engine.thd_get_partitioned_indices(borders.cuda(), int(borders[-1]), CP_SIZE, rank)
        ours = zigzag_indices(borders, cp_size=CP_SIZE, cp_rank=rank)
        wrong += not torch.equal(theirs.cpu().to(torch.int64), ours)
    yield row("slices: ranks unlike Transformer Engine's", "cuda", wrong, target=0, unit="count")


def assembly(device: str) -> Iterator[Row]:
    """Time a pack whose samples lie on the device already."""
    place = torch.device(device)
    samples = [{k: v.to(place) for k, v in sample.items()} for sample in _samples()]
    padded = [int(sample["padded_seq_len"]) for sample in samples]
    assemble = partial(pack_microbatch, samples, original=LENGTHS, padded=padded)
    nbytes = sum(assemble()[key].nbytes for key in TOKEN_KEYS)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    seconds = {
        name: median_s(partial(_finished, work, device), repeats=20, warmups=3)
        for name, work in (("pack", assemble), ("copy", partial(target.copy_, source)))
    }
    yield row(
        "assemble a pack",
        f"{nbytes / 1e6:.1f} MB of {len(LENGTHS)} samples, {device}",
        seconds["pack"] * 1e3,
        target=None,
        unit="ms",
        copy_ms=float(f"{seconds['copy'] * 1e3:.3g}"),
    )


def gloo_packed(rank: int, num_ranks: int, scheduler: str, device: str) -> dict[str, Any]:
    """Take packed steps over the default Gloo group."""
    return packed_steps(rank, num_ranks, scheduler, Layout(dp=num_ranks), device)


def gloo_unpacked(rank: int, num_ranks: int, num_samples: int, device: str) -> dict[str, Any]:
    """Take unpacked steps on the first rank."""
    return unpacked_steps(rank, num_ranks, num_samples, device)


def nccl_packed(rank: int, num_ranks: int, scheduler: str, device: str) -> dict[str, Any]:
    """Take packed steps over NCCL groups."""
    _join_nccl(rank, num_ranks)
    return packed_steps(rank, num_ranks, scheduler, Layout(dp=num_ranks), device)


def nccl_unpacked(rank: int, num_ranks: int, num_samples: int, device: str) -> dict[str, Any]:
    """Take unpacked steps with NCCL groups."""
    _join_nccl(rank, num_ranks)
    return unpacked_steps(rank, num_ranks, num_samples, device)


def _join_nccl(rank: int, num_ranks: int) -> None:
    import torch.distributed as dist  # noqa: PLC0415 - the ranks', not the parent's

    dist.destroy_process_group()  # the harness's is Gloo
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),  # type: ignore[attr-defined]  # exported, if not by __all__
        rank=rank,
        world_size=num_ranks,
    )


def _first(function: Callable[..., dict[str, Any]], num_ranks: int, *args: object) -> Any:
    outcome = spawn(function, num_ranks, *args, deadline_s=240.0)[0]
    if outcome.error or outcome.exit_code != 0:
        raise RuntimeError(f"rank 0 failed ({outcome.exit_code}):\n{outcome.error}")
    return outcome.result


def _samples() -> list[dict[str, torch.Tensor]]:
    return [
        build_unpacked_sample(torch.arange(n), torch.arange(n) + 1, multiple=MULTIPLE)
        for n in LENGTHS
    ]


def _pack(place: torch.device) -> dict[str, torch.Tensor]:
    samples = _samples()
    padded = [int(sample["padded_seq_len"]) for sample in samples]
    return pack_microbatch(samples, original=LENGTHS, padded=padded, device=place)


def _finished(work: Callable[[], object], device: str) -> None:
    work()
    if device == "cuda":
        torch.cuda.synchronize()


def _within(figure: Mapping[str, Any]) -> bool:
    return figure["target"] is None or figure["value"] <= figure["target"]


if __name__ == "__main__":
    main()
