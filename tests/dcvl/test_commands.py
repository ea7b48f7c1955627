"""Use of trained towers: separately, after export, and by each command."""

import json
import shutil
from importlib import import_module

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.nn.functional import normalize

import dclm
import dcvl.captioning
from dclm.blocks import CrossContext
from dclm.loss import IGNORED
from dctrain.errors import UserError
from dcvl.data.scenes import SceneSource, scene_tokenizer
from dcvl.load import load_pair
from tests.faults.fault_injection import mistake

from .commands import run, small
from .test_training import validated

CLASSES = {"0": "zero", "1": "one"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder with a run, its export, and a labeled set of scenes as PNG files."""
    folder = tmp_path_factory.mktemp("vl")
    run("fit", *small(folder), "--trainer.max_steps=3")
    source = SceneSource("val")
    for name in CLASSES.values():
        (folder / "set" / name).mkdir(parents=True)
    for number in range(5):
        picture = Image.fromarray(source.read(number)[0].permute(1, 2, 0).numpy())
        picture.save(folder / "set" / CLASSES[str(number % 2)] / f"{number}.png")
    run("export", f"--checkpoint={folder / 't/version_0'}", f"--out={folder / 'exported'}")
    return folder


@pytest.fixture(params=["t/version_0", "exported"])
def checkpoint(trained, request) -> str:
    return f"--checkpoint={trained / request.param}"


def pictures(folder) -> list:
    return sorted((folder / "set").rglob("*.png"))


def test_separate_and_exported_towers_match_run(trained):
    """The run, the export and each separate tower give the same outputs."""
    pair, exported = load_pair(str(trained / "t/version_0")), load_pair(str(trained / "exported"))
    images = torch.stack([pair.prepare(path.read_bytes()) for path in pictures(trained)])
    encoded = pair.encode("a large three above a small seven")
    ids = torch.from_numpy(encoded.input_ids)[None]
    image = timm.create_model(f"local-dir:{trained / 'exported/image'}", pretrained=True).eval()
    text = dclm.load_pretrained(trained / "exported/text")
    with torch.inference_mode():
        seen = pair.model.encode_images(images)
        torch.testing.assert_close(image(images), seen.pooled)
        torch.testing.assert_close(image.forward_features(images), seen.patches)
        expected = pair.model.text(ids, context=CrossContext(seen.patches[:1]))
        torch.testing.assert_close(text(ids, context=CrossContext(seen.patches[:1])), expected)
        both = pair.model.embed_images(seen)
        torch.testing.assert_close(exported.model.embed_images(exported.model.encode_images(images)), both)
        embedded = pair.model.encode_texts(ids, torch.tensor([encoded.end]))
        torch.testing.assert_close(exported.model.encode_texts(ids, torch.tensor([encoded.end])), embedded)
    assert exported.metadata == pair.metadata and exported.tokenizer.spec == pair.tokenizer.spec
    torch.testing.assert_close(exported.prepare(pictures(trained)[0].read_bytes()), images[0])


def test_caption_command_prints_one_caption_per_image(trained, checkpoint, capsys):
    capsys.readouterr()
    run("caption", checkpoint, "--images", str(trained / "set"), "--batch_size=2")
    lines = dict(line.split("\t") for line in capsys.readouterr().out.splitlines() if "\t" in line)
    assert list(lines) == [str(path) for path in pictures(trained)]
    run("caption", checkpoint, "--images", str(pictures(trained)[3]), "--max_new_tokens=2")
    path, text = capsys.readouterr().out.splitlines()[-1].split("\t")
    assert lines[path].startswith(text) and len(text.split()) <= 2
    run("caption", checkpoint, "--images", str(pictures(trained)[3]), "--num_beams=3")
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{path}\t")
    beams = ["--num_beams=3", "--temperature=1"]
    said = mistake(capsys, run, "caption", checkpoint, "--images", str(pictures(trained)[3]), *beams)
    assert "beam search cannot be combined with sampling" in said


def test_visualize_command_draws_cross_attention(trained, checkpoint, tmp_path, capsys):
    """The command draws the generated caption or the given text."""
    picture = str(pictures(trained)[2])
    run("caption", checkpoint, "--images", picture)
    told = capsys.readouterr().out.splitlines()[-1].split("\t")[1]
    for asked, text in (([], told), (["--text=two small sixes"], "two small sixes")):
        run("visualize", checkpoint, f"--image={picture}", f"--out={tmp_path / 'look'}", *asked)
        assert capsys.readouterr().out.splitlines()[-2:] == [text, str(tmp_path / "look/text.blocks.1.cross.png")]
        assert (tmp_path / "look/text.blocks.1.cross.png").stat().st_size > 10_000
    said = mistake(capsys, run, "visualize", checkpoint, f"--image={trained / 'set'}", f"--out={tmp_path / 'look'}")
    assert "has 5 images; expected one" in said


def test_embed_command_writes_normalized_embeddings(trained, checkpoint, tmp_path, capsys):
    run("embed", checkpoint, "--images", str(trained / "set"), f"--out={tmp_path / 'a/e.npy'}", "--batch_size=2")
    found = np.load(tmp_path / "a/e.npy")
    assert found.shape == (5, 16) and found.dtype == np.float32
    assert (tmp_path / "a/e.npy.txt").read_text().splitlines() == [str(path) for path in pictures(trained)]
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    pair = load_pair(str(trained / "t/version_0"))
    with torch.inference_mode():
        alone = pair.model.embed_images(pair.model.encode_images(pair.prepare(pictures(trained)[4].read_bytes())[None]))
    np.testing.assert_allclose(found[4], alone[0], atol=1e-5)


def test_retrieve_command_ranks_images_and_texts(trained, checkpoint, tmp_path, capsys):
    texts = ["a large three above a small seven", "two small sixes", "two large fives"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    asked = ("retrieve", checkpoint, "--images", str(trained / "set"), f"--texts={tmp_path / 'texts.txt'}")
    capsys.readouterr()
    run(*asked, "--top=2")
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line for line in lines if line in texts] == texts and len(lines) == 3 * 3
    run(*asked, "--by_image=true", "--top=9")
    by_image = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(by_image) == 5 * (1 + 3) and by_image[0] == str(pictures(trained)[0])
    value, path = lines[1].split()
    start = by_image.index(path)
    assert f"    {value}  {texts[0]}" in by_image[start : start + 4]


def test_classify_command_prints_expected_accuracy(trained, checkpoint, tmp_path, capsys):
    (tmp_path / "templates.txt").write_text("two large {}s\na small {}\n")
    capsys.readouterr()
    run("classify", checkpoint, f"--images=folder:{trained / 'set'}", f"--templates={tmp_path / 'templates.txt'}")
    printed = capsys.readouterr().out
    pair = load_pair(str(trained / "t/version_0"))
    means = []
    with torch.inference_mode():
        for name in ("one", "zero"):
            encoded = [pair.encode(text) for text in (f"two large {name}s", f"a small {name}")]
            ids = torch.stack([torch.from_numpy(text.input_ids) for text in encoded])
            means.append(pair.model.encode_texts(ids, torch.tensor([text.end for text in encoded])).mean(0))
        images = torch.stack([pair.prepare(path.read_bytes()) for path in pictures(trained)])
        best = (
            pair.model.embed_images(pair.model.encode_images(images)) @ normalize(torch.stack(means), dim=1).mT
        ).argmax(1)
    right = (best == torch.tensor([0, 0, 1, 1, 1])).float().mean()
    assert f"{100 * float(right):.2f} ± " in printed and "% of 5 images, 2 classes" in printed


def test_zero_shot_accuracy_equals_image_to_text_retrieval(trained, tmp_path, capsys):
    """Each class has one sentence, and the set is sorted by class."""
    labeled = f"classes:folder:{trained / 'set'}"
    data = [
        f"--data.val={labeled}",
        "--data.val_samples=null",
        '--data.templates=["a small {}"]',
        "--data.batch_size=2",
    ]
    run("fit", *small(tmp_path), "--trainer.max_steps=2", *data)
    (tmp_path / "template.txt").write_text("a small {}\n")
    capsys.readouterr()
    checkpoint = f"--checkpoint={tmp_path / 't/version_0'}"
    run("classify", checkpoint, f"--images=folder:{trained / 'set'}", f"--templates={tmp_path / 'template.txt'}")
    share = validated(tmp_path)["image_to_text"]
    assert f"{100 * share:.2f} ± " in capsys.readouterr().out


def test_model_trained_with_hidden_images_gets_black_images(trained, tmp_path, capsys):
    run("fit", *small(tmp_path), "--trainer.max_steps=2", "--data.hide_images=true")
    run("export", f"--checkpoint={tmp_path / 't/version_0'}", f"--out={tmp_path / 'exported'}")
    for checkpoint in (tmp_path / "t/version_0", tmp_path / "exported"):
        pair = load_pair(str(checkpoint))
        seen = [pair.prepare(path.read_bytes()) for path in pictures(trained)[:2]]
        assert torch.equal(*seen)
    assert seen[0].unique().numel() == 1 and tuple(seen[0].shape) == (3, 32, 32)


def test_unfinished_caption_is_drawn_completely(trained, tmp_path, monkeypatch, capsys):
    """The caption has the maximum length of the context."""
    drawn = []
    monkeypatch.setattr(
        import_module("dcvl.commands.visualize"), "draw_words", lambda *args: drawn.append(args[3]) or {}
    )
    monkeypatch.setattr(dcvl.captioning, "generate", endless)
    run("visualize", f"--checkpoint={trained / 't/version_0'}", f"--image={pictures(trained)[0]}", f"--out={tmp_path}")
    assert not drawn[0].is_cut and int((drawn[0].targets != IGNORED).sum()) == 15 + 1  # the words and the end token
    assert capsys.readouterr().out.splitlines()[-1] == " ".join(["small"] * 15)


def endless(decoder, prompts, max_new_tokens, *_, **__):
    """Generate one word repeatedly."""
    word = int(scene_tokenizer().encode(["small"])[0][0])
    return torch.cat([prompts, torch.full((len(prompts), max_new_tokens), word)], 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["caption", "--images=none.png"], "images=none.png does not exist"),
        (["caption", "--images=."], "have no images; expected"),
        (["caption", "--images=bad.png"], "cannot read the image bad.png"),
        (["caption", "--images=bad.png", "--temperature=-1"], "temperature=-1"),
        (["caption", "--images=bad.png", "--num_beams=0"], "num_beams=0"),
        (["embed", "--images=bad.png", "--out=e.txt"], "out=e.txt; expected a file name that ends in .npy"),
        (
            ["visualize", "--image=bad.png", "--out=o", "--text=" + " ".join(["small"] * 20)],
            "longer than the 16 tokens",
        ),
        (
            ["visualize", "--image=bad.png", "--out=o", "--text=a small dog"],
            "the tokenizer cannot encode",
        ),
        (["classify", "--images=digits", "--classes=ten.txt"], "the tokenizer cannot encode 'a photo of a a'"),
        (["classify", "--images=digits", "--classes=gap.txt"], "classes=gap.txt has an empty line"),
        (["retrieve", "--images=bad.png"], "text and texts: expected one of the two"),
        (["retrieve", "--images=bad.png", "--texts=none.txt"], "cannot read texts=none.txt"),
        (["classify", "--images=digits"], "images=digits has no class names"),
        (["classify", "--images=digits", "--classes=two.txt"], "the set has class 9, but there are 2 class names"),
        (["classify", "--images=digits", "--templates=two.txt"], "expected sentences, each with {} once"),
    ],
)
def test_invalid_arguments_are_rejected(trained, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.txt").write_text("a\nb\n")
    (tmp_path / "ten.txt").write_text("".join(f"{letter}\n" for letter in "abcdefghij"))
    (tmp_path / "gap.txt").write_text("a\n\nb\n")
    if "bad.png" in arguments[1]:
        (tmp_path / "bad.png").write_bytes(b"?")
    name, *rest = arguments
    assert message in mistake(capsys, run, name, f"--checkpoint={trained / 't/version_0'}", *rest)


@pytest.mark.slow
def test_unsuitable_models_are_rejected(trained, tmp_path, capsys):
    run("fit", *small(tmp_path), "--trainer.max_steps=1", "--model.contrastive=null")
    teller, source = f"--checkpoint={tmp_path / 't/version_0'}", str(trained / "set")
    assert "the model has no embeddings" in mistake(capsys, run, "embed", teller, "--images", source)
    run("fit", *small(tmp_path), "--trainer.max_steps=1", "--model.caption_weight=0")
    matcher = f"--checkpoint={tmp_path / 't/version_1'}"
    assert "is not a captioner" in mistake(capsys, run, "caption", matcher, "--images", source)
    picture = f"--image={pictures(trained)[0]}"
    assert "is not a captioner" in mistake(capsys, run, "visualize", matcher, picture, f"--out={tmp_path / 'look'}")
    out = f"--out={trained / 'exported'}"
    assert "already exists; nothing was overwritten" in mistake(capsys, run, "export", matcher, out)
    config = json.loads((trained / "exported/config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"format": "x"}))
    other = f"--checkpoint={tmp_path / 'other'}"
    assert "has a different format" in mistake(capsys, run, "embed", other, "--images", source)
    assert "does not exist" in mistake(capsys, run, "embed", "--checkpoint=none", "--images", source)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("mean", [0.5]), ("std", [0.0, 0.1, 0.1]), ("crop_fraction", 0), ("image_size", -8), ("templates", "{}")),
        *(("contrastive", "none"), ("embed_dim", 1.5), ("context_length", 10**12), ("tokenizer", 3)),
    ],
)
def test_invalid_config_values_of_export_raise_error(trained, tmp_path, field, value):
    shutil.copytree(trained / "exported", tmp_path / "exported")
    path = tmp_path / "exported/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError, match=rf"config.json: {field}=.*; expected "):
        load_pair(str(tmp_path / "exported"))


def test_duplicate_classes_and_excessive_max_new_tokens_are_rejected(trained, tmp_path, capsys):
    given = f"--checkpoint={trained / 't/version_0'}"
    (tmp_path / "classes").write_text("one\none\n")
    error = mistake(
        capsys, run, "classify", given, f"--images=folder:{trained / 'set'}", f"--classes={tmp_path}/classes"
    )
    assert "'one' is given twice" in error
    error = mistake(capsys, run, "caption", given, f"--images={pictures(trained)[0]}", "--max_new_tokens=1000")
    assert "max_new_tokens=1000" in error
