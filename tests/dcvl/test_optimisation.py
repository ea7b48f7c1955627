"""What weight decay leaves out, and the limit of the softmax's scale."""

import math
from itertools import pairwise

import pytest
from lightning.pytorch.callbacks import Callback

from dcvl import VisionLanguageModel
from dcvl.network import MAX_SOFTMAX_SCALE

from .commands import run, small

LIMIT = math.log(MAX_SOFTMAX_SCALE)


@pytest.mark.parametrize("decay_all", [False, True])
def test_compose_gates_are_not_decayed(decay_all):
    """Those of self-attention in both towers, and of both sides of the cross-attention."""
    module = VisionLanguageModel(decay_all=decay_all)
    free = {id(p) for group in module._parameter_groups() if not group["weight_decay"] for p in group["params"]}
    gates = [p for name, p in module.model.named_parameters() if ".compose." in name and name.endswith(".gate")]
    assert len(gates) == len(module.model.blocks) + 2 * module.model.text.config.cross_layers
    assert {id(gate) in free for gate in gates} == {not decay_all}
    assert all((id(p) in free) != decay_all for p in module.model.parameters() if p.ndim == 1)


class AboveItsLimit(Callback):
    """Begins with a scale above the limit, and keeps the scale of every step."""

    scales: list[float] = []  # noqa: RUF012

    def on_train_start(self, trainer, pl_module) -> None:
        self.scales.clear()
        pl_module.model.log_scale.data.fill_(LIMIT + 1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.scales.append(float(pl_module.model.log_scale))


def test_the_scale_of_the_softmax_has_a_limit_that_it_can_leave(tmp_path):
    """At random embeddings so large a scale is dear: it falls from the limit at once."""
    callback = "--trainer.callbacks+=tests.dcvl.test_optimisation.AboveItsLimit"
    run("fit", *small(tmp_path), "--model.contrastive=softmax", "--model.warmup_fraction=0", callback)
    scales = AboveItsLimit.scales
    assert LIMIT - 0.0031 < scales[0] < LIMIT - 0.001  # a step of AdamW
    assert all(after < before for before, after in pairwise(scales))
