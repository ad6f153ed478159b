"""The README's example runs and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "exchange" / "README.md"


def test_the_example_runs(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [line.strip() for line in text.splitlines() if line.startswith("    rank ")]
    assert sorted(re.findall(r"rank \d: .*?\]", done.stdout)) == told  # two processes print
    assert len(text.splitlines()) <= 100
