"""What `import tilewise` needs and touches, seen from fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tilewise

ROOT = str(Path(tilewise.__file__).parent.parent)


def python(code, **environment):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "jax", "ml_dtypes"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
"""


def test_everything_for_numpy_works_without_torch():
    code = (
        BLOCK
        + """
import numpy as np, tilewise
q = np.random.default_rng(0).standard_normal((1, 5, 2, 8))
o, lse, _ = tilewise.attention_forward(q, q, q, causal=True)
g = tilewise.attention_backward(o, q, q, q, o, lse, causal=True)
tilewise.merge([o, o], [lse, lse])
tilewise.attn_probs(q, q)
tilewise.reference(q, q, q, mask=tilewise.masks.causal(), score_mod=lambda x, b, h, i, j, s: x * 0.5)
tilewise.attention(q, q, q, dropout_p=0.1)
print(tilewise.doctor())
assert "torch" not in sys.modules
"""
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "torch: not imported" in done.stdout and "self-test: passed" in done.stdout


def test_import_does_not_import_torch_or_tools():
    done = python(
        "import tilewise, sys; print([m for m in ('torch', 'matplotlib', 'typer', 'rich', 'transformers') if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_import_order_does_not_matter():
    code = "import {}, {}; import torch; q = torch.randn(1, 5, 2, 8); print(tilewise.attention(q, q, q).shape)"
    for first, second in (("tilewise", "torch"), ("torch", "tilewise")):
        done = python(
            "import importlib.util as u\nif u.find_spec('torch') is None: raise SystemExit(0)\n"
            + code.format(first, second)
        )
        assert done.returncode == 0, done.stderr


def test_a_missing_extension_says_what_to_do(tmp_path):
    package = tmp_path / "tilewise"
    package.mkdir()
    for source in Path(tilewise.__file__).parent.glob("*.py"):
        (package / source.name).write_text(source.read_text())
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import tilewise"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "ImportError: tilewise: its compiled extension" in done.stderr and "Reinstall" in done.stderr


def test_public_names_exist_and_are_documented():
    for name in tilewise.__all__:
        assert hasattr(tilewise, name)
        if name not in ("__version__",):
            assert getattr(tilewise, name).__doc__, name
    for name in tilewise.masks.__all__:
        assert getattr(tilewise.masks, name).__doc__, name
    for name in tilewise.ops.__all__:
        assert getattr(tilewise.ops, name).__doc__, name
    assert Path(tilewise.__file__).with_name("py.typed").exists()
