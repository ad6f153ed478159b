"""The errors of the exchange, all of one class; peers raise theirs in the same round."""

from collections.abc import Sequence


class ExchangeError(RuntimeError):
    """Base class of what this package raises once ranks talk to each other."""


class PeerFailedError(ExchangeError):
    """Another rank reported an exception of its own, and this round has ended for all.

    The rank in question raises its original exception; only the text travels.

    Attributes:
        reasons: `(rank, text)` of every rank that failed, ascending by rank.
    """

    def __init__(self, reasons: Sequence[tuple[int, str]], *, doing: str) -> None:
        self.reasons = tuple(reasons)
        told = "; ".join(f"rank {rank}: {text}" for rank, text in self.reasons)
        super().__init__(f"failed while {doing} on {told}")


class PeerLostError(ExchangeError):
    """The connection to one or more ranks broke: they crashed, were killed, or left.

    Attributes:
        ranks: Ranks, local to the group, whose connection is known to be gone; may be empty.
    """

    def __init__(self, ranks: Sequence[int], *, doing: str, cause: str) -> None:
        self.ranks = tuple(ranks)
        super().__init__(
            f"lost the connection to {named(ranks)} while {doing}; look for the first error in the "
            f"logs there, and restart the job from its checkpoint (transport: {cause})"
        )


class ExchangeTimeoutError(ExchangeError, TimeoutError):
    """A rank did not take part within the time that the user allows.

    Attributes:
        ranks: Ranks, local to the group, that nothing came from; empty if that cannot be told.
    """

    def __init__(self, ranks: Sequence[int], *, doing: str, limit: str) -> None:
        self.ranks = tuple(ranks)
        super().__init__(
            f"{named(ranks)} took no part in {doing} within {limit}; it hangs, or the time is too "
            "short for the slowest rank's data"
        )


class ExchangeStoppedError(ExchangeError):
    """The wait was given up because a stop was requested on this rank."""


class MismatchError(ExchangeError, ValueError):
    """Ranks that must agree on a setting, a schema or a plan do not."""


class ProtocolError(ExchangeError):
    """A message of a peer is damaged, of another version, or out of turn."""


def named(ranks: Sequence[int], one: str = "", several: str = "") -> str:
    """Return "rank 3", "ranks 3, 5" or, where none is known, "a rank", and the verb."""
    if not ranks:
        return f"a rank {one}".rstrip()
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}".rstrip()
    more = ", ..." if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} {several}".rstrip()
