"""Waiting for a collective so that a stop, Ctrl-C, a timeout and a dead peer all get through."""

import contextlib
import logging
import threading
import time
import weakref
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
    named,
)

logger = logging.getLogger(__name__)

MOVING = "moving samples"
"""What ranks do once they have committed to a plan, for errors, whichever way the samples go."""

POLL_S = 0.2  # a wait inside Gloo holds signals back, and Ctrl-C must get through within a second
_LET_GO_S = 0.05  # Gloo's threads need microseconds, if they get a core

_started = threading.Event()  # whether this process has run a collective


def never() -> bool:
    """Return False: nobody asks to stop."""
    return False


def _nobody() -> Sequence[int]:
    return ()


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

    def wait(
        self,
        work: dist.Work,
        group: dist.ProcessGroup,
        *,
        doing: str,
        absent: Callable[[], Sequence[int]] = _nobody,
    ) -> None:
        """Wait until a Gloo collective has completed.

        Args:
            work: What `start_all_to_all` returned.
            group: The group it runs on, to find out who is missing.
            doing: What the collective is for, for the messages.
            absent: Returns the ranks that nothing has come from yet, where that can be told.

        Raises:
            PeerLostError: If the connection to a peer broke.
            ExchangeTimeoutError: After `timeout_s`, or the timeout of the group.
            ExchangeStoppedError: When `should_stop` says so.
            ExchangeError: If the group is destroyed meanwhile.
        """
        self.until(lambda: _completes(work, group, doing, absent), doing=doing, absent=absent)

    def until(
        self, completes: Callable[[], bool], *, doing: str, absent: Callable[[], Sequence[int]]
    ) -> None:
        """Wait until `completes`, which itself waits for 0.2 s at most, returns True.

        Raises:
            ExchangeTimeoutError: After `timeout_s`.
            ExchangeStoppedError: When `should_stop` says so.
        """
        started = time.monotonic()
        warned = False
        while not completes():
            waited = time.monotonic() - started
            if self.should_stop():
                raise ExchangeStoppedError(f"stopped after {waited:.1f} s of {doing}")
            if waited >= self.timeout_s:
                raise ExchangeTimeoutError(
                    absent(), doing=doing, limit=f"{self.timeout_s:g} s (timeout_s)"
                )
            if waited >= self.timeout_s / 2 and not warned:
                warned = True
                logger.warning(
                    "%s: %s kept the others waiting for %.1f s; giving up after %g s (timeout_s)",
                    doing,
                    named(absent(), "has", "have"),
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
    check_alive(group, doing)
    _started.set()
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


def check_alive(group: dist.ProcessGroup, doing: str) -> None:
    """Raise if the group was destroyed, which wakes nobody who waits inside it."""
    if not is_alive(group):
        raise ExchangeError(
            f"the process group was destroyed while or before {doing}; shut the exchange down "
            "before its groups"
        )


def _completes(
    work: dist.Work,
    group: dist.ProcessGroup,
    doing: str,
    absent: Callable[[], Sequence[int]],
) -> bool:
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(seconds=POLL_S))
        return True
    if not work.is_completed():
        check_alive(group, doing)
        return False  # only the poll's time is over; the operation goes on
    try:
        work.wait()
    except RuntimeError as error:
        raise _lost(group, doing, error, absent) from error
    return True


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether a group was not destroyed yet."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


def _lost(
    group: dist.ProcessGroup,
    doing: str,
    error: RuntimeError,
    absent: Callable[[], Sequence[int]] = _nobody,
) -> ExchangeError:
    check_alive(group, doing)
    cause = str(error).partition(". This is")[0]
    if "timed out" in cause.lower():  # by Gloo, whose timeout was the shorter one
        return ExchangeTimeoutError(
            absent(), doing=doing, limit="the timeout of the process group, shorter than timeout_s"
        )
    return PeerLostError(_unreachable(group), doing=doing, cause=cause)


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


def _let_go() -> None:
    """Wait until Gloo's threads have let go of the latest collective, before Python ends.

    The thread that ran it may be the last to drop it, and needs the interpreter's lock to drop its
    tensors. Once the interpreter is ending, Python ends such a thread on the spot, inside a C++
    destructor, and that ends the process with SIGABRT.
    """
    if _started.is_set():
        time.sleep(_LET_GO_S)


# Finalizers run in the reverse order of their making: after those of all that uses this module.
weakref.finalize(Patience, _let_go)
