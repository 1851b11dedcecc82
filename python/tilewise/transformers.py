"""Hugging Face Transformers with Tilewise inside: importing this module registers attn_implementation="tilewise".

    import tilewise.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")

Two registrations, for Transformers 4.57 and 5: the attention function, and the function that makes masks. A mask is not
an array of length x length here but an `AttentionMask`, which keeps the rule (causal, window, chunks, padding, packed
documents, functions of the model's own) in a form that Tilewise skips tiles by. docs/transformers.md has the guide.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
import transformers
from transformers import masking_utils, modeling_utils

from . import _transformers_models, masks
from ._attention import attention, attn_probs
from ._errors import UnsupportedError, message, refuse, refuse_type
from ._transformers_masks import NotTraceable, Rule, rule_of

__all__ = ["NAME", "AttentionMask", "attention_forward", "attention_mask", "register"]

#: the value of attn_implementation
NAME: Final = "tilewise"

_log: Final = logging.getLogger("tilewise.transformers")

# Models whose code computes with the mask itself get an ordinary tensor.
_COMPUTES_WITH_MASKS: Final = frozenset({"falcon"})

# Older compilers may not be able to follow rule_of, and that would be an error where a tensor serves.
_COMPILER_RECORDS: Final = torch.torch_version.TorchVersion(torch.__version__) >= (2, 11)

# ---------------------------------------------------------------------------------------------------- the mask


class AttentionMask:
    """Who sees whom in one forward pass, as a rule. Made by `attention_mask`, used by every layer.

    It has the attributes of the tensor [batch, 1, seqlen_q, seqlen_kv] that it stands for, as far as models look at
    them; `dense()` makes that tensor.
    """

    dtype = torch.bool
    ndim = 4

    def __init__(
        self,
        rule: Rule,
        shape: tuple[int, int, int],
        q_offset: Any,
        device: Any,
        may_be_packed: bool = False,
    ) -> None:
        batch, length_q, length_kv = shape
        self.shape = torch.Size((batch, 1, length_q, length_kv))
        self.device = torch.device(device)
        #: no padding was given and nothing is cached: position_ids and cu_seq_lens may still say where documents begin
        self.may_be_packed = may_be_packed and length_q == length_kv > 1
        self._rule = rule
        self._q_offset = q_offset
        self._options = _options(rule, q_offset, length_kv - length_q)
        self._packed: tuple[Any, dict[str, Any]] | None = None

    def options(self, position_ids: Any = None, cu_seq_lens: Any = None) -> dict[str, Any]:
        """Options of tilewise.attention. A layer hands in what it was called with."""
        if not self.may_be_packed or (position_ids is None and cu_seq_lens is None):
            return self._options
        source = position_ids if cu_seq_lens is None else cu_seq_lens
        if self._packed is None or self._packed[0] is not source:  # once for all layers
            ids = _document_ids(position_ids, cu_seq_lens, self.shape[0], self.shape[2])
            options = self._options
            if ids is not None:
                documents = masks.documents(ids.to(self.device))
                mask = options.get("mask")
                options = options | {"mask": documents if mask is None else mask & documents}
            self._packed = source, options
        return self._packed[1]

    def dense(self, **packing: Any) -> Any:
        """bool [batch, 1, seqlen_q, seqlen_kv], true = visible: for looking at."""
        batch, _, length_q, length_kv = self.shape
        q = torch.zeros(batch, length_q, 1, 1, device=self.device)
        k = torch.zeros(batch, length_kv, 1, 1, device=self.device)
        return attn_probs(q, k, **self.options(**packing)) > 0

    def to(self, device: Any = None, *_: Any, **__: Any) -> AttentionMask:
        """The same on another device: layers of one model may be spread over several."""
        if not isinstance(device, (str, int, torch.device)) or torch.device(device) == self.device:
            return self
        offset = self._q_offset.to(device) if isinstance(self._q_offset, torch.Tensor) else self._q_offset
        batch, _, length_q, length_kv = self.shape
        shape = (batch, length_q, length_kv)
        return AttentionMask(self._rule.to(device), shape, offset, device, self.may_be_packed)

    def dim(self) -> int:
        return 4

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"AttentionMask({list(self.shape)}: {shown or 'everything is visible'})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> NoReturn:
        _refuse_arithmetic(getattr(function, "__name__", str(function)))

    def __getitem__(self, index: Any) -> AttentionMask:
        # mask[:, :, :, :n] with n = all keys is how some models cut what is not there.
        whole = index if isinstance(index, tuple) else (index,)
        if all(
            isinstance(each, slice) and each.start in (None, 0) and each.step is None and each.stop in (None, n)
            for each, n in zip(whole, self.shape, strict=False)
        ):
            return self
        return _refuse_arithmetic("indexing")

    def _arithmetic(self, *_: Any) -> NoReturn:
        _refuse_arithmetic("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = _arithmetic
    __invert__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = _arithmetic


def _refuse_arithmetic(what: str) -> NoReturn:
    refuse_type(
        "attention_mask",
        f"{what} on a tilewise AttentionMask",
        "handing it to the attention function",
        "This model computes with its mask, so it is not written for attention interfaces: use "
        'attn_implementation="sdpa", and tilewise.sdpa.routed() around the call.',
    )


def _options(rule: Rule, q_offset: Any, bottom_right: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rule.right == 0:
        options["causal"] = True
    if rule.left is not None or (rule.right is not None and rule.right > 0):
        right = rule.right if rule.right else -1
        options["window"] = (-1 if rule.left is None else rule.left, right)
    if rule.mask is not None:
        options["mask"] = rule.mask
    if not isinstance(q_offset, int) or q_offset != bottom_right:
        options["q_offset"] = q_offset
    return options


def _positions(position_ids: Any, batch: int, length: int) -> Any:
    """[1 or batch, length], of what models call position_ids: [length], [1, length], [batch, length], or with an axis
    in front: one, or the text's positions in front of three of an image's. None if there are none of the text."""
    if not isinstance(position_ids, torch.Tensor) or position_ids.ndim == 0 or position_ids.shape[-1] != length:
        return None
    if position_ids.ndim == 1:
        return position_ids[None]
    if position_ids.ndim == 3:
        if position_ids.shape[0] not in (1, 4):
            return None
        position_ids = position_ids[0]
    return position_ids if position_ids.ndim == 2 and position_ids.shape[0] in (1, batch) else None


def _document_ids(position_ids: Any, cu_seq_lens: Any, batch: int, length: int) -> Any:
    """Numbers of documents [1 or batch, length], or None if there is only one: from the bounds of packed sequences if
    given, else a document begins where positions do not go on."""
    if cu_seq_lens is not None:
        if batch != 1:
            refuse("cu_seq_lens_q", f"bounds of packed sequences with batch {batch}", "batch 1")
        inner = cu_seq_lens[1:].contiguous()
        row = torch.arange(length, device=inner.device, dtype=inner.dtype)
        return torch.searchsorted(inner, row, right=True)[None]
    positions = _positions(position_ids, batch, length)
    if positions is None or torch.compiler.is_compiling():
        return None
    begins = torch.nn.functional.pad(positions[:, 1:] <= positions[:, :-1], (1, 0))
    return begins.cumsum(-1) if bool(begins.any()) else None


# ------------------------------------------------------------------------------------------------ the mask function


def attention_mask(
    batch_size: int,
    q_length: Any = None,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    allow_is_causal_skip: bool = True,
    device: Any = None,
    cache_position: Any = None,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """What Transformers calls once for each kind of layer in a forward pass: an `AttentionMask`.

    In 4.57 `cache_position` takes the place of q_length and q_offset. Inside torch.export, inside torch.compile with a
    static cache, for a single query of a cache that may be compiled, and for models that compute with masks, it is a
    bool tensor.
    """
    if isinstance(attention_mask, AttentionMask):
        return attention_mask  # made before, by generate()
    dense = functools.partial(
        _dense, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device,
        cache_position, kwargs,
    )  # fmt: skip
    if cache_position is not None:
        device, q_length, q_offset = cache_position.device, cache_position.shape[0], cache_position[0]
    if device is None:
        device = attention_mask.device if attention_mask is not None else "cpu"
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        known = torch.compiler.is_compiling() and isinstance(q_offset, int)
        if known and attention_mask is None and mask_function is masking_utils.causal_mask_function:
            return AttentionMask(Rule(right=0), (batch_size, q_length, kv_length), q_offset - kv_offset, device)
        # use_vmap: with functions of the model's own, of which a program cannot ask what rule_of would.
        own = kwargs.get("use_vmap", True)
        if not (known and _COMPILER_RECORDS) or own or torch.compiler.is_exporting():
            return dense()
    if q_length == 1 and not allow_is_causal_skip:
        return dense()  # [batch, 1, 1, seqlen_kv], which a compiled forward pass takes as one of its inputs
    if getattr(config, "model_type", None) in _COMPUTES_WITH_MASKS:
        return dense()
    if isinstance(q_offset, torch.Tensor) and q_offset.device.type == "cpu":
        q_offset = int(q_offset)
        if cache_position is not None and int(cache_position[-1]) != q_offset + q_length - 1:
            return dense()
    try:
        rule = rule_of(mask_function, batch_size, q_length, kv_length, q_offset, kv_offset)
    except NotTraceable as error:
        if not torch.compiler.is_compiling():
            _warn_once(f"mask function {getattr(mask_function, '__qualname__', mask_function)}", str(error))
        return dense()
    offset = q_offset - kv_offset
    packing = attention_mask is None and rule.mask is None and isinstance(offset, int) and offset == 0
    if attention_mask is not None:
        rule = _with_padding(rule, attention_mask, kv_length, kv_offset, offset, q_length)
    return AttentionMask(rule, (batch_size, q_length, kv_length), offset, device, may_be_packed=packing)


def _dense(
    batch_size: int, q_length: Any, kv_length: int, q_offset: Any, kv_offset: int, mask_function: Any, padding: Any,
    device: Any, cache_position: Any, kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """The same as a bool tensor [batch, 1, seqlen_q, seqlen_kv], by Transformers' own means."""
    where = {"device": device, "q_length": q_length, "q_offset": q_offset}
    if cache_position is not None:
        where = {"cache_position": cache_position}
    return masking_utils.sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=padding,
        **where,
        **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "allow_torch_fix": False},
    )


def _with_padding(rule: Rule, padding: Any, kv_length: int, kv_offset: int, offset: Any, q_length: int) -> Rule:
    """The rule and the mask of padding tokens [batch, tokens seen]; keys past its end are hidden."""
    if padding.ndim != 2:
        refuse("attention_mask", f"shape {list(padding.shape)}", "[batch, tokens], or 4-D [batch, 1 or heads, q, kv]")
    keep = padding[:, kv_offset : kv_offset + kv_length].bool()
    if (missing := kv_length - keep.shape[1]) > 0:
        keep = torch.nn.functional.pad(keep, (0, missing))
    known = keep
    if rule.right == 0 and isinstance(offset, int):
        known = keep[:, : offset + q_length]  # causal hides the rest
    if not (torch.compiler.is_compiling() or _capturing(keep)) and bool(known.all()):
        return rule
    return rule.and_mask(masks.key_padding(keep))


def _capturing(tensor: Any) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_warned: set[str] = set()


def _warn_once(what: str, why: str) -> None:
    text = f"{what}: {why}"
    _log.log(logging.DEBUG if text in _warned else logging.WARNING, "a mask of length x length is made: %s", text)
    _warned.add(text)


# ------------------------------------------------------------------------------------------------ the attention function


def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    position_ids: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """What a layer calls: query [batch, heads, seqlen_q, dim], key and value with their own number of heads.

    Args:
        attention_mask: an AttentionMask; a tensor [batch, 1 or heads, seqlen_q or 1, seqlen_kv], bool (true = attend) or
            float (added to the scores); [batch, seqlen_kv], true = no padding; or None.
        sliding_window, is_causal: used if there is no mask that says it already.
        s_aux: a sink for each head. position_bias: added to the scores, with a gradient.
        cu_seq_lens_q, cu_seq_lens_k: bounds of packed sequences, if attention_mask says nothing of them.

    Returns:
        o [batch, seqlen_q, heads, dim], and None, or the probabilities if output_attentions is true.
    """
    _refuse_what_changes_attention(kwargs)
    length_q, length_kv = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"layout": "bhsd", "softmax_scale": scaling}
    bounds = _bounds(cu_seq_lens_q, cu_seq_lens_k, length_q, length_kv)
    if isinstance(attention_mask, AttentionMask):
        if attention_mask.shape[2:] != (length_q, length_kv):
            refuse(
                "attention_mask",
                f"a mask of {list(attention_mask.shape[2:])} queries and keys",
                f"{[length_q, length_kv]}, as query and key have",
            )
        options |= attention_mask.options(position_ids, bounds)
    else:
        if attention_mask is None or (isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2):
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            options["causal"] = bool(causal) and length_q > 1
            if sliding_window is not None:
                options["window"] = (sliding_window - 1, -1 if causal else sliding_window - 1)
        if attention_mask is not None:
            options |= _from_tensor(attention_mask, length_kv)
        elif bounds is not None:
            options["mask"] = masks.documents(_document_ids(None, bounds, query.shape[0], length_q))
    if position_bias is not None:
        if position_bias.shape[-1] > length_kv:
            position_bias = position_bias[..., :length_kv]
        options["bias"] = options["bias"] + position_bias if "bias" in options else position_bias
    if softcap:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux
    if dropout:
        options["dropout_p"] = dropout
    if kwargs.get("deterministic"):
        options["deterministic"] = True
    o = attention(query, key, value, **options)
    probabilities = None
    if kwargs.get("output_attentions"):
        options.pop("dropout_p", None)
        probabilities = attn_probs(query.detach(), key.detach(), **options).to(query.dtype)
    return o.transpose(1, 2).contiguous(), probabilities


def _refuse_what_changes_attention(options: dict[str, Any]) -> None:
    for name in ("head_mask", "layer_head_mask", "block_table", "page_table"):
        if options.get(name) is not None:
            advice = (
                'attn_implementation="eager" has it.' if "head" in name else "Continuous batching is not supported."
            )
            raise UnsupportedError(message(name, f"a {type(options[name]).__name__}", "None", advice))
    if type(options.get("cache")).__name__ == "PagedAttentionCache":
        raise UnsupportedError(
            message(
                "cache", "a PagedAttentionCache", "dynamic and static caches", "Continuous batching is not supported."
            )
        )


def _bounds(cu_seq_lens_q: Any, cu_seq_lens_k: Any, length_q: int, length_kv: int) -> Any:
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return None
    if cu_seq_lens_q is None or cu_seq_lens_k is None or length_q != length_kv:
        refuse(
            "cu_seq_lens_q, cu_seq_lens_k",
            "one of them" if length_q == length_kv else f"bounds with {length_q} queries and {length_kv} keys",
            "both, the same, of sequences that attend to themselves",
        )
    return cu_seq_lens_q


def _from_tensor(mask: Any, length_kv: int) -> dict[str, Any]:
    """Options for a mask that is a tensor."""
    if not isinstance(mask, torch.Tensor):
        refuse_type(
            "attention_mask",
            f"a {type(mask).__name__}",
            "an AttentionMask, a tensor or None",
            "Masks of other attention implementations (BlockMask) are not taken.",
        )
    kind = str(mask.dtype).removeprefix("torch.")
    if mask.ndim == 2:
        if mask.is_floating_point():
            refuse("attention_mask", f"{kind} {list(mask.shape)}", "bool or integers for a 2-D mask, true = no padding")
        return {"mask": masks.key_padding(mask[:, -length_kv:])}
    if mask.ndim != 4:
        refuse("attention_mask", f"shape {list(mask.shape)}", "[batch, kv] or 4-D [batch, 1 or heads, q or 1, kv]")
    mask = mask[..., :length_kv]  # Transformers' eager attention cuts it so too
    if mask.is_floating_point():
        return {"bias": mask}
    if mask.dtype != torch.bool:
        refuse(
            "attention_mask",
            f"a 4-D mask of {kind}",
            "a 4-D mask of bool (true = attend) or of a float dtype (added to the scores)",
            "mask.bool() if it holds 0 and 1.",
        )
    return {"mask": mask}


# ---------------------------------------------------------------------------------------------------- registration


def register() -> None:
    """Makes attn_implementation="tilewise" known to Transformers. Importing the module does it."""
    modeling_utils.AttentionInterface.register(NAME, attention_forward)
    masking_utils.AttentionMaskInterface.register(NAME, attention_mask)
    _transformers_models.register(NAME)
    if not hasattr(modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation, "tilewise"):
        _watch_over_models()


def _watch_over_models() -> None:
    """Models that do not ask the attention interface would run their own code without a word: refused when made."""
    inner = modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(inner)
    def checked(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        found = inner(self, attn_implementation, *args, **kwargs)
        if found == NAME and not _asks_the_interface(type(self).__module__):
            raise UnsupportedError(
                message(
                    "attn_implementation",
                    f"{NAME!r} for {type(self).__name__}",
                    "models that use Transformers' attention interface",
                    f"In Transformers {transformers.__version__} this model has code of its own for attention. If it "
                    'supports "sdpa", use that, with tilewise.sdpa.routed() around its calls.',
                )
            )
        return found

    checked.tilewise = True  # type: ignore[attr-defined]
    modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation = checked


@functools.cache
def _asks_the_interface(module: str) -> bool:
    """Whether a model's module asks the interface, or has no attention of its own."""
    if module in _transformers_models.REGISTERED:
        return True
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # made in a notebook: nobody can tell
        return True
    return "ALL_ATTENTION_FUNCTIONS" in source or not re.search(r"^class \w*Attention\w*\(nn\.Module\)", source, re.M)


register()
