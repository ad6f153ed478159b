"""The examples' GPT is the tests' GPT."""

import sys
from pathlib import Path

# Spawned ranks inherit this path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
