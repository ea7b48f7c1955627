"""Corpora with changed files, and models of another tokenizer."""

import json
import shutil

import numpy as np
import pytest

from tests.dclm.commands import run, small

from .fault_injection import mistake


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder with a subword corpus and a short run on this corpus."""
    root = tmp_path_factory.mktemp("subwords")
    for number in range(12):
        (root / f"{number}.txt").write_text(f"some words of text {number}, and some more. " * 20)
    files = [str(path) for path in sorted(root.glob("*.txt"))]
    run("tokens", "--inputs", *files, f"--out={root}/corpus", "--tokenizer=bpe:300", "--val_fraction=0.3")
    run("fit", *subwords(root / "corpus", root))
    return root


def subwords(corpus, root) -> list[str]:
    return [*small(corpus, root), "--data.vocab_size=300", "--trainer.max_epochs=-1", "--trainer.max_steps=2"]


@pytest.fixture
def corpus(made, tmp_path):
    return shutil.copytree(made / "corpus", tmp_path / "corpus")


def test_changed_or_missing_tokenizer_is_rejected(corpus, tmp_path, capsys):
    path, manifest = corpus / "tokenizer.json", corpus / "manifest.json"
    words = path.read_text()
    content = json.loads(words)
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    assert "the tokenizer of the corpus, has changed" in mistake(capsys, run, "fit", *subwords(corpus, tmp_path))
    assert "tokenizer.json has changed" in mistake(capsys, run, "verify", f"--tokens={corpus}")
    path.unlink()
    assert "the tokenizer of the corpus, is missing" in mistake(capsys, run, "fit", *subwords(corpus, tmp_path))
    known = json.loads(manifest.read_text())
    del known["tokenizer_sha256"]  # as in corpora of earlier versions
    manifest.write_text(json.dumps(known))
    said = mistake(capsys, run, "fit", *subwords(corpus, tmp_path))
    assert "tokenizer.json is missing: the tokens have a vocabulary of" in said


@pytest.mark.parametrize(
    "change", [lambda c: c[:1], lambda c: 2 * c, lambda c: -c, lambda c: c[:, ::-1], lambda c: c > 0, lambda c: c[:, 0]]
)
def test_invalid_document_counts_are_rejected(corpus, tmp_path, capsys, change):
    path = corpus / "val-0000-documents.npy"
    np.save(path, change(np.load(path)))
    assert f"{path} is damaged" in mistake(capsys, run, "fit", *subwords(corpus, tmp_path))


@pytest.mark.parametrize("entry", [{"documents_file": None}, {"documents_file": -1}, {"bytes": "x"}])
def test_malformed_manifest_is_rejected(corpus, capsys, entry):
    path = corpus / "manifest.json"
    content = json.loads(path.read_text())
    content["splits"]["val"][0] |= entry
    path.write_text(json.dumps(content))
    assert "manifest.json is damaged" in mistake(capsys, run, "verify", f"--tokens={corpus}")
    path.write_text(json.dumps(content | {"dtype": []}))
    assert "dtype []" in mistake(capsys, run, "verify", f"--tokens={corpus}")


def test_checkpoint_of_another_tokenizer_is_rejected(made, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("plain bytes " * 200)
    run("tokens", f"--inputs={tmp_path}/a.txt", f"--out={tmp_path}/bytes")
    for command in ("validate", "test"):
        asked = [*subwords(tmp_path / "bytes", tmp_path), f"--checkpoint={made}/t/version_0"]
        assert "its tokenizer differs from the checkpoint's" in mistake(capsys, run, command, *asked)
    bytes_run = [*subwords(tmp_path / "bytes", tmp_path), "--trainer.max_steps=4"]
    said = mistake(capsys, run, "fit", *bytes_run, f"--resume={made}/t/version_0")
    assert "its tokenizer differs from the checkpoint's" in said
    said = mistake(capsys, run, "fit", *bytes_run, f"--init={made}/t/version_0")
    assert f"its tokenizer differs from init={made}/t/version_0's" in said


def test_resume_rejects_other_tokens_and_reports_changed_settings(made, corpus, tmp_path, capsys):
    shutil.copytree(made / "t", tmp_path / "t")
    resume = [*subwords(corpus, tmp_path), "--resume=latest", "--trainer.max_steps=4"]
    path = corpus / "manifest.json"
    content = json.loads(path.read_text())
    content["splits"]["train"][0]["sha256"] = "of other tokens"
    path.write_text(json.dumps(content))
    assert "the checkpoint was trained with corpus=" in mistake(capsys, run, "fit", *resume)
    resume[resume.index(f"--data.tokens={corpus}")] = f"--data.tokens={made}/corpus"
    said = mistake(capsys, run, "fit", *resume, "--data.separate_documents=true")
    assert "the checkpoint was trained with separate_documents=False" in said
    run("fit", *resume, "--data.val_tokens=48")
    assert "resumed with changed settings: data.val_tokens 1048576 -> 48" in capsys.readouterr().out


def test_export_into_run_folder_is_rejected(made, capsys):
    error = mistake(capsys, run, "export", f"--checkpoint={made}/t/version_0", f"--out={made}/t/version_0")
    assert "is the folder of a run; expected a separate folder" in error


def test_prompt_longer_than_context_prints_warning(made, capsys):
    asked = ["generate", f"--checkpoint={made}/t/version_0", f"--prompt={'words ' * 30}", "--max_new_tokens=1"]
    run(*asked)
    assert "tokens is longer than the training context of 24" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_validate_supports_other_precisions(made, tmp_path, capsys, precision):
    asked = [*subwords(made / "corpus", tmp_path), f"--checkpoint={made}/t/version_0"]
    run("validate", *asked, f"--trainer.precision={precision}")
    assert "val/loss" in capsys.readouterr().out
