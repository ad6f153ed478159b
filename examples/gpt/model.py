"""A small Megatron-Core `GPTModel` that trains on CPUs, and its summed token loss."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from gpt.attention import PackedAttention
from gpt.size import ModelSize

__all__ = ["ModelSize", "build_model", "summed_loss", "transformer_config"]

BYTE_VALUES = 256


def transformer_config(size: ModelSize, **settings: object) -> TransformerConfig:
    """Return a configuration that runs on CPUs; `settings` are Megatron-Core's own names."""
    return TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        # Fused kernels need CUDA.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **settings,
    )


def build_model(
    config: TransformerConfig, size: ModelSize, pg_collection: ProcessGroupCollection
) -> GPTModel:
    """Return the model with learned positions and attention that understands packs."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=BYTE_VALUES,
        max_sequence_length=size.positions,
        position_embedding_type="learned_absolute",
        pg_collection=pg_collection,
    )


def summed_loss(
    model: torch.nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    packed_seq_params: PackedSeqParams | None = None,
) -> torch.Tensor:
    """Return the sum over tokens of the masked loss, float64.

    A sum, never a mean: packs hold different numbers of tokens, so the step divides once, by the
    tokens of the whole global batch. That is what makes the loss independent of the packing.

    Args:
        model: The model.
        batch: tokens, labels, loss_mask, position_ids, each `[1, tokens]`.
        packed_seq_params: Borders of a pack, None for one unpacked sample.
    """
    tokens, labels, loss_mask, position_ids = batch
    losses: torch.Tensor = model(
        tokens, position_ids, None, labels=labels, packed_seq_params=packed_seq_params
    )
    return (losses * loss_mask).double().sum()
