"""The size of the model, apart from it: options are checked before Megatron-Core is imported."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Size of the model.

    Attributes:
        layers: Transformer layers.
        hidden: Width.
        heads: Attention heads.
        positions: Rows of the learned position table: the longest sequence, padding included.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    positions: int = 4096
