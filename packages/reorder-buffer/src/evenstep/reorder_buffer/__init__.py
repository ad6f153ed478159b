"""Wraps a data iterator so that every micro-batch costs each data-parallel rank the same."""
