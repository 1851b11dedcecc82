"""Functions for mask_mod and score_mod, beside Python's own operators.

    x + s.alpha * tilewise.ops.minimum(i - j, 128)

`+ - * / // % -x abs()` and comparisons work on traced values as they are; `**` with the exponents 1 to 4 and 0.5. Use
`&`, `|`, `~` for `and`, `or`, `not`, and `where` for `if`. `//` and `%` round towards minus infinity, as in Python.
NumPy's and torch's functions of the same names may be used instead (`torch.where`, `np.exp`).
"""

from ._trace import absolute as abs
from ._trace import exp, log, maximum, minimum, sqrt, tanh, to_float, where

__all__ = ["abs", "exp", "log", "maximum", "minimum", "sqrt", "tanh", "to_float", "where"]
