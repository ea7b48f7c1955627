"""Optimization: weight decay, parameters without a loss, loss weights, and the limit of the softmax scale."""

import math
from itertools import pairwise

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from dcvl import VisionLanguageModel
from dcvl.network import MAX_SOFTMAX_SCALE, Texts

from .commands import run, small
from .test_training import validated

LIMIT = math.log(MAX_SOFTMAX_SCALE)


@pytest.mark.parametrize("decay_all", [False, True])
def test_compose_gates_are_decayed_only_with_decay_all(decay_all):
    """The gates are those of self-attention in both towers and of both sides of cross-attention."""
    module = VisionLanguageModel(decay_all=decay_all)
    free = {id(p) for group in module._parameter_groups() if not group["weight_decay"] for p in group["params"]}
    gates = [p for name, p in module.model.named_parameters() if ".compose." in name and name.endswith(".gate")]
    assert len(gates) == len(module.model.blocks) + 2 * module.model.text.config.cross_layers
    assert {id(gate) in free for gate in gates} == {not decay_all}
    assert all((id(p) in free) != decay_all for p in module.model.parameters() if p.ndim == 1)


class AboveItsLimit(Callback):
    """Start with a scale above the limit and record the scale of every step."""

    scales: list[float] = []  # noqa: RUF012

    def on_train_start(self, trainer, pl_module) -> None:
        self.scales.clear()
        pl_module.model.log_scale.data.fill_(LIMIT + 1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.scales.append(float(pl_module.model.log_scale))


def test_softmax_scale_is_clamped_and_can_decrease(tmp_path):
    """With random embeddings, a large scale increases the loss, so it decreases from the limit immediately."""
    callback = "--trainer.callbacks+=tests.dcvl.test_optimization.AboveItsLimit"
    run("fit", *small(tmp_path), "--model.contrastive=softmax", "--model.warmup_fraction=0", callback)
    scales = AboveItsLimit.scales
    assert LIMIT - 0.0031 < scales[0] < LIMIT - 0.001  # one step of AdamW
    assert all(after < before for before, after in pairwise(scales))


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("mobilenetv3_small_050", {"conv_head.weight", "conv_head.bias"}),  # after the pooling
        ("efficientnet_lite0", set()),  # the layer of the same name is before the pooling
        ("convnext_atto", {"head.norm.weight", "head.norm.bias"}),
        ("dcvit_tiny_patch16_224", set()),
    ],
)
def test_captioner_freezes_parameters_unused_by_patches(name, frozen):
    text = {"dim": 16, "num_layers": 1, "num_heads": 2, "mlp_dim": 16, "windows": [None]}
    module = VisionLanguageModel(name, 32, text_overrides=text, contrastive=None)
    found = {name for name, p in module.model.image.named_parameters() if not p.requires_grad}
    assert found == frozen
    ids = torch.randint(32, (2, 16))
    texts = Texts(ids, ids, torch.tensor([5, 6]), torch.arange(2))
    module.model(torch.randn(2, 3, 32, 32), texts).caption_loss.backward()
    assert all(p.grad is not None for p in module.model.parameters() if p.requires_grad)


def test_loss_is_weighted_sum(tmp_path):
    run("fit", *small(tmp_path), "--trainer.max_steps=2", "--model.contrastive_weight=0.5", "--model.caption_weight=2")
    found = validated(tmp_path)
    assert found["loss"] == pytest.approx(0.5 * found["contrastive_loss"] + 2 * found["caption_loss"], rel=1e-6)
    assert found["contrastive_loss"] > 0.1 and found["caption_loss"] > 0.1
