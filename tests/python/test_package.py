"""What the wheel's extension may need and show, and the comments that the API reference is made of.

Wheels themselves, and how strangers use them, are checked by ./dev test --all.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import tilewise
from tilewise import _ext

ROOT = Path(__file__).resolve().parents[2]


def output_of(tool: str, *arguments: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool}")
    return subprocess.run([tool, *arguments, _ext.__file__], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="how Linux links")
def test_extension_needs_what_every_system_has():
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\.so", output_of("readelf", "-d"))
    # No OpenMP: it uses the one that the process has. No C++ run time: it brings its own.
    loader = {name for name in needed if name.startswith("ld-linux")}
    assert set(needed) - loader <= {"libc", "libm", "libgcc_s", "libdl", "libpthread"}


def test_extension_shows_its_entry_only():
    symbols = [line.split()[-1] for line in output_of("nm", "-D", "--defined-only").splitlines()]
    assert symbols == ["PyInit__ext"]


def test_annotations_can_be_evaluated():
    for name in tilewise.__all__:
        if callable(function := getattr(tilewise, name)) and not isinstance(function, type):
            typing.get_type_hints(function)


def doxygen_sees(text: str) -> str:
    path = ROOT / "docs/api/filter.py"
    spec = importlib.util.spec_from_file_location("doxygen_filter", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.filtered(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/* A header.\n */", "/** @file\n * A header.\n */"),
        ("// A header.\n//\n//     f();  // call", "/// @file\n/// A header.\n///\n///     f();  // call"),
        ("\n/* Adds. */\nint f(void);", "\n/** Adds. */\nint f(void);"),
        ("\n    int32_t d; /* > 0: on */", "\n    int32_t d; /**< \\> 0: on */"),
        ("\nint x = 0;  // @0 is the first", "\nint x = 0; ///< \\@0 is the first"),
        ("\n            // inside of a function\n", "\n            // inside of a function\n"),
        ("\n// " + "-" * 80 + "\n// Caption\n\nint x;", "\n\nint x;"),
        ("\nE(int);  // NOLINT(explicit)\n}  // namespace a", "\nE(int);\n}"),
    ],
)
def test_ordinary_comments_become_doxygens(before, after):
    assert doxygen_sees(before) == after
