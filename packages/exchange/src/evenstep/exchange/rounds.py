"""Rounds in which all ranks report, so that they go on together or fail together."""

import contextlib
import enum
import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from evenstep.exchange.channel import channels_of
from evenstep.exchange.errors import (
    ExchangeError,
    MismatchError,
    PeerFailedError,
    ProtocolError,
)
from evenstep.exchange.local_channel import LocalChannel
from evenstep.exchange.local_links import Links
from evenstep.exchange.waiting import Patience

T = TypeVar("T")
Setting = str | int | float | bool | None

_HEADER = struct.Struct("<4sHBBQ8s")  # magic, version, kind, status, round, settings' fingerprint
_MAGIC = b"EVEN"
_VERSION = 3
_MAX_REASON_CHARS = 4000  # the text of an exception that peers get to see


class Kind(enum.IntEnum):
    """What a round is for; the value is on the wire."""

    SETTINGS = 1
    OFFER = 2
    COMMIT = 3
    MEETING = 4
    LINKING = 5


class _Status(enum.IntEnum):
    READY = 1
    FAILED = 2


_DOING = {
    Kind.SETTINGS: "comparing settings",
    Kind.OFFER: "agreeing on a window",
    Kind.COMMIT: "committing to a plan",
    Kind.MEETING: "committing to a plan",
    Kind.LINKING: "committing to a plan",
}


class Rounds:
    """The control plane of one group: numbered rounds, each with the same outcome on every rank.

    Args:
        group: Gloo group for the messages, used by one thread only; None if `world_size` is 1.
        world_size: Number of ranks in the group.
        settings: What all ranks must have set alike. Its fingerprint is in every message.
        patience: How long to wait for peers.

    Attributes:
        failed: Whether the latest round failed on any rank, which all ranks know then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        world_size: int,
        settings: Mapping[str, Setting],
        patience: Patience,
    ) -> None:
        if group is None and world_size != 1:
            raise ValueError(f"a control group is needed for {world_size} ranks; got None")
        self._group = group if world_size > 1 else None
        self._channels = None if self._group is None else channels_of(self._group, world_size)
        self._pid = os.getpid()
        self._patience = patience
        self._settings = "\n".join(f"{key} = {settings[key]!r}" for key in sorted(settings))
        self._fingerprint = hashlib.blake2b(self._settings.encode(), digest_size=8).digest()
        self._number = 0
        self._broken: ExchangeError | None = None
        self.failed = False
        self._unheard: tuple[Kind, bytes] | None = None
        self._links: Links | None = None

    def gather(self, kind: Kind, make: Callable[[], tuple[T, bytes]]) -> tuple[T, list[memoryview]]:
        """Run one round: report what `make` returns, or that it failed, and hear all ranks.

        Args:
            kind: What the round is for.
            make: Called once; returns a local value, handed back, and the message for all ranks.

        Returns:
            The local value and every rank's message, in rank order.

        Raises:
            BaseException: What `make` raised, on this rank, once the peers know of it. Only a
                KeyboardInterrupt waits for no peer: the round is still to come then, and `fail`
                tells them in it.
            PeerFailedError: What `make` raised on another rank.
            MismatchError: If the settings differ.
            ExchangeError: As `Channel.gather`; then every later round raises it again.
        """
        self._check_usable()
        try:
            value, body = make()
            frame = self._frame(kind, _Status.READY, body)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:
            self._tell(kind, failure)
            raise
        frames = self._send(kind, frame)
        with self.breaking():
            self._check(kind, frames)
        return value, [frame[_HEADER.size :] for frame in frames]

    def fail(self, error: BaseException) -> None:
        """Tell the peers, in whichever round is next, that this rank takes no further part.

        Nothing is sent if the latest round failed, or no peer can be reached any more.

        Args:
            error: Why; the peers' `gather` raises its text.
        """
        with contextlib.suppress(ExchangeError):
            if self._unheard is not None:
                # An interrupt ended this round here, but the peers are in it still.
                self._broken = None
                kind, frame = self._unheard
                frames = self._exchange(kind, frame)
                self._check(kind, frames)
                if kind is Kind.LINKING:  # where the peers go on, if they could all connect
                    self._move([frame[_HEADER.size :] for frame in frames])
            if not self.failed:
                self._check_usable()
                self._tell(Kind.OFFER, error)

    def _tell(self, kind: Kind, failure: BaseException) -> None:
        """Make this round fail everywhere; what keeps the peers from hearing it becomes a note."""
        try:
            self._send(kind, self._frame(kind, _Status.FAILED, _reason(failure)))
        except ExchangeError as error:
            failure.add_note(f"not all peers know of it: {error}")
        self.failed = True

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Let no later round start if the body raises what makes this rank's state useless.

        That is any error but a peer's report that it failed, which leaves all ranks in step.
        """
        try:
            yield
        except PeerFailedError:
            raise
        except ExchangeError as error:
            self._broken = error
            raise
        except BaseException as error:
            self._broken = ExchangeError(f"an earlier call ended with {type(error).__name__}")
            raise

    def link(self, links: Links) -> LocalChannel | None:
        """Hold the next rounds of the group over connections of its own, if all ranks can.

        Every rank must call this, once all listen.

        Returns:
            What they are held over from now on; None if it is the group.

        Raises:
            ExchangeError: As `gather`.
        """
        self._links = links
        try:
            _, told = self.gather(Kind.LINKING, links.connect)
        except BaseException:
            if self._unheard is None:  # else `fail` goes on with them
                links.close()
            raise
        return self._move(told)

    def _move(self, told: Sequence[memoryview]) -> LocalChannel | None:
        links, self._links = self._links, None
        assert links is not None
        assert self._channels is not None
        with self.breaking():
            channel = links.finish(told)
            if channel is not None:
                self._channels.replace(channel)
        return channel

    def compare_settings(self) -> None:
        """Compare the settings of all ranks; every rank must call this.

        Raises:
            MismatchError: On every rank, naming the first setting that differs, ranks and values.
        """
        text = self._settings.encode()
        _, messages = self.gather(Kind.SETTINGS, lambda: (None, text))
        texts = [bytes(message).decode() for message in messages]
        for lines in zip(*(text.split("\n") for text in texts), strict=False):
            if len({*lines}) > 1:
                raise MismatchError(_differing_setting(lines))
        if len({*texts}) > 1:
            raise MismatchError("ranks have different sets of settings; do they run one version?")

    def _frame(self, kind: Kind, status: _Status, body: bytes) -> bytes:
        header = _HEADER.pack(_MAGIC, _VERSION, kind, status, self._number, self._fingerprint)
        return header + body

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ExchangeError(
                "this exchange was copied into another process by fork(), where its collectives "
                "would hang; construct it in the process that uses it"
            )
        if self._broken is not None:
            raise self._broken

    def _send(self, kind: Kind, frame: bytes) -> list[memoryview]:
        self._number += 1
        if self._channels is None:
            return [memoryview(frame)]
        self._channels.turn()
        return self._exchange(kind, frame)

    def _exchange(self, kind: Kind, frame: bytes) -> list[memoryview]:
        assert self._channels is not None
        assert self._group is not None
        channel = self._channels.current
        self._unheard = kind, frame
        with self.breaking():  # an interrupted round leaves its collective behind
            try:
                messages = channel.gather(frame, self._group, self._patience, doing=_DOING[kind])
            except ExchangeError:
                self._unheard = None  # and never will be
                raise
        self._unheard = None
        return messages

    def _check(self, kind: Kind, frames: list[memoryview]) -> None:
        headers = [_unpack_header(frame, rank) for rank, frame in enumerate(frames)]
        reasons = [
            (rank, bytes(frame[_HEADER.size :]).decode(errors="replace"))
            for rank, (frame, (_, status, _, _)) in enumerate(zip(frames, headers, strict=True))
            if status != _Status.READY
        ]
        self.failed = bool(reasons)
        if reasons:
            raise PeerFailedError(reasons, doing=_DOING[kind])
        for rank, (peer_kind, _, number, _) in enumerate(headers):
            if (peer_kind, number) != (headers[0][0], headers[0][2]):
                raise ProtocolError(
                    f"rank {rank} is in round {number} ({_name(peer_kind)}), rank 0 in round "
                    f"{headers[0][2]} ({_name(headers[0][0])}): the ranks made different calls"
                )
        if kind != Kind.SETTINGS and len({fingerprint for *_, fingerprint in headers}) > 1:
            self.compare_settings()  # all ranks know it, and learn here which one differs


def _unpack_header(frame: memoryview, rank: int) -> tuple[int, int, int, bytes]:
    if len(frame) < _HEADER.size:
        raise ProtocolError(f"the message of rank {rank} has only {len(frame)} bytes")
    magic, version, kind, status, number, fingerprint = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise ProtocolError(f"the message of rank {rank} is not evenstep's: it starts with {magic}")
    if version != _VERSION:
        raise ProtocolError(
            f"rank {rank} speaks version {version} of the protocol and this rank version "
            f"{_VERSION}; install one version of evenstep-exchange everywhere"
        )
    return kind, status, number, fingerprint


def _name(kind: int) -> str:
    return _DOING.get(Kind(kind), "?") if kind in {*Kind} else f"unknown kind {kind}"


def _differing_setting(lines: tuple[str, ...]) -> str:
    told = ", ".join(f"rank {rank} has {line}" for rank, line in enumerate(lines[:8]))
    return f"ranks must be set alike, but {told}{' ...' if len(lines) > 8 else ''}"


def _reason(error: BaseException) -> bytes:
    text = f"{type(error).__name__}: {error}"
    if len(text) > _MAX_REASON_CHARS:
        cut = len(text) - _MAX_REASON_CHARS
        text = f"{text[:_MAX_REASON_CHARS]} ... ({cut} more characters on that rank)"
    return text.encode(errors="backslashreplace")
