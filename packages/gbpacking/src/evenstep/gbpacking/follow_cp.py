"""Make a released Megatron-Core model follow the context-parallel group of each micro-batch.

Attention of releases runs on `PackedSeqParams.cp_group`, but rotary positions of packed sequences
are still cut for the group that the model was built with, and fail or are wrong on any other. So
each attention layer is told the micro-batch's group before it runs, again when it is recomputed.
"""

import copy
from typing import Any

import torch


class _Alone:
    """Stands for the group of a rank alone, where only place and size are asked for."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class _Follow:
    """Puts a micro-batch's group where an attention layer looks for its own."""

    def __init__(self, static: object) -> None:
        self._static = static

    def __call__(
        self, layer: torch.nn.Module, _: tuple[object, ...], arguments: dict[str, Any]
    ) -> None:
        params = arguments.get("packed_seq_params")
        groups: Any = layer.pg_collection
        if params is None or params.local_cp_size is None:
            groups.cp = self._static
        else:
            groups.cp = _Alone() if params.local_cp_size == 1 else params.cp_group


def follow_cp_groups(model: torch.nn.Module) -> None:
    """Make the model's attention layers follow the group of each micro-batch.

    Call it once after the model is built, before it is wrapped or compiled. It changes nothing for
    micro-batches without a group of their own, and is not needed where the model knows its
    positions otherwise (learned ones), nor on Megatron-Core dev.

    Args:
        model: A Megatron-Core model, or one model chunk of it.

    Raises:
        ValueError: If the model has no attention layer of Megatron-Core's.
    """
    from megatron.core.transformer.attention import Attention  # noqa: PLC0415 # an extra

    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention layer of Megatron-Core's; pass the model, or "
            "each of its chunks, as it was built"
        )
    for layer in layers:
        _prepare_transformer_engine(layer.core_attention)
        # A collection of its own: others that share it keep the group that they were built with.
        layer.pg_collection = copy.copy(layer.pg_collection)
        layer.register_forward_pre_hook(_Follow(layer.pg_collection.cp), with_kwargs=True)


def _prepare_transformer_engine(core_attention: torch.nn.Module) -> None:
    """Make the stream that Transformer Engine's attention overlaps its communication on.

    Megatron-Core makes it for all layers at once, but only for a model built with CP > 1.
    """
    kind: Any = type(core_attention)
    if getattr(kind, "cp_stream", False) is None and torch.cuda.is_available():
        kind.cp_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # untyped in torch
