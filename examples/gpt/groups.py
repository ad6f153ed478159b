"""Process groups as Megatron-Core makes them, on whatever backend the ranks have joined."""

from typing import NamedTuple

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection


class Parallelism(NamedTuple):
    """Sizes of the model's parallel groups; the rest of the ranks are data-parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1


def model_groups(parallelism: Parallelism) -> ProcessGroupCollection:
    """Create Megatron-Core's groups anew and return this rank's."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallelism.tensor,
        pipeline_model_parallel_size=parallelism.pipeline,
        context_parallel_size=parallelism.context,
    )
    return ProcessGroupCollection.use_mpu_process_groups()
