"""What docs/debugging.md shows runs as it stands, from top to bottom: its blocks, and its command lines."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewise import _cuda, _ext, _specs, cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "debugging.md"


def no_nvrtc() -> bool:
    _cuda.tell_nvrtc_path()
    with pytest.raises(Exception, match=r".") as error:
        _ext.compile(_specs.Spec().problem(), False, "30", "")  # a GPU that no compiler of today knows
    return "sm_30" not in str(error.value)


def test_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    text = PAGE.read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for name, block in re.findall(r"^```python (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        Path(name).write_text(block)
    namespace: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), namespace)
    commands = re.findall(r"^    tilewise (.*)$", text, re.MULTILINE)
    assert {shlex.split(each)[0] for each in commands} == {"explain", "show", "kernel", "record", "replay"}
    for line in commands:
        if line.startswith("kernel") and no_nvrtc():
            continue
        done = CliRunner().invoke(cli.app, shlex.split(line), catch_exceptions=False)
        assert done.exit_code == 0, f"{line}: {done.output}"
    assert Path("mask.png").stat().st_size > 1000
    assert len(Path("calls.jsonl").read_text().splitlines()) == 2


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE.read_text())
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []
    assert "docs/debugging.md" in (ROOT / "README.md").read_text()
