"""Global-batch sequence packing and dynamic context parallelism for Megatron-Core."""
