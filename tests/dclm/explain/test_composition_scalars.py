"""CompositionScalars callback: it logs curves of every layer and does not change training."""

import pytest
import torch
from lightning import Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from dclm import LanguageModel
from dcmha.analysis import measure_mixing
from dctrain.errors import UserError
from dctrain.explain import CompositionScalars
from tests.faults.fault_injection import mistake

from ..commands import run, small

CALLBACK = "--trainer.callbacks+=CompositionScalars"


def curves(folder) -> dict[str, list[tuple[int, float]]]:
    (events,) = folder.rglob("events.out.tfevents.*")
    found = EventAccumulator(str(events)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], marks=pytest.mark.slow, id="eager"),
        pytest.param(["--model.compile=true"], marks=pytest.mark.long, id="compiled"),
    ],
)
def test_curves_of_every_layer_are_logged(corpus, tmp_path, more):
    asked = ["--trainer.max_epochs=2", "--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1", *more]
    run("fit", *small(corpus, tmp_path / "plain"), *asked)
    run("fit", *small(corpus, tmp_path / "watched"), *asked, CALLBACK)
    plain, watched = curves(tmp_path / "plain"), curves(tmp_path / "watched")
    for tag in ("train/loss", "train/grad_norm"):
        assert watched[tag] == plain[tag]
    # with the callback, a compiled model is validated eagerly, so the losses agree up to rounding
    for (step, loss), (same_step, expected) in zip(watched["val/loss"], plain["val/loss"], strict=True):
        assert step == same_step and loss == pytest.approx(expected, rel=1e-6 if more else 0)
    added = {tag for tag in watched if tag not in plain}
    branches = [f"{side} {part}" for side in ("query", "key") for part in ("projection", "gate")]
    assert added == {
        f"composition/blocks.{layer}.attn/{composition} {what}"
        for layer in (0, 1)
        for composition in ("pre", "post")
        for what in (*branches, "effective rank", "static share")
    }
    for tag in added:
        assert [step for step, _ in watched[tag]] == [step for step, _ in watched["val/loss"]], tag
    assert any(len({value for _, value in watched[tag]}) == 2 for tag in added)


def test_values_match_measurement_of_first_batches():
    module = LanguageModel(overrides={"num_layers": 1, "dim": 32, "mlp_dim": 48, "num_heads": 4}, context_length=16)
    ids = torch.randint(257, (3, 2, 17), generator=torch.Generator().manual_seed(0))
    batches = [(row[:, :-1], row[:, 1:]) for row in ids]
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[CompositionScalars(batches=2)], enable_progress_bar=False
    )
    (found,) = trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)
    with torch.no_grad(), measure_mixing(module.model) as meters:
        for inputs, _ in batches[:2]:
            module.model(inputs)
    expected = meters["blocks.0.attn"]["post"].mixing()
    assert found["composition/blocks.0.attn/post key gate"] == pytest.approx(expected.sizes["key gate"].mean)
    assert found["composition/blocks.0.attn/post effective rank"] == pytest.approx(expected.effective_rank.mean)
    assert not module.model.blocks[0].attn.compose._forward_hooks


def test_plain_model_and_zero_batches_are_rejected(corpus, tmp_path, capsys):
    plain = "--model.overrides={pre_compose: false, post_compose: false}"
    assert "CompositionScalars: Decoder has no layer that composes heads" in mistake(
        capsys, run, "fit", *small(corpus, tmp_path), plain, CALLBACK
    )
    with pytest.raises(UserError, match="batches=0 must be at least 1"):
        CompositionScalars(0)
