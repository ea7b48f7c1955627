"""Byte counts of text with lossy tokenizers, and corpora of earlier versions without document counts."""

import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from dclm import TokenDataModule
from tests.dclm.commands import run, small
from tests.dclm.data.corpora import prepared, write_texts

from .fault_injection import mistake

DOCUMENTS = [f"Some   WORDS {'and   spaces   ' * i}\n\n" for i in range(60)]


@pytest.fixture
def lossy(tmp_path):
    """Path of a tokenizer that drops case and white space, as WordPiece tokenizers do."""
    words = ["[UNK]", "</s>", "some", "words", "and", "spaces"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def evaluation(folder, **options) -> TokenDataModule:
    data = TokenDataModule(str(folder), context_length=4, **options)
    data.setup("validate")
    return data


def test_bytes_per_token_counts_bytes_of_source_text(tmp_path, lossy):
    documents = list(dict.fromkeys(f"{i} {text}" for i, text in enumerate(DOCUMENTS)))
    manifest = prepared(
        [*write_texts(tmp_path / "in", documents)], tmp_path / "corpus", tokenizer=lossy, val_fraction=0.5
    )
    (entry,) = manifest["splits"]["val"]
    data = evaluation(tmp_path / "corpus", val_tokens=None)
    seen = data.num_val_samples * 4
    assert data.bytes_per_token * seen == pytest.approx(entry["bytes"], rel=0.02)
    decoded = data.corpus.tokenizer().num_bytes(data.val_samples.row[1 : seen + 1])
    assert decoded < 0.8 * entry["bytes"]
    halves = [data.val_samples.row.num_bytes(*span) for span in ((0, 50), (50, len(data.val_samples.row)))]
    assert sum(halves) == pytest.approx(entry["bytes"]) and min(halves) > 0
    some = evaluation(tmp_path / "corpus", val_tokens=40)
    assert some.num_val_samples == 10 and some.bytes_per_token * 40 == pytest.approx(halves[0], rel=0.3)


def test_corpus_without_document_counts_uses_decoded_bytes(tmp_path, lossy):
    prepared(write_texts(tmp_path / "in", DOCUMENTS[:20]), tmp_path / "corpus", tokenizer=lossy, val_fraction=0.5)
    path = tmp_path / "corpus/manifest.json"
    manifest = json.loads(path.read_text())
    for entry in manifest["splits"]["val"]:
        del entry["documents_file"], entry["documents_sha256"]
    path.write_text(json.dumps(manifest))
    data = evaluation(tmp_path / "corpus", val_tokens=None)
    seen = data.num_val_samples * 4
    assert data.bytes_per_token * seen == data.corpus.tokenizer().num_bytes(data.val_samples.row[1 : seen + 1])


def test_verify_rejects_changed_document_counts(tmp_path, lossy, capsys):
    prepared(write_texts(tmp_path / "in", DOCUMENTS[:20]), tmp_path / "corpus", tokenizer=lossy, val_fraction=0.5)
    run("verify", f"--tokens={tmp_path}/corpus")
    (tmp_path / "corpus/val-0000-documents.npy").write_bytes(b"damaged")
    assert "val-0000-documents.npy has changed" in mistake(capsys, run, "verify", f"--tokens={tmp_path}/corpus")


def test_preparation_without_output_can_be_repeated_with_other_settings(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "some text"}\n' * 3)
    asked = ["tokens", f"--inputs={tmp_path}/a.jsonl", f"--out={tmp_path}/corpus"]
    assert "no text with key 'text'" in mistake(capsys, run, *asked)
    run(*asked, "--text_key=body")
    assert "prepared with different text_key" in mistake(capsys, run, *asked)
    (tmp_path / "corpus/train-0000.bin").unlink()
    assert "train-0000.bin is missing; remove " in mistake(capsys, run, *asked, "--text_key=body")


def test_fit_rejects_corpus_without_validation_tokens(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text " * 30)
    run("tokens", f"--inputs={tmp_path}/a.txt", f"--out={tmp_path}/corpus", "--val_fraction=0")
    assert "warning: there are no validation tokens" in capsys.readouterr().out
    error = mistake(capsys, run, "fit", *small(tmp_path / "corpus", tmp_path / "root"))
    assert "corpus/val has 0 tokens; a sequence needs 24 and one more" in error
