"""One window, balanced by one call: no iterator, no thread, nothing kept."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from evenstep.balance import Strategy
from evenstep.exchange import Patience, SampleExchange
from evenstep.reorder_buffer.balancer import WindowBalancer
from evenstep.reorder_buffer.cost import CostFunction
from evenstep.reorder_buffer.layout import BatchT, Layout
from evenstep.reorder_buffer.local_reorder import ImageCountFunction
from evenstep.reorder_buffer.observer import WindowObserver, log_slots
from evenstep.reorder_buffer.presets import MIMO_LAYOUT
from evenstep.reorder_buffer.reader import ReaderPlace
from evenstep.reorder_buffer.source import Collected, WindowSpan
from evenstep.reorder_buffer.window import WindowPipeline

__all__ = ["exchange_window"]


def exchange_window(
    batches: Sequence[BatchT],
    *,
    dp_rank: int,
    dp_size: int,
    n_groups: int,
    cost_of: CostFunction,
    dp_group_gloo: dist.ProcessGroup | None,
    dp_group_nccl: dist.ProcessGroup | None,
    nccl_stream: torch.cuda.Stream | None = None,
    image_count_of: ImageCountFunction[BatchT] | None = None,
    probe: bool = False,
    layout: Layout[BatchT] = MIMO_LAYOUT,  # type: ignore[assignment]  # then BatchT is a dict
    strategy: str | Strategy = "lpt",
    timeout_s: float = 600.0,
    donate: bool = False,
) -> list[BatchT]:
    """Cost-balance a window of W micro-batches across a module DP group in one exchange.

    Every rank of the group must call this. Costs and metadata go over the Gloo group once per
    window, and the samples move in one `all_to_all_single`. Paired modules must pass the same
    `n_groups`, `cost_of` and `strategy`.

    Args:
        batches: This rank's W micro-batch shards, each with the same local sample count.
        dp_rank: This rank's module-local DP rank.
        dp_size: This module's DP size.
        n_groups: Canonical group count (LCM of the module DP sizes).
        cost_of: `callable(flat) -> float` per-sample cost (see `sample_cost`).
        dp_group_gloo: Gloo process group for the metadata; None if `dp_size` is 1.
        dp_group_nccl: Process group for the samples, NCCL or Gloo; None if `dp_size` is 1.
        nccl_stream: Optional CUDA stream to run the all-to-all on.
        image_count_of: Optional `callable(batch) -> LongTensor` of per-sample image counts.
        probe: When True, log the per-slot cost spread on `dp_rank == 0`.
        layout: The form of the micro-batches.
        strategy: Name or object of the balancing strategy.
        timeout_s: How long to wait for a peer, in seconds.
        donate: Whether `batches` are given away: nothing uses their memory from now on but what is
            returned. Then one whose samples all stay on this rank is returned where it lies,
            without a copy, if it is of tensors in host memory. If not, the tensors that a
            `BatchLayout` returns have memory of their own, and `batches` may be written to again.

    Returns:
        W rebalanced micro-batches for this rank, slot s at index s.

    Raises:
        ValueError: If `batches` is empty or the shards differ in local size. Peers raise
            `evenstep.exchange.PeerFailedError` then.
        evenstep.exchange.ExchangeError: If peers failed, disagree, or are lost.
    """
    balancer = WindowBalancer(
        dp_size=dp_size,
        n_groups=n_groups,
        cost_of=cost_of,
        image_count_of=image_count_of,
        layout=layout,
        strategy=strategy,
        donated=donate,
    )
    exchange = SampleExchange(
        rank=dp_rank,
        world_size=dp_size,
        control_group=dp_group_gloo,
        payload_group=dp_group_nccl,
        same_schema=False,  # the layout knows which fields a sample may lack
        patience=Patience(timeout_s=timeout_s),
        stream=nccl_stream,
    )

    def collect() -> Collected[BatchT]:
        if not batches:
            raise ValueError("batches is empty; a window needs at least one micro-batch")
        return Collected(batches, False, WindowSpan(0, ReaderPlace(), ReaderPlace()))

    observer = WindowObserver(dp_rank, log=probe)
    prepared = WindowPipeline(balancer, exchange, observer=observer).prepare(collect)
    assert prepared is not None  # only exhausted data ends
    prepared.launch()
    window = prepared.finish(part=True)
    if window.measured is not None:
        log_slots(window.measured.plan.slots)
    return window.batches
