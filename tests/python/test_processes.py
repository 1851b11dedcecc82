"""Attention in forked, spawned and threaded programs: right values, no hang, no more threads than were asked for.

Every program runs in a process group of its own, so that a hang anywhere in it is a failure here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = str(Path(tilewise.__file__).parent.parent)

# What all of them begin with. `works` compares with what the first process computed.
COMMON = """
import multiprocessing, os, signal, sys, threading
import numpy as np
import tilewise
tilewise.set_num_threads(3)
q = np.random.default_rng(0).standard_normal((2, 300, 4, 16)).astype(np.float32)

def results():
    o, lse, _ = tilewise.attention_forward(q, q, q, causal=True)
    g = tilewise.attention_backward(o, q, q, q, o, lse, causal=True)
    return o.tobytes(), g.dq.tobytes(), g.dv.tobytes()

def works(expected):
    return results() == expected

def threads():
    return len(os.listdir("/proc/self/task"))

def in_child(body):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(0 if body() else 1)
    return os.waitpid(pid, 0)[1] == 0
"""

# Operations that have torch start its own threads.
TORCH = """
import torch
a = torch.randn(1500, 1500)
torch.set_num_threads(3)
(a @ a).sum().item(), torch.sin(a).sum().item()
"""


@pytest.fixture(params=["numpy", "torch"])
def setting(request):
    """With torch in the process and without."""
    if request.param == "numpy":
        return COMMON
    pytest.importorskip("torch")
    return TORCH + COMMON


def run(tmp_path, program, timeout=180, **environment):
    script = tmp_path / "program.py"  # a file: spawned children import it
    script.write_text(program)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]), **environment}
    env.pop("TILEWISE_NUM_THREADS", None)
    process = subprocess.Popen(
        [sys.executable, str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"hangs: {process.communicate()[0].decode()}")
    assert process.returncode == 0, output.decode()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(setting, tmp_path, method):
    run(
        tmp_path,
        setting
        + f"""
def grandchild(expected):
    return works(expected) and in_child(lambda: works(expected))

if __name__ == "__main__":
    expected = results()
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        assert pool.map(grandchild, [expected] * 6) == [True] * 6
        assert works(expected)
""",
    )


def test_fork_while_other_threads_compute(setting, tmp_path):
    run(
        tmp_path,
        setting
        + """
expected = results()
stop = False
good = []
def compute():
    while not stop:
        good.append(works(expected))
others = [threading.Thread(target=compute) for _ in range(3)]
for thread in others: thread.start()
for _ in range(15):
    assert in_child(lambda: works(expected) and in_child(lambda: works(expected)))
stop = True
for thread in others: thread.join()
assert good and all(good) and works(expected)
""",
    )


def test_first_import_in_a_child_of_a_process_that_used_torch(tmp_path):
    """libgomp's threads stayed in the parent, and nobody tells a library that is loaded later."""
    pytest.importorskip("torch")
    run(
        tmp_path,
        TORCH
        + f"""
import os
pid = os.fork()
if pid == 0:
    import signal
    signal.alarm(60)
    exec({COMMON!r})
    assert works(results())
    assert "forked" in tilewise.doctor()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
""",
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader(tmp_path, method):
    pytest.importorskip("torch")
    run(
        tmp_path,
        TORCH
        + COMMON
        + f"""
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, n):
        x = torch.from_numpy(q) * (n + 1)
        return tilewise.attention(x, x, x, causal=True)

if __name__ == "__main__":
    expected = [Data()[n] for n in range(12)]
    loader = torch.utils.data.DataLoader(
        Data(), batch_size=None, num_workers=2, timeout=60, multiprocessing_context="{method}")
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(loader, expected, strict=True))
        assert torch.equal(Data()[3], expected[3])
""",
    )


def test_callers_share_the_threads(setting, tmp_path):
    run(
        tmp_path,
        setting
        + """
expected = results()
before = threads()
most, good = [], []
together = threading.Barrier(6)
def caller():
    for _ in range(10):
        together.wait()
        good.append(works(expected))
        most.append(threads())
callers = [threading.Thread(target=caller) for _ in range(6)]
for thread in callers: thread.start()
for thread in callers: thread.join()
assert all(good)
assert max(most) <= before + 6 + 2, (before, max(most))  # 6 callers, and two helpers for all of them
""",
    )


def test_inside_a_parallel_loop_of_torch(tmp_path):
    """The other threads of the loop call, too: each works alone."""
    torch = pytest.importorskip("torch")
    libraries = list((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not libraries:
        pytest.skip("this torch has another OpenMP run time")
    run(
        tmp_path,
        TORCH
        + COMMON
        + f"""
import ctypes
gomp = ctypes.CDLL("{libraries[0]}")
expected = results()
before = threads()
good = []
@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def body(_):
    good.append(tilewise.num_threads() == 1 and works(expected))
gomp.GOMP_parallel(body, None, 3, 0)
assert good == [True] * 3, good
assert threads() <= before, (before, threads())
""",
    )


def test_torchs_number_counts_in_every_thread(tmp_path):
    """OpenMP keeps a number per thread, and only the thread that called torch.set_num_threads has the new one."""
    pytest.importorskip("torch")
    run(
        tmp_path,
        """
import threading, torch, tilewise
torch.set_num_threads(1)
seen = [tilewise.num_threads()]
thread = threading.Thread(target=lambda: seen.append(tilewise.num_threads()))
thread.start()
thread.join()
assert seen == [1, 1], seen
""",
    )


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_affinity_at_run_time(setting, tmp_path):
    run(
        tmp_path,
        setting
        + """
import time
tilewise.set_num_threads(0)
cpus = os.sched_getaffinity(0)
before = tilewise.num_threads()
os.sched_setaffinity(0, {min(cpus)})
time.sleep(0.03)
assert tilewise.num_threads() == 1
os.sched_setaffinity(0, cpus)
time.sleep(0.03)
assert tilewise.num_threads() == before > 1
""",
    )
