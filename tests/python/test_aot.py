"""`tilewise aot`, `warmup` and `cache`: specs, reports, verdicts, and a pack that a machine without a compiler runs."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import tilewise
from tilewise import _cuda, _ext, _specs, aot, cli
from tilewise._specs import PASSES, Spec, committed_specs, spec_from, specs_from_model

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "build/dev/tests/fake_cuda"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def nvrtc():
    """Skips without a compiler, and says why."""
    _cuda.tell_nvrtc_path()
    with pytest.raises(tilewise.UnsupportedError) as error:
        _ext.compile(Spec().problem(), False, "30", "")  # a GPU that no compiler of today knows
    if "sm_30" not in str(error.value):
        pytest.skip(str(error.value))


def fake(**more: str) -> dict[str, str]:
    """An environment whose GPU and compiler are the fake ones of the tests."""
    if not (FAKE / "libcuda.so.1").exists() or not (FAKE / "libnvrtc.so.13").exists():
        pytest.skip(f"the fake GPU is not built: {FAKE}")
    names = {"TILEWISE_CUDA_DRIVER": str(FAKE / "libcuda.so.1"), "TILEWISE_NVRTC": str(FAKE / "libnvrtc.so.13")}
    return {
        **os.environ,
        **names,
        "TILEWISE_FAKE_CC": "8.0",
        "TILEWISE_CACHE_MAX_MB": "0",
        "TILEWISE_PACKS": "",
        **more,
    }


# ------------------------------------------------------------------------------------------------------------- specs


def test_committed_specs_cover_every_pair():
    specs = committed_specs()
    names = [spec.title() for spec in specs]
    assert len(set(names)) == len(names)
    for each in PASSES:
        assert sum(each in spec.passes for spec in specs) >= 40
    tuned = {(spec.dtype, spec.head_dim) for spec in specs if spec.tuned and spec.passes == ("forward",)}
    assert tuned == set(itertools.product(("float16", "bfloat16"), (64, 128, 256)))  # those of the tensor cores
    assert any(not spec.tuned for spec in specs)

    def values(spec):
        mask = spec.mask.split("(")[0] or ("chunk" if spec.chunk else "band" if spec.causal else "none")
        mod = ("array" if "gather" in spec.score_mod else "plain") if spec.score_mod else "none"
        flags = {name: getattr(spec, name) for name in ("softcap", "bias", "alibi", "sinks", "dropout")}
        dims = (spec.head_dim, spec.head_dim_v or spec.head_dim)
        return {"dtype": spec.dtype, "dims": dims, "mask": mask, "score_mod": mod, **flags}

    rows = [values(spec) for spec in specs]
    for one, other in itertools.combinations(rows[0], 2):
        wanted = set(itertools.product({row[one] for row in rows}, {row[other] for row in rows}))
        assert {(row[one], row[other]) for row in rows} == wanted, (one, other)
    kinds = {row["mask"] for row in rows}
    for kind in (
        "band", "chunk", "key_padding", "documents", "prefix", "intervals", "row_intervals", "tree", "blocks", "dense", "mod",
        "or",
    ):  # fmt: skip
        assert kind in kinds
    assert {row["dtype"] for row in rows} == set(_specs.DTYPES)


def test_the_committed_list_is_what_its_tool_writes(tmp_path):
    target = tmp_path / "specs.json"
    subprocess.run(
        [sys.executable, ROOT / "tools/make_specs.py", target],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
    )
    assert json.loads(target.read_text()) == json.loads((ROOT / "python/tilewise/specs.json").read_text())


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (7, "got 7; allowed: a JSON object"),
        ({"dtpye": "float16"}, "the field 'dtpye'"),
        ({"dtype": "int8"}, 'dtype: got "int8"; allowed: float32'),
        ({"head_dim": "64"}, "head_dim"),
        ({"causal": 1}, "causal: got 1; allowed: true or false"),
        ({"passes": []}, 'a list of "forward" and "backward"'),
        ({"arrays": ["int64(256)"]}, "int64(256)"),
    ],
)
def test_a_bad_spec_is_refused_by_its_field(entry, sentence):
    with pytest.raises(tilewise.InvalidArgumentError) as error:
        spec_from(entry, "spec 3")
    assert "spec 3" in str(error.value) or "arrays" in str(error.value)
    assert sentence in str(error.value)


MODELS = {
    "llama": (
        {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
         "torch_dtype": "bfloat16"},
        {"dtype": "bfloat16", "head_dim": 128, "heads": (32, 8), "causal": True, "softcap": False, "window": False},
    ),
    "gemma2": (
        {"model_type": "gemma2", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2304,
         "sliding_window": 4096, "attn_logit_softcapping": 50.0, "torch_dtype": "float32"},
        {"dtype": "float32", "head_dim": 256, "heads": (8, 4), "softcap": True, "window": True},
    ),
    "gpt_oss": (
        {"model_type": "gpt_oss", "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
        {"sinks": True, "head_dim": 64, "window": True, "dtype": "bfloat16"},
    ),
    "qwen2": (
        {"model_type": "qwen2", "num_attention_heads": 12, "num_key_value_heads": 2, "hidden_size": 1536,
         "sliding_window": 4096, "use_sliding_window": False, "torch_dtype": "float16"},
        {"window": False, "dtype": "float16", "head_dim": 128},
    ),
    "bloom": ({"model_type": "bloom", "n_head": 16, "hidden_size": 1024}, {"alibi": True, "head_dim": 64}),
    "deepseek": (
        {"model_type": "deepseek_v3", "num_attention_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "v_head_dim": 128, "hidden_size": 7168},
        {"head_dim": 192, "head_dim_v": 128},
    ),
    "seeing": (
        {"model_type": "sees", "torch_dtype": "float16", "text_config": {"num_attention_heads": 4, "hidden_size": 256}},
        {"head_dim": 64, "dtype": "float16"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_specs_of_models(name, tmp_path):
    config, wanted = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = specs_from_model(tmp_path)
    assert [spec.mask for spec in specs] == ["", "key_padding(@0)"]
    for spec in specs:
        assert spec.passes == PASSES
        assert {key: getattr(spec, key) for key in wanted} == wanted
        spec.problem()


def test_a_model_that_trains_with_dropout(tmp_path):
    config = {"model_type": "bert", "num_attention_heads": 12, "hidden_size": 384, "attention_probs_dropout_prob": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = specs_from_model(tmp_path / "config.json", "float32")
    assert {(spec.dropout, spec.passes) for spec in specs} == {(True, PASSES), (False, ("forward",))}
    assert {spec.causal for spec in specs} == {False}
    assert {spec.dtype for spec in specs} == {"float32"}


# ---------------------------------------------------------------------------------------------------------- commands


def test_help_texts():
    code, text = run("--help")
    assert code == 0
    for command, words in {
        "aot": ("--arch", "--out", "--specs", "--model", "--jobs", "--json", "TILEWISE_PACKS", "Exit status 1"),
        "warmup": ("--model", "--specs", "--arch", "cache"),
        "cache": ("ls", "verify", "clear", "TILEWISE_CACHE_DIR"),
    }.items():
        assert command in text
        code, help_text = run(command, "--help")
        assert code == 0
        for word in words:
            assert word in help_text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["warmup"], "neither --model nor --specs"),
        (["warmup", "--specs", "a", "--model", "b"], "got both"),
        (["warmup", "--specs", "/nonexistent.json"], "/nonexistent.json"),
        (["warmup", "--dtype", "float16", "--specs", "a"], "without --model"),
        (["aot", "--out", "/proc/self/x"], "--out: got '/proc/self/x'"),
    ],
)
def test_mistakes_get_a_sentence(arguments, sentence):
    code, text = run(*arguments)
    assert code == 2
    assert sentence in text


def spec_file(folder: Path, *entries: dict) -> str:
    path = folder / "specs.json"
    path.write_text(json.dumps(list(entries)))
    return str(path)


def test_bad_arch_and_no_compiler(tmp_path, monkeypatch):
    specs = spec_file(tmp_path, {"head_dim": 64})
    code, text = run("aot", "--out", str(tmp_path / "pack"), "--specs", specs, "--arch", "eighty")
    assert code == 2
    assert "eighty" in text
    monkeypatch.setenv("TILEWISE_NVRTC", "/nonexistent/libnvrtc.so")
    code, text = run("aot", "--out", str(tmp_path / "pack"), "--specs", specs, "--arch", "80")
    assert code == 2
    assert "/nonexistent/libnvrtc.so" in text


def test_one_spec_for_two_archs(nvrtc, tmp_path):
    """Each gets the best kernels that it runs: sm_75 has no tensor cores for bfloat16."""
    specs = spec_file(tmp_path, {"name": "mine", "dtype": "bfloat16", "head_dim": 64, "passes": ["forward"]})
    report = tmp_path / "report.json"
    command = ("aot", "--out", str(tmp_path / "pack"), "--specs", specs, "--arch", "75,90a", "--jobs", "2")
    code, text = run(*command, "--json", str(report))
    assert code == 0, text
    for entry in ("fwd_simt", "fwd_sm90", "fwd_mma"):
        assert entry in text
    assert "1 specs" in text
    kernels = json.loads(report.read_text())["kernels"]
    found = {(kernel["entry"], kernel["arch"]) for kernel in kernels}
    assert {("fwd_simt", "sm_75"), ("fwd_sm90", "sm_90a"), ("fwd_mma", "sm_90"), ("combine", "sm_90")} <= found
    assert not {("fwd_mma", "sm_75"), ("fwd_simt", "sm_90")} & found
    for kernel in kernels:
        assert 0 < kernel["registers"] <= 255
        assert kernel["shared_bytes"] >= 0
        assert not kernel["from_cache"]
        assert Path(kernel["path"]).parent == tmp_path / "pack"
        assert Path(kernel["path"]).stat().st_mode & 0o777 == 0o644

    code, text = run(*command, "--json", "-")
    assert code == 0
    again = json.loads(text)["kernels"]
    assert {(kernel["entry"], kernel["arch"]) for kernel in again} == found
    assert all(kernel["from_cache"] for kernel in again)

    code, text = run("cache", "ls", "--dir", str(tmp_path / "pack"), "--json")
    assert code == 0
    entries = json.loads(text)["entries"]
    wanted = {"fwd_simt.cu sm_75", "fwd_sm90.cu sm_90a", "fwd_mma.cu sm_90"}
    assert wanted <= {" ".join(entry["about"].split()[:2]) for entry in entries}
    assert run("cache", "verify", "--dir", str(tmp_path / "pack"))[0] == 0
    victim = Path(kernels[0]["path"])
    victim.write_bytes(victim.read_bytes()[:-1])
    code, text = run("cache", "verify", "--dir", str(tmp_path / "pack"))
    assert code == 1
    assert victim.name in text
    code, text = run("cache", "clear", "--dir", str(tmp_path / "pack"), "--yes")
    assert code == 0
    assert f"{len(entries)} kernels removed" in text


def test_warmup_fills_the_cache(nvrtc, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    config = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 256, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = run("warmup", "--model", str(tmp_path), "--arch", "80", "--pass", "fwd")
    assert code == 0, text
    code, text = run("cache", "ls")
    assert code == 0
    assert "fwd_mma.cu sm_80" in text
    assert "fwd_simt.cu" not in text
    assert str(tmp_path / "cache") in text
    assert run("cache", "clear", "--yes")[1].startswith(tuple("123456789"))
    assert "0 kernels" in run("cache", "ls")[1]


PACKED = """
import sys
import numpy as np
from tilewise import _ext
from tilewise._arrays import view

dtype, limit = sys.argv[1], float(sys.argv[2])
q = np.random.default_rng(0).standard_normal((1, 70, 2, 64)).astype(dtype)
o = np.zeros_like(q)
problem = _ext.Problem(view(q), view(q), view(q), 0)
problem.device_type, problem.causal = 1, 1
_ext.forward(problem, view(o), None)
q = q.astype(np.float64)
x = np.einsum("bihd,bjhd->bhij", q, q) / 8 + np.where(np.tri(70), 0, -np.inf)
p = np.exp(x - x.max(-1, keepdims=True))
wanted = np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), q)
assert np.abs(o - wanted).max() < limit
"""


@pytest.mark.parametrize(
    ("dtype", "limit", "file"), [("float32", 1e-5, "fwd_simt.cu"), ("float16", 2e-3, "fwd_mma.cu")]
)
def test_a_pack_runs_without_a_compiler(tmp_path, dtype, limit, file):
    """On the fake GPU: a pack made with the fake compiler, then a call with none."""
    pack = tmp_path / "pack"
    specs = spec_file(tmp_path, {"dtype": dtype, "head_dim": 64, "causal": True, "passes": ["forward"]})
    command = ["aot", "--out", str(pack), "--specs", specs, "--arch", "80", "--json", "-"]
    program = [sys.executable, "-c", "import sys; from tilewise.cli import main; sys.exit(main())"]
    made = subprocess.run([*program, *command], env=fake(), capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    kernels = json.loads(made.stdout)["kernels"]
    assert {kernel["file"] for kernel in kernels} >= {file, "prepare.cu"}
    assert {kernel["registers"] for kernel in kernels} == {None}  # a compiler that tells nothing

    def call(**environment: str):
        none = fake(TILEWISE_NVRTC="/nonexistent/libnvrtc.so", **environment)
        command = [sys.executable, "-c", PACKED, dtype, str(limit)]
        return subprocess.run(command, env=none, capture_output=True, text=True, check=False)

    done = call(TILEWISE_PACKS=str(pack))
    assert done.returncode == 0, done.stderr
    missing = call()
    assert missing.returncode != 0
    assert "/nonexistent/libnvrtc.so" in missing.stderr


CHOICES = """
from tilewise import _ext
from tilewise._specs import Spec

for dtype in ("float64", "float32", "float16", "bfloat16"):
    for backend in ("", "simt"):
        problem = Spec(dtype=dtype, head_dim=64, causal=True).problem()
        problem.device_type, problem.backend = 1, backend
        lines = _ext.Plan(problem, False).explain().splitlines()
        print(dtype, backend or "any", *(line.split()[-1] for line in lines if "implementation:" in line))
"""


@pytest.mark.parametrize(
    ("gpu", "sms", "best", "on_tensor_cores"),
    [
        ("7.0", 80, "", []),
        ("7.5", 40, "fwd_mma", ["float16"]),
        ("8.0", 108, "fwd_mma", ["float16", "bfloat16"]),
        ("9.0", 132, "fwd_mma", ["float16", "bfloat16"]),  # too few queries for its SMs
        ("9.0", 4, "fwd_sm90", ["float16", "bfloat16"]),
        ("10.0", 4, "fwd_mma", ["float16", "bfloat16"]),
    ],
)
def test_what_runs_where(gpu, sms, best, on_tensor_cores):
    """Tensor cores where the GPU has them for the dtype; the others, and who asks for them, get fwd_simt."""
    environment = fake(TILEWISE_FAKE_CC=gpu, TILEWISE_FAKE_SMS=str(sms))
    done = subprocess.run([sys.executable, "-c", CHOICES], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {tuple(line.split()[:2]): line.split()[2] for line in done.stdout.splitlines()}
    assert found == {
        (dtype, backend): best if dtype in on_tensor_cores and backend == "any" else "fwd_simt"
        for dtype in _specs.DTYPES
        for backend in ("any", "simt")
    }


# ----------------------------------------------------------------------------------------------------------- verdict


def kernel(**changes) -> str:
    line = {
        "family": "fwd_x", "file": "fwd_x.cu", "entry": "fwd_x", "arch": "sm_90a", "compiler": "NVRTC 13.0",
        "registers": 168, "shared_bytes": 0, "stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0,
        "local_bytes": 0, "image_bytes": 100, "seconds": 0.1, "from_cache": False, "warnings": [], "path": "/p/x.twk",
    }  # fmt: skip
    return json.dumps({**line, **changes}) + "\n"


SERIALISED = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"spill_store_bytes": 8, "spill_load_bytes": 12, "stack_bytes": 8}, "spills 8 bytes"),
        ({"stack_bytes": 32, "local_bytes": 32}, "32 bytes of local memory"),
        ({"warnings": [SERIALISED]}, "C7510"),
        ({"warnings": ["x.cu(3): warning #177-D: unused"]}, None),
    ],
)
@pytest.mark.parametrize("tuned", [False, True])
def test_only_a_tuned_kernel_fails(monkeypatch, changes, fault, tuned):
    monkeypatch.setattr(_ext, "compile", lambda *arguments: kernel(**changes))
    jobs = aot.jobs_of([Spec(name="the spec", tuned=tuned)], ["90a"], PASSES[:1])
    outcome = aot.compile_jobs(jobs, "/p", 2, Console(quiet=True))
    assert outcome.good == (fault is None or not tuned)
    assert bool(outcome.faults(tuned)) == (fault is not None)
    told = Console(record=True, width=160, file=io.StringIO())
    aot.print_outcome(outcome, told, every=True)
    text = told.export_text()
    if fault is not None and tuned:
        assert fault in text
        assert "fwd_x sm_90a, the spec" in text


def test_archs_in_turn_for_what_is_not_tuned():
    specs = [Spec(name="a"), Spec(name="b", tuned=True), Spec(name="c")]
    jobs = aot.jobs_of(specs, ["75", "80", "90a"], PASSES[:1], 2)
    assert [(job.spec.name, job.arch) for job in jobs] == [
        ("a", "75"), ("a", "80"), ("b", "75"), ("b", "80"), ("b", "90a"), ("c", "90a"), ("c", "75"),
    ]  # fmt: skip
    assert len(aot.jobs_of(specs, ["75", "80"], PASSES, 2)) == len(aot.jobs_of(specs, ["75", "80"], PASSES)) == 12


def test_a_kernel_that_does_not_compile_fails_and_the_rest_goes_on(monkeypatch):
    def compile_(problem, backward, arch, directory):
        if backward:
            raise tilewise.InternalError("bwd_x.cu does not compile")
        return kernel()

    monkeypatch.setattr(_ext, "compile", compile_)
    outcome = aot.compile_jobs(aot.jobs_of([Spec(name="the spec")], ["90a"], PASSES), "/p", 1, Console(quiet=True))
    assert not outcome.good
    assert outcome.failures == ["the spec, backward: bwd_x.cu does not compile"]
    assert len(outcome.kernels) == 1


def test_what_concerns_all_ends_it(monkeypatch):
    calls = []

    def compile_(problem, backward, arch, directory):
        calls.append(arch)
        raise tilewise.UnsupportedError("no NVRTC")

    monkeypatch.setattr(_ext, "compile", compile_)
    jobs = aot.jobs_of([Spec(name=str(n)) for n in range(50)], ["80"], PASSES)
    with pytest.raises(tilewise.UnsupportedError):
        aot.compile_jobs(jobs, "/p", 2, Console(quiet=True))
    assert len(calls) <= 4
