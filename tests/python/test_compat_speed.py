"""`python -m tilewise.compat speed`, with tiny models on the CPU."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise import compat

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if int(transformers.__version__.split(".")[0]) < 4 or not hasattr(transformers, "AttentionInterface"):
    pytest.skip("needs Transformers 4.57 or newer", allow_module_level=True)
compat_speed = pytest.importorskip("tilewise.compat_speed")
from tilewise import transformers as tilewise_transformers  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Threads as before; two rounds are as good as twenty here."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(compat_speed, "ROUNDS", dict.fromkeys(compat.SPEED_PARTS, 2))
    yield
    torch.set_num_threads(threads)


def test_everything(tmp_path, capsys):
    file, page = tmp_path / "out" / "speed.json", tmp_path / "page.md"
    page.write_text(f"before\n{compat_speed.BEGIN}\nold\n{compat.END}\nafter\n")
    arguments = ["speed", "--device", "cpu", "--tiny", "--json", str(file), "--markdown", str(page)]
    assert compat.main(arguments) == 0
    said, kept = capsys.readouterr().out, json.loads(file.read_text())
    assert kept["about"]["tiny"] is True and kept["about"]["transformers"] == transformers.__version__
    assert [(case["part"], case["family"], case["backward"]) for case in kept["cases"]] == [
        ("train", "Llama", True),
        ("generate", "Falcon", False),
        ("generate", "Llama", False),
        ("compiled", "Llama", False),
        ("compiled", "Llama", True),
    ]
    for case in kept["cases"]:
        wanted = {"tilewise", "sdpa"} | ({"eager"} if case["part"] != "compiled" else set())
        assert set(case["results"]) == wanted and set(case["ratios"]) == wanted - {"tilewise"}
        for name, outcome in case["results"].items():
            assert not outcome["fault"] and not outcome["wrong"], (case["name"], name, outcome["fault"])
            assert outcome["tokens_per_second"] > 0 and len(outcome["seconds"]) == 2
            assert outcome["tokens_per_second"] == pytest.approx(case["tokens"] / outcome["median"])
            assert outcome["peak_bytes"] is None  # of a GPU only
        measures = {"logits"} if case["new"] else {"loss", "gradient"} if case["backward"] else {"loss"}
        assert set(case["results"]["tilewise"]["differences"]) == measures
        for ratio in case["ratios"].values():
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"] and ratio["rounds"] == 2
    assert "tiny Falcon" in said and "time of Tilewise / this" in said
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "| tiny Falcon | 4 tokens after 16" in text


def test_what_is_wrong_is_not_timed(monkeypatch, tmp_path):
    inner = tilewise_transformers.attention
    monkeypatch.setattr(tilewise_transformers, "attention", lambda *a, **o: inner(*a, **o) * 1.1)
    file, out = tmp_path / "speed.json", io.StringIO()
    assert compat_speed.speed(["train"], "cpu", tiny=True, json_file=file, out=out) == 1
    results = json.loads(file.read_text())["cases"][0]["results"]
    assert results["tilewise"]["wrong"] and not results["tilewise"]["seconds"]
    assert results["sdpa"]["seconds"] and results["eager"]["seconds"]
    assert "wrong: " in out.getvalue()


def test_memory_that_runs_out_is_said(monkeypatch):
    inner = compat_speed.answer_of

    def answer(case, model, *more):
        if model.config._attn_implementation == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return inner(case, model, *more)

    monkeypatch.setattr(compat_speed, "answer_of", answer)
    out = io.StringIO()
    assert compat_speed.speed(["train"], "cpu", tiny=True, out=out) == 0  # eager attention's own limit, not a fault
    assert "out of memory" in out.getvalue()


def test_time_that_runs_out_is_said():
    out = io.StringIO()
    assert compat_speed.speed(["generate"], "cpu", tiny=True, seconds=0.0, out=out) == 0
    assert "1 rounds" in out.getvalue() and "no time left" in out.getvalue()


def test_refusals(capsys):
    assert compat.main(["speed", "--device", "cpu"]) == 2
    assert "--device: got cpu with models of full size; allowed: cuda, or cpu with --tiny" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert compat.main(["speed", "--device", "cuda"]) == 2
        assert "--device: got cuda" in capsys.readouterr().err


def test_without_transformers():
    program = (
        "import sys; sys.modules['transformers'] = None; from tilewise import compat; sys.exit(compat.main(['speed']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("tilewise.compat needs torch and transformers (pip install torch transformers): ")
    assert "Traceback" not in done.stderr


def test_the_page_has_a_place_for_the_table():
    inside = PAGE.read_text().split(compat_speed.BEGIN)
    assert len(inside) == 2
    assert inside[1].split(compat.END)[0].strip().startswith("| model | measured | Tilewise | SDPA | eager |")
