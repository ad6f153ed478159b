"""The parts of `train_vlm.py` that any training run has: a model, a workload, options, a report."""
