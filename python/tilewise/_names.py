"""Errors in the words of the function that was called.

What the fronts for other APIs call cu_seqlens_k is cu_seqlens_kv of `tilewise.attention`, which finds out what is wrong with
it. `own_names` stands around every function of theirs and says its errors with the function's own argument names.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ._errors import Error
from ._problem import OPTION_NAMES

F = TypeVar("F", bound=Callable[..., Any])

# What the fronts call arguments of attention, attention_forward, attention_backward and merge. Of the names in a row a
# function has one; all others are the same, or not there.
_ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "q": ("query", "qkv"),
    "k": ("key", "kv", "qkv"),
    "v": ("value", "kv", "qkv"),
    "o": ("out", "out_"),
    "out": ("out_",),
    "lse": ("softmax_lse", "logsumexp"),
    "do": ("dout", "grad_out"),
    "o_parts": ("out_partial",),
    "lse_parts": ("lse_partial",),
    "rng": ("rng_state", "philox_seed"),
    "seed": ("rng_state", "philox_seed"),
    "mask": ("attn_mask",),
    "bias": ("attn_mask",),
    "causal": ("is_causal",),
    "window": ("window_size",),
    "window left": ("window_size[0]", "window_size_left"),
    "window right": ("window_size[1]", "window_size_right"),
    "chunk": ("attention_chunk",),
    "softmax_scale": ("scale",),
    "cu_seqlens_q": ("cu_seqlens", "cum_seq_q"),
    "cu_seqlens_kv": ("cu_seqlens_k", "cu_seqlens", "cum_seq_k"),
    "max_seqlen_q": ("max_seqlen", "max_q"),
    "max_seqlen_kv": ("max_seqlen_k", "max_seqlen", "max_k"),
    "seqused_q": ("sequed_q",),
    "seqused_kv": ("seqused_k", "sequed_k"),
    "leftpad_kv": ("leftpad_k",),
}
_NAMES: Final = sorted(OPTION_NAMES | _ALIASES.keys(), key=len, reverse=True)  # "window left" before "window"
_SENTENCES: Final = re.compile(r"(?<=\.) ")
_ASIDES: Final = re.compile(r" \([^()]*\)")


def own_names(function: F) -> F:
    """The function, with errors that name its own arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Error as error:
            error.args = (_Words.of(function).say(str(error)),)
            raise

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # for getfullargspec
    return call  # type: ignore[return-value]


class _Words:
    """How a function says what `tilewise.attention` says."""

    @staticmethod
    @functools.cache
    def of(function: Callable[..., Any]) -> _Words:
        return _Words(inspect.signature(function).parameters.keys())

    def __init__(self, parameters: Any) -> None:
        def own(name: str) -> str:
            candidates = (name, *_ALIASES.get(name, ()))
            return next((each for each in candidates if each.partition("[")[0] in parameters), "")

        self._own = {name: own(name) for name in _NAMES}
        count = Counter(self._own.values())
        self._shared = [name for name in count if name and count[name] > 1]
        # Advice that is about these is for others: "with layout bhsd"; "only v may ..." of a kv.
        self._unsaid = _any_of([name for name, own in self._own.items() if not own or count[own] > 1])

    def say(self, text: str) -> str:
        refusal, *advice = _SENTENCES.split(text)
        said = [self._rename(_ASIDES.sub(lambda aside: "" if self._unsaid.search(aside[0]) else aside[0], refusal))]
        for sentence in advice:
            if "tilewise." in sentence:  # another function's arguments
                said.append(sentence)
            elif not self._unsaid.search(sentence):
                said.append(self._rename(sentence))
        return " ".join(said)

    def _rename(self, text: str) -> str:
        text = _any_of(_NAMES).sub(lambda word: self._own[word[0]] or word[0], text)
        for name in self._shared:  # "qkv, qkv, qkv: got"
            text = re.sub(rf"\b{name}(?:(?:, | and ){name}\b)+", name, text)
        return text


def _any_of(names: list[str]) -> re.Pattern[str]:
    """Any of the names, as a word that is not inside quotes (a value that was seen)."""
    return re.compile(rf"(?<!['\w.])(?:{'|'.join(names)})(?!['\w(])")
