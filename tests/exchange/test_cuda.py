"""What only a GPU can show; the checks stand in a script that also runs without pytest."""

import pytest
import torch

from benchmarks.gpu.exchange_check import main


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_samples_pass_through_streams_pinned_buffers_and_threads() -> None:
    assert main() == 0
