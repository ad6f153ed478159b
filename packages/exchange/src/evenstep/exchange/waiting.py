"""Waiting for a collective so that a stop, Ctrl-C, a timeout and a dead peer all get through."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from evenstep.exchange.errors import (
    ExchangeError,
    ExchangeStoppedError,
    ExchangeTimeoutError,
    PeerLostError,
)

logger = logging.getLogger(__name__)

POLL_S = 0.2  # a wait inside Gloo holds signals back, and Ctrl-C must get through within a second


def never() -> bool:
    """Return False: nobody asks to stop."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long this rank waits for its peers.

    Attributes:
        timeout_s: Seconds after which a wait raises `ExchangeTimeoutError`; half-way it warns. It
            must be shorter than the timeout of the groups, which breaks them for good.
        should_stop: Asked every 0.2 s during a wait; True raises `ExchangeStoppedError`.
    """

    timeout_s: float = 600.0
    should_stop: Callable[[], bool] = never

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(
                f"timeout_s is {self.timeout_s}; it must be a positive number of seconds"
            )

    def wait(self, work: dist.Work, group: dist.ProcessGroup, *, doing: str) -> None:
        """Wait until a Gloo collective has completed.

        Args:
            work: What `start_all_to_all` returned.
            group: The group it runs on, to find out who is missing.
            doing: What the collective is for, for the messages.

        Raises:
            PeerLostError: If the connection to a peer broke.
            ExchangeTimeoutError: After `timeout_s`.
            ExchangeStoppedError: When `should_stop` says so.
            ExchangeError: If the group is destroyed meanwhile.
        """
        started = time.monotonic()
        warned = False
        while not _completes(work, group, doing):
            waited = time.monotonic() - started
            _check_alive(group, doing)
            if self.should_stop():
                raise ExchangeStoppedError(f"stopped after {waited:.1f} s of {doing}")
            if waited >= self.timeout_s:
                raise ExchangeTimeoutError(
                    f"a rank took no part in {doing} for {self.timeout_s:g} s (timeout_s): it "
                    "hangs, or the time is too short for the slowest rank's data"
                )
            if waited >= self.timeout_s / 2 and not warned:
                warned = True
                logger.warning(
                    "%s: a rank has kept the others waiting for %.1f s; giving up after %g s "
                    "(timeout_s)",
                    doing,
                    waited,
                    self.timeout_s,
                )


def start_all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    recv_splits: Sequence[int] | None = None,
    send_splits: Sequence[int] | None = None,
    doing: str,
) -> dist.Work:
    """Start `all_to_all_single`; splits are in elements, None for equal ones.

    Raises:
        ExchangeError: If the group was destroyed.
        PeerLostError: If the connection to a peer is already broken.
    """
    _check_alive(group, doing)
    try:
        work = dist.all_to_all_single(
            received,
            sent,
            None if recv_splits is None else list(recv_splits),
            None if send_splits is None else list(send_splits),
            group=group,
            async_op=True,
        )
    except RuntimeError as error:
        raise _lost(group, doing, error) from error
    assert work is not None  # None is for ranks outside the group
    return work


def _check_alive(group: dist.ProcessGroup, doing: str) -> None:
    """Raise if the group was destroyed, which wakes nobody who waits inside it."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError) as error:
        raise ExchangeError(
            f"the process group was destroyed while or before {doing}; shut the exchange down "
            "before its groups"
        ) from error


def _completes(work: dist.Work, group: dist.ProcessGroup, doing: str) -> bool:
    try:
        work.wait(timedelta(seconds=POLL_S))
    except RuntimeError as error:
        if not work.is_completed():
            return False  # only the poll's time is over; the operation goes on
        if work.exception() is not None:
            raise _lost(group, doing, error) from error
    return True


def _lost(group: dist.ProcessGroup, doing: str, error: RuntimeError) -> PeerLostError:
    return PeerLostError(
        _unreachable(group), doing=doing, cause=str(error).partition(". This is")[0]
    )


def _unreachable(group: dist.ProcessGroup) -> list[int]:
    """Return the peers that a receive cannot even be posted for; the group is broken anyway."""
    unreachable = []
    for peer, global_rank in enumerate(dist.get_process_group_ranks(group)):
        if peer != dist.get_rank(group):
            try:
                dist.irecv(torch.empty(1), src=global_rank, group=group)
            except RuntimeError:
                unreachable.append(peer)
    return unreachable
