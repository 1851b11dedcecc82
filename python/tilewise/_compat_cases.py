"""What `python -m tilewise.compat speed` runs: models of full size and tiny ones, their steps, and what they must agree on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers

from . import transformers as registered  # noqa: F401 (by its import)
from .compat import SPEED_PARTS as PARTS

IMPLEMENTATIONS: Final = ("tilewise", "sdpa", "eager")


# --------------------------------------------------------------------------------------------------------- the cases


@dataclass(frozen=True)
class Case:
    """A model, and what is done with it: a training step (backward), a forward pass, or `new` tokens after `length`."""

    part: str
    name: str
    family: str  # Llama, Falcon
    options: dict[str, Any]
    batch: int
    length: int
    new: int = 0
    backward: bool = False
    implementations: tuple[str, ...] = IMPLEMENTATIONS

    @property
    def what(self) -> str:
        tokens = f"{self.batch} x {self.length} tokens" if self.batch > 1 else f"{self.length} tokens"
        if self.new:
            return f"{self.new} tokens after {self.length}"
        return f"forward + backward, {tokens}" if self.backward else f"forward, {tokens}"

    @property
    def tokens(self) -> int:
        return self.batch * (self.new or self.length)


def _llama(layers: int, hidden: int, heads: int, inner: int, vocabulary: int = 32000) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 16384, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip


def _falcon(layers: int, heads: int, vocabulary: int = 65024) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary, "hidden_size": 64 * heads, "num_hidden_layers": layers, "num_attention_heads": heads,
        "alibi": False, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "bias": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip


def cases(parts: Sequence[str] = PARTS, tiny: bool = False) -> list[Case]:
    pair = ("tilewise", "sdpa")
    if tiny:
        llama, one, falcon = _llama(2, 64, 4, 96, 128), _llama(1, 64, 4, 96, 128), _falcon(2, 3, 128)
        all_ = [
            Case("train", "tiny Llama", "Llama", llama, 1, 96, backward=True),
            Case("generate", "tiny Falcon", "Falcon", falcon, 1, 16, 4),
            Case("generate", "tiny Llama", "Llama", llama, 1, 16, 4),
            Case("compiled", "tiny Llama, compiled", "Llama", one, 1, 32, implementations=pair),
            Case("compiled", "tiny Llama, compiled", "Llama", one, 1, 32, backward=True, implementations=pair),
        ]
    else:
        small = _llama(4, 512, 8, 1376)
        all_ = [
            Case("train", "Llama, 1.3B", "Llama", _llama(24, 2048, 16, 5504), 1, 8192, backward=True),
            Case("generate", "Falcon, 71 heads of 64 on 1, 8 layers", "Falcon", _falcon(8, 71), 1, 512, 64),
            Case("generate", "Llama, 16 heads of 128, 8 layers", "Llama", _llama(8, 2048, 16, 5504), 1, 512, 64),
            Case("compiled", "small Llama, compiled", "Llama", small, 4, 1024, implementations=pair),
            Case("compiled", "small Llama, compiled", "Llama", small, 4, 1024, backward=True, implementations=pair),
        ]
    return [case for case in all_ if case.part in parts]


def build(case: Case, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The model with each implementation; all have the same weights, in the same memory."""
    models: dict[str, Any] = {}
    for name in case.implementations:
        config = getattr(transformers, f"{case.family}Config")(**case.options)
        torch.manual_seed(0)
        with torch.device(device):
            made = getattr(transformers, f"{case.family}ForCausalLM")._from_config(
                config, attn_implementation=name, dtype=dtype
            )
        for first, mine in zip(next(iter(models.values()), made).parameters(), made.parameters(), strict=True):
            mine.data = first.data
        models[name] = made.train(case.backward)
    return models


# ------------------------------------------------------------------------------------------------- what is run


def turn_of(case: Case, model: Any, ids: Any, device: str, tiny: bool) -> Callable[[], Any]:
    """What is timed. Returns the loss, or the sequences."""
    if case.new:
        return lambda: _generate(case, model, ids)
    run = model
    if case.part == "compiled":
        backend = "eager" if tiny else "inductor"  # eager: the graph is captured, nothing is generated
        run = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)

    def step() -> Any:
        with torch.set_grad_enabled(case.backward):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
            if case.backward:
                model.zero_grad(set_to_none=True)
                loss.backward()
        return loss.detach()

    return step


def _generate(case: Case, model: Any, ids: Any, **more: Any) -> Any:
    with torch.no_grad():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=case.new, do_sample=False, **more
        )


class _Forced(transformers.LogitsProcessor):
    """Makes generation say given tokens, so that the logits of every step can be compared."""

    def __init__(self, given: Any, start: int) -> None:
        self.given, self.start = given, start

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        wanted = self.given[:, input_ids.shape[1] - self.start, None]
        return torch.full_like(scores, -math.inf).scatter_(1, wanted, 0.0)


def answer_of(case: Case, model: Any, turn: Callable[[], Any], ids: Any, given: Any) -> dict[str, Any]:
    """What the implementations must agree on; on the way everything that they compile or load is there."""
    if case.new:
        forced = transformers.LogitsProcessorList([_Forced(given, case.length)])
        options = {"logits_processor": forced, "output_logits": True, "return_dict_in_generate": True}
        return {"logits": torch.stack(_generate(case, model, ids, **options).logits).float().cpu()}
    answer = {"loss": turn().float().cpu()}
    if case.backward:
        answer["gradient"] = model.model.layers[0].self_attn.q_proj.weight.grad.float().cpu()
    return answer


def apart(a: Any, b: Any) -> float:
    """Norm of the difference as a share of the norm of b; infinite where something is not a number."""
    found = float((a - b).norm() / b.norm().clamp(min=1e-30))
    return found if found == found else math.inf
