"""Connections between the processes of one machine, each pair once."""

import contextlib
import socket
import struct
from collections.abc import Sequence
from hashlib import blake2b

from evenstep.exchange.errors import ExchangeError
from evenstep.exchange.local_channel import LocalChannel

_BACKLOG = 1 << 10  # more ranks than run on one machine
_CONNECTED = b"1"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Links:
    """The connections between all ranks of a node, made in two steps with a round behind each.

    Args:
        rank: This rank in the group.
        secrets: Random bytes of each rank, from which the others know its name.
        processes: The process of each rank.
    """

    def __init__(self, rank: int, secrets: Sequence[bytes], processes: Sequence[int]) -> None:
        self._rank, self._secrets, self._processes = rank, secrets, processes
        self._listener: socket.socket | None = None
        self._connections: dict[int, socket.socket] = {}

    def listen(self) -> None:
        """Let the higher ranks connect; nobody can if this system has no such sockets."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            listener = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.setblocking(False)
            listener.bind(_name(self._secrets[self._rank]))
            listener.listen(_BACKLOG)
            self._listener = listener
            closing.pop_all()

    def connect(self) -> tuple[None, bytes]:
        """Connect to the lower ranks, all of which listen; return whether that was possible."""
        with contextlib.suppress(OSError):
            for peer in range(self._rank):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._connections[peer] = connection
                connection.setblocking(False)
                connection.connect(_name(self._secrets[peer]))
            if self._listener is not None:
                return None, _CONNECTED
        return None, b"0"

    def finish(self, told: Sequence[memoryview]) -> LocalChannel | None:
        """Return the channel over the connections; None if not all could be made.

        Args:
            told: What `connect` returned on each rank.

        Raises:
            ExchangeError: If this rank cannot take the connections that were made. The peers find
                theirs closed.
        """
        try:
            if any(bytes(message) != _CONNECTED for message in told):
                self.close()
                return None
            self._accept()
        except OSError as error:
            self.close()
            raise ExchangeError(
                f"this rank cannot take the connections of its node: {error}; raise its limit "
                "(ulimit -n), or set EVENSTEP_SHARED_MEMORY=0"
            ) from error
        except BaseException:
            self.close()
            raise
        self._close_listener()
        return LocalChannel(self._rank, self._connections)

    def close(self) -> None:
        """Close all that is open."""
        self._close_listener()
        for connection in self._connections.values():
            connection.close()

    def _accept(self) -> None:
        """Take the connections of the higher ranks, all of which were made before."""
        assert self._listener is not None
        ranks = {process: rank for rank, process in enumerate(self._processes)}
        while len(self._connections) < len(self._processes) - 1:
            connection, _ = self._listener.accept()
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            rank = ranks.get(_CREDENTIALS.unpack(credentials)[0])
            if rank is None or rank <= self._rank:
                connection.close()  # some other process of this machine
            else:
                self._connections[rank] = connection

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()


def _name(secret: bytes) -> bytes:
    """Return a name that is in no file system; it tells nobody the secret."""
    return b"\0evenstep-" + blake2b(secret, digest_size=16).hexdigest().encode()
