"""Means over batches of different sizes."""

import math

import pytest
import torch

from dctrain.utils.weighted_mean import WeightedMean


def test_mean_is_weighted_by_batch_size():
    mean = WeightedMean()
    mean.update(torch.tensor(1.0), 3)
    mean.update(torch.tensor(2.0), torch.tensor(1))
    assert float(mean.compute()) == pytest.approx(1.25)
    mean.reset()
    mean.update(torch.tensor(5.0), 2)
    assert float(mean.compute()) == 5.0
    mean.update(torch.tensor(math.nan), 1)
    assert math.isnan(mean.compute())


def test_validation_loss_does_not_depend_on_batch_size(shards):
    """The last batch is smaller than the others."""
    import lightning as L

    from dcvision import ImageClassifier, ImageDataModule

    losses = []
    torch.manual_seed(0)
    model = ImageClassifier(model_kwargs={"depth": 1})
    torch.nn.init.normal_(model.model.head.weight)  # the head starts at zero, so all losses would be equal
    for size in (7, 40):
        data = ImageDataModule(f"shards:{shards}", f"shards:{shards}", batch_size=size)
        trainer = L.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        (found,) = trainer.validate(model, data, verbose=False)
        losses.append(found["val/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
