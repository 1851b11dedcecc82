#!/usr/bin/env python3
"""Room rules: who may include whom, and which knowledge lives in one file only.

The tree is the architecture (HACKING.md); an include against the direction would compile just as well, so a lint has
to notice it. Usage: tools/lint_rooms.py [ROOT]. Exit status 1 if a rule is broken; warnings do not count.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Room: what it may include. The first prefix that fits a path names its room.
ROOMS = {
    "include": {"include"},
    "src/core": {"include", "src/core"},
    "src/jit": {"include", "src/core", "src/jit"},
    "src/cpu": {"include", "src/core", "src/cpu"},
    "src/cuda": {"include", "src/core", "src/jit", "src/cuda", "kernels/tilewise/abi.h"},
    "src": {"include", "src/core", "src/cpu", "src/cuda", "src/jit"},  # implementations.cpp alone, see below
    "kernels": {"kernels"},
    "python": {"include", "src/core", "src/cpu", "python"},
    "examples": {"include", "examples"},
    "tests": {"include", "src", "src/core", "src/jit", "src/cpu", "src/cuda", "kernels", "tests"},
    "bench": {"include", "bench"},
}
RENDERED = {"spec.cuh", "wgmma.cuh"}  # device text that the host writes for each kernel
INCLUDE_PATH = ("src", "include", "kernels", "tests", "bench")  # besides the folder of the including file


@dataclass(frozen=True)
class Confined:
    """A pattern that only certain files may hold."""

    name: str
    pattern: re.Pattern[str]
    within: tuple[str, ...]  # the rule looks at these folders
    allowed: tuple[str, ...]  # and lets these files be
    reason: str


CONFINED = (
    Confined(
        "openmp",
        re.compile(
            r"\b(omp_\w+|GOMP_\w+|__kmp\w*|kmpc?_\w+|KMP_\w+|libi?omp\w*|libgomp)\b|#\s*pragma\s+omp\b|<omp\.h>"
        ),
        ("src", "include", "python", "kernels"),
        ("src/cpu/parallel.cpp",),
        "one file knows OpenMP",
    ),
    Confined(
        "libcuda",
        re.compile(
            r"\bcu[A-Z]\w*|\bCU[a-z]\w*|\bCU_[A-Z]\w+|\bCUDA_(SUCCESS|ERROR_\w+)|\blibcuda\b|[<\"/]cuda\w*\.h\b"
        ),
        ("src", "include", "python/tilewise/_ext.cpp", "python/tilewise/_ext.hpp", "python/tilewise/_ext_quick.cpp"),
        ("src/cuda/driver.hpp", "src/cuda/driver.cpp"),
        "src/cuda/driver.* alone knows the driver; its table has names of ours",
    ),
    Confined(
        "libnvrtc",
        re.compile(r"\bnvrtc[A-Z]\w*|\bNVRTC_\w+|\blibnvrtc\b"),
        ("src", "include", "python/tilewise/_ext.cpp", "python/tilewise/_ext.hpp", "python/tilewise/_ext_quick.cpp"),
        ("src/jit/nvrtc.cpp",),
        "src/jit/nvrtc.cpp alone knows the compiler",
    ),
    Confined(
        "getenv",
        re.compile(r"\b(secure_)?getenv\b"),
        ("src", "include", "python/tilewise/_ext.cpp", "python/tilewise/_ext.hpp", "python/tilewise/_ext_quick.cpp"),
        ("src/core/env.cpp",),
        "src/core/env.cpp reads the environment for all",
    ),
    Confined(
        "python",
        re.compile(r"#\s*include\s*[<\"](Python\.h|nanobind/|pybind11/|torch/|ATen/|c10/)"),
        ("src", "include", "kernels", "tests", "examples"),
        (),
        "only the extension knows Python, and nobody knows torch",
    ),
    Confined(
        "exit",
        re.compile(r"(?<![\w.>])(std::|::)?(_?exit|_Exit|quick_exit|abort|terminate)\s*\("),
        ("src", "include"),
        (),
        "errors are values; a library never ends its process",
    ),
)

# Written so that this line does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.\-])/(?:work|root|farm)/|/opt/(?:wheels|pypi)")
CODE = {".h", ".hpp", ".c", ".cpp", ".inl", ".cu", ".cuh"}
MAX_KERNEL_LINES = 700

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    rule: str
    text: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {'warning: ' if self.warning else ''}{self.text} [{self.rule}]"


def room_of(path: str) -> str | None:
    return next((room for room in ROOMS if path.startswith(room + "/")), None)


def without_comments(text: str) -> str:
    """Comments become blanks of the same shape, so that line numbers stay; strings stay as they are."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return re.sub(r"[^\n]", " ", found) if found.startswith("/") else found

    return COMMENT_OR_STRING.sub(blank, text)


def line_at(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def resolve(root: Path, path: str, name: str) -> str | None:
    """The file of ours that an include names, relative to the root."""
    for folder in (str(Path(path).parent), *INCLUDE_PATH):
        candidate = (root / folder / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root).as_posix()
    return None


def check_includes(root: Path, path: str, code: str) -> Iterator[Finding]:
    room = room_of(path)
    if room is None:
        return
    if room == "src" and path != "src/implementations.cpp":
        yield Finding(path, 1, "rooms", "a source stands in a room of src/; only implementations.cpp joins them")
        return
    for match in INCLUDE.finditer(code):
        name = match.group(2)
        line = line_at(code, match.start(2))
        target = resolve(root, path, name)
        if target is None:
            if room == "kernels" and name in RENDERED:
                continue
            if match.group(1) == '"' or name.startswith("tilewise/"):
                yield Finding(path, line, "rooms", f"include of {name}: no such file")
            continue
        if room_of(target) not in ROOMS[room] and target not in ROOMS[room]:
            allowed = ", ".join(sorted(ROOMS[room]))
            yield Finding(path, line, "rooms", f"{room}/ may not include {target}; it may include {allowed}")


def check_confined(path: str, code: str) -> Iterator[Finding]:
    for rule in CONFINED:
        if path in rule.allowed or not any(path == w or path.startswith(w + "/") for w in rule.within):
            continue
        for match in rule.pattern.finditer(code):
            text = f"{match.group().strip()}: {rule.reason}"
            yield Finding(path, line_at(code, match.start()), rule.name, text)


def check_file(root: Path, path: str) -> Iterator[Finding]:
    data = (root / path).read_bytes()
    if b"\0" in data:
        return
    text = data.decode("utf-8", errors="replace")
    for match in MACHINE_PATH.finditer(text):
        yield Finding(path, line_at(text, match.start()), "machine-path", f"{match.group()}…: a path of one machine")
    if Path(path).suffix not in CODE:
        return
    code = without_comments(text)
    yield from check_includes(root, path, code)
    yield from check_confined(path, code)
    lines = text.count("\n")
    if lines > MAX_KERNEL_LINES and (path.startswith("kernels/") or path.endswith(".inl")):
        yield Finding(
            path, 1, "length", f"{lines} lines; a kernel is read top to bottom, up to {MAX_KERNEL_LINES}", True
        )


def project_files(root: Path) -> list[str]:
    """What git has or would take; in an unpacked archive, everything outside build outputs."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0 and listed.stdout:
        return sorted(f for f in set(listed.stdout.split("\0")) if f and (root / f).is_file())
    skipped = {".git", ".venv", "build", "__pycache__"}
    files = (f.relative_to(root) for f in root.rglob("*") if f.is_file())
    return sorted(f.as_posix() for f in files if not skipped.intersection(f.parts))


def lint(root: Path) -> list[Finding]:
    root = root.resolve()
    return [finding for path in project_files(root) for finding in check_file(root, path)]


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    findings = lint(root)
    for finding in findings:
        print(finding)
    return any(not finding.warning for finding in findings)


if __name__ == "__main__":
    sys.exit(main())
