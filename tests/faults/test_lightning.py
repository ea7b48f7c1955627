"""Direct use of the modules with Lightning, without the project's data or command line."""

import lightning as L
import pytest
import timm
import torch
from torch.utils.data import DataLoader, TensorDataset

from dclm import LanguageModel, TokenDataModule
from dcvision import ImageClassifier, ImageDataModule
from tests.dclm.data.corpora import numbered_corpus


def trainer(root, **kwargs) -> L.Trainer:
    options = {"max_epochs": 2, "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return L.Trainer(accelerator="cpu", default_root_dir=root, **{**options, **kwargs})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_classifier_trains_with_any_loader_of_images_and_labels(tmp_path, dtype):
    images = torch.randint(0, 256, (20, 3, 8, 8)).to(dtype)
    loader = DataLoader(TensorDataset(images, torch.arange(20) % 10), batch_size=5)
    module, run = ImageClassifier(model_kwargs={"depth": 1}, warmup_steps=2), trainer(tmp_path)
    run.fit(module, loader, loader)
    assert run.global_step == 8 and 0 <= run.callback_metrics["val/top1"] <= 1
    assert module.lr_schedulers().get_last_lr()[0] < 1e-6  # the cosine schedule has ended
    assert len(run.predict(module, loader)) == 4


def test_floating_point_images_are_not_normalized():
    module = ImageClassifier(model_kwargs={"depth": 1}).eval()
    torch.nn.init.normal_(module.model.head.weight)
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(module(images / 127.5 - 1), module(images))


def test_language_model_trains_with_any_loader_of_tokens(tmp_path):
    tokens = torch.arange(200).view(8, 25)
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2)
    module, run = LanguageModel(context_length=24), trainer(tmp_path)
    run.fit(module, loader, loader)
    assert run.global_step == 8 and run.callback_metrics["val/loss"].isfinite()
    assert "val/bits_per_byte" not in run.callback_metrics


@pytest.mark.parametrize("model", ["timm", "torch"])
def test_classifier_accepts_module_instead_of_model_name(tmp_path, model):
    def build() -> torch.nn.Module:
        if model == "timm":
            return timm.create_model("mhavit_digits_patch2_8", depth=1)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))

    module, run = ImageClassifier(build(), warmup_steps=1), trainer(tmp_path, max_steps=3)
    run.fit(module, ImageDataModule())
    path = run.checkpoint_callback.best_model_path
    loaded = ImageClassifier.load_from_checkpoint(path, model=build())
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in module.state_dict().items())
    assert "model" not in loaded.hparams


def test_image_modules_load_from_checkpoint(tmp_path):
    module, run = (
        ImageClassifier(model_kwargs={"depth": 1}, ema_decay=0.5),
        trainer(tmp_path, max_steps=1),
    )
    run.fit(module, ImageDataModule(batch_size=32, crop_fraction=1.0), ckpt_path=None)
    path = run.checkpoint_callback.best_model_path
    loaded = ImageClassifier.load_from_checkpoint(path)
    assert loaded.hparams.ema_decay == 0.5 and len(loaded.model.blocks) == 1
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in module.state_dict().items())
    assert loaded(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)).shape == (1, 10)
    data = ImageDataModule.load_from_checkpoint(path)
    assert (data.batch_size, data.eval_transform.transforms[0].size) == (32, [8])


def test_text_modules_load_from_checkpoint(tmp_path):
    corpus = numbered_corpus(tmp_path / "corpus")
    module, run = LanguageModel(context_length=24), trainer(tmp_path, max_steps=1)
    run.fit(module, TokenDataModule(str(corpus), context_length=24, batch_size=4))
    path = run.checkpoint_callback.best_model_path
    loaded = LanguageModel.load_from_checkpoint(path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in module.state_dict().items())
    data = TokenDataModule.load_from_checkpoint(path)
    assert (data.tokens, data.context_length, data.batch_size) == (str(corpus), 24, 4)
    trainer(tmp_path).validate(loaded, data)
