"""Nested samples of tensors to aligned, self-describing bytes and back, without pickle."""
