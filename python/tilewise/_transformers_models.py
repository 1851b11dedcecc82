"""Models of Transformers that choose their attention in ways of their own, with Tilewise among the choices.

Falcon, and in Transformers 4.57 BERT, look their attention class up in a dictionary of their module; these classes run
the model's own code for PyTorch's function, routed. T5 of 4.57 has one formula and no choice: its method gets one.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any, Final

import torch
import transformers

from .sdpa import routed

# Modules whose models take Tilewise though they do not ask the attention interface.
REGISTERED: Final[set[str]] = set()


def register(name: str) -> None:
    _register_class("falcon", "FALCON_ATTENTION_CLASSES", "FalconAttention", name)
    if int(transformers.__version__.split(".")[0]) < 5:
        _register_class("bert", "BERT_SELF_ATTENTION_CLASSES", "BertSdpaSelfAttention", name)
        _register_t5(name)


def _register_class(model: str, dictionary: str, base_name: str, name: str) -> None:
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    classes = getattr(module, dictionary, None)
    if classes is None or name in classes:
        return
    base: Any = getattr(module, base_name)

    class Routed(base):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            if hasattr(self, "config"):  # it reads there which of its formulas is meant
                self.config = copy.copy(config)
                self.config._attn_implementation_internal = "sdpa"

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with routed(strict=True):
                return super().forward(*args, **kwargs)

    Routed.__name__ = Routed.__qualname__ = f"{base_name}Tilewise"
    classes[name] = Routed
    REGISTERED.add(module.__name__)


def _register_t5(name: str) -> None:
    from transformers.models.t5 import modeling_t5

    own_init, own = modeling_t5.T5Attention.__init__, modeling_t5.T5Attention.forward
    if not hasattr(own, "tilewise"):

        def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            own_init(self, config, *args, **kwargs)
            self.config = config

        def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, "config", None) is not None and self.config._attn_implementation == name:
                return _t5_forward(self, hidden_states, *args, **kwargs)
            return own(self, hidden_states, *args, **kwargs)

        forward.tilewise = True  # type: ignore[attr-defined]
        modeling_t5.T5Attention.__init__, modeling_t5.T5Attention.forward = init, forward
    REGISTERED.add(modeling_t5.__name__)


def _t5_forward(
    self: Any, hidden_states: Any, mask: Any = None, key_value_states: Any = None, position_bias: Any = None,
    past_key_values: Any = None, layer_head_mask: Any = None, query_length: Any = None, use_cache: bool = False,
    output_attentions: bool = False, cache_position: Any = None,
) -> Any:  # fmt: skip
    """T5's attention: unscaled scores, and a bias that the first layer makes and all share (the mask is part of it)."""
    from .transformers import attention_forward

    def heads(x: Any) -> Any:
        return x.unflatten(-1, (self.n_heads, self.key_value_proj_dim)).transpose(1, 2)

    crossed = key_value_states is not None
    cache, known = past_key_values, False
    if isinstance(past_key_values, transformers.EncoderDecoderCache):
        known = crossed and past_key_values.is_updated.get(self.layer_idx, False)
        cache = past_key_values.cross_attention_cache if crossed else past_key_values.self_attention_cache
    query = heads(self.q(hidden_states))
    if known:
        layer = cache.layers[self.layer_idx]
        key, value = layer.keys, layer.values
    else:
        source = key_value_states if crossed else hidden_states
        key, value = heads(self.k(source)), heads(self.v(source))
        if cache is not None:
            key, value = cache.update(
                key, value, self.layer_idx, {"cache_position": None if crossed else cache_position}
            )
            if crossed and cache is not past_key_values:
                past_key_values.is_updated[self.layer_idx] = True
    if position_bias is None:
        length_q, length_kv = query.shape[2], key.shape[2]
        if self.has_relative_attention_bias:
            position_bias = self.compute_bias(length_q, length_kv, device=query.device, cache_position=cache_position)
        else:
            position_bias = torch.zeros(1, self.n_heads, length_q, length_kv, device=query.device, dtype=query.dtype)
            position_bias.requires_grad = self.gradient_checkpointing and self.training
        if mask is not None:
            position_bias = position_bias + mask[..., :length_kv]
    o, weights = attention_forward(
        self, query, key, value, None, dropout=self.dropout if self.training else 0.0, scaling=1.0, is_causal=False,
        position_bias=position_bias, head_mask=layer_head_mask, output_attentions=output_attentions,
    )  # fmt: skip
    result = (self.o(o.flatten(-2)), position_bias)
    return (*result, weights) if output_attentions else result
