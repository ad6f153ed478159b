"""A small message from every rank to every rank, where all run on one machine.

Gloo hands each message from thread to thread several times, in each process; where ranks keep all
cores busy, each hand-over waits for one. Here the thread that waits reads the socket itself.
"""

import contextlib
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from evenstep.exchange.channel import MAX_MESSAGE_BYTES
from evenstep.exchange.errors import ExchangeError, PeerLostError, ProtocolError
from evenstep.exchange.waiting import POLL_S, Patience, check_alive

# The number of the round, the bytes of the whole message, and where this part of it begins.
_HEAD = struct.Struct("<QQQ")
_PART_BYTES = 1 << 16  # what any system lets into a socket at once


def _never(_peer: int) -> bool:
    return False


def _close(connections: Sequence[socket.socket], process: int) -> None:
    """Close connections so that peers see it though a forked child has them too; it does not."""
    for connection in connections:
        if os.getpid() == process:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        connection.close()


class LocalChannel:
    """All-gathers one message per rank over sockets between the processes.

    Every step is such that an interrupt behind any instruction loses nothing: a part that was sent
    and not noted is sent again, and dropped where it is known; a part is taken from the socket
    only once it is kept.

    Args:
        rank: This rank in the group.
        connections: To every other rank of the group.

    Attributes:
        has_ended: Returns whether the process of a rank is known to be gone. The end of its
            connection tells that too, unless a forked child of it lives on.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self.has_ended: Callable[[int], bool] = _never
        self._rank = rank
        self._links = {peer: _Link(connections[peer]) for peer in sorted(connections)}
        self._process = os.getpid()
        self._number = 0
        self._message = b""
        self._is_pending = False
        weakref.finalize(self, _close, [*connections.values()], self._process).atexit = False

    def gather(
        self, message: bytes, group: dist.ProcessGroup, patience: Patience, *, doing: str
    ) -> list[memoryview]:
        """Send `message` to every rank and return the messages of all, in rank order.

        As `Channel.gather`, which says more.
        """
        check_alive(group, doing)
        if os.getpid() != self._process:
            raise ExchangeError("this group was copied into another process by fork()")
        if not self._is_pending:
            for link in self._links.values():
                link.begin(self._number + 1, message)
            self._message = message
            self._number, self._is_pending = self._number + 1, True
        if len(self._message) > MAX_MESSAGE_BYTES:
            for link in self._links.values():
                link.send()  # the first part, from which the peers know
            told = f"announced a message of {len(self._message)} bytes"
            raise ProtocolError(_refusal(self._rank, told, doing))
        patience.until(lambda: self._completes(group, doing), doing=doing, absent=self._absent)
        found = {peer: memoryview(link.arrived) for peer, link in self._links.items()}
        found[self._rank] = memoryview(self._message)
        messages = [found[rank] for rank in sorted(found)]
        self._is_pending = False
        return messages

    def _absent(self) -> list[int]:
        return [peer for peer, link in self._links.items() if not link.has_arrived]

    def _completes(self, group: dist.ProcessGroup, doing: str) -> bool:
        """Send and receive what can be, for a while; return whether nothing is left."""
        give_up = time.monotonic() + POLL_S
        busy = list(self._links)
        while busy := [peer for peer in busy if not self._step(peer, doing)]:
            left = give_up - time.monotonic()
            if left <= 0:
                check_alive(group, doing)
                ended = [*filter(self.has_ended, busy)]
                # One may have sent its message, and ended, since.
                if lost := [peer for peer in ended if not self._step(peer, doing)]:
                    raise PeerLostError(lost, doing=doing, cause="the process has ended")
                return False
            poll = select.poll()
            for link in map(self._links.__getitem__, busy):
                poll.register(link.descriptor, link.awaited)
            poll.poll(1e3 * left)
        return True

    def _step(self, peer: int, doing: str) -> bool:
        """Do what is possible at once; return whether all is done."""
        link = self._links[peer]
        try:
            link.send()
            link.receive()
        except (EOFError, OSError) as error:
            raise PeerLostError([peer], doing=doing, cause=str(error)) from error
        except ValueError as error:
            raise ProtocolError(_refusal(peer, str(error), doing)) from error
        return link.is_done


def _refusal(rank: int, what: str, doing: str) -> str:
    return f"rank {rank} {what} in {doing}, so it runs another program or another version"


class _Link:
    """This process's end of the connection to one peer."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._number = 0
        self._message = b""
        self._sent: int | None = 0  # bytes; None once the peer will read no more
        self.arrived = bytearray()
        self._expected: int | None = None  # bytes, once the first part has told

    @property
    def descriptor(self) -> int:
        return self._connection.fileno()

    def begin(self, number: int, message: bytes) -> None:
        """Begin a round; the same one again changes nothing that peers notice."""
        self._number, self._message = number, message
        self._sent, self.arrived, self._expected = 0, bytearray(), None

    @property
    def has_arrived(self) -> bool:
        return len(self.arrived) == self._expected

    @property
    def is_sent(self) -> bool:
        return self._sent is None or self._sent == len(self._message)

    @property
    def is_done(self) -> bool:
        return self.is_sent and self.has_arrived

    @property
    def awaited(self) -> int:
        """The events to wait for."""
        receiving = 0 if self.has_arrived else select.POLLIN
        return receiving | (0 if self.is_sent else select.POLLOUT)

    def send(self) -> None:
        """Send what the socket takes."""
        while not self.is_sent:
            assert self._sent is not None
            part = self._message[self._sent : self._sent + _PART_BYTES]
            head = _HEAD.pack(self._number, len(self._message), self._sent)
            try:
                self._connection.send(head + part, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._sent = None  # what it sent before may still be there to read
                return
            self._sent += len(part)

    def receive(self) -> None:
        """Take what is there of the peer's message.

        Raises:
            EOFError: If no more will come.
            ValueError: If it cannot be part of the message, saying why.
        """
        while not self.has_arrived:
            try:
                packet = self._connection.recv(_HEAD.size + _PART_BYTES, socket.MSG_PEEK)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # told once, before what is left to read
            if not packet:
                raise EOFError("its end of the connection is closed")
            self._keep(packet)
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                self._connection.recv(1)  # and the rest of the packet is dropped

    def _keep(self, packet: bytes) -> None:
        if len(packet) < _HEAD.size:
            raise ValueError(f"sent a packet of {len(packet)} bytes")
        number, nbytes, begin = _HEAD.unpack_from(packet)
        if number < self._number or (number == self._number and begin < len(self.arrived)):
            return  # sent twice
        if number != self._number or begin != len(self.arrived):
            raise ValueError(f"sent byte {begin} of round {number} out of turn")
        if not 0 < nbytes <= MAX_MESSAGE_BYTES or begin + len(packet) - _HEAD.size > nbytes:
            raise ValueError(f"announced a message of {nbytes} bytes")
        self._expected = nbytes
        self.arrived += packet[_HEAD.size :]
