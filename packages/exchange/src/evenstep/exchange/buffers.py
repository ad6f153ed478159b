"""Host memory that is used again, because fresh memory costs a page fault every 4 KiB."""

import threading

import torch

CPU = torch.device("cpu")


class BufferPool:
    """Keeps host buffers that were given back for whoever asks next, from any thread.

    Args:
        pinned: Allocate page-locked memory, which a GPU copies to and from by itself.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a 1-D uint8 host tensor of `nbytes` with arbitrary content."""
        with self._lock:
            self._free.sort(key=torch.Tensor.numel)
            for index, whole in enumerate(self._free):
                if whole.numel() >= nbytes:
                    return self._free.pop(index)[:nbytes]
            if self._free:
                del self._free[0]  # too small for today's windows; a larger one takes its place
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)[:]

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take back what `take` returned; no view of it may be in use any more."""
        whole = buffer._base  # noqa: SLF001 - torch has no public name for a view's base
        assert whole is not None
        with self._lock:
            self._free.append(whole)
