"""The state of a run: what was served, in a dict that a checkpoint can hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from evenstep.exchange import Setting
from evenstep.reorder_buffer.reader import ReaderPlace
from evenstep.reorder_buffer.source import WindowSpan

__all__ = ["Bookmark", "Progress", "StateDict", "begin_next_pass", "decode_state", "encode_state"]

StateDict: TypeAlias = dict[str, Any]
"""A state as torch's checkpoints take it: plain values and tensors, and the loader's own."""

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the training loop has come in one pass.

    Attributes:
        place: The start of the window that is being served.
        served: Micro-batches of that window that were served.
        behind: Micro-batches of the pass that were served, equal on all ranks.
        last: Whether no window follows, on any rank; then `place` is where reading has ended.
        ended: Whether the loop has seen the end of the pass, too.
    """

    place: ReaderPlace
    served: int = 0
    behind: int = 0
    last: bool = False
    ended: bool = False

    def describe(self) -> str:
        """Return in words what must be equal on all ranks that resume."""
        return f"{self.behind} micro-batches{' and the end' if self.last else ''}"


def encode_state(progress: Progress, *, dp_rank: int, settings: Mapping[str, Setting]) -> StateDict:
    """Return the dict for a checkpoint of this rank."""
    return {
        "version": _VERSION,
        "dp_rank": dp_rank,
        "settings": dict(settings),
        "place": {field: getattr(progress.place, field) for field in ReaderPlace.__slots__},
        "served": progress.served,
        "behind": progress.behind,
        "last": progress.last,
        "ended": progress.ended,
    }


def decode_state(
    state: Mapping[str, Any], *, dp_rank: int, settings: Mapping[str, Setting]
) -> Progress:
    """Return how far the saved run had come.

    Args:
        state: What `encode_state` returned.
        dp_rank: This rank.
        settings: Those of now, which must be those of then.

    Raises:
        ValueError: If the state is none, or of another version, or a setting has changed; naming
            it, with both values.
    """
    version = state.get("version")
    if version != _VERSION:
        raise ValueError(
            f"the state has version {version!r}, and this release reads version {_VERSION}; pass "
            "what state_dict() returned, unchanged"
        )
    for name, saved in state["settings"].items():
        if settings.get(name) != saved:
            raise ValueError(
                f"{name} is {settings.get(name)!r}, but the state was saved with {saved!r}; the "
                "samples would come in another order, so resume with the settings of then, or "
                "start the epoch anew"
            )
    place = ReaderPlace(**state["place"])
    own = place.loader is not None or place.generator is not None
    if own and state["dp_rank"] != dp_rank:
        raise ValueError(
            f"dp_rank is {dp_rank}, but the state was saved by rank {state['dp_rank']}; it holds "
            "the place of that rank's loader, so every rank must save and load its own"
        )
    return Progress(
        place=place,
        served=state["served"],
        behind=state["behind"],
        last=state["last"],
        ended=state["ended"],
    )


def begin_next_pass(state: Mapping[str, Any]) -> StateDict:
    """Return the state of a pass's end as that of the next pass's beginning; another as it is."""
    if not state.get("ended"):
        return dict(state)
    place = state["place"]
    # A loader that another rank's end kept from its own cannot return behind it; it begins anew.
    loader = place["loader"] if place["exhausted"] else None
    place = {**place, "batches_read": 0, "exhausted": False, "loader": loader}
    return {**state, "ended": False, "last": False, "behind": 0, "served": 0, "place": place}


class Bookmark:
    """Follows the training loop through one pass, so that it can be told where it is."""

    def __init__(self) -> None:
        self._start: Progress | None = None
        self._span: WindowSpan | None = None
        self._size = 0
        self._last = False
        self._served = 0
        self._behind = 0
        self._end: ReaderPlace | None = None

    @property
    def begun(self) -> bool:
        """Whether the pass has begun."""
        return self._start is not None

    def begin(self, start: Progress) -> None:
        """Begin the pass, at its beginning or where an earlier run was."""
        self._start = start
        self._behind = start.behind

    def enter(self, span: WindowSpan, size: int, *, last: bool) -> int:
        """Begin a window of `size` micro-batches; return how many an earlier run has served.

        Args:
            span: The part of this rank's data that it was made from.
            size: Its micro-batches.
            last: Whether no window follows.

        Raises:
            ValueError: If it served more than there are.
        """
        assert self._start is not None
        self._served = self._start.served if self._span is None else 0
        if self._served >= size:
            raise ValueError(
                f"window {span.number} has {size} micro-batches, but the saved run was served "
                f"{self._served} of it; the data is not that of the saved run"
            )
        self._span, self._size, self._last = span, size, last
        return self._served

    def serve(self) -> None:
        """Count a micro-batch of the window."""
        self._served += 1
        self._behind += 1

    def finish(self, end: ReaderPlace) -> None:
        """Note that the training loop has seen the end of the pass."""
        self._end = end

    def progress(self) -> Progress:
        """Return where the training loop is; the pass must have begun."""
        assert self._start is not None
        if self._end is not None:
            return Progress(place=self._end, behind=self._behind, last=True, ended=True)
        if self._span is None:
            return self._start
        if self._served == self._size:
            return Progress(place=self._span.end, behind=self._behind, last=self._last)
        return Progress(place=self._span.start, served=self._served, behind=self._behind)
