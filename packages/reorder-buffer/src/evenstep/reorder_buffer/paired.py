"""Whether modules on other ranks derive the same order, asked once in a while."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist

from evenstep.exchange import MismatchError, Patience, SampleExchange, Setting

__all__ = ["PairedCheck", "PairedModules", "PairedOrderError"]


class PairedOrderError(MismatchError):
    """Paired modules came to different orders, so sample i of one is not sample i of the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedCheck:
    """A check that paired modules (an encoder and a language model, say) agree about the order.

    Modules on disjoint ranks, each with a DP size of its own, derive the same order from the same
    costs without talking. This makes sure of it: settings once, at construction, and a digest of
    costs and order for the first and then each `every`-th window, and at the end of the data.

    All ranks of `group` take part, in the same windows. Under overlap that happens in the worker;
    without, a module waits in `next()` until the others plan the same window, so it must not be
    needed for them to get there.

    Attributes:
        group: A Gloo group that nobody else uses, of the ranks of all paired modules, or of at
            least one of each.
        every: Windows from one check to the next.

    Raises:
        ValueError: If `every` is not positive.
    """

    group: dist.ProcessGroup
    every: int = 100

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every is {self.every!r}; it must be a positive number of windows")


class PairedModules:
    """The check of one buffer; see `PairedCheck`.

    Args:
        check: What to do; None does nothing.
        patience: How long to wait for the other modules.
    """

    def __init__(self, check: PairedCheck | None, patience: Patience) -> None:
        self._check = check
        self._patience = patience

    def compare_settings(self, settings: Mapping[str, Setting]) -> None:
        """Compare what paired modules must have set alike.

        Raises:
            MismatchError: On all ranks, naming the first setting that differs, ranks and values.
        """
        if self._check is not None:
            self._compare({**settings, "paired.every": self._check.every})

    def is_due(self, window: int) -> bool:
        """Whether this window is one to compare."""
        return self._check is not None and window % self._check.every == 0

    def compare_window(
        self,
        window: int,
        costs_per_slot: Sequence[Sequence[float]],
        route: Sequence[tuple[int, int, int]],
    ) -> None:
        """Compare a window's costs and order; see `is_due`.

        Args:
            window: Number of the window.
            costs_per_slot: Cost per sample of every slot, by slot-local position.
            route: `(dst_slot, owner_rank, canonical_pos)` per window-global index.

        Raises:
            PairedOrderError: On all ranks, if they differ.
        """
        sizes = [len(slot) for slot in costs_per_slot]
        self._compare_order(window, sizes, _costs(costs_per_slot), _order(route))

    def compare_end(self, window: int) -> None:
        """Compare at which window the data has ended.

        Raises:
            PairedOrderError: On all ranks, if others have this window, or ended before.
        """
        if self._check is not None:
            self._compare_order(window, [], "none: its data has ended", "none")

    def _compare_order(self, window: int, sizes: list[int], costs: str, order: str) -> None:
        told: dict[str, Setting] = {
            "1 window": window,
            "2 samples per micro-batch": str(sizes),
            "3 costs": costs,
            "4 order": order,
        }
        try:
            self._compare(told)
        except MismatchError as error:
            raise PairedOrderError(
                f"paired modules differ in window {window}: {error}. Ranks are those of the paired "
                "group. Different costs: cost_of must depend only on what all modules hold "
                "(count image tokens of input_ids, not patches); different samples: their loaders "
                "must read the same data; equal costs and another order: one version of evenstep"
            ) from error

    def _compare(self, values: Mapping[str, Setting]) -> None:
        assert self._check is not None
        group = self._check.group
        SampleExchange(
            rank=dist.get_rank(group),
            world_size=dist.get_world_size(group),
            control_group=group,
            payload_group=group,
            settings=values,
            patience=self._patience,
        ).compare_settings()


def _costs(costs_per_slot: Sequence[Sequence[float]]) -> str:
    return _digest(array("d", chain.from_iterable(costs_per_slot)))


def _order(route: Sequence[tuple[int, int, int]]) -> str:
    """Return a digest of slots and canonical positions; owners differ with the DP size."""
    places = chain.from_iterable((slot, position) for slot, _, position in route)
    return _digest(array("q", places))


def _digest(values: "array[float] | array[int]") -> str:
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
