"""Fresh rank processes, for tests in which a rank crashes, hangs or leaves without cleaning up."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

CONTEXT = multiprocessing.get_context("spawn")  # fork copies threads' locks and Gloo's sockets

RankFunction = Callable[..., Any]

START_S = 300.0  # importing torch on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rank ended.

    Attributes:
        exit_code: The exit code of the process; negative for the signal that ended it.
        result: What the function returned; None if it did not return.
        error: The traceback of the exception that left the function; empty if none did.
        timed_out: Whether the rank was still running at the deadline and was killed then.
    """

    exit_code: int
    result: Any
    error: str
    timed_out: bool


def spawn(
    fn: RankFunction,
    world_size: int,
    *args: object,
    deadline_s: float = 60.0,
    cleanup: bool = True,
    group_timeout_s: float = 60.0,
) -> list[Outcome]:
    """Call `fn(rank, world_size, *args)` in fresh processes and wait until the last has ended.

    A rank that fails leaves its peers alone: how they take it is what such a test looks at.

    Args:
        fn: A function of a test module, so that the child can import it.
        world_size: Number of ranks; they share a Gloo default group.
        *args: Further arguments, picklable.
        deadline_s: Ranks that still run so long after all have started are killed and marked.
        cleanup: Destroy the process groups after `fn`; False leaves that to `fn` or to nobody.
        group_timeout_s: Timeout of the default group's collectives.

    Returns:
        One outcome per rank.
    """
    with rendezvous_file() as rendezvous:
        ranks = [
            start_process(
                _rank_main,
                Seat(rank, world_size, rendezvous, group_timeout_s),
                fn,
                args,
                cleanup,
                name=f"rank {rank}",
            )
            for rank in range(world_size)
        ]
        started = time.monotonic() + START_S
        for process, pipe in ranks:
            wait([pipe, process.sentinel], timeout=max(0.0, started - time.monotonic()))
            with contextlib.suppress(EOFError):
                pipe.poll() and pipe.recv()
        deadline = time.monotonic() + deadline_s
        return [_outcome(process, pipe, deadline) for process, pipe in ranks]


@contextlib.contextmanager
def rendezvous_file() -> Iterator[str]:
    """Yield the URL of a file, not yet there, where ranks of this machine can meet."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        yield (Path(folder) / "rendezvous").as_uri()


class Seat(NamedTuple):
    """Where a rank meets its peers."""

    rank: int
    world_size: int
    rendezvous: str
    timeout_s: float


def join_group(seat: Seat) -> None:
    """Enter the Gloo default group of this machine's ranks."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    # Ignored, and that is inherited, where the tests run as a shell's background job.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=seat.rendezvous,
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(seconds=seat.timeout_s),
    )


def start_process(
    target: Callable[..., None], *args: object, name: str
) -> tuple[BaseProcess, Connection]:
    """Start `target(pipe, *args)` and return the process with this side's end of the pipe."""
    ours, theirs = CONTEXT.Pipe()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when the child imports it
    process = CONTEXT.Process(target=target, args=(theirs, *args), name=name, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _rank_main(
    pipe: Connection, seat: Seat, fn: RankFunction, args: tuple[object, ...], cleanup: bool
) -> None:
    join_group(seat)
    pipe.send(None)  # the deadline counts from here: importing torch takes what it takes
    try:
        result = fn(seat.rank, seat.world_size, *args)
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        raise
    pipe.send((result, ""))
    if cleanup:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _outcome(process: BaseProcess, pipe: Connection, deadline: float) -> Outcome:
    result, error = None, ""
    left = max(0.0, deadline - time.monotonic())
    if pipe in wait([pipe, process.sentinel], timeout=left):
        with contextlib.suppress(EOFError):
            result, error = pipe.recv()
    process.join(timeout=max(0.0, deadline - time.monotonic()))
    timed_out = process.is_alive()
    if timed_out:
        process.kill()
        process.join()
    pipe.close()
    assert process.exitcode is not None
    return Outcome(exit_code=process.exitcode, result=result, error=error, timed_out=timed_out)
