"""An installed wheel in an environment that has NumPy and nothing else: does it work, and what does it weigh?

python installed.py SITE      # the site-packages that it must be in
"""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import tilewise

MAX_BYTES = 10 * 2**20
MAX_IMPORT_SECONDS = 0.15


def check_results() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 300, 4, 32), np.float32) for _ in range(3))
    mask = tilewise.masks.documents(np.arange(300) // 100) & tilewise.masks.mod(lambda b, h, i, j, s: abs(i - j) < 64)
    fading = tilewise.score_mod(lambda x, b, h, i, j, s: x - s.slope[h] * abs(i - j), slope=np.full(4, 0.1))
    options = {"causal": True, "mask": mask, "score_mod": fading}
    np.testing.assert_allclose(
        tilewise.attention(q, k, v, **options), tilewise.reference(q, k, v, **options), rtol=0, atol=1e-5
    )
    try:  # an exception on its way from C++
        tilewise.attention(q, k[..., :3], v)
    except tilewise.InvalidArgumentError as error:
        assert str(error).startswith("k: got head_dim 3"), error
    else:
        raise AssertionError("a wrong head_dim was not refused")


def check_files(package: Path) -> int:
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    sources = [path.name for path in files if path.suffix in (".c", ".cpp", ".h", ".hpp")]
    assert not sources, f"sources in the wheel: {sources}"
    assert len([path for path in files if path.suffix == ".so"]) == 1
    assert (package / "py.typed").exists() and (package / "_ext.pyi").exists()
    size = sum(path.stat().st_size for path in files)
    assert size <= MAX_BYTES, f"{size} bytes installed; at most {MAX_BYTES}"
    return size


def import_seconds(name: str) -> float:
    """The best of ten processes, which may find the machine busy."""
    code = f"import time; start = time.perf_counter(); import {name}; print(time.perf_counter() - start)"
    runs = [subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True) for _ in range(10)]
    return min(float(run.stdout) for run in runs)


def main() -> None:
    package = Path(tilewise.__file__).parent
    assert package.parent == Path(sys.argv[1]), package
    check_results()
    foreign = sorted(name for name in sys.modules if re.match(r"(torch|cupy|jax|typer|rich|matplotlib)\b", name))
    assert not foreign, f"import tilewise brought {foreign}"
    size = check_files(package)
    numpy, whole = import_seconds("numpy"), import_seconds("tilewise")
    # Where NumPy alone takes as long as that, the machine is the slow one.
    assert whole < max(MAX_IMPORT_SECONDS, 1.5 * numpy), f"import took {whole:.3f} s, of which NumPy {numpy:.3f} s"
    print(f"{size / 2**20:.1f} MiB, import {whole:.3f} s (NumPy {numpy:.3f})")


if __name__ == "__main__":
    main()
