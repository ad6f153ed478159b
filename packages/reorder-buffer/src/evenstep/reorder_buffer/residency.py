"""How many bytes of windows a rank holds, now and at most."""

import threading
from collections import deque

__all__ = ["Residency"]


class Residency:
    """Counts windows' bytes from the offer until the last micro-batch was given to the consumer.

    A window counts as what this rank read, plus what is packed and received, until it is joined;
    from the start of joining as what it is joined to; and it is gone when the next one is served.

    Attributes:
        now: Bytes held now.
        peak: The most that were held at any time.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._lock = threading.Lock()
        self._ready: deque[int] = deque()
        self._served = 0

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more; a negative number for bytes that are gone."""
        with self._lock:
            self.now += nbytes
            self.peak = max(self.peak, self.now)

    def join(self, nbytes: int) -> None:
        """Count a window that is being joined, and will be served after those before it."""
        self.add(nbytes)
        self._ready.append(nbytes)

    def serve(self) -> None:
        """Note that the next window is served, and the one before it gone."""
        self.add(-self._served)
        self._served = self._ready.popleft()
