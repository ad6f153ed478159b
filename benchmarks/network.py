"""Time `exchange_window` between two hosts on a slow link, LPT against least-move.

The hosts are network namespaces of this machine, joined by a virtual cable whose rate is limited
in both directions; each runs two ranks. That takes Linux, root, and the programs `ip` and `tc`;
where one is missing, the benchmark says so and prints no figure.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import Row, report, row
from benchmarks.exchange import CASES, Bench
from tests.harness.processes import Seat, join_group

RANKS_PER_HOST = 2
HOSTS = 2
LINK_MBIT_S = 1000
ROUNDS = 5
CASE = CASES[0]


def hosts() -> list[str]:
    """Return names of namespaces that no other process uses."""
    return [f"evenstep-{os.getpid()}-{host}" for host in range(HOSTS)]


def device(host: int) -> str:
    return f"even{os.getpid() % 100000}h{host}"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Make two namespaces with a cable between them, and remove both in the end."""
    names = hosts()
    with contextlib.ExitStack() as cleanup:
        for name in names:
            run("ip", "netns", "add", name)
            cleanup.callback(run, "ip", "netns", "delete", name)
        run("ip", "link", "add", device(0), "type", "veth", "peer", "name", device(1))
        for host, name in enumerate(names):
            inside = partial(run, "ip", "netns", "exec", name)
            run("ip", "link", "set", device(host), "netns", name)
            inside("ip", "address", "add", f"10.77.0.{host + 1}/24", "dev", device(host))
            inside("ip", "link", "set", device(host), "up")
            inside("ip", "link", "set", "lo", "up")
            shape = f"rate {LINK_MBIT_S}mbit burst 256kb latency 100ms".split()
            inside("tc", "qdisc", "add", "dev", device(host), "root", "tbf", *shape)
        yield names


def rank_main(rank: int, rendezvous: str) -> None:
    """Be one rank; rank 0 prints the seconds of every round as JSON."""
    import torch.distributed as dist  # noqa: PLC0415 - takes seconds, and the parent does without

    join_group(Seat(rank, HOSTS * RANKS_PER_HOST, rendezvous, 300.0))
    bench = Bench(rank, HOSTS * RANKS_PER_HOST, CASE)
    seconds: dict[str, list[float]] = {name: [] for name in CASE.targets}
    for _ in range(ROUNDS + 1):
        for name, values in seconds.items():
            values.append(bench.timed(partial(bench.window, name)).seconds)
    if rank == 0:
        print(json.dumps({name: values[1:] for name, values in seconds.items()}), flush=True)
    dist.destroy_process_group()


def start_rank(rank: int, host: str, rendezvous: str) -> "subprocess.Popen[str]":
    program = [sys.executable, __file__, "--rank", str(rank), rendezvous]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *program],
        env={**os.environ, "GLOO_SOCKET_IFNAME": device(rank // RANKS_PER_HOST)},
        stdout=subprocess.PIPE,
        text=True,
    )


def seconds_by_strategy() -> dict[str, list[float]]:
    """Run the ranks on the two hosts and return what rank 0 measured."""
    with two_hosts() as names, tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        ranks = [
            start_rank(rank, names[rank // RANKS_PER_HOST], rendezvous)
            for rank in range(HOSTS * RANKS_PER_HOST)
        ]
        try:
            told, _ = ranks[0].communicate(timeout=600)
            for process in ranks:
                if process.wait(timeout=60):
                    raise RuntimeError(f"a rank ended with exit code {process.returncode}")
        finally:
            for process in ranks:
                process.kill()
    result: dict[str, list[float]] = json.loads(told.splitlines()[-1])
    return result


def figures() -> Iterator[Row]:
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if sys.platform != "linux" or os.geteuid() != 0 or missing:
        print(f"skipped: this takes Linux, root, and ip and tc (missing: {missing})")
        return
    try:
        seconds = seconds_by_strategy()
    except subprocess.CalledProcessError as error:
        print(f"skipped: {' '.join(error.cmd)} failed: {error.stderr.strip()}")
        return
    case = f"{CASE.name}, {HOSTS} hosts x {RANKS_PER_HOST} ranks, {LINK_MBIT_S} Mbit/s"
    for name, values in seconds.items():
        yield row(
            f"exchange_window, {name}", case, statistics.median(values), target=None, unit="s"
        )
    pairs = zip(seconds["least_move"], seconds["lpt"], strict=True)
    yield row(
        "least_move / lpt",
        case,
        statistics.median([least / lpt for least, lpt in pairs]),
        target=None,
        unit="ratio",
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]), sys.argv[3])
    else:
        report(__doc__ or "", figures)
