"""Tensors of samples on an accelerator, packed with one ``torch.cat``."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from evenstep.serialize.dtypes import ALIGNMENT, aligned
from evenstep.serialize.packing_checks import check_layout, checked_tensor, device_rule, resolved
from evenstep.serialize.schema import SampleLayout


class FieldsOfDevice:
    """The tensors of samples on an accelerator, joined with one ``torch.cat``: few launches."""

    __slots__ = ("_device", "_padding", "_pieces", "nbytes")

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._device = device
        self._padding = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
        self._pieces: list[Tensor] = []

    def add(
        self,
        keys: Sequence[str],
        sample: Mapping[str, Tensor | None],
        layout: SampleLayout | None = None,
        index: int = 0,
    ) -> None:
        """Add the tensors of a sample, as :meth:`FieldsOfHost.add` does."""
        if layout is not None:
            check_layout(index, sample, layout)
        for key in keys:
            value = sample[key]
            if value is None:
                continue
            tensor = checked_tensor(key, value)
            if tensor.is_meta or tensor.device != self._device:
                raise ValueError(device_rule(key, tensor, str(self._device)))
            # Views cost no launch; only a tensor that is not contiguous is copied here.
            self._pieces.append(resolved(tensor).contiguous().view(-1).view(torch.uint8))
            self._pieces.append(self._padding[: -tensor.nbytes % ALIGNMENT])
            self.nbytes += aligned(tensor.nbytes)

    def write(self, out: Tensor) -> None:
        """Copy all fields, and zero the padding."""
        if self._pieces:
            torch.cat(self._pieces, out=out)
