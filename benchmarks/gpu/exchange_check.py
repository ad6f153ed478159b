"""Check on a single GPU, with world size 1, what a CPU cannot show of the exchange.

Run it where a GPU is at hand (`python benchmarks/gpu/exchange_check.py`). It prints one line per
check and exits 1 if one fails. With one rank no sample changes its rank, so the checks drive the
parts that samples pass through (`Payload`, `PayloadGroup`) with a plan in which rank 0 sends to
itself: the bytes are packed, go through NCCL or Gloo, and come back as views.
"""

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from evenstep.exchange import Moves, Patience, PayloadGroup
from evenstep.exchange.payload import Payload
from evenstep.exchange.payload_group import chunks
from evenstep.serialize import TensorSample, pack_samples, sample_layout, unpack_samples

CPU = torch.device("cpu")
CYCLES = 200_000_000  # that a kernel spins: some tenth of a second


def spin(cycles: int) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch's tests do so


def side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch


def samples(device: torch.device, count: int = 8) -> list[TensorSample]:
    return [
        {
            "ids": torch.arange(1000 + i, device=device),
            "pixels": torch.full((300 + i, 64), float(i), device=device),
            "mask": torch.arange(33 + i, device=device) % 3 == 0,
        }
        for i in range(count)
    ]


def moves_to_self(flats: list[TensorSample]) -> Moves:
    """Return a plan in which rank 0 sends all bytes to itself."""
    nbytes = sum(sample_layout(flat).nbytes for flat in flats)
    return Moves(
        kept=(),
        sends=((),),
        receives=((),),
        send_splits=(nbytes,),
        recv_splits=(nbytes,),
        shared=(False,),
        shift_peaks=(nbytes,),
        peak_total=nbytes,
        digest=b"",
    )


def payload_of(
    group: PayloadGroup, flats: list[TensorSample], device: torch.device | None = None
) -> Payload:
    layouts = [sample_layout(flat) for flat in flats]
    where = device or flats[0]["ids"].device  # type: ignore[union-attr] # a tensor, see samples
    return Payload(group, flats, layouts, moves_to_self(flats), device=where)


def expect_equal(received: torch.Tensor, flats: list[TensorSample]) -> None:
    """Raise unless `received` holds `flats`, read on the current stream."""
    layouts = [sample_layout(flat) for flat in flats]
    for got, wanted in zip(unpack_samples(received, layouts), flats, strict=True):
        for key, value in wanted.items():
            assert torch.equal(got[key], value), key  # type: ignore[arg-type] # tensors


def nccl_on_a_side_stream(gpu: torch.device, nccl: dist.ProcessGroup, _: dist.ProcessGroup) -> None:
    """The samples are written late on the current stream; packing must wait, and reading too."""
    group = PayloadGroup(nccl, stream=side_stream())
    flats = samples(gpu)
    spin(CYCLES)
    for flat in flats:
        flat["pixels"].add_(1)  # type: ignore[union-attr] # a tensor
    payload = payload_of(group, flats)
    payload.launch()
    received = payload.wait(Patience())
    assert received.device == gpu
    expect_equal(received, flats)


def computing_goes_on(gpu: torch.device, nccl: dist.ProcessGroup, _: dist.ProcessGroup) -> None:
    """A launch does not wait for what the current stream computes after the packing."""
    stream = side_stream()
    group = PayloadGroup(nccl, stream=stream)
    payload = payload_of(group, samples(gpu))
    torch.cuda.synchronize()
    spin(20 * CYCLES)
    computed = torch.cuda.current_stream().record_event()
    payload.launch()
    payload.settle(Patience())
    stream.synchronize()
    assert not computed.query(), "the transfer waited for the computation"
    payload.wait(Patience())


def received_memory_is_not_reused_early(
    gpu: torch.device, nccl: dist.ProcessGroup, _: dist.ProcessGroup
) -> None:
    """`record_stream`: memory that the current stream still reads is not given to the other."""
    stream = side_stream()
    group = PayloadGroup(nccl, stream=stream)
    flats = samples(gpu)
    payload = payload_of(group, flats)
    payload.launch()
    received = payload.wait(Patience())
    nbytes = received.numel()
    spin(CYCLES)
    copy = received.clone()  # late, on the current stream
    del received, payload
    with torch.cuda.stream(stream):
        for _again in range(8):
            torch.empty(nbytes, dtype=torch.uint8, device=gpu).fill_(255)
    expect_equal(copy, flats)


def host_samples_over_nccl(_: torch.device, nccl: dist.ProcessGroup, __: dist.ProcessGroup) -> None:
    group = PayloadGroup(nccl, stream=side_stream())
    flats = samples(CPU)
    payload = payload_of(group, flats)
    payload.launch()
    received = payload.wait(Patience())
    assert received.device == CPU
    assert received.is_pinned()
    expect_equal(received, flats)


def device_samples_over_gloo(
    gpu: torch.device, _: dist.ProcessGroup, gloo: dist.ProcessGroup
) -> None:
    group = PayloadGroup(gloo, stream=side_stream())
    flats = samples(gpu)
    spin(CYCLES)
    for flat in flats:
        flat["pixels"].add_(1)  # type: ignore[union-attr] # a tensor
    payload = payload_of(group, flats)
    buffers = payload._sent, payload._received  # noqa: SLF001 - nothing else shows where they are
    assert all(buffer.is_pinned() for buffer in buffers)
    payload.launch()
    received = payload.wait(Patience())
    assert received.device == gpu
    expect_equal(received, flats)


def chunks_over_nccl(gpu: torch.device, nccl: dist.ProcessGroup, _: dist.ProcessGroup) -> None:
    group = PayloadGroup(nccl, chunk_bytes=4096)
    flats = samples(gpu)
    assert len([*chunks(moves_to_self(flats), 0, 4096)]) > 100
    payload = payload_of(group, flats)
    payload.launch()
    expect_equal(payload.wait(Patience()), flats)


def a_worker_thread_uses_the_right_device(
    gpu: torch.device, nccl: dist.ProcessGroup, _: dist.ProcessGroup
) -> None:
    """A worker packs, under its own device; the calling thread launches and reads."""
    group = PayloadGroup(nccl, stream=side_stream())
    flats = samples(gpu)
    made: list[Payload] = []

    def work() -> None:
        with torch.cuda.device(gpu):
            made.append(payload_of(group, flats))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    made[0].launch()
    expect_equal(made[0].wait(Patience()), flats)


def packing_on_the_device_equals_packing_on_the_host(
    gpu: torch.device, _: dist.ProcessGroup, __: dist.ProcessGroup
) -> None:
    assert torch.equal(pack_samples(samples(gpu)).cpu(), pack_samples(samples(CPU)))


CHECKS: tuple[Callable[[torch.device, dist.ProcessGroup, dist.ProcessGroup], None], ...] = (
    nccl_on_a_side_stream,
    computing_goes_on,
    received_memory_is_not_reused_early,
    host_samples_over_nccl,
    device_samples_over_gloo,
    chunks_over_nccl,
    a_worker_thread_uses_the_right_device,
    packing_on_the_device_equals_packing_on_the_host,
)


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    gpu = torch.device("cuda", 0)
    torch.cuda.set_device(gpu)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl", init_method=(Path(folder) / "rendezvous").as_uri(), rank=0, world_size=1
        )
        nccl, gloo = dist.new_group(backend="nccl"), dist.new_group(backend="gloo")
        assert isinstance(nccl, dist.ProcessGroup)
        assert isinstance(gloo, dist.ProcessGroup)
        for check in CHECKS:
            try:
                check(gpu, nccl, gloo)
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - the other checks shall run, too
                failed += 1
                print(f"FAILED {check.__name__}: {type(error).__name__}: {error}")
            else:
                print(f"ok     {check.__name__}")
        dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
