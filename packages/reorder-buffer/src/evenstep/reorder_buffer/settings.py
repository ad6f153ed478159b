"""What must be set alike on all ranks, and what a buffer's arguments may be."""

import functools
import os

import torch.distributed as dist

from evenstep.balance import Strategy
from evenstep.exchange import Setting
from evenstep.reorder_buffer.balancer import WindowBalancer
from evenstep.reorder_buffer.layout import BatchT

__all__ = ["check_overlap", "check_window_size", "described", "settings_of"]


def check_window_size(window_size: int) -> None:
    """Raise ValueError unless `window_size` is a positive integer."""
    if type(window_size) is not int or window_size < 1:
        raise ValueError(
            f"window_size is {window_size!r}; it must be a positive number of micro-batches"
        )


def check_overlap(payload_group: dist.ProcessGroup | None) -> None:
    """Raise ValueError where an exchange beside the computation could not work.

    Args:
        payload_group: The group for the samples.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            "overlap=True cannot work under CUDA_DEVICE_MAX_CONNECTIONS=1: the side all-to-all and "
            "the gradients' all-reduce would share one hardware queue and can deadlock. Unset the "
            "variable, or pass overlap=False"
        )
    if payload_group is not None and payload_group is dist.group.WORLD:
        raise ValueError(
            "overlap=True needs a group of its own for the samples, not the default group, which "
            "the training loop uses at the same time; see build_module_dp_process_groups"
        )


def settings_of(balancer: WindowBalancer[BatchT], **more: Setting) -> dict[str, Setting]:
    """Return what all ranks must have set alike, as plain values that can be compared."""
    return {
        "n_groups": balancer.n_groups,
        "dp_size": balancer.dp_size,
        "strategy": described(balancer.strategy),
        "cost_of": described(balancer.cost_of),
        "layout": described(balancer.layout),
        **more,
    }


def described(value: "str | Strategy | object") -> str:
    """Return a description of an object that is the same in every process that has an equal one.

    A value object is described by its fields, a function by its name; an address never occurs.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, functools.partial):
        arguments = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in value.keywords.items())]
        return _without_address(f"{described(value.func)}({', '.join(arguments)})", value)
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{value.__module__}.{name}"
    return _without_address(repr(value), value)


def _without_address(text: str, value: object) -> str:
    return type(value).__qualname__ if " at 0x" in text else text
