"""The package requires only torch and nothing from the trainers."""

import subprocess
import sys

import dcmha

WITHOUT_EXTRAS = """
import sys

sys.modules |= dict.fromkeys({extras})  # importing one fails
import torch
from dcmha import DCAttention, DCCrossAttention, record_attention

x = torch.randn(2, 5, 32, requires_grad=True)
layer = DCAttention(32, 4)
with record_attention(layer) as recorded:
    layer(x).sum().backward()
DCCrossAttention(32, 4)(x, x)
print(len(recorded), layer.resolved_impl)
"""
EXTRAS = (
    *("lightning", "torchvision", "timm", "webdataset", "braceexpand", "torchmetrics", "tensorboard", "jsonargparse"),
    *("safetensors", "huggingface_hub", "tokenizers", "zstandard", "sklearn", "scipy", "matplotlib", "PIL", "tqdm"),
    *("dctrain", "dcvision", "dclm"),
)


def test_package_works_with_only_torch_installed():
    command = [sys.executable, "-c", WITHOUT_EXTRAS.format(extras=EXTRAS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "1 cpu", result.stderr


def test_all_exported_names_exist():
    assert all(hasattr(dcmha, name) for name in dcmha.__all__)
