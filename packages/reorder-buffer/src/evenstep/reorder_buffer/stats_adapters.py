"""Where statistics can go: TensorBoard, any `log(dict, step)` function, a file, several of these.

Nothing is imported for it: whatever has the methods will do.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from evenstep.reorder_buffer.stats import OnWindow, SlotLoads, WindowSeconds, WindowStats

__all__ = ["StatsFile", "on_every", "read_stats", "to_log", "to_tensorboard"]


class ScalarWriter(Protocol):
    """What TensorBoard's `SummaryWriter` has."""

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, /
    ) -> object:
        """Add a point to a curve."""
        ...


class LogFunction(Protocol):
    """What `wandb.log` is, and many a logger's `log_metrics`."""

    def __call__(self, scalars: dict[str, float], step: int, /) -> object:
        """Log scalars at a step."""
        ...


def to_tensorboard(writer: ScalarWriter, *, prefix: str = "evenstep/") -> OnWindow:
    """Return a callback that adds each window's scalars to a `SummaryWriter`.

    The step is a running number of windows, which goes on over epochs.
    """

    def add(scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return to_log(add, prefix=prefix)


def to_log(log: LogFunction, *, prefix: str = "evenstep/") -> OnWindow:
    """Return a callback that calls `log({"evenstep/...": value}, step)` for each window.

    The step is a running number of windows, which goes on over epochs. For Weights & Biases, whose
    steps are the training loop's, drop it: `to_log(lambda scalars, step: run.log(scalars))`.
    """
    first = step = 0

    def on_window(stats: WindowStats) -> None:
        nonlocal first, step
        if first + stats.window < step:  # another epoch
            first = step
        step = first + stats.window + 1
        log({prefix + name: value for name, value in stats.scalars().items()}, step - 1)

    return on_window


def on_every(*callbacks: OnWindow) -> OnWindow:
    """Return a callback that calls several, in order."""

    def on_window(stats: WindowStats) -> None:
        for callback in callbacks:
            callback(stats)

    return on_window


class StatsFile:
    """A callback that appends each window's statistics to a file, one JSON object per line.

    Give every rank a file of its own. A line is written at once, so a crash loses none.

    Args:
        path: The file; its folder must exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __call__(self, stats: WindowStats) -> None:
        """Append one line."""
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(stats)) + "\n")


def read_stats(*paths: str | Path) -> list[WindowStats]:
    """Return what `StatsFile` wrote, file by file.

    Raises:
        ValueError: If a line is no statistics, naming file and line.
    """
    read = []
    for path in paths:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            try:
                read.append(_from_dict(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{path}, line {number} is no window of StatsFile: {error}"
                ) from error
    return read


def _from_dict(fields: Mapping[str, object]) -> WindowStats:
    made = dict(fields)
    slots, seconds = made.pop("slots"), made.pop("seconds")
    build: Callable[..., WindowStats] = WindowStats  # it checks the names, as JSON cannot
    return build(
        slots=tuple(SlotLoads(**slot) for slot in slots),  # type: ignore[attr-defined]  # checked above
        seconds=WindowSeconds(**seconds),  # type: ignore[arg-type]  # likewise
        **made,
    )
