"""Initialization from weights: both towers together, or each tower separately."""

import pytest
import torch

import dclm
from dctrain.checkpointing.checkpoint import find_checkpoint, load_checkpoint
from tests.dcvision.commands import run as run_vision
from tests.faults.fault_injection import mistake

from .commands import other_words, run, small

STILL = ("--model.lr=0", "--trainer.max_steps=1")
PLAIN = ("--model.model=mhavit_small_patch4_32", "--model.cross_compose=false")


def weights(folder) -> dict[str, torch.Tensor]:
    return load_checkpoint(find_checkpoint(str(folder / "t/version_0")))["state_dict"]


@pytest.mark.slow
def test_composed_model_is_initialized_from_plain_model(tmp_path, capsys):
    run("fit", *small(tmp_path / "plain"), *PLAIN, "--trainer.max_steps=1")
    exported = f"--out={tmp_path / 'exported'}"
    run("export", f"--checkpoint={tmp_path / 'plain/t/version_0'}", exported)
    before = weights(tmp_path / "plain")
    for number, source in enumerate(("plain/t/version_0", "exported")):
        run("fit", *small(tmp_path / str(number)), *STILL, f"--init={tmp_path / source}")
        now = weights(tmp_path / str(number))
        assert all(torch.equal(now[name], weight) for name, weight in before.items())
        new = now.keys() - before.keys()
        assert new and all(".compose." in name for name in new)
    printed = capsys.readouterr().out
    assert printed.count(f"; {len(new)} tensors are randomly initialized, the first is image.blocks.0.") == 2


def test_towers_are_initialized_from_separate_models(tmp_path):
    """The sources are an image model with a head and a language model that was not trained on images."""
    quiet = [argument for argument in small(tmp_path / "image") if argument.startswith(("--trainer", "--name"))]
    image = ["--model.model=dcvit_small_patch4_32", "--model.model_kwargs={embed_dim: 32, depth: 2, num_heads: 4}"]
    data = ["--data.train=digits", "--data.val=digits", "--data.image_size=32", "--data.batch_size=8"]
    run_vision("fit", *quiet, *image, *data, "--trainer.max_steps=1", "--trainer.limit_val_batches=1")
    shape = {"dim": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 48, "windows": (None,), "vocab_size": 257}
    decoder = dclm.Decoder(dclm.decoder_config("dcformer_pp_debug", context_length=64, **shape))
    dclm.save_pretrained(decoder, tmp_path / "text", native=True)
    source = f"image={tmp_path / 'image/t/version_0'},text={tmp_path / 'text'}"
    run("fit", *small(tmp_path / "new"), *STILL, "--data.tokenizer=bytes", f"--init={source}")
    now = weights(tmp_path / "new")
    expected = {
        name.replace("model.", "model.image.", 1): weight
        for name, weight in weights(tmp_path / "image").items()
        if name.startswith("model.") and not name.startswith("model.head")
    }
    expected |= {f"model.text.{name}": weight for name, weight in decoder.state_dict().items()}
    assert all(torch.equal(now[name], weight) for name, weight in expected.items())
    assert "model.text.blocks.1.cross.q.weight" in now.keys() - expected.keys()


@pytest.mark.slow
def test_one_tower_is_initialized_from_pair(tmp_path):
    run("fit", *small(tmp_path / "a"), "--trainer.max_steps=1")
    before = weights(tmp_path / "a")
    for tower, other in (("image", "text"), ("text", "image")):
        source = f"--init={tower}={tmp_path / 'a/t/version_0'}"
        run("fit", *small(tmp_path / tower), *STILL, "--seed_everything=5", source)
        now = weights(tmp_path / tower)
        kept = {name for name, weight in before.items() if torch.equal(now[name], weight) and weight.std() > 0}
        assert {name for name in before if name.startswith(f"model.{tower}.")} - kept <= {
            name for name, weight in before.items() if not weight.std() > 0
        }
        assert not any(name.startswith(f"model.{other}.") for name in kept)


@pytest.mark.slow
def test_text_tower_with_different_tokenizer_is_rejected(tmp_path, capsys):
    """With a different tokenizer of the same size, each row of the embeddings would belong to another word."""
    run("fit", *small(tmp_path / "a"), "--trainer.max_steps=1")
    run("export", f"--checkpoint={tmp_path / 'a/t/version_0'}", f"--out={tmp_path / 'exported'}")
    other = f"--data.tokenizer={other_words(tmp_path / 'other.json')}"
    for source in ("a/t/version_0", "exported", "text=a/t/version_0", "text=exported/text"):
        tower, _, path = source.rpartition("=")
        named = f"--init={tower}{'=' if tower else ''}{tmp_path / path}"
        said = mistake(capsys, run, "fit", *small(tmp_path / "b"), *STILL, other, named)
        assert "was trained with a different tokenizer" in said
    run("fit", *small(tmp_path / "b"), *STILL, other, f"--init=image={tmp_path / 'a/t/version_0'}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none", "none does not exist"),
        ("image=none", "none"),
        ("text=none", "none does not exist"),
        ("image=a,image=b", "expected a run or export of dcvl, or image=SOURCE,text=SOURCE, each once"),
        ("text=a,b", "each once"),
        ("image=", "each once"),
    ],
)
def test_invalid_init_sources_are_rejected(tmp_path, capsys, source, message):
    assert message in mistake(capsys, run, "fit", *small(tmp_path), f"--init={source}")


def test_different_heads_or_normalization_are_rejected(tmp_path, capsys):
    run("fit", *small(tmp_path / "a"), "--trainer.max_steps=1")
    source = f"--init={tmp_path / 'a/t/version_0'}"
    image = "--model.model_kwargs={embed_dim: 32, depth: 2, num_heads: 2}"
    assert "4 heads in blocks.0.attn; the model has 2" in mistake(capsys, run, "fit", *small(tmp_path), image, source)
    scaled = "--model.model_kwargs.pretrained_cfg_overlay={mean: [0.1, 0.2, 0.3]}"
    for tower in ("", "image="):
        said = mistake(capsys, run, "fit", *small(tmp_path), scaled, source.replace("=", f"={tower}", 1))
        assert "normalizes images with mean [0.5, 0.5, 0.5]" in said and "mean [0.1, 0.2, 0.3]" in said
    text = "--model.text_overrides={dim: 32, num_layers: 2, num_heads: 2, mlp_dim: 48, windows: [null]}"
    assert "num_heads=4, here 2" in mistake(capsys, run, "fit", *small(tmp_path), text, source)
