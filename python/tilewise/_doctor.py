"""Facts about this installation, and a first failing check if there is one."""

from __future__ import annotations

import platform
import sys

import numpy as np

from . import _ext
from ._attention import attention


def doctor() -> str:
    """A report as text: versions, instruction set and threads of the CPU backend, implementations, and a self-test.

    For bug reports; the command line has it too. It imports nothing that is not imported already.
    """
    lines = [
        f"python: {platform.python_version()} ({platform.machine()}, {platform.system()})",
        f"numpy: {np.__version__}",
    ]
    torch = sys.modules.get("torch")
    lines.append(
        "torch: not imported" if torch is None else f"torch: {torch.__version__}, {torch.get_num_threads()} threads"
    )
    lines.append(f"extension: {_ext.__file__}")
    lines.extend(line for line in _ext.doctor().splitlines() if line)
    lines.append(f"self-test: {_self_test()}")
    return "\n".join(lines)


def _self_test() -> str:
    """A small causal problem against the formula in NumPy, on the implementation that a call would get."""
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, 70, 2, 32), dtype=np.float32) for _ in range(3))
    try:
        o = attention(q, k, v, causal=True)
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    x = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k) / np.sqrt(32.0)
    x = np.where(np.tri(70, dtype=bool), x, -np.inf)
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    difference = float(np.abs(o - np.einsum("bhij,bjhd->bihd", p, v)).max())
    return "passed" if difference < 1e-5 else f"failed: off by {difference:.2e} from the formula, allowed 1e-5"
