"""What can go wrong. Every error of the package is a `tilewise.Error` and also the built-in exception that fits.

The text of an error says which argument, what was seen, what is allowed, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn


class Error(Exception):
    """Base of everything that tilewise raises on purpose."""


class InvalidArgumentError(Error, ValueError):
    """A value that no call could take: a shape, a dtype, a range, a text."""


class ArgumentTypeError(Error, TypeError):
    """An object of the wrong kind, or an option that does not exist."""


class TraceError(ArgumentTypeError):
    """A mask_mod or score_mod does something that an expression cannot say."""


class UnsupportedError(Error, NotImplementedError):
    """A valid problem that no implementation on this machine takes; the text has each one's reason."""


class OutOfMemoryError(Error, MemoryError):
    """Workspace that could not be allocated."""


class InternalError(Error, RuntimeError):
    """A failure that is tilewise's own fault."""


# Numbers of tilewise_status in tilewise.h; the extension looks its exceptions up here.
BY_STATUS: dict[int, type[Error]] = {
    1: InvalidArgumentError,
    2: UnsupportedError,
    3: OutOfMemoryError,
    4: InternalError,
    5: InternalError,
}


def message(argument: str, seen: object, allowed: str, advice: str = "") -> str:
    """The four parts of every refusal, worded as the C++ side words them."""
    text = f"{argument}: got {seen}; allowed: {allowed}."
    return f"{text} {advice}" if advice else text


def refuse(argument: str, seen: object, allowed: str, advice: str = "") -> NoReturn:
    raise InvalidArgumentError(message(argument, seen, allowed, advice))


def refuse_type(argument: str, seen: object, allowed: str, advice: str = "") -> NoReturn:
    raise ArgumentTypeError(message(argument, seen, allowed, advice))


def refuse_unknown(function: str, unknown: Iterable[str], known: Iterable[str]) -> NoReturn:
    """For options that do not exist: names the nearest that does."""
    names = sorted(unknown)
    known = sorted(known)
    hints = [(name, difflib.get_close_matches(name, known, n=1, cutoff=0.5)) for name in names]
    nearest = "; ".join(f"did you mean {match[0]!r} instead of {name!r}?" for name, match in hints if match)
    nearest = nearest[:1].upper() + nearest[1:]
    raise ArgumentTypeError(
        message(f"{function}()", f"the option {', '.join(map(repr, names))}", ", ".join(known), nearest)
    )
