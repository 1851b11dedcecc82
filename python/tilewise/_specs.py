"""Specs of GPU kernels to compile before they are needed: the committed list (specs.json), a file of one's own, or what a
model's config.json says.

A spec is a JSON object. Of a call only what is compiled into a kernel matters, so it has no lengths, batch or scale:

    name        for reports; the default is made of the rest
    dtype       float32, float64, float16, bfloat16
    head_dim, head_dim_v
    heads       [query heads, key/value heads]
    causal, window, chunk, softcap, bias, alibi, sinks, dropout    true if the calls use it
    mask, score_mod    the text that `repr` of masks and `str` of functions show, with @k for arrays, $k for scalars
    arrays      what they read, like "int64[256]": dtype and rank count; the axes of 256 are queries or keys
    scalars     how many of them
    passes      ["forward", "backward"]
    tuned       a spill, local memory or serialised wgmma is an error
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Final

from . import _ext
from ._errors import InvalidArgumentError, refuse

PASSES: Final = ("forward", "backward")
DTYPES: Final = ("float32", "float64", "float16", "bfloat16")
# Numbers of tilewise_dtype.
_NUMBERS: Final = {
    "float64": 1, "float32": 2, "float16": 3, "bfloat16": 4, "int64": 5, "int32": 6, "int16": 7, "int8": 8, "uint8": 9,
    "bool": 10, "uint32": 11,
}  # fmt: skip
_FLAGS: Final = ("causal", "window", "chunk", "softcap", "bias", "alibi", "sinks", "dropout")
_SEQLEN: Final = 256


def _view(dtype: str, *shape: int) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """A view without data: the library looks at shapes only."""
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return (0, _NUMBERS[dtype], shape, strides)


@dataclass(frozen=True)
class Spec:
    name: str = ""
    dtype: str = "float16"
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    heads: tuple[int, int] = (4, 2)
    causal: bool = False
    window: bool = False
    chunk: bool = False
    softcap: bool = False
    bias: bool = False
    alibi: bool = False
    sinks: bool = False
    dropout: bool = False
    mask: str = ""
    score_mod: str = ""
    arrays: tuple[str, ...] = ()
    scalars: int = 0
    passes: tuple[str, ...] = PASSES
    tuned: bool = False

    def title(self) -> str:
        if self.name:
            return self.name
        dims = str(self.head_dim) if self.head_dim_v in (0, self.head_dim) else f"{self.head_dim}/{self.head_dim_v}"
        parts = [self.dtype, f"d{dims}", *(flag for flag in _FLAGS if getattr(self, flag)), self.mask]
        return " ".join(filter(None, [*parts, "score_mod" if self.score_mod else ""]))

    def problem(self) -> _ext.Problem:
        heads_q, heads_kv = self.heads
        q = _view(self.dtype, 1, _SEQLEN, heads_q, self.head_dim)
        k = _view(self.dtype, 1, _SEQLEN, heads_kv, self.head_dim)
        v = _view(self.dtype, 1, _SEQLEN, heads_kv, self.head_dim_v or self.head_dim)
        problem = _ext.Problem(q, k, v, 0)
        problem.causal = int(self.causal)
        if self.window:
            problem.window_left, problem.window_right = 64, -1 if self.causal else 64
        problem.chunk = 64 if self.chunk else 0
        problem.softcap = 30.0 if self.softcap else 0.0
        problem.dropout_p = 0.1 if self.dropout else 0.0
        if self.bias:
            problem.set_bias(_view(self.dtype, 1, heads_q, _SEQLEN, _SEQLEN))
        if self.alibi:
            problem.set_alibi_slopes(_view("float32", heads_q))
        if self.sinks:
            problem.set_sinks(_view("float32", heads_q))
        problem.mask = self.mask
        problem.score_mod = self.score_mod
        problem.set_arrays([_array(text) for text in self.arrays])
        problem.set_scalars([0.0] * self.scalars)
        return problem


def _array(text: str) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    match = re.fullmatch(r"(\w+)\[([\d, ]*)\]", text)
    if match is None or match[1] not in _NUMBERS:
        refuse("arrays", repr(text), f'a dtype and a shape like "int64[{_SEQLEN}]"; dtypes {", ".join(_NUMBERS)}')
    return _view(match[1], *(int(extent) for extent in match[2].split(",") if extent.strip()))


def _integer(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


_KINDS: Final[Mapping[str, tuple[str, Any]]] = {
    "name": ("a text", lambda x: isinstance(x, str)),
    "dtype": (", ".join(DTYPES), lambda x: x in DTYPES),
    "head_dim": ("a whole number", _integer),
    "head_dim_v": ("a whole number", _integer),
    "heads": (
        "[query heads, key/value heads]",
        lambda x: isinstance(x, list) and len(x) == 2 and all(map(_integer, x)),
    ),
    "mask": ("a text", lambda x: isinstance(x, str)),
    "score_mod": ("a text", lambda x: isinstance(x, str)),
    "arrays": ("a list of texts", lambda x: isinstance(x, list) and all(isinstance(each, str) for each in x)),
    "scalars": ("a whole number", _integer),
    "passes": (
        'a list of "forward" and "backward"',
        lambda x: isinstance(x, list) and bool(x) and all(each in PASSES for each in x),
    ),
}


def spec_from(entry: Any, where: str) -> Spec:
    names = [field.name for field in fields(Spec)]
    if not isinstance(entry, dict):
        refuse(where, repr(entry), "a JSON object with " + ", ".join(names))
    for name, value in entry.items():
        if name not in names:
            refuse(where, f"the field {name!r}", ", ".join(names))
        kind, good = _KINDS.get(name, ("true or false", lambda x: isinstance(x, bool)))
        if not good(value):
            refuse(f"{where}: {name}", json.dumps(value), kind)
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    spec = Spec(**values)
    try:
        spec.problem()
    except InvalidArgumentError as error:
        raise type(error)(f"{where}: {error}") from None
    return spec


def committed_specs() -> list[Spec]:
    """The list that comes with the package."""
    return _specs(json.loads(resources.files(__package__).joinpath("specs.json").read_text()), "specs.json")


def specs_from_file(path: Path) -> list[Spec]:
    return _specs(_read(path, "--specs"), str(path))


def _read(path: Path, argument: str) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        refuse(argument, f"{str(path)!r} ({error})", "a JSON file")


def _specs(content: Any, where: str) -> list[Spec]:
    entries = content.get("specs") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        refuse(where, "no list of specs", 'a list, or an object with a list "specs"')
    return [spec_from(entry, f"{where}, spec {n}") for n, entry in enumerate(entries)]


# --------------------------------------------------------------------------------------------------------- models


def _first(config: Mapping[str, Any], names: Iterable[str], default: Any = None) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)


def specs_from_model(path: Path, dtype: str | None = None) -> list[Spec]:
    """What calls of a model with this config.json (in the style of Hugging Face) need: without and with a padding mask;
    with dropout too, if it trains with it."""
    if path.is_dir():
        path = path / "config.json"
    config = _read(path, "--model")
    if not isinstance(config, dict):
        refuse("--model", f"{str(path)!r}, which holds no object", "a config.json")
    outer = config
    for part in ("text_config", "llm_config", "language_config"):  # of models that see or hear too
        if isinstance(config.get(part), dict):
            config = {**{name: outer[name] for name in ("torch_dtype", "dtype") if name in outer}, **config[part]}
            break
    kind = str(_first(config, ["model_type"], ""))
    nested: dict[str, Any] = config["attn_config"] if isinstance(config.get("attn_config"), dict) else {}

    heads = _first(config, ["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"])
    hidden = _first(config, ["hidden_size", "n_embd", "d_model"])
    dim = _first(config, ["head_dim", "d_kv", "qk_head_dim"])
    if isinstance(config.get("qk_nope_head_dim"), int) and isinstance(config.get("qk_rope_head_dim"), int):
        dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]  # latent attention, as trained
    if not _integer(heads, 1) or (dim is None and not _integer(hidden, 1)):
        refuse(
            "--model",
            f"{str(path)!r} without them",
            "num_attention_heads, and head_dim or hidden_size, as numbers",
        )
    dim = hidden // heads if dim is None else dim
    heads_kv = _first(config, ["num_key_value_heads", "num_kv_heads", "n_head_kv"], nested.get("kv_n_heads", heads))
    if config.get("multi_query") is True and "num_key_value_heads" not in config:
        heads_kv = 1
    if not _integer(dim, 1) or not _integer(heads_kv, 1) or heads % heads_kv:
        refuse("--model", f"{heads} heads on {heads_kv} of size {dim}", "a multiple of the key/value heads, and a size")
    named = dtype or str(_first(config, ["torch_dtype", "dtype"], "bfloat16")).removeprefix("torch.")
    if named not in DTYPES:
        refuse("--model", f"torch_dtype {named!r}", ", ".join(DTYPES), "--dtype names another one.")
    sliding = _integer(_first(config, ["sliding_window", "attention_window"]), 1) and config.get(
        "use_sliding_window", True
    )
    common: dict[str, Any] = {
        "dtype": named,
        "head_dim": dim,
        "head_dim_v": config["v_head_dim"] if _integer(config.get("v_head_dim"), 1) else 0,
        "heads": (heads, heads_kv),
        "causal": _causal(config, kind),
        "softcap": bool(_first(config, ["attn_logit_softcapping", "attn_logit_softcap"])),
        "alibi": config.get("alibi") is True
        or nested.get("alibi") is True
        or kind == "bloom"
        or config.get("position_embedding_type") == "alibi",
        "bias": "relative_attention_num_buckets" in config,
        "sinks": kind == "gpt_oss" or config.get("attention_sink") is True,
    }
    title = f"{kind or path.parent.name or path.name} {named}"
    bands: list[tuple[str, dict[str, Any]]] = [("", {"window": bool(sliding)})]
    if _integer(config.get("attention_chunk_size"), 1):
        bands.append((" chunk", {"chunk": True}))
    drops = _first(config, ["attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate"], 0.0)
    trained = isinstance(drops, (int, float)) and drops > 0
    padded: dict[str, Any] = {"mask": "key_padding(@0)", "arrays": (f"bool[1,{_SEQLEN}]",)}
    masks: tuple[tuple[str, dict[str, Any]], ...] = (("", {}), (" padding", padded))
    specs = []
    for band, more in bands:
        for padding, mask in masks:
            for dropout in (False, True) if trained else (False,):
                # Without its dropout such a model only runs forward.
                passes = PASSES[:1] if trained and not dropout else PASSES
                name = title + band + padding + (" dropout" if dropout else "")
                specs.append(Spec(name=name, dropout=dropout, passes=passes, **common, **more, **mask))
    return specs


def _causal(config: Mapping[str, Any], kind: str) -> bool:
    encoders = ("bert", "roberta", "deberta", "electra", "vit", "clip_vision", "siglip", "wav2vec", "t5", "whisper")
    if kind.startswith(encoders) or kind.endswith(("bert", "encoder")):
        return bool(config.get("is_decoder", False))
    return not config.get("use_bidirectional_attention", False)
