"""The README's Python runs, in order, as one session."""

import re
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[2] / "packages" / "serialize"


def test_the_readme_s_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 2
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), session)
    received = session["received"]
    assert received.merge("ids", [2, 0]).tolist() == [0, 1, 2, 3, 0, 1, 2]  # type: ignore[attr-defined]  # PackedSamples
    assert torch.equal(session["mapped"]["ids"], torch.arange(6))  # type: ignore[index]  # a dict
    assert len(text.splitlines()) <= 100


def test_the_format_page_lists_every_dtype_code() -> None:
    from evenstep.serialize.dtypes import DTYPES

    text = (PACKAGE / "FORMAT.md").read_text(encoding="utf-8")
    for code, dtype in DTYPES.items():
        name = str(dtype).removeprefix("torch.")
        if re.fullmatch(r"u?int[1-7]", name):  # two ranges on the page
            assert code == (25 if name[0] == "u" else 32) + int(name[-1])
        else:
            assert f"| {code} | {name} |" in text
