"""`tilewise explain`, `show` and `kernel`, and that help is worth reading."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import tilewise
from tilewise import cli, masks
from tilewise.show import FULL, PARTIAL, SKIP, tile_map

FAKE = Path(__file__).parents[2] / "build/dev/tests/fake_cuda"
PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    return result.exit_code, result.output


# --------------------------------------------------------------------------------------------------------------- help


def commands() -> dict[str, click.Command]:
    found = {}
    for name, command in typer.main.get_command(cli.app).commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {each}": value for each, value in inner.items()} if inner else {name: command}
    return found


@pytest.mark.parametrize("name", commands())
def test_every_command_and_every_option_says_what_it_is(name):
    command = commands()[name]
    assert len(command.help or "") > 20
    silent = [each.name for each in command.params if isinstance(each, click.Option) and not each.help]
    assert not silent
    code, text = run(*name.split(), "--help")
    assert code == 0
    for line in re.findall(r"Example: tilewise (\w+)", text):
        assert line == name.split()[0]


def test_help_groups_the_commands():
    code, text = run("--help")
    assert code == 0
    for word in ("explain", "show", "kernel", "record", "replay", cli.LOOK, cli.MEASURE, cli.KERNELS, cli.ABOUT):
        assert word in text
    assert "GPU" in text.split("Options")[0]


# ------------------------------------------------------------------------------------------------------------ explain


def test_explain_names_every_option():
    flags = ["--causal", "--bias", "--alibi", "--sinks", "--deterministic", "--batch-invariant"]
    mask = ["--mask", "documents(np.arange(seqlen) // 9)", "--score-mod", "lambda x, b, h, i, j, s: x * 2"]
    code, text = run("explain", *flags, "--chunk", "64", "--softcap", "30", "--dropout-p", "0.5", *mask)
    assert code == 0
    for line in text.splitlines()[0], next(line for line in text.splitlines() if line.startswith("backward")):
        assert line.endswith(
            "b1 hq8/hkv8 sq4096 skv4096 d64 float32 causal chunk(64) softcap bias alibi sinks dropout "
            "mask=documents(@0,@0) score_mod=mul(x,2) deterministic batch_invariant"
        )
    assert text.count("implementation: cpu_tiled") == 2
    for paragraph in text.split("backward "):
        assert paragraph.count("workspace:") == 1


def test_explain_says_why_an_implementation_declined():
    code, text = run("explain", "--backend", "fwd_mma", "--pass", "fwd")
    assert code == 2
    assert "fwd_mma: works on CUDA tensors; these are on cpu" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain", "--mask", "documents("], "--mask: got documents( (SyntaxError"),
        (["explain", "--mask", "3"], "mask: got a int"),
        (["explain", "--score-mod", "lambda x: x"], "score_mod: got a function of (x)"),
        (["explain", "--device", "tpu"], "--device: got 'tpu'; allowed: cpu, cuda"),
        (["show", "--tile", "64"], "--tile: got '64'; allowed: two numbers"),
        (["show", "--head", "8"], "h: got 8; allowed: 0 to num_heads_q - 1 = 7"),
        (["show", "--sequence", "1"], "b: got 1"),
        (["kernel", "--arch", "x"], "x"),
        (["replay", "x", "--device", "tpu"], "--device: got 'tpu'"),
        (["record", "x", "/no/such/program"], "COMMAND: got '/no/such/program'"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_status_2(arguments, sentence):
    code, text = run(*arguments)
    assert code == 2
    assert sentence in text
    assert "Traceback" not in text


# --------------------------------------------------------------------------------------------------------------- show


def dense_classes(visible: np.ndarray, tile_q: int, tile_kv: int) -> np.ndarray:
    rows, columns = (range(0, n, tile) for n, tile in zip(visible.shape, (tile_q, tile_kv), strict=True))
    tiles = [[visible[i : i + tile_q, j : j + tile_kv] for j in columns] for i in rows]
    return np.array([[FULL if t.all() else PARTIAL if t.any() else SKIP for t in row] for row in tiles])


def test_tiles_are_those_of_the_dense_mask():
    q, k = np.empty((2, 150, 4, 8), np.float32), np.empty((2, 200, 2, 8), np.float32)
    ids, kv_ids = np.arange(150) // 40, np.arange(200) // 50
    i, j = np.arange(150)[:, None], np.arange(200)[None]
    seen = (ids[:, None] == kv_ids[None]) & (j <= i + 50)
    found = tile_map(q, k, k, b=1, h=3, tile=(32, 16), causal=True, mask=masks.dense(ids[:, None] == kv_ids[None]))
    expected = dense_classes(seen, 32, 16)
    assert np.array_equal(found.classes == SKIP, expected == SKIP)
    assert found.counts == {each: int((expected == each).sum()) for each in (FULL, PARTIAL, SKIP)}
    assert sum(found.counts.values()) == 5 * 13


def test_show_prints_and_draws(tmp_path):
    png = tmp_path / "deep" / "mask.png"
    code, text = run("show", "--seqlen", "300", "--causal", "--window", "100,0", "--tile", "64,64", "--png", str(png))
    assert code == 0
    assert text.splitlines()[1:6] == ["▒····", "▒▒···", "▒▒▒··", "·▒▒▒·", "··▒▒▒"]
    assert "█ full 0 (0.0%), ▒ partial 12 (48.0%), · skip 13 (52.0%)" in text
    assert png.read_bytes().startswith(PNG)


def test_a_long_mask_is_shown_in_few_marks_and_at_once():
    code, text = run("show", "--seqlen", str(2**20), "--causal", "--window", "100000,0")
    assert code == 0
    assert "tiles of 2048 queries × 2048 keys" in text
    assert max(len(line) for line in text.splitlines()[1:-1]) <= 96


def test_marks_that_share_tiles_are_partial_unless_all_are_alike():
    found = tile_map(*[np.empty((1, 512, 1, 8), np.float32)] * 3, causal=True)
    assert found.picture(8) == [
        "▒·······",
        "█▒······",
        "██▒·····",
        "███▒····",
        "████▒···",
        "█████▒··",
        "██████▒·",
        "███████▒",
    ]
    assert found.picture(4) == ["▒···", "█▒··", "██▒·", "███▒"]


def test_show_of_nothing():
    code, text = run("show", "--seqlen", "0")
    assert code == 0
    assert "full 0 (0.0%)" in text


# ------------------------------------------------------------------------------------------------------------- kernel


def test_kernel_names_the_kernels_and_prints_what_was_written():
    if not (FAKE / "libnvrtc.so.13").exists():
        pytest.skip(f"the fake GPU is not built: {FAKE}")
    environment = {
        **os.environ,
        "TILEWISE_CUDA_DRIVER": str(FAKE / "libcuda.so.1"),
        "TILEWISE_NVRTC": str(FAKE / "libnvrtc.so.13"),
        "TILEWISE_CACHE_MAX_MB": "0",
        "TILEWISE_PACKS": "",
    }
    mask = "masks.mod(lambda b, h, i, j, s: i % 7 == j % 7)"
    command = [
        "kernel",
        "--dtype",
        "float16",
        "--head-dim",
        "64",
        "--mask",
        mask,
        "--pass",
        "fwd",
        "--source",
        "--arch",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tilewise.cli", *command, "80"],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fwd_mma" in done.stdout
    assert "backward" not in done.stdout
    assert "// spec.cuh of fwd_mma.cu" in done.stdout
    assert "kTileKV" in done.stdout
    assert "7" in done.stdout.split("spec.cuh of")[1]


def test_the_report_of_a_pack_does_not_repeat_the_sources():
    from tilewise.aot import Kernel, Outcome

    kernel = Kernel("s", False, "f", "f.cu", "e", "sm_80", "c", 1, 1, 0, 0, 0, 0, 9, 0.1, False, [], "p", "text")
    (told,) = Outcome([kernel]).report()["kernels"]
    assert told["path"] == "p"
    assert "rendered" not in told


def test_tile_map_refuses_unknown_options():
    a = np.empty((1, 4, 1, 8), np.float32)
    with pytest.raises(tilewise.ArgumentTypeError, match=r"Did you mean 'causal'"):
        tile_map(a, a, a, causall=True)
