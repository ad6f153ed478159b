"""One ragged all-to-all that moves whole training samples between data-parallel ranks."""
