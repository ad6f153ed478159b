"""A small Megatron-Core GPT on real text, for `train_gpt_packed.py` and the tests."""
