"""Captions: generation for images, plots and printed output, and reading from shards."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dclm
from dclm.data.tokenizers import ByteTokenizer
from dctrain.checkpointing.checkpoint import load_checkpoint, newest_checkpoint
from dctrain.data.sampler import SampleRef
from dctrain.errors import UserError
from dcvision.factory import build_model
from dcvl import CaptionDataModule, ImageText
from dcvl.caption_plots import draw_words
from dcvl.captioning import exact_matches, generate_captions
from dcvl.data.captions import open_captions
from dcvl.data.samples import CaptionedSamples, CaptionEncoder
from dcvl.data.scenes import RELATIONS, Scene, SceneSource, Thing, scene_tokenizer
from tests.conftest import write_shard
from tests.faults.fault_injection import mistake

from .commands import run, small


def image_bytes(value: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def test_scenes_are_deterministic_and_splits_are_disjoint():
    """A scene depends only on its number, the splits are disjoint, and training has all words of the unseen split."""
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
    assert len(seen) == 180
    told = {
        name: {word.strip(",") for caption in found for word in caption.split()} for name, found in captions.items()
    }
    assert told["unseen"] < told["train"]
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
def test_scene_caption_matches_expected_text(scene, caption):
    assert scene.caption == caption


def test_encoder_pads_and_truncates_captions():
    encode = CaptionEncoder(ByteTokenizer(), 6)
    ids, targets, end, is_cut = encode("ab")
    assert ids.tolist() == [256, 97, 98, 256, 256, 256] and end == 3 and not is_cut
    assert targets.tolist() == [97, 98, 256, -100, -100, -100]
    ids, targets, end, is_cut = encode("abcdef")
    assert ids.tolist() == [256, 97, 98, 99, 100, 256] and end == 5 and is_cut
    assert targets.tolist() == [97, 98, 99, 100, -100, -100]  # the end of a truncated caption is not a target


def test_captions_are_read_from_shards(tmp_path):
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
    shown = batch.images[:, 0, 0, 0].tolist()
    assert sorted(shown) == [0, 1, 2, 3] and batch.counts.all()
    expected = [(image, caption) for image in shown for caption in source.read(image)[1]]
    assert [shown[owner] for owner in batch.texts.owners] == [image for image, _ in expected]
    assert batch.texts.input_ids.tolist() == [data.encode(caption).input_ids.tolist() for _, caption in expected]
    samples = CaptionedSamples(source, data.train_transform, data.encode, 0, 100, has_all=False)
    drawn = {tuple(samples[SampleRef(0, epoch)].captions[0].input_ids) for epoch in range(20)}
    assert drawn == {tuple(data.encode(caption).input_ids) for caption in ("one", "two")}


def test_streamed_shards_yield_each_sample_once(tmp_path):
    """An epoch has each sample once with one of its captions; unreadable images are marked in `counts`."""
    for part in range(2):
        samples = [
            {"__key__": f"{i}", "png": image_bytes(i) if i != 5 else b"?", "txt": f"{i} a\n{i} b"}
            for i in range(4 * part, 4 * part + 4)
        ]
        write_shard(tmp_path / f"{part}.tar", samples)
    local = f"shards:{tmp_path}/{{0..1}}.tar"
    url = f"shards:pipe:cat {tmp_path}/{{0..1}}.tar"
    common = {"tokenizer": "bytes", "image_size": 8, "batch_size": 4, "num_workers": 2, "max_bad_images": 9}
    data = CaptionDataModule(url, local, stream_samples=8, **common)
    data.setup("fit")
    batches = list(data.train_dataloader())
    read = data.words.decode
    texts = [read(row[1:end].tolist()) for b in batches for row, end in zip(*b.texts[0:3:2], strict=True)]
    values = [int(image[0, 0, 0]) for batch in batches for image in batch.images]
    counts = [bool(count) for batch in batches for count in batch.counts]
    assert sorted(int(text[0]) for text in texts) == list(range(8)) and {text[-1] for text in texts} <= {"a", "b"}
    for text, value, count in zip(texts, values, counts, strict=True):
        assert (value, count) == ((0, False) if text[0] == "5" else (int(text[0]), True))
    with pytest.raises(UserError, match="is a stream; expected a local set"):
        CaptionDataModule(local, url, **common).setup("fit")
    assert all((b.texts.owners == torch.arange(len(b.images))).all() for b in batches)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({}, "has 0 of the fields txt;json"),
        ({"txt": " \n"}, "has no captions"),
        ({"txt": b"\xff\xfe"}, "the captions of"),
        ({"json": b"[1]"}, "no text in 'caption'"),
        ({"json": b'{"width": 3}'}, "no text in 'caption'"),
        ({"json": b"{"}, "the captions of"),
    ],
)
def test_samples_without_text_raise_error(tmp_path, text, message):
    path = write_shard(tmp_path / "a.tar", [{"__key__": "0", "png": image_bytes(), **text}])
    with pytest.raises(UserError, match=message):
        open_captions(f"shards:{path}", is_train=True)


def test_unreadable_image_is_zeroed_and_excluded(tmp_path, capsys):
    samples = [{"__key__": str(i), "png": image_bytes(i) if i != 1 else b"?", "txt": "a"} for i in range(4)]
    spec = f"shards:{write_shard(tmp_path / 'a.tar', samples)}"
    data = CaptionDataModule(spec, spec, tokenizer="bytes", image_size=8, batch_size=4, max_bad_images=1)
    data.setup("fit")
    (batch,) = data.val_dataloader()
    bad = batch.counts.tolist().index(False)
    assert batch.counts.sum() == 3 and len(batch.images) == 4 and len(batch.names) == 3 and not batch.images[bad].any()
    told = (batch.texts.targets >= 0).any(1).tolist()
    assert told == batch.counts.tolist()
    data.on_before_batch_transfer(batch, 0)
    assert "skipped an unreadable image (1 so far)" in capsys.readouterr().out


def test_hide_images_gives_black_images():
    seen, hidden = (CaptionDataModule(batch_size=4, val_samples=6, hide_images=hides) for hides in (False, True))
    for data in (seen, hidden):
        data.setup("fit")
    for loader in ("train_dataloader", "val_dataloader"):
        shown, black = (next(iter(getattr(data, loader)())) for data in (seen, hidden))
        assert not black.images.any() and shown.images.flatten(1).any(1).all() and black.counts.all()
        assert torch.equal(black.texts.input_ids, shown.texts.input_ids)
    source = hidden.open("scenes:unseen", is_train=False)
    assert not hidden.read(source, 3)[0].any() and seen.read(source, 3)[0].any()


def test_classes_are_converted_to_captions(tmp_path):
    for name in ("fire_truck", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(image_bytes())
    source = open_captions(f"classes:folder:{tmp_path}", True, templates=["a {}", "one {}"])
    assert [source.read(i)[1] for i in range(2)] == [["a dog", "one dog"], ["a fire truck", "one fire truck"]]
    with pytest.raises(UserError, match="has no class names"):
        open_captions("classes:digits", is_train=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_shuffles_sorted_set(tmp_path, monkeypatch, ranks):
    """Each image is used once over all ranks; a subset is sampled from all images."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(9):
            (tmp_path / name / f"{number}.png").write_bytes(image_bytes())
    spec = f"classes:folder:{tmp_path}"
    for wanted, count in ((None, 18), (8, 8)):
        names, mixed = [], 0
        for rank in range(ranks):
            data = CaptionDataModule(spec, spec, "bytes", 32, batch_size=4, val_samples=wanted)
            data.setup("fit")
            monkeypatch.setattr(CaptionDataModule, "rank", rank)
            monkeypatch.setattr(CaptionDataModule, "world_size", ranks)
            for batch in data.val_dataloader():
                names += [name for name, counts in zip(batch.names, batch.counts.tolist(), strict=True) if counts]
                mixed += len({name.split("/")[-2] for name in batch.names}) == 2
        assert len(names) == len(set(names)) == count and mixed >= 2
        assert 0 < sum("/cat/" in name for name in names) < count


def made(embed_dim: int | None = 8, **overrides) -> ImageText:
    torch.manual_seed(0)
    tower = build_model("dcvit_small_patch4_32", 0, 32, {"embed_dim": 32, "depth": 1, "num_heads": 4})
    shape = {"dim": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 48, "vocab_size": 32, "context_length": 16}
    looks = {"context_dim": 32, "cross_layers": 1, "cross_compose": True, "init_std": 0.3}
    text = dclm.Decoder(dclm.decoder_config("dcformer_pp_debug", **shape | looks | overrides))
    return ImageText(tower, text, embed_dim).eval()


def test_greedy_captions_match_stepwise_decoding():
    model, tokenizer = made(), scene_tokenizer()
    images = torch.randn(3, 3, 32, 32)
    told = generate_captions(model, images, tokenizer, 6)
    for image, caption in zip(images, told, strict=True):
        ids = [tokenizer.eos_id]
        context = model.context(model.encode_images(image[None]))
        while len(ids) <= 6 and (len(ids) == 1 or ids[-1] != tokenizer.eos_id):
            ids.append(int(model.text(torch.tensor([ids]), context=context)[0, -1].argmax()))
        ended = ids[1:-1] if ids[-1] == tokenizer.eos_id else ids[1:]
        assert tokenizer.decode(ended) == caption
    assert len(set(told)) > 1
    with pytest.raises(ValueError, match="has no cross-attention"):
        generate_captions(made(context_dim=None, cross_layers=0, cross_compose=False), images, tokenizer, 6)


def test_beam_search_improves_mean_log_likelihood():
    """Beams give a higher mean log-likelihood per token, including the end token, than greedy decoding."""
    model, tokenizer = made(), scene_tokenizer()
    images = torch.randn(8, 3, 32, 32)

    def score(image, caption):
        ids = [tokenizer.eos_id, *tokenizer.encode([caption])[0].tolist(), tokenizer.eos_id][:7]
        logits = model.text(torch.tensor([ids[:-1]]), context=model.context(model.encode_images(image[None])))
        return float(logits[0].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).mean())

    with torch.no_grad():
        told = {beams: generate_captions(model, images, tokenizer, 6, num_beams=beams) for beams in (1, 8)}
        gains = [score(i, b) - score(i, a) for i, a, b in zip(images, told[1], told[8], strict=True)]
    assert sum(gains) > 0.1 and told[1] != told[8]
    with pytest.raises(ValueError, match="num_beams=8 with temperature=0.5, top_p=None: beam search cannot be"):
        generate_captions(model, images, tokenizer, 6, 0.5, num_beams=8)


def test_mismatched_towers_raise_error():
    with pytest.raises(ValueError, match="context_dim=24 of the text tower does not match the image tower's width 32"):
        made(context_dim=24)
    with pytest.raises(ValueError, match="cross_layers=2: texts are embedded before the cross-attention layers"):
        made(cross_layers=2)


def test_exact_match_requires_equality_with_one_caption():
    captions = [["two large threes"], ["two small ones", "two fives, a large and a small one"], ["two small sixes"]]
    told = ["two large threes", "two fives, a large and a small one", "two small six"]
    assert exact_matches(told, captions, scene_tokenizer()) == [True, True, False]


EXACT = ["--trainer.callbacks+=dcvl.callbacks.ExactCaptions", "--trainer.callbacks.count=5"]


def test_exact_captions_callback_prints_and_draws_captions(tmp_path, capsys):
    run("fit", *small(tmp_path), "--trainer.max_steps=2", *EXACT)
    printed = capsys.readouterr().out
    assert printed.count("(is: ") == 2 and "@" in printed
    assert (tmp_path / "t/version_0/captions-unseen.png").stat().st_size > 10_000


@pytest.mark.slow
def test_cross_attention_images_are_logged_at_each_validation(tmp_path):
    """Each validation logs one image per cross-attention layer; the callback does not change the training."""
    draws = "--trainer.callbacks+=dcvl.callbacks.CrossAttentionImages"
    few = ["--trainer.max_steps=1", "--trainer.val_check_interval=1", "--model.contrastive=null"]
    run("fit", *small(tmp_path / "a"), *few, draws)
    run("fit", *small(tmp_path / "b"), *few)
    (events,) = (tmp_path / "a/t/version_0").rglob("events.out.tfevents.*")
    images = EventAccumulator(str(events), size_guidance={"images": 0}).Reload()
    names = [f"words/text.blocks.{layer}.cross" for layer in (0, 1)]
    assert sorted(images.Tags()["images"]) == names
    assert [[image.step for image in images.Images(name)] for name in names] == [[0, 1]] * 2
    a, b = (load_checkpoint(newest_checkpoint(tmp_path / run))["state_dict"] for run in "ab")
    assert all(torch.equal(a[name], weight) for name, weight in b.items())


def test_drawn_maps_have_rows_of_words_and_columns_of_heads():
    """Rows are the words in order and the end token; columns are the heads, before and after composition."""
    model, tokenizer = made(embed_dim=None, cross_layers=2), scene_tokenizer()
    image, caption = torch.zeros(3, 32, 32, dtype=torch.uint8), "a large three above a small seven"
    encoded = CaptionEncoder(tokenizer, 16)(caption)
    figures = draw_words(model, image, torch.randn(3, 32, 32), encoded, tokenizer)
    assert list(figures) == ["text.blocks.0.cross", "text.blocks.1.cross"]
    for figure in figures.values():
        _, before, after = (axes for axes in figure.axes if axes.get_xlabel() == "head" or not axes.axison)
        for axes in (before, after):
            assert [label.get_text() for label in axes.get_yticklabels()] == [*caption.split(), "(end)"]
            assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2", "3"]
        maps = [np.asarray(axes.images[0].get_array().filled(np.nan)) for axes in (before, after)]
        assert maps[0].shape == maps[1].shape == (8 * 9 - 1, 4 * 9 - 1)
        sums = [
            float(values[9 * row : 9 * row + 8, 9 * head : 9 * head + 8].sum())
            for values in maps
            for row, head in ((0, 0), (7, 3), (3, 2))
        ]
        assert sums[:3] == pytest.approx([1.0] * 3) and all(abs(value - 1) > 1e-3 for value in sums[3:])
    plain = draw_words(made(cross_compose=False), image, torch.randn(3, 32, 32), encoded, tokenizer)
    assert [axes.get_xlabel() for axes in plain["text.blocks.1.cross"].axes].count("head") == 1


def test_exact_captions_callback_skips_unreadable_images(tmp_path, capsys):
    captions = ["two small sixes", "two large ones", "two small sevens"]
    samples = [{"__key__": str(i), "png": image_bytes(i), "txt": caption} for i, caption in enumerate(captions)]
    samples[1]["png"] = b"?"
    spec = f"shards:{write_shard(tmp_path / 'a.tar', samples)}"
    run("fit", *small(tmp_path), "--trainer.max_steps=1", EXACT[0], f"--trainer.callbacks.data={spec}")
    printed = capsys.readouterr().out
    assert printed.count("ExactCaptions skips an image") == 1 and printed.count("(is: ") == 2


def test_embeddings_are_normalized_in_float32_under_autocast():
    """Half precision would make cosines inaccurate."""
    model, images = made(), torch.randn(3, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        embedded = model.embed_images(model.encode_images(images))
    assert embedded.dtype == torch.float32
    torch.testing.assert_close(embedded.norm(dim=1), torch.ones(3), rtol=1e-6, atol=1e-6)


def test_templates_preserve_other_placeholders(tmp_path):
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog/0.png").write_bytes(image_bytes())
    source = open_captions(f"classes:folder:{tmp_path}", True, templates=["a {} of {0}"])
    assert source.read(0)[1] == ["a dog of {0}"]


@pytest.mark.slow
def test_invalid_callback_settings_are_rejected(tmp_path, capsys):
    draws = "--trainer.callbacks+=dcvl.callbacks.CrossAttentionImages"
    said = mistake(capsys, run, "fit", *small(tmp_path), draws, "--model.caption_weight=0")
    assert "CrossAttentionImages requires a captioner" in said
    said = mistake(capsys, run, "fit", *small(tmp_path), draws, "--trainer.callbacks.index=-1")
    assert "CrossAttentionImages's index=-1; expected 0 to " in said
    said = mistake(capsys, run, "fit", *small(tmp_path), draws, "--trainer.logger=false")
    assert "CrossAttentionImages requires a TensorBoard logger" in said
    said = mistake(capsys, run, "fit", *small(tmp_path), *EXACT, "--model.caption_weight=0")
    assert "ExactCaptions requires a captioner" in said
    none = [*EXACT[:1], "--trainer.callbacks.count=0"]
    assert "count=0 must be at least 1" in mistake(capsys, run, "fit", *small(tmp_path), *none)
