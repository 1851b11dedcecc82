"""Tilewise: exact attention with linear memory, on NumPy and CuPy arrays and torch tensors.

    o = tilewise.attention(q, k, v, causal=True)

`attention` is the call; `attention_forward`, `attention_backward` and `merge` are its parts, for libraries built on
top; `masks` and `score_mod` say who sees whom and how scores change; `reference` is the formula in float64; `plan`,
`supports`, `explain` and `doctor` answer questions. docs/python.md has the guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from . import _ext
except ImportError as error:  # say what to do, before the linker's own line
    raise ImportError(
        "tilewise: its compiled extension tilewise._ext cannot be loaded. "
        f"Python said: {error}. Reinstall tilewise for this Python (pip install --force-reinstall tilewise), or build it "
        "in the checkout (./dev build)."
    ) from error

from . import masks, ops
from ._arrays import as_view
from ._attention import (
    Gradients,
    attention,
    attention_backward,
    attention_forward,
    attn_probs,
    dropout_mask,
    merge,
    reference,
    score_mod,
)
from ._doctor import doctor
from ._errors import (
    ArgumentTypeError,
    Error,
    InternalError,
    InvalidArgumentError,
    OutOfMemoryError,
    TraceError,
    UnsupportedError,
)
from ._plan import Plan, explain, plan, supports

if TYPE_CHECKING:
    from .sdpa import scaled_dot_product_attention as scaled_dot_product_attention

__version__ = _ext.version()


def num_threads() -> int:
    """Threads that the CPU backend works with: `set_num_threads`, else those of the process's OpenMP run time (in a torch
    process, torch.get_num_threads())."""
    return _ext.num_threads()


def set_num_threads(count: int) -> None:
    """Limits the CPU backend to `count` threads; 0 = follow the OpenMP run time again. Results do not depend on it."""
    _ext.set_num_threads(count)


def __getattr__(name: str) -> object:
    """What needs torch, imported when it is asked for."""
    if name == "scaled_dot_product_attention":
        from . import sdpa

        return sdpa.scaled_dot_product_attention
    raise AttributeError(f"module 'tilewise' has no attribute {name!r}")


__all__ = [
    "ArgumentTypeError",
    "Error",
    "Gradients",
    "InternalError",
    "InvalidArgumentError",
    "OutOfMemoryError",
    "Plan",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "as_view",
    "attention",
    "attention_backward",
    "attention_forward",
    "attn_probs",
    "doctor",
    "dropout_mask",
    "explain",
    "masks",
    "merge",
    "num_threads",
    "ops",
    "plan",
    "reference",
    "score_mod",
    "set_num_threads",
    "supports",
]
