"""What happened in one window, as a value: loads, moves, bytes and times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import fsum
from typing import TypeAlias

from evenstep.balance import window_cost_spread

__all__ = ["OnWindow", "SlotLoads", "WindowSeconds", "WindowStats", "plan_stats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLoads:
    """Loads of the ranks in one micro-batch, in units of the cost function.

    Attributes:
        before_max: Largest load of a rank as the samples were read.
        before_min: Smallest.
        before_mean: Mean; no plan that keeps samples in their slot gets the largest below it.
        after_max: Largest load of a rank as the samples are computed.
        after_min: Smallest.
        after_mean: Mean; differs from `before_mean` only if samples change their slot.
        moved_samples: Samples read into this slot that leave their rank.
    """

    before_max: float
    before_min: float
    before_mean: float
    after_max: float
    after_min: float
    after_mean: float
    moved_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSeconds:
    """Where this rank's time went; under overlap most of it beside the computation.

    Each is the time a thread of the host spent, no part counted twice, except `wait`. On CUDA
    work is only launched in that time, and a stream goes on with it.

    Attributes:
        collect: Reading the micro-batches from the loader.
        cost: Cutting them into samples and computing costs.
        control: Agreeing with the peers and planning; it includes waiting for the slowest rank.
        pack: Deriving who sends what, and packing it.
        transfer: Launching the collective and waiting for its bytes.
        merge: Joining samples to micro-batches.
        wait: How long `next()` kept the training loop. Without overlap it contains all others.
    """

    collect: float = 0.0
    cost: float = 0.0
    control: float = 0.0
    pack: float = 0.0
    transfer: float = 0.0
    merge: float = 0.0
    wait: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStats:
    """One window on one rank. Loads and shares are equal on all ranks; bytes and times are its own.

    Attributes:
        window: Number of the window in the epoch, from 0.
        dp_rank: The rank that measured.
        dp_size: Number of ranks.
        slots: Loads of each micro-batch of the window.
        samples: Samples of the window over all ranks.
        moved_cost_share: Share of the window's cost that leaves its rank, 0 to 1.
        bytes_sent: Bytes that this rank sends to others.
        bytes_received: Bytes that it gets from others.
        seconds: Where this rank's time went.
    """

    window: int
    dp_rank: int
    dp_size: int
    slots: tuple[SlotLoads, ...]
    samples: int
    moved_cost_share: float
    bytes_sent: int
    bytes_received: int
    seconds: WindowSeconds

    @property
    def moved_sample_share(self) -> float:
        """Share of the window's samples that leave their rank, 0 to 1."""
        return sum(slot.moved_samples for slot in self.slots) / self.samples

    @property
    def imbalance_before(self) -> float:
        """Largest load over mean load as read, where every micro-batch synchronises; at least 1."""
        return _ratio([s.before_max for s in self.slots], [s.before_mean for s in self.slots])

    @property
    def imbalance_after(self) -> float:
        """Largest load over mean load as computed."""
        return _ratio([s.after_max for s in self.slots], [s.after_mean for s in self.slots])

    def scalars(self) -> dict[str, float]:
        """Return the figures worth a curve, by name; `..._s` are seconds."""
        seconds = {f"{f.name}_s": getattr(self.seconds, f.name) for f in fields(self.seconds)}
        return {
            "imbalance_before": self.imbalance_before,
            "imbalance_after": self.imbalance_after,
            "moved_cost_share": self.moved_cost_share,
            "moved_sample_share": self.moved_sample_share,
            "bytes_sent": float(self.bytes_sent),
            "bytes_received": float(self.bytes_received),
            **seconds,
        }

    def __str__(self) -> str:
        """Return one line for a log."""
        times = ", ".join(
            f"{f.name} {getattr(self.seconds, f.name) * 1e3:.1f}" for f in fields(self.seconds)
        )
        return (
            f"window {self.window}: largest / mean load {self.imbalance_before:.3f} -> "
            f"{self.imbalance_after:.3f}; moved {self.moved_cost_share:.1%} of the cost and "
            f"{self.moved_sample_share:.1%} of {self.samples} samples; rank {self.dp_rank} sent "
            f"{self.bytes_sent / 1e6:.1f} MB, received {self.bytes_received / 1e6:.1f} MB; ms: "
            f"{times}"
        )


OnWindow: TypeAlias = Callable[[WindowStats], object]
"""Gets the statistics of each window as it is served, in the thread that calls `next()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStats:
    """The part of `WindowStats` that follows from costs and plan.

    Attributes:
        slots: As in `WindowStats`.
        samples: As in `WindowStats`.
        moved_cost_share: As in `WindowStats`.
    """

    slots: tuple[SlotLoads, ...]
    samples: int
    moved_cost_share: float


def plan_stats(
    costs_per_slot: Sequence[Sequence[float]],
    route: Sequence[tuple[int, int, int]],
    dp_size: int,
) -> PlanStats:
    """Return what a route does to the loads.

    Args:
        costs_per_slot: Cost per sample of every slot, by slot-local position.
        route: `(dst_slot, owner_rank, canonical_pos)` per window-global index.
        dp_size: Number of ranks.

    Raises:
        ValueError: As `window_cost_spread`.
    """
    spreads = window_cost_spread(costs_per_slot, route, dp_size)
    costs = [cost for slot in costs_per_slot for cost in slot]
    after: list[list[float]] = [[] for _ in costs_per_slot]
    moved: list[float] = []
    per_slot = len(costs_per_slot[0]) if costs_per_slot else 0
    for index, (cost, (dst_slot, owner, _)) in enumerate(zip(costs, route, strict=True)):
        after[dst_slot].append(cost)
        if owner != index % per_slot * dp_size // per_slot:
            moved.append(cost)
    total = fsum(costs)
    return PlanStats(
        slots=tuple(
            SlotLoads(
                before_max=spread["before_max"],
                before_min=spread["before_min"],
                before_mean=fsum(slot_costs) / dp_size,
                after_max=spread["after_max"],
                after_min=spread["after_min"],
                after_mean=fsum(after_costs) / dp_size,
                moved_samples=int(spread["remote"]),
            )
            for spread, slot_costs, after_costs in zip(spreads, costs_per_slot, after, strict=True)
        ),
        samples=len(costs),
        moved_cost_share=fsum(moved) / total if total else 0.0,
    )


def _ratio(largest: Sequence[float], means: Sequence[float]) -> float:
    mean = fsum(means)
    return max(1.0, fsum(largest) / mean) if mean else 1.0
