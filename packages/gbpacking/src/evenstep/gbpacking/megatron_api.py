"""What the installed Megatron-Core offers: its scheduler, if it has one, and what that accepts.

Megatron-Core is imported only here and in the functions that need it, never when this package is
imported. Two generations of its scheduler API exist: an enum of schedulers and a packed fetch
without `config` (main), and a dict of schedulers and a fetch with `dynamic_cp` and `config` (dev).
Releases on the package index have none.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Final, TypeAlias

from evenstep.gbpacking.enabled import DYNAMIC_CP_SCHEDULERS

_SCHEDULE_MODULE: Final = "megatron.core.datasets.data_schedule"

_DEV_HINT: Final = (
    " Dynamic context parallelism needs a checkout of Megatron-Core's dev branch, or a scheduler"
    " of evenstep."
)

_ROUTE_PREBUILDERS: Final = (
    ("megatron.core.packed_seq_params", "prebuild_thd_cp_partition_route"),
    ("megatron.core.utils", "prebuild_thd_cp_partition_route"),
    ("megatron.core.transformer.context_parallel", "prebuild_thd_cp_partition_route"),
)
"""Where a Megatron-Core with context-parallel layout routes may keep the function."""


EntryPoint: TypeAlias = Callable[..., object]
"""A function of Megatron-Core, called by keyword only."""


def scheduler_api() -> tuple[EntryPoint, EntryPoint]:
    """Import Megatron-Core's scheduler entry points: wrap the iterator, fetch a packed batch.

    Raises:
        ImportError: If the installed Megatron-Core has no scheduler.
    """
    module = importlib.import_module(_SCHEDULE_MODULE)
    names = ("wrap_data_iterator", "get_batch_on_this_rank_for_sequence_packing")
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise ImportError(f"{_SCHEDULE_MODULE} has no {' and no '.join(missing)}")
    return getattr(module, names[0]), getattr(module, names[1])


def has_scheduler_api() -> bool:
    """Return whether the installed Megatron-Core has a scheduler, of whatever names."""
    try:
        scheduler_api()
    except ImportError:
        return False
    return True


def registered_schedulers() -> tuple[str, ...]:
    """Return the names that Megatron-Core's scheduler registry answers to, sorted.

    Keys may be names (dev) or members of an enum whose values are names (main).
    """
    module = importlib.import_module(_SCHEDULE_MODULE)
    registry: Iterable[object] = getattr(module, "scheduler_map", ())
    return tuple(sorted(str(getattr(key, "value", key)) for key in registry))


@cache
def accepted_parameters(function: EntryPoint) -> frozenset[str]:
    """Return the names of the parameters that `function` declares.

    Cached: it is asked once per micro-batch.
    """
    return frozenset(inspect.signature(function).parameters)


def call_with_accepted(function: EntryPoint, **arguments: object) -> object:
    """Call `function` with those arguments that it declares, and leave out the others."""
    accepted = accepted_parameters(function)
    return function(**{name: value for name, value in arguments.items() if name in accepted})


@cache
def thd_cp_route_prebuilder() -> EntryPoint | None:
    """Return Megatron-Core's prebuild of a THD CP partition route, or None if it has no routes."""
    for module_name, name in _ROUTE_PREBUILDERS:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        if callable(prebuilder := getattr(module, name, None)):
            found: EntryPoint = prebuilder
            return found
    return None


def megatron_version() -> str:
    """Return the version of the installed Megatron-Core, for messages."""
    try:
        version = importlib.import_module("megatron.core").__version__
    except (ImportError, AttributeError):
        return "(none installed)"
    return str(version)


def probe_global_batch_packing_support(scheduler: str, *, dynamic_cp: bool = False) -> str | None:
    """Return why the installed Megatron-Core cannot run `scheduler`, or None if it can.

    Asked before training, it turns a KeyError or TypeError of the first step into a message. It
    speaks of Megatron-Core's own loop; `choose_scheduler` says whether evenstep runs instead.

    Args:
        scheduler: A scheduler's name.
        dynamic_cp: Whether the packed fetch must accept the arguments of dynamic context
            parallelism as well.
    """
    hint = _DEV_HINT if dynamic_cp or scheduler in DYNAMIC_CP_SCHEDULERS else ""
    try:
        wrap, fetch = scheduler_api()
    except ImportError as error:
        return f"Megatron-Core {megatron_version()} has no packing scheduler: {error}.{hint}"
    registered = registered_schedulers()
    if scheduler not in registered:
        return (
            f"Megatron-Core {megatron_version()} has no scheduler {scheduler!r}; registered are "
            f"{', '.join(map(repr, registered)) or 'none'}.{hint}"
        )
    for function in (wrap, fetch):
        if "pg_collection" not in accepted_parameters(function):
            return _lacks(function, ["pg_collection"]) + hint
    missing = sorted({"dynamic_cp", "config"} - accepted_parameters(fetch))
    if dynamic_cp and missing:
        return _lacks(fetch, missing) + hint
    return None


def _lacks(function: EntryPoint, parameters: list[str]) -> str:
    name = getattr(function, "__name__", repr(function))
    return (
        f"{name} of Megatron-Core {megatron_version()} does not accept {' and '.join(parameters)}; "
        "use a newer Megatron-Core."
    )
