"""Captions: told of images, drawn and printed, and read from shards."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import dclm
from dclm.data.tokenizers import ByteTokenizer
from dctrain.errors import UserError
from dctrain.order import SampleRef
from dcvision.classifier import build_model
from dcvl import CaptionDataModule, ImageText
from dcvl.captioning import exact_matches, tell_captions
from dcvl.data.captions import open_captions
from dcvl.data.samples import CaptionedSamples, CaptionEncoder
from dcvl.data.scenes import RELATIONS, Scene, SceneSource, Thing, scene_tokenizer
from tests.conftest import write_shard
from tests.faults.drill import mistake

from .commands import run, small


def image_bytes(value: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def test_scenes():
    """Each is a function of its number; splits do not meet; training has every digit in every place."""
    train, unseen = SceneSource("train"), SceneSource("unseen")
    image, (caption,) = train.read(7)
    again, (same,) = SceneSource("train").read(7)
    assert torch.equal(image, again) and caption == same and image.shape == (3, 32, 32) and image.dtype == torch.uint8
    captions = {name: {s.read(i)[1][0] for i in range(1500)} for name, s in (("train", train), ("unseen", unseen))}
    assert not captions["train"] & captions["unseen"]
    seen = [
        Scene(relation, Thing(a, True), Thing(b, False)) for relation in RELATIONS for a in range(10) for b in range(10)
    ]
    seen = [scene for scene in seen if not scene.is_unseen]
    assert len(seen) == 160
    plural = {caption.split()[-1] for caption in captions["train"] if caption.startswith("two")}
    assert len(plural) == 11  # of ten digits, and "one"
    for relation in RELATIONS:
        for place in (1, 2):
            assert {scene[place].digit for scene in seen if scene.relation == relation} == set(range(10))
    tokenizer = scene_tokenizer()
    for caption in captions["train"] | captions["unseen"]:
        (ids,) = tokenizer.encode([caption])
        assert tokenizer.decode(ids.tolist()) == caption and tokenizer.eos_id not in ids


@pytest.mark.parametrize(
    ("scene", "caption"),
    [
        (Scene("above", Thing(3, True), Thing(7, False)), "a large three above a small seven"),
        (Scene("left of", Thing(4, False), Thing(9, True)), "the digit left of the large nine is a small four"),
        (Scene("above", Thing(5, True), Thing(5, False)), "two fives, a large and a small one"),
        (Scene("left of", Thing(6, False), Thing(6, False)), "two small sixes"),
    ],
)
def test_a_scene_is_told_in_one_way(scene, caption):
    assert scene.caption == caption


def test_encoded_captions():
    encode = CaptionEncoder(ByteTokenizer(), 6)
    ids, targets, end, is_cut = encode("ab")
    assert ids.tolist() == [256, 97, 98, 256, 256, 256] and end == 3 and not is_cut
    assert targets.tolist() == [97, 98, 256, -100, -100, -100]
    ids, targets, end, is_cut = encode("abcdef")
    assert ids.tolist() == [256, 97, 98, 99, 100, 256] and end == 5 and is_cut
    assert targets.tolist() == [97, 98, 99, 100, 256, -100]


def test_shards_of_captions(tmp_path):
    samples = [
        {"__key__": "0", "png": image_bytes(0), "txt": "one\ntwo\n"},
        {"__key__": "1", "png": image_bytes(1), "json": json.dumps({"caption": "three", "width": 8}).encode()},
        {"__key__": "2", "png": image_bytes(2), "json": json.dumps({"captions": ["four", "five"]}).encode()},
        {"__key__": "3", "png": image_bytes(3), "txt": "six", "json": json.dumps({"caption": "no"}).encode()},
    ]
    spec = f"shards:{write_shard(tmp_path / 'a.tar', samples)}"
    source = open_captions(spec, is_train=True)
    assert [source.read(i)[1] for i in range(4)] == [["one", "two"], ["three"], ["four", "five"], ["six"]]
    assert source.read(2)[0] == image_bytes(2)
    data = CaptionDataModule(spec, spec, tokenizer="bytes", image_size=8, batch_size=4)
    data.setup("fit")
    (batch,) = data.val_dataloader()
    assert batch.texts.owners.tolist() == [0, 0, 1, 2, 2, 3] and len(batch.texts.input_ids) == 6
    assert batch.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3] and batch.counts.all()
    samples = CaptionedSamples(source, data.train_transform, data.encode, 0, 100, has_all=False)
    drawn = {tuple(samples[SampleRef(0, epoch)].captions[0].input_ids) for epoch in range(20)}
    assert drawn == {tuple(data.encode(caption).input_ids) for caption in ("one", "two")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({}, "has 0 of the fields txt;json"),
        ({"txt": " \n"}, "holds no caption"),
        ({"txt": b"\xff\xfe"}, "the captions of"),
        ({"json": b"[1]"}, "no text under 'caption'"),
        ({"json": b'{"width": 3}'}, "no text under 'caption'"),
        ({"json": b"{"}, "the captions of"),
    ],
)
def test_samples_without_text(tmp_path, text, message):
    path = write_shard(tmp_path / "a.tar", [{"__key__": "0", "png": image_bytes(), **text}])
    with pytest.raises(UserError, match=message):
        open_captions(f"shards:{path}", is_train=True)


def test_an_unreadable_image_leaves_its_place(tmp_path, capsys):
    samples = [{"__key__": str(i), "png": image_bytes(i) if i != 1 else b"?", "txt": "a"} for i in range(4)]
    spec = f"shards:{write_shard(tmp_path / 'a.tar', samples)}"
    data = CaptionDataModule(spec, spec, tokenizer="bytes", image_size=8, batch_size=4, max_bad_images=1)
    data.setup("fit")
    (batch,) = data.val_dataloader()
    assert batch.counts.tolist() == [True, False, True, True] and len(batch.images) == 4
    assert (batch.texts.targets[1] == -100).all() and (batch.texts.targets[0] >= 0).any()
    data.on_before_batch_transfer(batch, 0)
    assert "skipped an unreadable image (1 so far)" in capsys.readouterr().out


def test_images_may_be_hidden():
    seen, hidden = (CaptionDataModule(batch_size=4, val_samples=6, hide_images=hides) for hides in (False, True))
    for data in (seen, hidden):
        data.setup("fit")
    for loader in ("train_dataloader", "val_dataloader"):
        shown, black = (next(iter(getattr(data, loader)())) for data in (seen, hidden))
        assert not black.images.any() and shown.images.flatten(1).any(1).all() and black.counts.all()
        assert torch.equal(black.texts.input_ids, shown.texts.input_ids)
    source = hidden.open("scenes:unseen", is_train=False)
    assert not hidden.read(source, 3)[0].any() and seen.read(source, 3)[0].any()


def test_classes_become_captions(tmp_path):
    for name in ("fire_truck", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(image_bytes())
    source = open_captions(f"classes:folder:{tmp_path}", True, templates=["a {}", "one {}"])
    assert [source.read(i)[1] for i in range(2)] == [["a dog", "one dog"], ["a fire truck", "one fire truck"]]
    with pytest.raises(UserError, match="does not name its classes"):
        open_captions("classes:digits", is_train=True)


def made(**overrides) -> ImageText:
    torch.manual_seed(0)
    tower = build_model("dcvit_small_patch4_32", 0, 32, {"embed_dim": 32, "depth": 1, "num_heads": 4})
    shape = {"dim": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 48, "vocab_size": 32, "context_length": 16}
    looks = {"context_dim": 32, "cross_layers": 1, "cross_compose": True, "init_std": 0.3}
    text = dclm.Decoder(dclm.decoder_config("dcformer_pp_debug", **shape | looks | overrides))
    return ImageText(tower, text, 8).eval()


def test_captions_are_told_greedily():
    model, tokenizer = made(), scene_tokenizer()
    images = torch.randn(3, 3, 32, 32)
    told = tell_captions(model, images, tokenizer, 6)
    for image, caption in zip(images, told, strict=True):
        ids = [tokenizer.eos_id]
        context = model.context(model.see(image[None]))
        while len(ids) <= 6 and (len(ids) == 1 or ids[-1] != tokenizer.eos_id):
            ids.append(int(model.text(torch.tensor([ids]), context=context)[0, -1].argmax()))
        ended = ids[1:-1] if ids[-1] == tokenizer.eos_id else ids[1:]
        assert tokenizer.decode(ended) == caption
    assert len(set(told)) > 1
    with pytest.raises(ValueError, match="tells no captions"):
        tell_captions(made(context_dim=None, cross_layers=0, cross_compose=False), images, tokenizer, 6)


def test_captions_are_searched_by_beams():
    """No beam is worse than the greedy one, per token; what ends a caption counts."""
    model, tokenizer = made(), scene_tokenizer()
    images = torch.randn(8, 3, 32, 32)

    def score(image, caption):
        ids = [tokenizer.eos_id, *tokenizer.encode([caption])[0].tolist(), tokenizer.eos_id][:7]
        logits = model.text(torch.tensor([ids[:-1]]), context=model.context(model.see(image[None])))
        return float(logits[0].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).mean())

    with torch.no_grad():
        told = {beams: tell_captions(model, images, tokenizer, 6, num_beams=beams) for beams in (1, 8)}
        gains = [score(i, b) - score(i, a) for i, a, b in zip(images, told[1], told[8], strict=True)]
    assert sum(gains) > 0.1 and told[1] != told[8]
    with pytest.raises(ValueError, match="num_beams=8 with temperature=0.5: beams are not sampled"):
        tell_captions(model, images, tokenizer, 6, 0.5, num_beams=8)


def test_towers_whose_widths_do_not_meet():
    with pytest.raises(ValueError, match="context_dim=24 of the text tower; the image tower's patches have 32"):
        made(context_dim=24)


def test_exact_matches():
    captions = [["two large threes"], ["two small ones", "two fives, a large and a small one"], ["two small sixes"]]
    told = ["two large threes", "two fives, a large and a small one", "two small six"]
    assert exact_matches(told, captions, scene_tokenizer()) == [True, True, False]


EXACT = ["--trainer.callbacks+=dcvl.callbacks.ExactCaptions", "--trainer.callbacks.count=5"]


def test_some_captions_are_shown(tmp_path, capsys):
    run("fit", *small(tmp_path), "--trainer.max_steps=2", *EXACT)
    printed = capsys.readouterr().out
    assert printed.count("(is: ") == 2 and "@" in printed
    assert (tmp_path / "t/version_0/captions-unseen.png").stat().st_size > 10_000


def test_mistakes_of_the_callback(tmp_path, capsys):
    said = mistake(capsys, run, "fit", *small(tmp_path), *EXACT, "--model.caption_weight=0")
    assert "ExactCaptions is for a model that tells captions" in said
    none = [*EXACT[:1], "--trainer.callbacks.count=0"]
    assert "count=0 must be at least 1" in mistake(capsys, run, "fit", *small(tmp_path), *none)
