"""Steps of fine-tuning with attn_implementation="tilewise": equal to those in eager attention, to rounding.

Adapters (LoRA), adapters on 4-bit weights (QLoRA), gradient checkpointing, and two processes with DDP and FSDP.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tilewise import compat

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tilewise.transformers")

DEVICE = os.environ.get("TILEWISE_TEST_DEVICE", "cpu")
IMPLEMENTATIONS = ("tilewise", "eager")
TOLERANCE = {"atol": 2e-5, "rtol": 2e-4}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with compat._quietly():
        yield
    torch.set_num_threads(threads)


def trained(model, steps=2, learning_rate=0.05):
    """Losses of some steps on a padded batch, and the trained parameters."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(weights.values(), lr=learning_rate)
    inputs, _ = compat.batch(compat.architecture("Llama"), "left", DEVICE)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in weights.items()}


def assert_same_training(a, b):
    assert a[0] == pytest.approx(b[0], rel=1e-5)
    assert a[1].keys() == b[1].keys() and a[1]
    for name in a[1]:
        torch.testing.assert_close(a[1][name], b[1][name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


class Linear4bit(torch.nn.Linear):
    """Frozen weights of 4 bits with a scale and a zero for every 8 inputs, two to a byte: as GPTQ checkpoints have them."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device=DEVICE)
        groups = linear.weight.detach().unflatten(-1, (-1, 8))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = (high - low) / 15
        levels = ((groups - low) / scale).round().to(torch.uint8).flatten(-2)
        del self.weight
        self.register_buffer("packed", levels[:, 0::2] | (levels[:, 1::2] << 4))
        self.register_buffer("scale", scale)
        self.register_buffer("low", low)

    @property
    def weight(self):
        levels = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(-2)
        return (levels.unflatten(-1, (-1, 8)) * self.scale + self.low).flatten(-2)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


def in_four_bits(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and name != "lm_head":
                setattr(module, name, Linear4bit(child))
    return model


@pytest.mark.parametrize("bits", [32, 4], ids=["LoRA", "QLoRA"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_adapters(name, bits):
    peft = pytest.importorskip("peft")
    found = []
    for implementation in IMPLEMENTATIONS:
        model = compat.architecture(name).build(implementation, DEVICE)
        if bits == 4:
            model = in_four_bits(model)
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False,
            lora_dropout=0.0,
        )  # fmt: skip
        model = peft.get_peft_model(model, config)
        found.append(trained(model))
        assert all("lora_" in parameter for parameter in found[-1][1])
    assert_same_training(*found)
    assert found[0][0][1] < found[0][0][0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "gpt-oss"])
def test_gradient_checkpointing(name, reentrant):
    plain = compat.architecture(name).build("tilewise", DEVICE).train()
    checked = compat.architecture(name).build("tilewise", DEVICE).train()
    checked.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_training(trained(checked), trained(plain))


def test_gradient_checkpointing_with_dropout():
    """The second run of a layer drops what the first did: gradients of a step are those without checkpoints."""
    found = []
    for checkpoints in (False, True):
        model = compat.architecture("Llama").build("tilewise", DEVICE, attention_dropout=0.3).train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        found.append(trained(model, steps=1))
    assert_same_training(*found)


# --------------------------------------------------------------------------------------------------- two processes


def worker(rank, rendezvous):
    """One of two processes: a step with DDP and one with FSDP, each with half of the batch, against one with all of it."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    which = compat.architecture("Llama")
    inputs, _ = compat.batch(which, "plain")
    half = {name: x[rank : rank + 1] for name, x in inputs.items()}

    def gradients(model, wrapped, inputs):
        wrapped(**inputs, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    whole = which.build("tilewise")
    expected = gradients(whole, whole, inputs)

    def compare(found):
        for name, gradient in found.items():
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(gradient, expected[name], atol=2e-5, rtol=1e-3)

    model = which.build("tilewise")
    compare(gradients(model, torch.nn.parallel.DistributedDataParallel(model), half))
    print("DDP", flush=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = which.build("tilewise")
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compare(gradients(model, model, half))
    print("FSDP", flush=True)
    dist.destroy_process_group()


def test_two_processes():
    """DDP and FSDP over Gloo: gradients are those of one process with the whole batch."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no Gloo")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "worker"]
        path = os.pathsep.join([str(Path(compat.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        processes = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/rendezvous"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            for process in processes:
                out, err = process.communicate(timeout=240)
                assert process.returncode == 0 and out.split() == ["DDP", "FSDP"], err[-3000:]
        finally:
            for process in processes:
                process.kill()


if __name__ == "__main__":
    worker(int(sys.argv[2]), sys.argv[3])
    # Gloo's threads let go of a finished collective's tensors after its caller went on. One that needs the interpreter
    # for that while it is being taken down ends the process with std::terminate; so it is not taken down.
    os._exit(0)
