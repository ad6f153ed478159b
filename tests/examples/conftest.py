"""The modules of the examples are imported as the script imports them: from its own folder."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
