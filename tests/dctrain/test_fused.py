"""The optimizer is fused on a GPU, unless a gradient scaler must inspect the gradients first."""

from types import SimpleNamespace

import pytest
import torch

import dclm


@pytest.mark.parametrize(
    ("device", "scaler", "expected"), [("cpu", None, None), ("cuda", None, True), ("cuda", 1, None)]
)
def test_optimizer_is_fused_on_gpu_without_scaler(device, scaler, expected, monkeypatch):
    made = {}
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, **options: made.update(options) or None)
    monkeypatch.setattr(torch.optim.lr_scheduler, "LambdaLR", lambda *args: None)
    module = dclm.LanguageModel()
    strategy, plugin = SimpleNamespace(root_device=torch.device(device)), SimpleNamespace(scaler=scaler)
    run = {"max_steps": 100, "max_epochs": None, "fast_dev_run": False}
    module._trainer = SimpleNamespace(strategy=strategy, precision_plugin=plugin, **run)
    module.configure_optimizers()
    assert made["fused"] is expected
