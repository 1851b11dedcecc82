"""`tilewise replay`: recorded calls run again, and judged by the accuracy rule of docs/formula.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _ext
from ._arrays import is_float
from ._attention import run_backward, run_forward
from ._errors import Error
from ._problem import K, Q, Settings, V
from ._record import Recorded
from ._standard import most_keys, name_of, standard_attention
from .measure import Verdict

Tensor = Any  # torch.Tensor, which the checker does not know
_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass
class Outcome:
    number: int
    pass_: str
    shapes: str
    implementation: str = ""
    judged: dict[str, Verdict] = field(default_factory=dict)  # by the name of a result
    error: str = ""  # why it did not run

    @property
    def passed(self) -> bool:
        return not self.error and all(each.passed for each in self.judged.values())


def replay(recorded: Recorded, device: str, backend: str | None) -> Outcome:
    """Runs one recorded pass on a device, by an implementation or the best, and compares all of its results."""
    outcome = Outcome(recorded.number, recorded.pass_, shapes_of(recorded))
    in_torch = recorded.kind != "numpy" or device != "cpu"
    backward = recorded.pass_ == "backward"
    rng = recorded.rng or (0, 0)
    try:
        settings = recorded.settings_for(device, in_torch, backend)
        arrays = recorded.make_arrays(device, in_torch)
        do, dlse = (recorded.make_gradient(name, device, in_torch) for name in ("do", "dlse"))
        plan = _ext.Plan(settings.problem(arrays, rng), backward).explain()
        outcome.implementation = plan.partition("implementation: ")[2].split("\n", 1)[0]
        found = results_of(settings, arrays, rng, do, dlse, recorded.wanted if backward else ())
        here = [_host(array) for array in arrays]
        exact = reference_of(settings, here, rng, _host(do), _host(dlse), recorded.wanted if backward else ())
        plain = standard_attention(
            _on_cpu(settings), here, rng, _host(do), _host(dlse), recorded.wanted if backward else ()
        )
    except Error as error:
        outcome.error = str(error)
        return outcome
    names = [name for name in found if name not in ("o", "lse")] if backward else ["o", "lse"]
    few_keys = most_keys(_on_cpu(settings), here) <= 4
    outcome.judged = judge({name: found[name] for name in names}, exact, plain, here[Q].dtype, few_keys)
    return outcome


def shapes_of(recorded: Recorded) -> str:
    arrays = [(name, recorded.arrays[place] or {}) for name, place in (("q", Q), ("k", K), ("v", V))]
    sizes = [f"{name} {'×'.join(map(str, about['shape']))}" for name, about in arrays]
    return " ".join([*sizes, arrays[0][1]["dtype"]])


def results_of(
    settings: Settings, arrays: Sequence[Any], rng: Any, do: Any, dlse: Any, wanted: Sequence[int]
) -> dict[str, Tensor]:
    """What the implementation gives, on the host: o and lse, and gradients if they are wanted."""
    with torch.no_grad():
        o, lse = run_forward(settings, arrays, rng, True)
        assert lse is not None
        results = {"o": o, "lse": lse}
        if wanted:
            gradients = run_backward(settings, arrays, rng, do, o, lse, dlse, wanted)
            results |= {"d" + name_of(settings, place): gradient for place, gradient in gradients.items()}
    return {name: _host(array) for name, array in results.items()}


def reference_of(
    settings: Settings, arrays: Sequence[Any], rng: Any, do: Any, dlse: Any, wanted: Sequence[int]
) -> dict[str, Tensor]:
    """The same by the formula in float64."""
    formula = _on_cpu(settings)
    formula.backend = "reference"
    wide = [array.double() if array is not None and is_float(array) else array for array in arrays]
    do, dlse = (None if each is None else each.double() for each in (do, dlse))
    return results_of(formula, wide, rng, do, dlse, wanted)


def _on_cpu(settings: Settings) -> Settings:
    settings = settings.on_host()
    settings.is_torch = True
    return settings


def _host(array: Any) -> Any:
    """As a tensor on the CPU."""
    if array is None or isinstance(array, torch.Tensor):
        return None if array is None else array.detach().cpu()
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return torch.from_numpy(array.astype("float32")).bfloat16()
    return torch.from_numpy(array.copy())


def judge(
    found: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor], dtype: torch.dtype, few_keys: bool
) -> dict[str, Verdict]:
    """max|x - ref| <= c max|std - ref| + 2 max|round(ref) - ref|, c = 2 for o and 3 for gradients, and a mean error of at
    most 1.5 times that of std; with what the yardstick cannot say: it may be exact by luck, where there are few numbers."""
    finite_lse = exact["lse"][exact["lse"].isfinite()].abs()
    largest_lse = finite_lse.max().item() if finite_lse.numel() else 0.0
    gradients = [exact[name] for name in found if name.startswith("d")]
    largest_gradient = max([1.0, *(_largest(each) for each in gradients)])
    verdicts: dict[str, Verdict] = {}
    for name, x in found.items():
        ref, std = exact[name].double(), plain[name].double()
        x_wide = x.double()
        nearest = ref.to(x.dtype).double()
        usable = nearest.isfinite()
        if (
            not torch.equal(
                torch.where(usable, 0.0, nearest).nan_to_num(1e300), torch.where(usable, 0.0, x_wide).nan_to_num(1e300)
            )
            or not x_wide[usable].isfinite().all()
        ):
            verdicts[name] = Verdict(math.nan, 0.0)  # NaN or infinity in the wrong places
            continue
        ref, std, x_wide, nearest = ref[usable], std[usable], x_wide[usable], nearest[usable]
        if not ref.numel():
            verdicts[name] = Verdict(0.0, 0.0)
            continue
        error, floor = (x_wide - ref).abs(), (nearest - ref).abs().max().item()
        std_error = (std - ref).abs().nan_to_num(0.0, 0.0)
        worst_std, largest = std_error.max().item(), ref.abs().max().item()
        if name == "lse":
            unit = 1e-13 if dtype == torch.float64 else 2e-6
            verdicts[name] = Verdict(error.max().item(), unit * max(1.0, largest) + 2 * worst_std, magnitude=largest)
            continue
        scale = max(largest, 0.03, largest_gradient if name.startswith("d") else 0.0)
        slack = 1e-12 * scale if dtype == torch.float64 else (32 + 2 * largest_lse) * 2.0**-23 * scale
        if x.numel() < 64 or few_keys:
            slack += 8 * _ROUNDOFF[dtype] * scale
        factor = 2 if name == "o" else 10 if x.numel() < 64 else 3
        mean_allowed = 1.5 * std_error.mean().item() + floor + slack if x.numel() >= 1024 else math.inf
        allowed = factor * worst_std + 2 * floor + slack
        verdicts[name] = Verdict(error.max().item(), allowed, error.mean().item(), mean_allowed, largest)
    return verdicts


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def run(calls: Iterable[Recorded], device: str | None, backend: str | None, say: Callable[[Outcome], None]) -> bool:
    """Replays all; whether all passed. `device` None = the recorded one if it is here."""
    good = True
    for recorded in calls:
        place = device or (recorded.device if torch.cuda.is_available() else "cpu")
        outcome = replay(recorded, place, backend)
        say(outcome)
        good = good and outcome.passed
    return good
