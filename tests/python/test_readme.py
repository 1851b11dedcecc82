"""The snippets of README.md run as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"README.md has {len(found)} blocks of {language}, and this test is about exactly one"
    return found[0]


def library_directory() -> Path:
    """Where `./dev build` or a plain cmake build put libtilewise."""
    candidates = [ROOT / "build/dev", ROOT / "build"]
    if given := os.environ.get("TILEWISE_LIBRARY_DIR"):
        candidates = [Path(given)]
    for directory in candidates:
        if (directory / "libtilewise.so").exists():
            return directory
    pytest.fail(f"no libtilewise.so in {', '.join(map(str, candidates))}: run ./dev build first")


def test_python_block():
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", block("python")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_cpp_block(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("c++")
    assert compiler, "no C++ compiler"
    library = library_directory()
    source, program = tmp_path / "readme.cpp", tmp_path / "readme"
    source.write_text(block("cpp"))
    command = [
        compiler,
        "-std=c++20",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-I",
        str(ROOT / "include"),
        str(source),
        "-o",
        str(program),
    ]
    command += ["-L", str(library), "-ltilewise", f"-Wl,-rpath,{library}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("document", ["README.md", "HACKING.md", "docs/demo.md"])
def test_links_lead_somewhere(document):
    path = ROOT / document
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose)
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert not missing, f"{document} links to what does not exist: {missing}"
