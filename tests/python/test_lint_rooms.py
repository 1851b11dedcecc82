"""The room lint can fail: one offending file per rule, and a clean tree beside it."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "lint_rooms.py"
spec = importlib.util.spec_from_file_location("lint_rooms", SCRIPT)
assert spec is not None
assert spec.loader is not None
lint_rooms = importlib.util.module_from_spec(spec)
sys.modules["lint_rooms"] = lint_rooms
spec.loader.exec_module(lint_rooms)

CLEAN = {
    "include/tilewise/tilewise.h": "#include <stdint.h>\n",
    "include/tilewise/tilewise.hpp": '#include "tilewise/tilewise.h"\n',
    "src/core/plan.hpp": '#include "tilewise/tilewise.h"\n',
    "src/core/env.cpp": 'const char* v = std::getenv("X");\n',
    "src/cpu/parallel.cpp": 'auto f = dlsym(h, "GOMP_parallel");  // libgomp\n',
    "src/cpu/reference.cpp": '#include "core/plan.hpp"\n// omp_get_max_threads() and exit() in a comment\n',
    "src/implementations.cpp": '#include "core/plan.hpp"\n',
    "kernels/tilewise/mma.cuh": '#include "spec.cuh"\n',
    "kernels/tilewise/fwd.cu": '#include "spec.cuh"\n#include "mma.cuh"\n#include "wgmma.cuh"\n',
    "python/tilewise/_ext.cpp": "#include <nanobind/nanobind.h>\n",
    "examples/one.cpp": "#include <tilewise/tilewise.hpp>\n",
}


def lint(root: Path, extra: dict[str, str]) -> list[str]:
    for path, text in {**CLEAN, **extra}.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return [f"{f.path}:{f.line}:{f.rule}" for f in lint_rooms.lint(root)]


def test_clean_tree_passes(tmp_path: Path) -> None:
    assert lint(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("include/tilewise/more.hpp", '#include "core/plan.hpp"\n', "rooms"),
        ("src/core/bad.cpp", '\n#include "../cpu/reference.cpp"\n', "rooms"),
        ("src/core/bad.cpp", '#include "missing.hpp"\n', "rooms"),
        ("src/cpu/bad.cpp", '#include "../implementations.cpp"\n', "rooms"),
        ("src/second.cpp", '#include "core/plan.hpp"\n', "rooms"),
        ("kernels/tilewise/bad.cu", '#include "specs.cuh"\n', "rooms"),
        ("kernels/tilewise/bad.cuh", '#include "../../src/core/plan.hpp"\n', "rooms"),
        ("examples/bad.c", '#include "../src/core/plan.hpp"\n', "rooms"),
        ("src/cpu/bad.cpp", "#pragma omp parallel for\n", "openmp"),
        ("src/cpu/bad.cpp", "#include <omp.h>\n", "openmp"),
        ("src/core/bad.cpp", 'dlsym(h, "omp_get_max_threads");\n', "openmp"),
        ("src/cpu/bad.cpp", '/* why */ getenv("HOME");\n', "getenv"),
        ("src/core/bad.cpp", "#include <Python.h>\n", "python"),
        ("src/core/bad.hpp", "void f() { std::abort(); }\n", "exit"),
        ("src/cpu/bad.inl", "if (x) exit(1);\n", "exit"),
        ("docs/bad.md", "see /wo" + "rk/main\n", "machine-path"),
        ("src/cpu/long.inl", "\n" * 701, "length"),
    ],
)
def test_every_rule_can_fail(tmp_path: Path, path: str, text: str, rule: str) -> None:
    line = len(text) - len(text.lstrip("\n")) + 1 if rule != "length" else 1
    assert lint(tmp_path, {path: text}) == [f"{path}:{line}:{rule}"]


def test_other_words_are_let_be(tmp_path: Path) -> None:
    assert lint(tmp_path, {"src/core/fine.cpp": "loop.exit(); on_exit(); compute(); recompute();\n"}) == []


def test_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lint_rooms.py", str(tmp_path)])
    lint(tmp_path, {"src/cpu/long.inl": "\n" * 701})
    assert lint_rooms.main() == 0
    assert "warning" in capsys.readouterr().out
    lint(tmp_path, {"src/cpu/bad.cpp": "abort();\n"})
    assert lint_rooms.main() == 1
