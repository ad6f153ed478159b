"""Check on a single GPU what a CPU cannot show of the reorder buffer's overlap.

Run it where a GPU is at hand (`python benchmarks/gpu/reorder_check.py`). It prints the machine, one
line of JSON per figure and one per check, and exits 1 if a check fails. With world size 1 no sample
changes its rank, so this checks threads, streams and memory; NCCL between GPUs needs several.
"""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks._report import machine, row
from evenstep.exchange import ModuleGroups
from evenstep.reorder_buffer import ReorderingBuffer, batch_to_cuda

SAMPLES, LENGTH, WIDTH = 16, 2048, 1176
WINDOWS = 12
MODES: dict[str, dict[str, Any]] = {
    "in line": {"overlap": False},
    "worker launches": {"overlap": True, "launch": "worker"},
    "caller launches": {"overlap": True, "launch": "caller"},
}


def microbatch(number: int) -> dict[str, Any]:
    """Return a micro-batch whose every element tells where it belongs."""
    rows = torch.arange(number * SAMPLES, (number + 1) * SAMPLES)
    return {
        "input_ids": rows.view(-1, 1).repeat(1, LENGTH),
        "features": rows.view(-1, 1, 1).repeat(1, 64, WIDTH).float(),
    }


def cost_of(flat: dict[str, Any], /) -> float:
    return float(int(flat["features"].flatten()[0].item()) * 7919 % 101) + 1


def expected(found: dict[str, Any]) -> bool:
    """Return whether a micro-batch's fields agree in all elements."""
    first = found["input_ids"][:, :1]
    whole = (found["input_ids"] == first).all() & (found["features"] == first.unsqueeze(2)).all()
    return bool(whole)


@contextmanager
def buffer(
    made: ModuleGroups, mode: str, *, on_gpu: bool, windows: int = WINDOWS
) -> Iterator[ReorderingBuffer[Any]]:
    def source() -> Iterator[dict[str, Any]]:
        for number in range(windows):
            batch = microbatch(number)
            yield batch_to_cuda(batch) if on_gpu else batch

    with ReorderingBuffer(
        source(),
        dp_rank=made.rank,
        dp_size=made.world_size,
        n_groups=4,
        cost_of=cost_of,
        dp_group_gloo=made.control,
        dp_group_nccl=made.payload,
        **MODES[mode],
    ) as balanced:
        yield balanced


def computing(milliseconds: float) -> None:
    """Keep the current stream busy, without the host."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch's tests do so


def arrives_whole(made: ModuleGroups, mode: str, *, on_gpu: bool) -> bool:
    """All micro-batches are right while the stream that uses them is busy and memory is reused."""
    verdicts = []
    with buffer(made, mode, on_gpu=on_gpu) as balanced:
        for batch in balanced:
            computing(5)
            moved = batch_to_cuda(batch)
            del batch
            verdicts.append(expected(moved))
            torch.empty(1 << 24, device="cuda").fill_(-1.0)  # takes what was freed too early
    torch.cuda.synchronize()
    return len(verdicts) == WINDOWS and all(verdicts)


def host_does_not_wait(made: ModuleGroups, mode: str) -> bool:
    """`next()` returns while the current stream is still busy."""
    with buffer(made, mode, on_gpu=True) as balanced:
        for _ in range(3):
            next(balanced)
        torch.cuda.synchronize()
        time.sleep(0.5)  # the worker is as far ahead as it may be
        busy = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        computing(500)
        busy.record()
        next(balanced)
        return not busy.query()  # type: ignore[no-untyped-call]  # untyped in torch


def worker_stays_off_the_stream(made: ModuleGroups, mode: str) -> bool:
    """The worker packs the next window while the current stream is busy."""
    with buffer(made, mode, on_gpu=True) as balanced:
        next(balanced)
        next(balanced)
        torch.cuda.synchronize()
        time.sleep(0.5)  # the worker is as far ahead as it may be
        before = balanced.resident_bytes
        computing(1000)
        next(balanced)
        started = time.perf_counter()
        while balanced.resident_bytes < before and time.perf_counter() < started + 0.7:
            time.sleep(0.01)
        return time.perf_counter() < started + 0.7


def ends_clean(made: ModuleGroups, mode: str) -> bool:
    with buffer(made, mode, on_gpu=True, windows=50) as balanced:
        next(balanced)
    names = [thread.name for thread in threading.enumerate()]
    return not any(name.startswith("evenstep") for name in names)


def waited_ms(made: ModuleGroups, mode: str, *, on_gpu: bool) -> float:
    """Return the host's mean wait in `next()`, with 100 ms of simulated computation."""
    waits = []
    with buffer(made, mode, on_gpu=on_gpu) as balanced:
        for _ in range(WINDOWS - 2):
            started = time.perf_counter()
            next(balanced)
            waits.append(time.perf_counter() - started)
            time.sleep(0.1)
    return 1e3 * sum(waits[3:]) / len(waits[3:])


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing to check")
        return 0
    print(json.dumps({**machine(), "gpu": torch.cuda.get_device_name()}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        url = (Path(folder) / "rendezvous").as_uri()
        dist.init_process_group("nccl", init_method=url, rank=0, world_size=1)
        world = dist.group.WORLD
        assert isinstance(world, dist.ProcessGroup)
        failed = 0
        with ModuleGroups.create(world, overlap=True) as made:
            for mode in MODES:
                for name, passed in checks(made, mode):
                    print(json.dumps({"check": name, "mode": mode, "passed": passed}), flush=True)
                    failed += not passed
            for place in ("host", "gpu"):
                times = {mode: waited_ms(made, mode, on_gpu=place == "gpu") for mode in MODES}
                for mode in [*MODES][1:]:
                    ratio = times[mode] / times["in line"]
                    figure = "waiting in next(), overlap / in line"
                    case = f"samples on the {place}, {mode}"
                    print(json.dumps(row(figure, case, ratio, target=0.05, unit="ratio")))
        dist.destroy_process_group()
    return min(failed, 1)


def checks(made: ModuleGroups, mode: str) -> Iterator[tuple[str, bool]]:
    """Yield the name of each check and whether it passes."""
    tests: dict[str, Callable[[], bool]] = {
        "arrives whole, samples on the host": lambda: arrives_whole(made, mode, on_gpu=False),
        "arrives whole, samples on the GPU": lambda: arrives_whole(made, mode, on_gpu=True),
        "ends clean": lambda: ends_clean(made, mode),
    }
    if mode != "in line":
        tests["the host does not wait"] = lambda: host_does_not_wait(made, mode)
        tests["the worker stays off the stream"] = lambda: worker_stays_off_the_stream(made, mode)
    for name, test in tests.items():
        yield name, test()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    sys.exit(main())
