"""How every benchmark here speaks: a line for the machine, then one line of JSON per figure.

A benchmark is a script (`python benchmarks/NAME.py`); it puts the project's root on `sys.path`
first, so that scripts and tests alike import `benchmarks._report` and `benchmarks.workloads`:

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from benchmarks.workloads import TRACES_VARIABLE, traces_folder

Row: TypeAlias = Mapping[str, object]
"""One figure: `figure`, `case`, `value`, `target`, `unit`, and whatever else helps to read it."""


def row(
    figure: str, case: str, value: float, *, target: float | None, unit: str, **extra: object
) -> Row:
    """Return one figure, its value rounded to five digits.

    Args:
        figure: What is measured.
        case: On which input.
        value: The measurement, a median of at least five where it is a time.
        target: The value that it should not exceed; None where the figure only informs.
        unit: Unit of `value` and `target` ("ms", "MB", "ratio", ...).
        extra: Further keys of the line.
    """
    return {
        "figure": figure,
        "case": case,
        "value": float(f"{value:.5g}"),
        "target": target,
        "unit": unit,
        **extra,
    }


def median_s(
    work: Callable[[], object],
    *,
    repeats: int = 5,
    warmups: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the median seconds of `repeats` calls, after `warmups` unmeasured ones.

    Args:
        work: What to measure.
        repeats: Measured calls.
        warmups: Calls before those.
        clock: `time.process_time` counts the processor time of this process instead: for planning
            on one thread, so that other work on the machine counts less.
    """
    for _ in range(warmups):
        work()
    seconds = []
    for _ in range(repeats):
        start = clock()
        work()
        seconds.append(clock() - start)
    return statistics.median(seconds)


def machine() -> Row:
    """Return what a figure cannot be read without: processor, cores, Python and commit."""
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "uncommitted": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def report(description: str, *sources: Callable[[], Iterable[Row]]) -> None:
    """Read the command line, then print the machine and every figure as soon as it is measured.

    Args:
        description: The benchmark's docstring, for `--help`.
        sources: Functions that yield figures, in the order to run them.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--traces",
        type=Path,
        default=traces_folder(),
        help=f"folder of the traces (default: ../shared/traces, or ${TRACES_VARIABLE})",
    )
    traces = parser.parse_args().traces.resolve()
    if not traces.is_dir():
        parser.error(
            f"the traces' folder {traces} is missing; pass --traces FOLDER or set {TRACES_VARIABLE}"
        )
    os.environ[TRACES_VARIABLE] = str(traces)  # spawned ranks read it too
    print(json.dumps(machine()), flush=True)
    for source in sources:
        for figure in source():
            print(json.dumps(figure), flush=True)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    """Return what git prints, or nothing where there is no git or no repository."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
