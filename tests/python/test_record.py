"""TILEWISE_RECORD and `tilewise replay`: what is written is the call, what is read back is it again, and the judge judges."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tilewise
from tilewise import _record, cli, masks, ops

torch = pytest.importorskip("torch")

from tilewise import _standard, _torch, replay  # noqa: E402


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    return result.exit_code, result.output


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """A file that calls are written to, as if TILEWISE_RECORD and TILEWISE_RECORD_DATA had been set."""
    path = tmp_path / "calls.jsonl"
    monkeypatch.setattr(_record, "FILE", str(path))
    monkeypatch.setattr(_record, "DATA", True)
    monkeypatch.setattr(_torch, "_has_quick_calls", False)
    return path


def stop() -> None:
    assert _record.FILE, "recording has stopped by itself"
    _record.FILE = ""


def torch_case(seed: int, dtype: torch.dtype):
    """q, k, v and options: everything that attention takes, drawn."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, heads_kv, group = r.choice([1, 2, 3]), r.choice([2, 4]), r.choice([1, 2])
    heads, queries, keys, dim, dim_v = (
        heads_kv * group,
        r.randint(1, 90),
        r.randint(1, 99),
        r.randint(1, 40),
        r.randint(1, 40),
    )

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=g).to(dtype).requires_grad_()

    def maybe(name, p, value):
        if r.random() < p:
            options[name] = value() if callable(value) else value

    options: dict = {}
    packed = r.random() < 0.25
    if packed:
        lengths, lengths_kv = ([r.randint(0, n) for _ in range(batch)] for n in (50, 60))
        cu, cu_kv = (np.concatenate([[0], np.cumsum(each)]) for each in (lengths, lengths_kv))
        options |= {"cu_seqlens_q": cu, "cu_seqlens_kv": torch.tensor(cu_kv, dtype=torch.int32)}
        queries, keys = max(lengths), max(lengths_kv)
        shapes = (int(cu[-1]), heads, dim), (int(cu_kv[-1]), heads_kv, dim), (int(cu_kv[-1]), heads_kv, dim_v)
    else:
        options["layout"] = layout = r.choice(["bshd", "bhsd"])
        sizes = (queries, heads, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v)
        shapes = tuple((batch, s, h, d) if layout == "bshd" else (batch, h, s, d) for s, h, d in sizes)
        maybe("seqused_kv", 0.3, lambda: [r.randint(0, keys) for _ in range(batch)])
        maybe("seqused_q", 0.2, lambda: [r.randint(0, queries) for _ in range(batch)])
        maybe("leftpad_kv", 0.2, lambda: [r.randint(0, keys) for _ in range(batch)])
        maybe("mask", 0.4, lambda: r.choice([
            lambda: masks.documents(torch.arange(queries) // 20, torch.arange(keys) // 20),
            lambda: masks.mod(lambda b, h, i, j, s: (abs(i + s.q_offset - j) < s.width) | (j % 7 == 0), width=13),
            lambda: masks.dense((torch.rand(batch, 1, 1, keys, generator=g) > 0.4).expand(-1, -1, queries, -1)),
            lambda: ~masks.window(3, 4) | masks.key_padding(torch.rand(batch, keys, generator=g) > 0.3),
        ])())  # fmt: skip
    q, k, v = (draw(*shape, dtype=dtype) for shape in shapes)
    maybe("causal", 0.5, True)
    maybe("q_offset", 0.2, lambda: r.choice([3, "top_left", [1] * batch]))
    maybe("window", 0.2, lambda: (r.randint(-1, 50), r.randint(-1, 50)))
    maybe("chunk", 0.2, lambda: r.randint(1, 60))
    maybe("softcap", 0.3, lambda: r.choice([3.0, 30.0]))
    maybe("softmax_scale", 0.2, 0.3)
    maybe("bias", 0.3, lambda: draw(r.choice([1, batch]), r.choice([1, heads]), max(queries, 1), max(keys, 1)))
    maybe("alibi_slopes", 0.3, lambda: torch.rand(heads, generator=g).requires_grad_())
    maybe("sinks", 0.3, lambda: draw(heads))
    maybe("dropout_p", 0.25, 0.2)
    maybe("deterministic", 0.2, True)
    maybe("batch_invariant", 0.2, True)
    table = draw(heads, 61)
    maybe("score_mod", 0.4, lambda: r.choice([
        tilewise.score_mod(
            lambda x, b, h, i, j, s: x + s.table[h, ops.minimum(ops.maximum(i - j, -30), 30) + 30], table=table
        ),
        tilewise.score_mod(
            lambda x, b, h, i, j, s: ops.where(j // 3 % 2 == 0, x * s.f, ops.tanh(x) - abs(i - j) / s.n), f=0.7, n=9
        ),
    ]))  # fmt: skip
    return q, k, v, options


def run_case(seed: int, dtype: torch.dtype):
    """o, lse and the gradients of everything that has one."""
    q, k, v, options = torch_case(seed, dtype)
    o, lse = tilewise.attention(q, k, v, return_lse=True, **options)
    g = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(x.shape, generator=g).to(x.dtype) for x in (o, lse)]
    torch.autograd.backward([o, lse], gradients)
    return o, lse, q.grad, k.grad, v.grad


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("seed", range(40))
def test_a_recorded_call_is_that_call(seed, recording):
    """The same bits come out of the call as it was read back, and the accuracy rule holds for it."""
    dtype = DTYPES[seed % 4]
    o, lse, dq, dk, dv = run_case(seed, dtype)
    stop()
    forward, backward = _record.read(recording)
    assert (forward.pass_, backward.pass_) == ("forward", "backward")
    settings, arrays = backward.settings_for("cpu", True, None), backward.make_arrays("cpu", True)
    do, dlse = (backward.make_gradient(name, "cpu", True) for name in ("do", "dlse"))
    found = replay.results_of(settings, arrays, backward.rng, do, dlse, backward.wanted)
    for name, value in {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
        assert torch.equal(found[name].nan_to_num(7), value.detach().nan_to_num(7)), name
    for recorded in (forward, backward):
        outcome = replay.replay(recorded, "cpu", None)
        assert outcome.passed, outcome
        assert outcome.implementation == "cpu_tiled"


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_the_yardstick_is_the_formula_up_to_rounding(seed, recording):
    run_case(seed, torch.float64)
    stop()
    _, backward = _record.read(recording)
    settings, arrays = backward.settings_for("cpu", True, None), backward.make_arrays("cpu", True)
    gradients = [backward.make_gradient(name, "cpu", True) for name in ("do", "dlse")]
    arguments = settings, arrays, backward.rng, *gradients, backward.wanted
    exact, plain = replay.reference_of(*arguments), _standard.standard_attention(*arguments)
    assert exact.keys() == plain.keys()
    for name, value in exact.items():
        limit = 1e-9 if plain[name].dtype == torch.float64 else 1e-5  # of float32 arrays beside float64 ones
        torch.testing.assert_close(plain[name].double(), value.double(), rtol=limit, atol=limit, msg=name)


def test_numpy_arrays_keep_strides_and_alignment(recording):
    a = np.random.default_rng(0).standard_normal((2, 60, 4, 33)).astype(np.float32)
    q, k, v = a[:, ::-2], a[..., ::-1], np.broadcast_to(a[:1, :, :1, :32], (2, 60, 4, 32))
    tilewise.attention(q, k, v, causal=True, seqused_kv=np.array([50, 60], np.int32))
    stop()
    (recorded,) = _record.read(recording)
    assert recorded.kind == "numpy"
    arrays = recorded.make_arrays("cpu", False)
    for place, given in enumerate((q, k, v)):
        made = arrays[place]
        assert made.strides == given.strides
        assert np.array_equal(made, given)
        assert made.ctypes.data % 64 == given.ctypes.data % 64
    assert replay.replay(recorded, "cpu", None).passed


def test_numbers_that_were_not_recorded_are_drawn_the_same_every_time(recording, monkeypatch):
    monkeypatch.setattr(_record, "DATA", False)
    q = torch.randn(1, 30, 2, 16, dtype=torch.bfloat16)
    ids = torch.arange(30) // 7
    tilewise.attention(q, q, q, mask=masks.documents(ids), alibi_slopes=[0.5, 0.25])
    stop()
    text = recording.read_text()
    (recorded,) = _record.read(recording)
    first, second = (recorded.make_arrays("cpu", True) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], q)
    assert not torch.equal(first[0], first[1])
    assert first[0].dtype == torch.bfloat16
    assert 0.8 < first[0].float().std() < 1.2
    assert torch.equal(first[-1], ids)  # integers decide the mask: they are always there
    assert text.count('"data"') == 1
    assert replay.replay(recorded, "cpu", None).passed


PROGRAM = """
import sys, torch, tilewise
q = torch.randn(1, 20, 2, 8, requires_grad=True)
for _ in range(3):                      # from its second time on a call takes a quicker way
    o = tilewise.attention(q, q, q, causal=True)
o.sum().backward()
plan = tilewise.plan(q.detach(), q.detach(), q.detach(), causal=True)
plan.run(q.detach(), q.detach(), q.detach())
a = q.detach().numpy()
o, lse, _ = tilewise.attention_forward(a, a, a)
tilewise.attention_backward(o, a, a, a, o, lse)
sys.exit(5)
"""


def test_the_environment_variable_writes_every_call(tmp_path):
    path = tmp_path / "calls.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "TILEWISE_RECORD": str(path)}, timeout=120, check=False
    )
    assert done.returncode == 5
    assert [each.pass_ for each in _record.read(path)] == ["forward"] * 3 + ["backward"] + ["forward"] * 2 + [
        "backward"
    ]


def test_tilewise_record_runs_a_program_and_replay_checks_it(tmp_path):
    path = tmp_path / "calls.jsonl"
    program = [sys.executable, "-m", "tilewise.cli", "record", "--data", str(path), sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, timeout=120, check=False)
    assert done.returncode == 5
    code, text = run("replay", str(path))
    assert code == 0, text
    assert text.count("passed") == 7
    assert text.count("cpu_tiled") == 7
    code, text = run("replay", str(path), "--impl", "reference", "--calls", "1,4", "--device", "cpu")
    assert code == 0
    assert text.count("reference") == 2
    assert "q 1×20×2×8 k 1×20×2×8 v 1×20×2×8 float32" in text


def test_without_the_variable_nothing_is_recorded(monkeypatch):
    assert _record.FILE == ""
    monkeypatch.setattr(_record, "_write", lambda *_: pytest.fail("was called"))
    a = np.zeros((1, 4, 1, 8), np.float32)
    tilewise.attention(a, a, a)


def test_a_file_that_cannot_be_written_stops_the_recording_and_not_the_call(monkeypatch, tmp_path):
    monkeypatch.setattr(_record, "FILE", str(tmp_path / "no/such/folder"))
    a = np.ones((1, 4, 1, 8), np.float32)
    with pytest.warns(UserWarning, match=r"no/such/folder: recording has stopped: FileNotFoundError"):
        o = tilewise.attention(a, a, a)
    assert np.array_equal(o, a)
    assert _record.FILE == ""


def test_a_wrong_result_fails_and_so_does_nan(recording, monkeypatch):
    q = torch.randn(1, 40, 2, 16, requires_grad=True)
    tilewise.attention(q, q, q).sum().backward()
    stop()
    right_forward, right_backward = replay.run_forward, replay.run_backward

    def forward(settings, *arguments):
        o, lse = right_forward(settings, *arguments)
        if settings.backend != "reference":
            o[0, 7, 1, 3] += change
        return o, lse

    monkeypatch.setattr(replay, "run_forward", forward)
    verdicts = []
    for change in (0.0, 1e-3, float("nan"), float("inf")):  # noqa: B007 (forward reads it)
        code, text = run("replay", str(recording), "--calls", "1")
        verdicts.append((code, "FAILED" in text))
    assert verdicts == [(0, False)] + [(1, True)] * 3
    change = 0.0

    def backward(settings, *arguments):
        gradients = right_backward(settings, *arguments)
        return {place: each * (1.0 if settings.backend == "reference" else 1.001) for place, each in gradients.items()}

    monkeypatch.setattr(replay, "run_backward", backward)
    code, text = run("replay", str(recording))
    assert code == 1
    assert text.count("FAILED") == 1


def test_a_call_that_no_implementation_takes_does_not_pass(recording):
    a = np.ones((1, 4, 1, 8), np.float32)
    tilewise.attention(a, a, a)
    stop()
    code, text = run("replay", str(recording), "--impl", "fwd_mma")
    assert code == 1
    assert "did not run" in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text + text[:200], ":2: got a line that ends after 200 characters"),
        (lambda text: text + "{]\n", ":2: got a line that is no JSON"),
        (lambda text: text + "[1]\n", ":2: got other JSON"),
        (lambda text: text.replace('"format": 1', '"format": 99'), ":1: got format 99"),
        (lambda text: text.replace('"chunk": 0, ', ""), ":1: got a call of tilewise"),
        (lambda text: text.replace('"kind"', '"kin"'), ":1: got a line without 'kind'"),
        (
            lambda text: text.replace('"data": "', '"data": "!'),
            ":1: did not run: seqused_kv: got data that cannot be read",
        ),
        (lambda text: "", "got no calls"),
    ],
)
def test_a_broken_file_is_told_with_the_file_and_the_line(change, sentence, recording, monkeypatch):
    monkeypatch.setattr(_record, "DATA", False)
    a = np.ones((1, 4, 1, 8), np.float32)
    tilewise.attention(a, a, a, seqused_kv=[3])
    stop()
    recording.write_text(change(recording.read_text()))
    code, text = run("replay", str(recording))
    assert code in (1, 2)
    assert sentence in text
    assert str(recording) in text
    assert "Traceback" not in text


def test_files_that_are_not_there(tmp_path):
    code, text = run("replay", str(tmp_path / "x"))
    assert code == 2
    assert "No such file" in text
    code, text = run("explain", "--from", str(tmp_path / "x:3"))
    assert code == 2
    assert "--from: got" in text


def test_a_call_captured_in_a_graph_says_what_it_lacks(recording, monkeypatch):
    a = np.ones((1, 4, 1, 8), np.float32)
    right = _record._described
    monkeypatch.setattr(_record, "_described", lambda array, readable: right(array, False))
    tilewise.attention(a, a, a, seqused_kv=[3])
    stop()
    (recorded,) = _record.read(recording)
    outcome = replay.replay(recorded, "cpu", None)
    assert not outcome.passed
    assert "seqused_kv: got no data: the call was captured in a CUDA graph" in outcome.error


def test_explain_and_show_take_a_recorded_call(recording, tmp_path):
    q = torch.randn(2, 200, 4, 16)
    tilewise.attention(q, q, q, causal=True, mask=masks.documents(torch.arange(200) // 64), deterministic=True)
    stop()
    code, text = run("explain", "--from", f"{recording}:1", "--pass", "fwd")
    assert code == 0
    assert text.startswith("forward b2 hq4/hkv4 sq200 skv200 d16 float32 causal mask=documents(@0,@0) deterministic\n")
    code, text = run("show", "--from", str(recording), "--sequence", "1")
    assert code == 0
    assert "▒···\n·▒··\n··▒·\n···▒\n" in text
    code, text = run("explain", "--from", f"{recording}:2")
    assert code == 2
    assert "allowed: 1 to 1" in text


def test_a_line_of_the_file_is_plain_json(recording):
    tilewise.attention(*[np.ones((1, 4, 1, 8), np.float32)] * 3, window=(2, 0))
    stop()
    (line,) = recording.read_text().splitlines()
    found = json.loads(line)
    assert found["settings"]["window"] == [2, 0]
    assert found["arrays"][0]["shape"] == [1, 4, 1, 8]
    assert Path(recording).stat().st_mode & 0o777 & ~0o666 == 0


def test_bfloat16_of_numpy_is_replayed_or_says_what_it_needs(recording, monkeypatch):
    tilewise.attention(*[torch.ones(1, 4, 1, 8, dtype=torch.bfloat16)] * 3)
    stop()
    recording.write_text(recording.read_text().replace('"kind": "torch"', '"kind": "numpy"'))
    (recorded,) = _record.read(recording)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert "pip install ml_dtypes" in replay.replay(recorded, "cpu", None).error
    monkeypatch.undo()
    pytest.importorskip("ml_dtypes")
    assert replay.replay(recorded, "cpu", None).passed
