"""The code of docs/python.md runs as it stands, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def test_blocks_run(capsys):
    pytest.importorskip("torch")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 5
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    assert namespace["table"].grad.abs().sum() > 0
    assert "implementation" in capsys.readouterr().out


def test_every_public_name_is_mentioned():
    import tilewise

    text = PAGE.read_text()
    for name in tilewise.__all__:
        assert name in text or name in ("__version__", "as_view", "num_threads", "Gradients", "Plan"), name
