"""No function compiled for a newer instruction set can end up in the hands of code that runs everywhere.

An inline function that is in several object files is kept once, from whichever the linker sees first. The objects of
newer instruction sets are linked last, so what they share with an object of the baseline is safe; what they share with
nobody must bear the instruction set in its name, or another library could be handed their copy.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

OBJECTS = Path(__file__).parents[2] / "build" / "dev" / "CMakeFiles" / "tilewise_objects.dir" / "src"
NEWER = {f"attention_{isa}.cpp.o": isa for isa in ("avx2", "avx512")}


def inline_functions(objects: list[Path]) -> dict[str, str]:
    """Mangled to readable name."""
    table = {}
    for name_style in ("", "-C"):
        text = subprocess.run(
            ["nm", "--defined-only", *name_style.split(), *map(str, objects)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        table[name_style] = re.findall(r"^[0-9a-f]+ [WV] (.+)$", text, re.MULTILINE)
    return dict(zip(table[""], table["-C"], strict=True))


def test_shared_functions_are_of_the_baseline() -> None:
    objects = list(OBJECTS.rglob("*.o"))
    newer = [file for file in objects if file.name in NEWER]
    if not newer or shutil.which("nm") is None:
        pytest.skip("no object files of ./dev build for x86 here")
    baseline = inline_functions([file for file in objects if file.name not in NEWER])
    assert baseline
    for file in newer:
        functions = inline_functions([file])
        assert functions, f"{file.name} has no inline function at all: does this test still look in the right place?"
        stray = [
            readable
            for mangled, readable in functions.items()
            if NEWER[file.name] not in readable and mangled not in baseline and not mangled.startswith("DW.ref.")
        ]
        assert not stray, f"{file.name} alone holds {stray}: put them into its namespace or make them static"


def test_newer_instruction_sets_are_linked_last() -> None:
    ninja = OBJECTS.parents[2] / "build.ninja"
    if not ninja.exists():
        pytest.skip("not built by ./dev build")
    link = re.search(r"^build libtilewise\.so\S*: (.*)$", ninja.read_text(), re.MULTILINE)
    assert link is not None
    order = [Path(word).name for word in link.group(1).split() if word.endswith(".cpp.o")]
    present = [name for name in NEWER if name in order]
    assert order[len(order) - len(present) :] == present
