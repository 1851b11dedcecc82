"""Small models of real architectures, with Tilewise against eager: `python -m tilewise.compat report`.

Every model is built from its configuration, with random weights, twice: attn_implementation="eager" and "tilewise". Both
get the same batches: plain, padded on the right and on the left, packed documents; and both generate, token by token,
with a growing and with a static cache. Compared are logits, losses, the gradients of all parameters, and the tokens and
logits of generation. `python -m tilewise.compat speed` measures large ones: compat_speed.py.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ._errors import refuse

VOCABULARY: Final = 64
LENGTH: Final = 12  # three times the window
WINDOW: Final = 4
BOUNDS: Final = (0, 5, 6, LENGTH)  # of packed documents
# Largest difference allowed, as a share of the largest value; both sides round in every layer. In half precision both are
# compared with float32, and three times eager's largest difference in any variant is added.
TOLERANCE: Final = {"float32": 2e-5, "bfloat16": 2**-7, "float16": 2**-10}
MEASURES: Final = ("logits", "loss", "gradients", "generate")
VARIANTS: Final = ("plain", "right", "left", "packed", "dynamic", "static")
TITLES: Final = {
    "plain": "plain", "right": "padded right", "left": "padded left", "packed": "packed", "dynamic": "generate",
    "static": "static cache",
}  # fmt: skip
BEGIN: Final = "<!-- begin: python -m tilewise.compat report --markdown -->"
END: Final = "<!-- end -->"
SPEED_PARTS: Final = ("train", "generate", "compiled")  # of compat_speed.py


# ------------------------------------------------------------------------------------------------- the models


@dataclass(frozen=True)
class Architecture:
    """A model class of Transformers and the configuration of a small one."""

    name: str
    features: str
    model: str
    config: str
    options: dict[str, Any]
    kind: str = "decoder"  # decoder, encoder, seq2seq, image, speech
    variants: tuple[str, ...] = VARIANTS
    reference: str = "eager"

    def build(self, attn_implementation: str, device: Any = "cpu", dtype: Any = None, **more: Any) -> Any:
        """A model with reproducible random weights, in evaluation mode."""
        import torch
        import transformers

        config = getattr(transformers, self.config)(**self.options | more)
        torch.manual_seed(0)
        with _quietly():
            model = getattr(transformers, self.model)._from_config(config, attn_implementation=attn_implementation)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                # Large enough that attention is far from uniform, and sinks and biases from nothing.
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 and "norm" in name.lower() else 0.25 * noise)
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        return model.to(device=device, dtype=dtype).eval()


def _decoder(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": None, "attention_dropout": 0.0, **more,
    }  # fmt: skip


_LAYERS: Final = ["sliding_attention", "full_attention"]

ARCHITECTURES: Final = (
    Architecture(
        "GPT-2", "learned positions", "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
    ),
    Architecture("Llama", "grouped heads", "LlamaForCausalLM", "LlamaConfig", _decoder()),
    Architecture(
        "Mistral", "sliding window, grouped heads", "MistralForCausalLM", "MistralConfig",
        _decoder(sliding_window=WINDOW, head_dim=8),
    ),
    Architecture(
        "Qwen2", "grouped heads, window in the upper layers", "Qwen2ForCausalLM", "Qwen2Config",
        _decoder(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    Architecture("Qwen3", "grouped heads, normalised q and k", "Qwen3ForCausalLM", "Qwen3Config", _decoder(head_dim=16)),
    Architecture(
        "Falcon (ALiBi)", "ALiBi, multi-query", "FalconForCausalLM", "FalconConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True,
         "multi_query": True, "new_decoder_architecture": False, "parallel_attn": False, "bias": True,
         "attention_dropout": 0.0, "hidden_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
        variants=("plain", "right", "left", "dynamic"),
        reference="sdpa",  # Transformers' eager code for Falcon adds ALiBi twice
    ),
    Architecture(
        "Falcon (rotary)", "grouped heads", "FalconForCausalLM", "FalconConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False,
         "num_kv_heads": 2, "new_decoder_architecture": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
        variants=("plain", "right", "left", "dynamic"),
    ),
    Architecture(
        "Gemma 2", "softcap, alternating window", "Gemma2ForCausalLM", "Gemma2Config",
        _decoder(sliding_window=WINDOW, head_dim=8, attn_logit_softcapping=5.0, final_logit_softcapping=30.0,
                 query_pre_attn_scalar=8, layer_types=_LAYERS),
    ),
    Architecture(
        "Gemma 3", "alternating window, normalised q and k", "Gemma3ForCausalLM", "Gemma3TextConfig",
        _decoder(sliding_window=WINDOW, head_dim=8, query_pre_attn_scalar=8, layer_types=_LAYERS),
    ),
    Architecture(
        "gpt-oss", "sinks, alternating window, experts", "GptOssForCausalLM", "GptOssConfig",
        _decoder(sliding_window=WINDOW, head_dim=8, num_local_experts=4, num_experts_per_tok=2, layer_types=_LAYERS),
    ),
    Architecture(
        "BERT", "both directions", "BertForMaskedLM", "BertConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0, "pad_token_id": 0},
        "encoder", ("plain", "right", "left"),
    ),
    Architecture(
        "T5", "learned relative bias, unscaled, cross-attention", "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0,
         "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16},
        "seq2seq", ("plain", "right", "left", "dynamic"),
    ),
    Architecture(
        "ViT", "images, both directions", "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 12,
         "patch_size": 3, "num_channels": 1, "num_labels": 5, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0},
        "image", ("plain",),
    ),
    Architecture(
        "Whisper", "speech, cross-attention", "WhisperForConditionalGeneration", "WhisperConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
         "max_source_positions": 10, "max_target_positions": 64, "dropout": 0.0, "attention_dropout": 0.0,
         "activation_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
         "decoder_start_token_id": 2, "begin_suppress_tokens": None},
        "speech", ("plain", "right", "dynamic"),
    ),
)  # fmt: skip


def architecture(name: str) -> Architecture:
    for each in ARCHITECTURES:
        if each.name.lower() == name.lower():
            return each
    return refuse("model", repr(name), ", ".join(each.name for each in ARCHITECTURES))


# ------------------------------------------------------------------------------------------------- the batches


def batch(which: Architecture, variant: str, device: Any = "cpu") -> tuple[dict[str, Any], Any]:
    """Inputs with labels, and a bool tensor: the rows of the logits that mean something (None = all)."""
    import torch

    generator = torch.Generator().manual_seed(2)

    def tokens(*shape: int) -> Any:
        return torch.randint(3, VOCABULARY, shape, generator=generator)

    real = None
    if which.kind == "image":
        inputs = {"pixel_values": torch.randn(2, 1, 12, 12, generator=generator), "labels": torch.tensor([1, 3])}
    elif which.kind == "speech":
        features = torch.randn(2, 8, 20, generator=generator)
        decoded = tokens(2, 7)
        inputs = {"input_features": features, "decoder_input_ids": decoded, "labels": decoded}
        if variant == "right":
            real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
            inputs |= {"decoder_attention_mask": real.long(), "labels": decoded.where(real, -100)}
    else:
        ids = tokens(2, LENGTH)
        inputs = {"input_ids": ids, "labels": ids}
        if variant in ("right", "left"):
            keep = torch.ones(2, LENGTH, dtype=torch.bool)
            keep[1, LENGTH - 5 :] = False
            keep = keep.flip(1) if variant == "left" else keep
            # The row in front of a first token is padding, which attends to nothing: no loss for predicting from it.
            labelled = keep & torch.nn.functional.pad(keep[:, :-1], (1, 0))
            inputs |= {
                "input_ids": ids.where(keep, 0), "attention_mask": keep.long(), "labels": ids.where(labelled, -100),
            }  # fmt: skip
            if which.kind == "decoder":
                inputs["position_ids"] = (keep.long().cumsum(-1) - 1).clamp(min=0)
            real = keep
        if which.kind == "seq2seq":
            inputs["labels"] = tokens(2, 6)
            real = None
        if variant == "packed":
            positions = torch.cat([torch.arange(b - a) for a, b in pairwise(BOUNDS)])[None]
            labels = ids[:1].where(positions > 0, -100)  # no document predicts the next one's first token
            inputs |= {"input_ids": ids[:1], "labels": labels, "position_ids": positions, "use_cache": False}
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    return moved, None if real is None else real.to(device)


# ------------------------------------------------------------------------------------------------- comparing


@dataclass
class Result:
    """What came of one model: the worst error of each measure, by variant, as a share of what is allowed."""

    which: Architecture
    errors: dict[tuple[str, str], float] = field(default_factory=dict)
    fault: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.fault and all(error <= 1 for error in self.errors.values())

    def worst(self, measure: str) -> float | None:
        found = [error for (_, name), error in self.errors.items() if name == measure]
        return max(found) if found else None

    def variant_passed(self, variant: str) -> bool | None:
        found = [error for (name, _), error in self.errors.items() if name == variant]
        return all(error <= 1 for error in found) if found else None


def difference(a: Any, b: Any, scale: float | None = None) -> float:
    """Largest difference as a share of the largest value of b (of `scale`, if that is larger)."""
    a, b = a.detach().double(), b.detach().double()
    if not a.numel():
        return 0.0
    largest = max(float(b.abs().max()), scale or 0.0, 1e-30)
    found = float((a - b).abs().max()) / largest
    return found if found == found else float("inf")


def compare_step(which: Architecture, ours: Any, eager: Any, variant: str) -> dict[str, float]:
    """logits, loss and gradients of one batch."""
    device = next(eager.parameters()).device
    inputs, real = batch(which, variant, device)
    outputs = []
    for model, run in ((ours, _run), (eager, _run_alone if variant == "packed" else _run)):
        model.zero_grad(set_to_none=True)
        logits, loss = run(model, inputs)
        loss.backward()
        outputs.append((logits, loss))
    a, b = (logits if real is None else logits[real] for logits, _ in outputs)
    theirs = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    mine = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    if mine.keys() != theirs.keys():
        raise AssertionError(f"parameters with a gradient differ: {sorted(mine.keys() ^ theirs.keys())}")
    # The gradient of a key's bias is nothing but rounding: a share of the largest gradient is the floor.
    floor = 0.05 * max(float(g.abs().max()) for g in theirs.values())
    return {
        "logits": difference(a, b),
        "loss": difference(outputs[0][1], outputs[1][1]),
        "gradients": max(difference(mine[name], theirs[name], floor) for name in theirs),
    }


def _run(model: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
    dtype = next(model.parameters()).dtype
    features = {name: inputs[name].to(dtype) for name in ("pixel_values", "input_features") if name in inputs}
    output = model(**inputs | features)
    return output.logits, output.loss


def _run_alone(model: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """What packed documents must give: each of them run alone."""
    import torch

    logits = torch.cat([model(inputs["input_ids"][:, a:b]).logits for a, b in pairwise(BOUNDS)], 1)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), inputs["labels"][0, 1:])
    return logits, loss


def compare_generation(which: Architecture, ours: Any, eager: Any, variant: str, steps: int = 6) -> float:
    """Logits of every step of greedy generation from a left-padded batch; other tokens are an infinite difference."""
    import torch

    device, dtype = next(eager.parameters()).device, next(eager.parameters()).dtype
    if which.kind == "speech":
        inputs = {"input_features": batch(which, "plain", device)[0]["input_features"].to(dtype)}
    else:
        made = batch(which, "right" if which.kind == "seq2seq" else "left", device)[0]
        inputs = {name: made[name] for name in ("input_ids", "attention_mask")}
    options: dict[str, Any] = {"max_new_tokens": steps, "do_sample": False, "output_logits": True}
    options["return_dict_in_generate"] = True
    if variant == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    found = []
    for model in (ours, eager):
        generate = _plain_generate(model) if which.kind == "speech" else model.generate
        with torch.no_grad(), _quietly():
            found.append(generate(**inputs, **options))
    if not torch.equal(found[0].sequences, found[1].sequences):
        return float("inf")
    return max(difference(a, b) for a, b in zip(found[0].logits, found[1].logits, strict=True))


def _plain_generate(model: Any) -> Callable[..., Any]:
    """Generation without what Whisper does around it: segments, languages, timestamps."""
    from transformers import GenerationMixin

    return lambda **options: GenerationMixin.generate(model, **options)


def check(
    which: Architecture, device: Any = "cpu", dtype: str = "float32", variants: Iterable[str] = VARIANTS
) -> Result:
    """One model, all of its variants that are asked for."""
    import torch

    from . import transformers as _  # noqa: F401 (registers)

    started = time.perf_counter()
    result = Result(which)
    rounding: dict[str, float] = {}
    allowed, half = TOLERANCE[dtype], dtype in ("bfloat16", "float16")
    try:
        eager = which.build(which.reference, device, getattr(torch, dtype))
        ours = which.build("tilewise", device, getattr(torch, dtype))
        exact = which.build(which.reference, device, getattr(torch, dtype)).float() if half else eager
        for variant in which.variants:
            if variant not in variants:
                continue
            if half and variant in ("dynamic", "static"):
                continue  # a token that is nearly as likely as another is anybody's choice
            if variant in ("dynamic", "static"):
                result.errors[variant, "generate"] = compare_generation(which, ours, eager, variant)
            else:
                for measure, error in compare_step(which, ours, exact, variant).items():
                    result.errors[variant, measure] = error
                if half:
                    for measure, error in compare_step(which, eager, exact, variant).items():
                        rounding[measure] = max(error, rounding.get(measure, 0.0))
        for (variant, measure), error in result.errors.items():
            result.errors[variant, measure] = error / (allowed + 3 * rounding.get(measure, 0.0))
    except Exception as error:  # of one model; the others are still worth knowing
        result.fault = f"{type(error).__name__}: {error}"
    result.seconds = time.perf_counter() - started
    return result


class _quietly:
    """Without the advice that Transformers prints for models that are as small and random as these."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        self._level = logging.get_verbosity()
        logging.set_verbosity_error()

    def __exit__(self, *error: Any) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self._level)
        self._warnings.__exit__(*error)


# ------------------------------------------------------------------------------------------------- the report


def table(results: Sequence[Result]) -> str:
    """Models x measures: the worst error as a share of what is allowed (1 = just passed)."""
    rows: list[tuple[str, ...]] = [("model", *MEASURES, "seconds", "")]
    for result in results:
        cells = ["-" if (error := result.worst(measure)) is None else f"{error:.3f}" for measure in MEASURES]
        verdict = "passed" if result.passed else f"FAILED  {result.fault}" if result.fault else "FAILED"
        rows.append((result.which.name, *cells, f"{result.seconds:.1f}", verdict))
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)),
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def markdown(results: Sequence[Result]) -> str:
    """Architectures x features, as it stands in the documentation."""
    lines = [f"| architecture | has | {' | '.join(TITLES.values())} |", "|---|---|" + "---|" * len(TITLES)]
    for result in results:
        words = {True: "yes", False: "**no**", None: "-"}
        cells = [words[result.variant_passed(variant)] for variant in VARIANTS]
        lines.append(f"| {result.which.name} | {result.which.features} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_markdown(path: Path, results: Sequence[Result]) -> bool:
    return write_between(path, BEGIN, markdown(results))


def write_between(path: Path, begin: str, inside: str) -> bool:
    """Replaces what stands between two markers of a page; whether that changed it."""
    text = path.read_text()
    if text.count(begin) != 1 or END not in text.split(begin)[-1]:
        refuse("--markdown", f"{path} without the markers", f"a page with one {begin!r} and, after it, {END!r}")
    before, rest = text.split(begin)
    after = rest.split(END, 1)[1]
    new = f"{before}{begin}\n{inside}\n{END}{after}"
    if new != text:
        path.write_text(new)
    return new != text


def report(
    names: Sequence[str] = (), device: str = "cpu", dtype: str = "float32", page: Path | None = None, out: Any = None
) -> int:
    """Prints the table; 0 if all passed."""
    import torch
    import transformers

    from . import __version__

    out = out or sys.stdout
    chosen = [architecture(name) for name in names] or list(ARCHITECTURES)
    if device.startswith("cuda") and not torch.cuda.is_available():
        refuse("--device", device, "cpu, or cuda where torch sees a GPU")
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    basis = f"eager, {TOLERANCE[dtype]:g} of the largest value"
    if dtype in ("bfloat16", "float16"):
        basis = f"eager in float32, {TOLERANCE[dtype]:g} of the largest value + 3 x that of eager in {dtype}"
    print(
        f"tilewise {__version__}, transformers {transformers.__version__}, torch {torch.__version__}, {where}, {dtype}\n"
        f"worst difference from {basis}, as a share of what is allowed\n",
        file=out, flush=True,
    )  # fmt: skip
    results = []
    for n, which in enumerate(chosen, 1):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{n}/{len(chosen)} {which.name}", end="", file=sys.stderr, flush=True)
        results.append(check(which, device, dtype))
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    print(table(results), file=out)
    failed = [result for result in results if not result.passed]
    print(f"\n{len(results) - len(failed)} of {len(results)} models passed", file=out)
    if page is not None:
        changed = write_markdown(page, results)
        print(f"{page}: {'rewritten' if changed else 'as it was'}", file=out)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tilewise.compat",
        description="Real architectures with attn_implementation='tilewise': compared with eager attention, and timed.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("report", help="build, compare, print a table; exit status 1 if something differs")
    one.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:N")
    one.add_argument("--dtype", default="float32", choices=sorted(TOLERANCE))
    one.add_argument("--model", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    one.add_argument("--markdown", type=Path, metavar="FILE", help="rewrite the table between the markers of FILE")
    two = commands.add_parser("speed", help="train, generate, compile whole models; exit status 1 if a result is wrong")
    two.add_argument("--device", default="", help="cuda (default where torch sees a GPU), cuda:N, cpu (with --tiny)")
    two.add_argument("--part", action="append", default=[], choices=SPEED_PARTS, help="only this one; may be repeated")
    two.add_argument("--tiny", action="store_true", help="small models: shows that it works, measures nothing")
    two.add_argument(
        "--seconds", type=float, default=80.0, help="time for everything (default 80): fewer rounds, then cases"
    )
    two.add_argument("--json", type=Path, metavar="FILE", help="write every time and the facts of the machine")
    two.add_argument("--markdown", type=Path, metavar="FILE", help="rewrite the table between the markers of FILE")
    options = parser.parse_args(arguments)
    try:
        if options.command == "speed":
            from .compat_speed import speed

            return speed(options.part, options.device, options.tiny, options.seconds, options.json, options.markdown)
        return report(options.model, options.device, options.dtype, options.markdown)
    except ImportError as error:
        print(
            f"tilewise.compat needs torch and transformers (pip install torch transformers): {error}", file=sys.stderr
        )
        return 2
    except ValueError as error:
        print(f"python -m tilewise.compat: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
