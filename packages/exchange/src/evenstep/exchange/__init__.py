"""One ragged all-to-all that moves whole training samples between data-parallel ranks."""

from evenstep.exchange.errors import (
    ExchangeError,
    ExchangeStoppedError,
    ExchangeTimeoutError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    ProtocolError,
)
from evenstep.exchange.exchange import Check, Plan, SampleExchange
from evenstep.exchange.garbage import collection_paused
from evenstep.exchange.groups import ModuleGroups, build_module_dp_process_groups
from evenstep.exchange.host_memory import HOST_MEMORY, HostMemory
from evenstep.exchange.moves import Moves, Placement, plan_moves
from evenstep.exchange.offer import Agreement, Cost, Offer, RankReport
from evenstep.exchange.payload_group import DEFAULT_CHUNK_BYTES, PayloadGroup
from evenstep.exchange.prepare import PreparedExchange, prepare_sample_exchange
from evenstep.exchange.rounds import Setting
from evenstep.exchange.transfer import SETTLE_S, Arrival, Transfer
from evenstep.exchange.waiting import Patience

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "HOST_MEMORY",
    "SETTLE_S",
    "Agreement",
    "Arrival",
    "Check",
    "Cost",
    "ExchangeError",
    "ExchangeStoppedError",
    "ExchangeTimeoutError",
    "HostMemory",
    "MismatchError",
    "ModuleGroups",
    "Moves",
    "Offer",
    "Patience",
    "PayloadGroup",
    "PeerFailedError",
    "PeerLostError",
    "Placement",
    "Plan",
    "PreparedExchange",
    "ProtocolError",
    "RankReport",
    "SampleExchange",
    "Setting",
    "Transfer",
    "build_module_dp_process_groups",
    "collection_paused",
    "plan_moves",
    "prepare_sample_exchange",
]
