"""docs/levels without a GPU: every level compiles without spills, is right on the fake GPU, and no figure is typed by hand.

tests/fake_cuda runs the very texts, thread by thread; level 6's inline PTX (mma.cuh) has a stand-in here.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "build/dev/tests/fake_cuda"
sys.path.insert(0, str(ROOT / "docs/levels"))
import run as levels  # noqa: E402

sys.path.pop(0)

ALL = (*levels.LEVELS, *levels.VARIANTS)
INSTRUCTIONS = """
__device__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned b[2] = {b0, b1};
    tw_mma_m16n8k16_bf16(d, a, b, d);
}
__device__ unsigned pack(float x, float y) { return tw_float_to_bfloat16(x) | unsigned(tw_float_to_bfloat16(y)) << 16; }
__device__ void load_fragments(unsigned (&to)[4], const Bfloat16* row) { tw_ldmatrix<4>(to, row); }
__device__ void load_fragments_transposed(unsigned (&to)[4], const Bfloat16* row) { tw_ldmatrix<4, true>(to, row); }
__device__ void copy_async(Bfloat16* to, const Bfloat16* from) { tw_cp_async<16>(to, from); }
__device__ void wait_for_copies() {}
"""


@pytest.fixture(scope="module")
def nvrtc():
    try:
        return levels.Compiler()
    except (levels.Failure, OSError) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("level", ALL, ids=lambda level: level.name)
def test_a_level_compiles_without_spills(nvrtc, level, arch):
    told = [f"static_assert(sizeof(Shared) == {launch.shared});" for launch in level.launches if launch.shared]
    cubin, log = nvrtc.compile(level.source() + "\n".join(told), level.file, arch)
    assert cubin.startswith(b"\x7fELF")
    assert "warning" not in log, log
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log) == [("0", "0")] * len(level.launches)
    static = [int(size) for size in re.findall(r"(\d+) bytes smem", log)]
    limit = {"sm_80": 163, "sm_90": 227}[arch] * levels.KIB
    assert all(launch.shared <= limit for launch in level.launches) and all(size <= 48 * levels.KIB for size in static)


# ------------------------------------------------------------------------------------------------------ the fake GPU


@pytest.fixture(scope="module")
def gpu():
    """The fake compiler, and a driver with a current context."""
    for name in ("libcuda.so.1", "libnvrtc.so.13"):
        if not (FAKE / name).exists():
            pytest.skip(f"the fake GPU is not built: {FAKE / name}")
    before = os.environ.get("TILEWISE_CUDA_DRIVER")
    os.environ["TILEWISE_CUDA_DRIVER"] = str(FAKE / "libcuda.so.1")
    try:
        driver = levels.Driver()
    finally:
        if before is None:
            del os.environ["TILEWISE_CUDA_DRIVER"]
        else:
            os.environ["TILEWISE_CUDA_DRIVER"] = before
    context = ctypes.c_void_p()
    driver("cuInit", 0)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    driver("cuCtxSetCurrent", context)
    yield levels.Compiler(str(FAKE / "libnvrtc.so.13")), driver
    driver("cuCtxSetCurrent", None)
    driver("cuDevicePrimaryCtxRelease_v2", 0)


class DeviceArray:
    def __init__(self, driver: levels.Driver, host: np.ndarray) -> None:
        self.driver, self.host, self.address = driver, host, ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(host.nbytes))
        driver("cuMemcpyHtoD_v2", self.address, host.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(host.nbytes))

    def values(self) -> np.ndarray:
        to = np.empty_like(self.host)
        self.driver("cuMemcpyDtoH_v2", to.ctypes.data_as(ctypes.c_void_p), self.address, ctypes.c_size_t(to.nbytes))
        return to

    def free(self) -> None:  # checks the margins around it
        self.driver("cuMemFree_v2", self.address)


def to_bits(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def compile_for_the_fake(compiler, source: str, name: str) -> bytes:
    """Its shared memory of run-time size is a function's result, not an array; and it has sm_90."""
    pattern = r"extern __shared__ __align__\(16\) float memory\[\];"
    source = re.sub(pattern, "float* const memory = reinterpret_cast<float*>(tw_dynamic_shared());", source)
    headers = {path.name: path.read_text() for path in levels.HERE.glob("*.cuh")} | {"mma.cuh": INSTRUCTIONS}
    return compiler.compile(source, name, "sm_90", headers)[0]


def result_of(level, gpu, q, k, v):
    compiler, driver = gpu
    heads, seqlen, _ = q.shape
    cubin = compile_for_the_fake(compiler, level.source(), level.file)
    functions = driver.load(cubin, level.launches)
    nan = np.float32(np.nan)
    arrays = [DeviceArray(driver, to_bits(x)) for x in (q, k, v)]
    arrays.append(DeviceArray(driver, np.full(q.shape, 0x7FFF, np.uint16)))  # o: poisoned
    arrays.append(DeviceArray(driver, np.full((heads, seqlen), nan)))
    arrays.append(DeviceArray(driver, np.full(max(1, level.scratch(heads, seqlen)), nan)))
    problem = levels.Problem(*(array.address.value for array in arrays), seqlen)
    driver.run(functions, level, problem, heads, 0)
    driver("cuCtxSynchronize")
    o, lse = to_float(arrays[3].values()), arrays[4].values()
    for array in arrays:
        array.free()
    return o, lse


def exact(q, k, v):
    q, k, v = (to_float(to_bits(x)).astype(np.float64) for x in (q, k, v))
    x = q @ k.transpose(0, 2, 1) / 8
    highest = x.max(-1, keepdims=True)
    p = np.exp(x - highest)
    total = p.sum(-1, keepdims=True)
    return p / total @ v, (highest + np.log(total))[..., 0]


@pytest.mark.parametrize("level", ALL, ids=lambda level: level.name)
def test_a_level_is_right(gpu, level):
    random = np.random.default_rng(level.number)
    q, k, v = (random.standard_normal((3, 256, 64)) for _ in range(3))
    # Scores that rise and that fall from tile to tile, by more than exp takes; and scores far below 0.
    q[:2] *= 14
    k[0] *= np.linspace(0.1, 3, 256)[:, None]
    k[1] *= np.linspace(3, 0.1, 256)[:, None]
    k[2, :, 0] -= 100
    q[2, :, 0] = abs(q[2, :, 0]) + 8
    o, lse = result_of(level, gpu, q, k, v)
    wanted, wanted_lse = exact(q, k, v)
    rounding = np.abs(to_float(to_bits(wanted)) - wanted).max()
    # Levels 1 to 5 round o alone; on tensor cores P is rounded too, 2^-9 of weights whose sum is 1.
    limit = 1.1 * rounding + 1e-5 if level.number < 6 else 2 * rounding + 2**-9 * np.abs(v).max()
    assert np.abs(o - wanted).max() <= limit  # false for NaN
    assert (np.abs(lse - wanted_lse) <= 1e-5 * np.maximum(1, np.abs(wanted_lse))).all()
    assert np.abs(wanted).mean() > 100 * np.abs(o - wanted).mean()


def test_levels_2_to_5_are_one_computation(gpu):
    """They differ in the order of sums and in where numbers wait, so in the last bits of fp32: bf16 rarely shows it."""
    random = np.random.default_rng(9)
    q, k, v = (random.standard_normal((1, 256, 64)) for _ in range(3))
    results = [result_of(level, gpu, q, k, v)[0] for level in levels.LEVELS[:5]]
    for other in results[1:]:
        assert (results[0] == other).mean() > 0.98


# ------------------------------------------------------------------------------------------------------ the runner


def run_py(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(levels.HERE / "run.py"), *arguments], capture_output=True, text=True, check=False
    )


def test_help_and_mistakes():
    done = run_py("--help")
    assert done.returncode == 0
    for option in ("--shapes", "--rounds", "--seconds", "--json", "--table"):
        assert option in done.stdout
    for wrong, sentence in (("4x32", "BATCHxHEADSxSEQLEN"), ("1x1x100", "128 divides"), ("9000x9x128", "65535")):
        done = run_py("--shapes", wrong)
        assert done.returncode == 2 and sentence in done.stderr
    assert run_py("--rounds", "0").returncode == 2
    assert "No such file" in run_py("--table", "/nonexistent.json").stderr


def test_without_a_gpu_it_says_what_it_needs():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run_py()
    assert done.returncode == 2 and "needs an NVIDIA GPU" in done.stderr and "Traceback" not in done.stderr


def test_a_whole_run_on_the_fake_gpu(gpu, monkeypatch, tmp_path, capsys):
    """Everything but the clock: compiled, checked, timed, kept, printed. On torch's CPU tensors, which the fake reads."""
    torch = pytest.importorskip("torch")
    compiler, driver = gpu

    class Clock:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = time.perf_counter()

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end) -> float:
            return 1e3 * (end.time - self.time)

    class Compiler:
        def compile(self, source: str, name: str, arch: str) -> tuple[bytes, str]:
            assert arch == "sm_90"
            return compile_for_the_fake(compiler, source, name), ""

        def version(self) -> str:
            return compiler.version()

    stream = type("Stream", (), {"cuda_stream": 0})
    for name, value in (("is_available", lambda: True), ("get_device_capability", lambda: (9, 0)), ("Event", Clock),
                        ("get_device_name", lambda: "a fake"), ("current_stream", lambda: stream)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(levels, "DEVICE", "cpu")
    monkeypatch.setattr(levels, "Compiler", Compiler)
    monkeypatch.setattr(levels, "Driver", lambda: driver)
    kept = tmp_path / "new" / "levels.json"
    arguments = ["--shapes", "1x2x128", "--rounds", "2", "--seconds", "0.001", "--json", str(kept)]
    assert levels.main(arguments) == 0, capsys.readouterr().out
    record = json.loads(kept.read_text())
    assert [row["name"] for row in record["shapes"][0]["rows"]] == [level.name for level in ALL] + list(levels.PEERS)
    for row in record["shapes"][0]["rows"]:
        assert len(row["ms"]) == 2 and min(row["ms"]) > 0 and 0 < row["error"] <= record["shapes"][0]["error_limit"]
    assert record["registers"]["1, standard"] == [64, 64, 64]  # of the fake: every kernel
    assert levels.tables(record) in capsys.readouterr().out

    wrong = levels.LEVELS[4].source().replace("m[i] = highest;", "m[i] = 0;")
    monkeypatch.setattr(levels.Level, "source", lambda level: wrong)
    monkeypatch.setattr(levels, "LEVELS", levels.LEVELS[4:5])
    monkeypatch.setattr(levels, "VARIANTS", ())
    monkeypatch.setattr(levels, "tables", lambda record: "")
    assert levels.main(arguments) == 1
    assert "WRONG: 5, queries split over warps" in capsys.readouterr().out


def made_up_record() -> dict:
    names = [level.name for level in ALL] + list(levels.PEERS)
    rows = [
        {"name": name, "error": 1e-3, "wrong": None, "ms": [100.0 / (n + 1), 120.0 / (n + 1)]}
        for n, name in enumerate(names)
    ]
    shape = {"batch": 1, "heads": 1, "seqlen": 4096, "standard_error": 1e-3, "error_limit": 3e-3, "rows": rows}
    about = {
        "gpu": "G",
        "date": "2026-01-01T00:00:00+00:00",
        "commit": "c",
        "torch": "t",
        "driver": "13.0",
        "nvrtc": "13.0",
    }
    return {**about, "rounds": 2, "seconds": 0.2, "registers": {names[0]: [1, 2, 3]}, "shapes": [shape]}


def test_tables_say_what_the_record_says():
    text = levels.tables(made_up_record())
    lines = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if "|" in line
    }
    flops = 4 * 4096**2 * 64
    first = lines["[1, standard](1-standard.cu)"]
    assert first == ["1 / 2 / 3", "110", levels.human(flops / 110e9), "", "0.50"]
    assert lines["[2, tiles: FlashAttention](2-tiles.cu)"][3:] == ["2.00", "1.00"]
    assert lines["[6, tensor cores](6-tensor-cores.cu)"][3:] == ["1.20", "3.00"]
    assert lines["*5, with 64 queries per block*"][3:] == ["2.00", "4.00"]  # beside level 4, not beside a variant
    assert "not measured" not in text
    record = made_up_record()
    record["shapes"][0]["rows"][3]["wrong"] = "o is off"
    assert "worth nothing" in levels.tables(record)
    assert levels.tables(None).count("not measured yet") == 2 * (len(ALL) + len(levels.PEERS))


def test_the_page_has_the_figures_of_the_record():
    record = json.loads(levels.RESULTS.read_text()) if levels.RESULTS.exists() else None
    page = levels.README.read_text()
    assert levels.with_tables(page, record) == page, (
        "python docs/levels/run.py --table bench/results/nvidia-h200/levels.json"
    )
    figures = page.split(levels.BEGIN)[0] + page.split(levels.END)[1]
    assert not re.search(r"\d[\d.]* (ms|TFLOP/s|times as fast)\b", figures), "a figure outside of what run.py writes"


def test_every_level_has_its_file_and_its_section():
    assert sorted(path.name for path in levels.HERE.glob("*.cu")) == [level.file for level in levels.LEVELS]
    page = levels.README.read_text()
    for level in levels.LEVELS:
        assert f"]({level.file})" in page and f"\n## {level.number}. " in page
        text = (levels.HERE / level.file).read_text()
        assert text.startswith(f"// Level {level.number}: ")
        assert 60 <= len(text.splitlines()) <= 150
