"""Token files and samples: sequences of an epoch, document ids, vocabulary sizes, and damaged files."""

import json

import numpy as np
import pytest
import torch

from dclm.data import TokenDataModule
from dclm.data.samples import collate
from dclm.data.token_files import Corpus
from dctrain.checkpointing.checkpoint import load_checkpoint, newest_checkpoint
from dctrain.data.sampler import SampleRef
from dctrain.errors import UserError

from .corpora import jsonl, numbered_corpus, prepared, texts, write_texts


def module(folder, stage: str = "fit", **options) -> TokenDataModule:
    options = {"context_length": 32, "batch_size": 3} | options
    data = TokenDataModule(str(folder), **options)
    data.setup(stage)
    return data


def test_epoch_contains_each_sequence_at_most_once(tmp_path):
    data = module(numbered_corpus(tmp_path / "c"))
    tokens = data.corpus.split("train")[:]
    batches = list(data.train_dataloader())
    samples = [i for batch in batches for i in batch.samples]
    assert len(samples) == len(set(samples)) == 30  # 31 sequences, ten batches of three
    assert samples != sorted(samples)
    for batch in batches:
        for number, row, targets in zip(batch.samples, batch.input_ids, batch.targets, strict=True):
            assert row.tolist() == tokens[number * 32 : number * 32 + 32].tolist()
            assert targets.tolist() == tokens[number * 32 + 1 : number * 32 + 33].tolist()
        assert batch.document_ids is None
    again = [i for batch in module(tmp_path / "c").train_dataloader() for i in batch.samples]
    other = [i for batch in module(tmp_path / "c", seed=1).train_dataloader() for i in batch.samples]
    assert again == samples != other


def test_evaluation_uses_first_tokens_in_order(tmp_path):
    folder = numbered_corpus(tmp_path / "c")
    for val_tokens, expected in ((None, [0, 1, 2, 3, 4, 5]), (1, [0]), (65, [0, 1, 2]), (10**9, [0, 1, 2, 3, 4, 5])):
        data = module(folder, "validate", val_tokens=val_tokens)
        assert [i for batch in data.val_dataloader() for i in batch.samples] == expected
    assert data.train_samples is None


@pytest.mark.parametrize("batch_size", [1, 3])
def test_padding_has_ignored_targets_and_valid_input_ids(batch_size, tmp_path):
    data = module(numbered_corpus(tmp_path / "c"), "validate", batch_size=batch_size)
    samples = data.val_samples
    batch = collate([samples[SampleRef(i, 0, is_padding=i == batch_size - 1)] for i in range(batch_size)])
    assert (batch.targets[-1] == -100).all() and (batch.targets[:-1] >= 0).all()
    assert (batch.input_ids >= 0).all()


def test_rows_span_multiple_files(tmp_path):
    prepared(write_texts(tmp_path / "in", texts(40)), tmp_path / "c", val_fraction=0.0, segment_tokens=300)
    row = Corpus(tmp_path / "c").split("train")
    assert len(row.files) > 3
    whole = np.concatenate([np.fromfile(f.filename, "<u2") for f in row.files])
    assert np.array_equal(row[:], whole)
    for start in range(0, len(row), 7):
        assert np.array_equal(row[start : start + 60], whole[start : start + 60])
    assert row[5:5].dtype == row[:].dtype == np.int64 and len(row[5:5]) == 0


def test_document_ids_are_numbered_within_a_sequence(tmp_path):
    data = module(numbered_corpus(tmp_path / "c"), separate_documents=True)
    for batch in data.train_dataloader():
        ended = (batch.input_ids == 256).long()
        for row, document_ids in zip(ended, batch.document_ids, strict=True):
            expected, number = [], 0
            for is_end in row.tolist():
                expected.append(number)  # the end token belongs to the document that it ends
                number += is_end
            assert document_ids.tolist() == expected
        assert batch.document_ids.max() >= 1


def test_bytes_per_token_match_evaluated_tokens(tmp_path):
    data = module(numbered_corpus(tmp_path / "c"), "validate")
    tokens = data.corpus.split("val")[1 : 6 * 32 + 1]
    assert data.bytes_per_token == pytest.approx((tokens < 256).mean())
    documents = ["plain words here " * 30, "\u65e5\u672c\u8a9e" * 90]
    (tmp_path / "in.jsonl").write_bytes(jsonl(documents * 3))
    prepared([tmp_path / "in.jsonl"], tmp_path / "b", tokenizer="bpe:300", val_fraction=0.0)
    manifest = json.loads((tmp_path / "b/manifest.json").read_text())
    manifest["splits"]["val"] = manifest["splits"]["train"]
    (tmp_path / "b/manifest.json").write_text(json.dumps(manifest))
    for val_tokens in (64, None):
        data = module(tmp_path / "b", "validate", val_tokens=val_tokens, vocab_size=300)
        count = data.num_val_samples * 32
        text = data.corpus.tokenizer().decode(data.val_samples.row[1 : count + 1].tolist())
        assert data.bytes_per_token == pytest.approx(len(text.encode()) / count)


def damage(folder, name="train-0000-000.bin", **changes):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"][0] |= {k: v for k, v in changes.items() if k in ("tokens", "max_token")}
    path.write_text(json.dumps(manifest | {k: v for k, v in changes.items() if k not in ("tokens", "max_token")}))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"tokens": 1001},
            {},
            "has 2000 bytes; its manifest says 1001 tokens of uint16, 2002 bytes: the file is trunc",
        ),
        ({"dtype": "uint32"}, {}, "says 1000 tokens of uint32, 4000 bytes: the file is truncated or has a"),
        ({"dtype": "float32"}, {}, "dtype 'float32'; expected 'dclm-tokens-1' with uint16 or uint32"),
        ({"format": "other"}, {}, "has format 'other'"),
        ({"max_token": 300}, {}, r"c/train has token 300; expected 0 to 256 \(data.vocab_size=257\)"),
        ({}, {"vocab_size": 100}, "has a vocabulary of 257; data.vocab_size=100 must be at least that"),
        ({}, {"context_length": 1000}, "has 1000 tokens; a sequence needs 1000 and one more"),
        ({}, {"context_length": 300}, "c/val has 200 tokens; a sequence needs 300 and one more"),
        ({}, {"batch_size": 32}, "smaller than one global batch of 32 x 1 ranks"),
        ({}, {"context_length": 0}, "context_length=0"),
        ({}, {"batch_size": 0}, "batch_size=0: expected a whole number from 1"),
    ],
)
def test_invalid_manifests_and_options_raise_user_error(changes, options, message, tmp_path):
    folder = numbered_corpus(tmp_path / "c")
    damage(folder, **changes)
    with pytest.raises(UserError, match=message):
        module(folder, **options)


def test_missing_or_damaged_files_raise_user_error(tmp_path):
    with pytest.raises(UserError, match="not a prepared corpus"):
        module(tmp_path)
    folder = numbered_corpus(tmp_path / "c")
    (folder / "val-0000-000.bin").unlink()
    with pytest.raises(UserError, match="val-0000-000.bin is missing"):
        module(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json is damaged"):
        module(folder)


def test_token_outside_vocabulary_is_reported_with_its_position(tmp_path):
    folder = numbered_corpus(tmp_path / "c")
    tokens = np.fromfile(folder / "train-0000-000.bin", "<u2")
    tokens[500] = 999
    tokens.tofile(folder / "train-0000-000.bin")
    with pytest.raises(UserError, match=r"has token 999 near token 480; expected 0 to 256"):
        list(module(folder, batch_size=1).train_dataloader())


def test_batches_have_expected_shape_and_dtype(tmp_path):
    batch = next(iter(module(numbered_corpus(tmp_path / "c")).train_dataloader()))
    assert batch.input_ids.shape == batch.targets.shape == (3, 32)
    assert batch.input_ids.dtype == batch.targets.dtype == torch.int64


@pytest.mark.parametrize(
    ("tokens", "options", "rows"),
    [
        ("c", {}, 257),
        ("c", {"vocab_multiple": 64}, 320),
        ("c", {"vocab_size": 300}, 300),
        ("stdlib", {"vocab_multiple": 10}, 260),
    ],
)
def test_vocab_size_follows_tokenizer_and_options(tokens, options, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbered_corpus(tmp_path / "c")
    assert TokenDataModule(tokens, **options).vocab_size == rows


def test_trained_model_has_vocab_size_embedding_rows(tmp_path):
    from ..commands import run, small

    corpus = numbered_corpus(tmp_path / "c", 41 * 24 + 1)
    options = ["--data.vocab_size=null", "--data.vocab_multiple=100", "--trainer.max_epochs=1"]
    run("fit", *small(corpus, tmp_path), *options, "--trainer.limit_train_batches=1")
    weights = load_checkpoint(newest_checkpoint(tmp_path / "t"))["state_dict"]
    assert weights["model.embed.weight"].shape[0] == weights["model.output.weight"].shape[0] == 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 300, "vocab_multiple": 2}, "vocab_size=300 and vocab_multiple=2 are both given"),
        ({"vocab_multiple": 0}, "vocab_size=None and vocab_multiple=0 must be at least 1"),
        ({"tokens": "none"}, "none is not a prepared corpus"),
        ({"tokens": "idxmap:none"}, "data.tokenizer is required"),
    ],
)
def test_invalid_vocabulary_options_raise_user_error(options, message):
    with pytest.raises(UserError, match=message):
        TokenDataModule(**options)
