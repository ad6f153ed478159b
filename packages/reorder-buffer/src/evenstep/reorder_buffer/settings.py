"""What must be set alike on all ranks, and what a buffer's arguments may be."""

import functools
import os

import torch.distributed as dist

from evenstep.balance import Strategy
from evenstep.exchange import Setting
from evenstep.reorder_buffer.balancer import WindowBalancer
from evenstep.reorder_buffer.layout import BatchT

__all__ = [
    "check_overlap",
    "check_rank",
    "check_uneven_end",
    "check_window_size",
    "described",
    "settings_of",
]


def check_window_size(window_size: int) -> None:
    """Raise ValueError unless `window_size` is a positive integer."""
    if type(window_size) is not int or window_size < 1:
        raise ValueError(
            f"window_size is {window_size!r}; it must be a positive number of micro-batches"
        )


def check_rank(dp_rank: int, dp_size: int) -> None:
    """Raise ValueError unless `dp_rank` is one of `dp_size` ranks."""
    if not 0 <= dp_rank < dp_size:
        raise ValueError(
            f"dp_rank is {dp_rank}; it must be in [0, {dp_size}), the DP group's ranks"
        )


def check_uneven_end(on_uneven_end: str) -> None:
    """Raise ValueError unless `on_uneven_end` is a known choice."""
    if on_uneven_end not in {"stop", "raise"}:
        raise ValueError(f"on_uneven_end is {on_uneven_end!r}; it must be 'stop' or 'raise'")


def check_overlap(
    control: dist.ProcessGroup | None, payload: dist.ProcessGroup | None, *, one_thread: bool
) -> None:
    """Raise ValueError where an exchange beside the computation could not work.

    Args:
        control: The group for the metadata.
        payload: The group for the samples.
        one_thread: Whether one thread uses both.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            "overlap=True cannot work under CUDA_DEVICE_MAX_CONNECTIONS=1: the side all-to-all and "
            "the gradients' all-reduce would share one hardware queue and can deadlock. Unset the "
            "variable, or pass overlap=False"
        )
    if payload is not None and payload is control and not one_thread:
        raise ValueError(
            "dp_group_gloo and dp_group_nccl are one group, but two threads use them under "
            "overlap=True with launch='caller'; see build_module_dp_process_groups"
        )
    for name, group in (("dp_group_gloo", control), ("dp_group_nccl", payload)):
        if group is not None and group is dist.group.WORLD:
            raise ValueError(
                f"{name} is the default group, which the training loop uses at the same time; "
                "overlap=True needs a group of its own, see build_module_dp_process_groups"
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
