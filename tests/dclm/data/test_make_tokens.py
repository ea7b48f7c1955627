"""Preparation of a corpus: every document is preserved for all formats, batch sizes and interruptions."""

import gzip
import hashlib
import io
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pytest
import zstandard
from filelock import FileLock
from pyarrow import parquet

from dclm.cli import main
from dclm.data.corpus_options import CorpusOptions
from dclm.data.make_tokens import make_tokens, prepare
from dclm.data.stdlib import stdlib_sources
from dclm.data.texts import find_inputs, read_documents
from dclm.data.token_files import Corpus
from dclm.data.token_segments import TokenSegment
from dclm.data.tokenizers import train_bpe
from dctrain.errors import UserError
from tests.dctrain.commands import ROOT

from ..commands import run, small
from .corpora import jsonl, prepared, texts, write_texts


def documents_of(folder) -> dict[str, list[str]]:
    """Return the decoded documents of a corpus, keyed by split."""
    corpus = Corpus(folder)
    tokenizer = corpus.tokenizer()
    found = {}
    for split in ("train", "val"):
        tokens = corpus.split(split)[:]
        ends = np.flatnonzero(tokens == corpus.eos_id)
        assert len(tokens) == 0 or ends[-1] == len(tokens) - 1
        found[split] = [tokenizer.decode(part[:-1]) for part in np.split(tokens, ends + 1)[:-1]]
    return found


def parquet_bytes(records: list[dict]) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(records), buffer, row_group_size=7)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.zst", "json.gz", "parquet"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_document_is_preserved(kind, tokenizer, tmp_path):
    documents = texts(40)
    if kind == "txt":
        write_texts(tmp_path / "in", documents)
    else:
        (tmp_path / "in").mkdir()
        for part, some in enumerate((documents[:25], documents[25:])):
            data = jsonl(some)
            if kind.endswith("zst"):  # two frames, as parallel compressors write them
                data = b"".join(zstandard.compress(half) for half in (data[:100], data[100:]))
            if kind.endswith("gz"):
                data = gzip.compress(data)
            if kind == "parquet":
                data = parquet_bytes([json.loads(line) for line in data.splitlines()])
            (tmp_path / f"in/{part}.{kind}").write_bytes(data)
    manifest = prepared([tmp_path / "in"], tmp_path / "out", tokenizer=tokenizer, val_fraction=0.3)
    found = documents_of(tmp_path / "out")
    assert sorted(found["train"] + found["val"]) == sorted(documents)
    assert 4 < len(found["val"]) < 22
    assert [t for t in documents if t in set(found["train"])] == found["train"]
    for split, entries in manifest["splits"].items():
        assert sum(e["documents"] for e in entries) == len(found[split])
        assert sum(e["bytes"] for e in entries) == len("".join(found[split]).encode())
        for entry in entries:
            data = (tmp_path / "out" / entry["file"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == entry["sha256"]
            assert np.frombuffer(data, "<u2").max() == entry["max_token"]
    assert manifest["vocab_size"] == {"bytes": 257}.get(tokenizer, manifest["vocab_size"]) <= 300


def test_batch_size_changes_only_segment_boundaries(tmp_path):
    write_texts(tmp_path / "in", texts(60))
    small = prepared([tmp_path / "in"], tmp_path / "a", segment_tokens=200, batch_bytes=1)
    large = prepared([tmp_path / "in"], tmp_path / "b", segment_tokens=200, batch_bytes=10**6)
    assert len(small["splits"]["train"]) > 5 and len(large["splits"]["train"]) == 1
    assert small["tokens"] == large["tokens"]
    assert documents_of(tmp_path / "a") == documents_of(tmp_path / "b")


@pytest.mark.parametrize("stop_after", [1, 2, 5, 12])
def test_interrupted_preparation_resumes_to_the_same_result(stop_after, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_bytes(jsonl(texts(90)))
    write_texts(tmp_path / "more", texts(9))
    (tmp_path / "more/004.txt").write_bytes(b"caf\xe9")
    inputs = [tmp_path / "in.jsonl", tmp_path / "more"]
    options = {"segment_tokens": 120, "val_fraction": 0.2, "batch_bytes": 50}
    whole = prepared(inputs, tmp_path / "a", **options)
    assert len(whole["splits"]["train"]) > stop_after + 1 and len(whole["skipped"]) == 1
    calls = []
    close = TokenSegment.close

    def interrupted(segment):
        calls.append(1)
        if len(calls) > stop_after:
            raise KeyboardInterrupt
        return close(segment)

    with monkeypatch.context() as patch:
        patch.setattr(TokenSegment, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared(inputs, tmp_path / "b", **options)
    assert not (tmp_path / "b/manifest.json").exists()
    written = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "b").glob("*.bin")}
    assert prepared(inputs, tmp_path / "b", **options) == whole
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "b").glob("*.bin")}
    assert written and written.items() <= after.items()
    assert documents_of(tmp_path / "a") == documents_of(tmp_path / "b")
    assert not list((tmp_path / "b").rglob("*.partial")) and not (tmp_path / "b/progress.json").exists()


def test_repeated_run_changes_nothing_and_different_input_is_rejected(tmp_path):
    files = write_texts(tmp_path / "in", texts(20))
    first = prepared(files, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    assert prepared(files, tmp_path / "out") == first
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == before
    with pytest.raises(UserError, match="prepared with different inputs; nothing was overwritten"):
        prepared(files[1:], tmp_path / "out")
    with pytest.raises(UserError, match="prepared with different tokenizer, val_fraction"):
        prepared(files, tmp_path / "out", tokenizer="bpe:300", val_fraction=0.5)


def test_saved_tokenizer_can_be_reused(tmp_path):
    files = write_texts(tmp_path / "in", texts(30))
    prepared(files, tmp_path / "a", tokenizer="bpe:280")
    prepared(files, tmp_path / "b", tokenizer=str(tmp_path / "a/tokenizer.json"))
    a, b = Corpus(tmp_path / "a"), Corpus(tmp_path / "b")
    assert np.array_equal(a.split("train")[:], b.split("train")[:])
    assert a.tokenizer().spec == b.tokenizer().spec
    assert a.eos_id == 0


def test_large_vocabularies_use_four_bytes_per_token(tmp_path, monkeypatch):
    monkeypatch.setattr("dclm.data.tokenizers.ByteTokenizer.vocab_size", 70000)
    manifest = prepared(write_texts(tmp_path / "in", texts(20)), tmp_path / "out")
    assert manifest["dtype"] == "uint32"
    found = documents_of(tmp_path / "out")
    assert sorted(found["train"] + found["val"]) == sorted(texts(20))


def test_files_that_are_not_utf8_are_skipped_and_listed(tmp_path):
    files = write_texts(tmp_path / "in", texts(5))
    files[2].write_bytes(b"caf\xe9")
    manifest = prepared(files, tmp_path / "out", val_fraction=0.0)
    assert manifest["skipped"] == [str(files[2])]
    assert len(documents_of(tmp_path / "out")["train"]) == 4


def test_split_of_a_document_depends_on_its_content_only(tmp_path):
    documents = texts(60)
    prepared(write_texts(tmp_path / "a", documents), tmp_path / "out_a", val_fraction=0.3)
    prepared(write_texts(tmp_path / "b", documents[::-1] + documents[:10]), tmp_path / "out_b", val_fraction=0.3)
    assert set(documents_of(tmp_path / "out_a")["val"]) == set(documents_of(tmp_path / "out_b")["val"])


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', {}, r"a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"txt": "x"}\n', {}, "a.jsonl, line 1: no text with key 'text'"),
        ("a.jsonl", b'["x"]\n', {}, "line 1: not a JSON object"),
        ("a.jsonl", jsonl(["x"]), {"text_key": "content"}, "line 1: no text with key 'content'"),
        ("a.jsonl.zst", b"no zstandard", {}, "a.jsonl.zst is damaged"),
        ("a.parquet", b"no parquet", {}, "a.parquet is damaged"),
        ("a.parquet", parquet_bytes([{"text": "x", "n": 1}]), {"text_key": "n"}, r"a.parquet, row 1: no text with key"),
        ("a.parquet", parquet_bytes([{"text": "x"}]), {"text_key": "body"}, "a.parquet, row 1: no text with key"),
        ("a.bin", b"x", {"tokenizer": "bpe:9"}, "bpe:9 is too small; expected at least 257"),
        ("a.bin", b"x", {"tokenizer": "bpe:many"}, "tokenizer='bpe:many'; expected bpe:SIZE"),
        ("a.bin", b"x", {"tokenizer": "no/such/tokenizer.json"}, "no/such/tokenizer.json does not exist"),
        ("a.bin", b"\xff", {}, "the inputs have no training documents"),
        ("a.txt", b"x", {"val_fraction": 1.0}, r"val_fraction=1.0 must be in \[0, 1\)"),
        ("a.txt", b"x", {"segment_tokens": 0}, "segment_tokens=0 at least 1"),
    ],
)
def test_invalid_inputs_and_options_raise_user_error(name, data, options, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        prepared([tmp_path / name], tmp_path / "out", **options)


def test_truncated_zstandard_file_raises_user_error(tmp_path):
    data = zstandard.compress(jsonl(texts(500)))
    (tmp_path / "a.jsonl.zst").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="a.jsonl.zst is damaged: the file is truncated"):
        prepared([tmp_path / "a.jsonl.zst"], tmp_path / "out")


def test_missing_inputs_raise_user_error(tmp_path):
    with pytest.raises(UserError, match="nothing does not exist"):
        prepared([tmp_path / "nothing"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no input in .*empty; expected files with suffix .jsonl"):
        prepared([tmp_path / "empty"], tmp_path / "out")


def test_find_inputs_selects_files_by_suffix(tmp_path):
    for name in ("b.py", "a.txt", "sub/c.py", "d.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [p.name for p in find_inputs([tmp_path])] == ["a.txt", "b.py", "c.py"]
    assert [p.name for p in find_inputs([tmp_path], (".py",))] == ["b.py", "c.py"]
    assert [p.name for p in find_inputs([tmp_path / "d.bin"], (".py",))] == ["d.bin"]


def test_tokenizer_without_end_token_is_rejected(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "STOP": 2}, unk_token="[UNK]")).save(str(tmp_path / "t.json"))
    files = write_texts(tmp_path / "in", texts(3))
    with pytest.raises(UserError, match=r"no end-of-text token; expected one of <\|endoftext\|>, </s>, <eos>"):
        prepared(files, tmp_path / "a", tokenizer=str(tmp_path / "t.json"))
    assert prepared(files, tmp_path / "b", tokenizer=str(tmp_path / "t.json"), eos="STOP")["eos_id"] == 2
    assert Corpus(tmp_path / "b").tokenizer().eos_id == 2
    (tmp_path / "t.json").write_text(json.dumps({"no": "tokenizer"}))
    with pytest.raises(UserError, match="the tokenizer cannot be read"):
        prepared(files, tmp_path / "c", tokenizer=str(tmp_path / "t.json"))


def test_truncation_and_padding_of_tokenizer_are_disabled(tmp_path):
    from tokenizers import Tokenizer

    long = "all of this long text " * 20
    files = write_texts(tmp_path / "in", [long, "a", "the end <|endoftext|> is not here"])
    tokenizer = Tokenizer.from_str(train_bpe([long], 300).spec)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "t.json"))
    prepared(files, tmp_path / "out", tokenizer=str(tmp_path / "t.json"), val_fraction=0.0)
    assert documents_of(tmp_path / "out")["train"] == [file.read_text() for file in files]


def test_find_inputs_lists_files_once_and_follows_links(tmp_path):
    write_texts(tmp_path / "in", texts(3))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/sub").symlink_to(tmp_path / "in")
    (tmp_path / "in/loop").symlink_to(tmp_path / "linked")
    assert len(find_inputs([tmp_path / "in", tmp_path / "in/000.txt"])) == 3
    assert len(find_inputs([tmp_path / "linked"])) == 3


@pytest.mark.parametrize("name", ["a.jsonl.bz2", "b.zst", "c.txt.xz"])
def test_unsupported_compression_formats_are_rejected(name, tmp_path):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match="is compressed; expected one of .jsonl.zst, .jsonl.gz, .json.gz"):
        prepared([tmp_path / name], tmp_path / "out")


def test_truncated_gzip_file_raises_user_error(tmp_path):
    data = gzip.compress(jsonl(texts(500)))
    (tmp_path / "a.json.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="a.json.gz is damaged"):
        prepared([tmp_path / "a.json.gz"], tmp_path / "out")


@pytest.mark.parametrize("batch_bytes", [1, 10**6])
def test_validation_inputs_form_the_validation_split(batch_bytes, tmp_path):
    """The splits are the same for batches of one document and for a single batch of all documents."""
    inputs, val = texts(30), texts(12, start=100)
    write_texts(tmp_path / "in", inputs)
    (tmp_path / "val.jsonl.zst").write_bytes(zstandard.compress(jsonl(val)))
    options = CorpusOptions(segment_tokens=200, val_fraction=0.0, num_val=1)
    files = [*find_inputs([tmp_path / "in"]), tmp_path / "val.jsonl.zst"]
    prepare(files, tmp_path / "out", options, progress=False, batch_bytes=batch_bytes)
    assert documents_of(tmp_path / "out") == {"train": inputs, "val": val}
    make_tokens([str(tmp_path / "in")], str(tmp_path / "b"), segment_tokens=200, val=[str(tmp_path / "val.jsonl.zst")])
    assert documents_of(tmp_path / "b") == {"train": inputs, "val": val}
    with pytest.raises(UserError, match="000.txt is in both inputs and val"):
        make_tokens([str(tmp_path / "in")], str(tmp_path / "c"), val=[str(tmp_path / "in/000.txt")])


def test_invalid_tokenizer_leaves_output_folder_usable(tmp_path):
    files = write_texts(tmp_path / "in", texts(5))
    for wrong in ("bpe:3x", "bpe:3", "no/such/tokenizer.json"):
        with pytest.raises(UserError):
            prepared(files, tmp_path / "out", tokenizer=wrong)
    prepared(files, tmp_path / "out", tokenizer="bpe:300")


def test_concurrent_preparation_of_same_folder_is_rejected(tmp_path):
    files = write_texts(tmp_path / "in", texts(5))
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out/plan.lock"), pytest.raises(UserError, match="is being prepared by another process"):
        prepared(files, tmp_path / "out")


@pytest.mark.parametrize(
    "signum",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), pytest.param(signal.SIGINT, marks=pytest.mark.long)],
)
def test_killed_preparation_resumes_to_the_same_result(signum, tmp_path):
    documents = [f"document {i} " + "word " * (i % 97) for i in range(20000)]
    for part in range(3):
        (tmp_path / f"{part}.jsonl").write_bytes(jsonl(documents[part::3]))
    inputs = [str(tmp_path / f"{part}.jsonl") for part in range(3)]
    command = ["tokens", "--inputs", *inputs, "--segment_tokens=8000", "--tokenizer=bpe:300"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dclm", *command, f"--out={tmp_path}/b"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background processes ignore SIGINT
    )
    while not list(tmp_path.glob("b/progress.json")):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signum)
    process.wait(timeout=60)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[signum]
    assert not (tmp_path / "b/manifest.json").exists()
    for folder in ("a", "b"):
        main([*command, f"--out={tmp_path}/{folder}"])
    assert (tmp_path / "a/manifest.json").read_bytes() == (tmp_path / "b/manifest.json").read_bytes()
    for path in (tmp_path / "a").glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_document_positions_increase_to_the_file_size(tmp_path):
    """The progress bar ends at 100 percent."""
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(jsonl(texts(300))))
    positions = [document.position for document in read_documents(path, "text")]
    assert positions == sorted(positions) and positions[-1] == path.stat().st_size


def test_built_in_corpus_is_the_standard_library():
    files = stdlib_sources()
    assert len(files) > 500
    assert {"argparse.py", "dataclasses.py"} <= {file.name for file in files}
    assert not any("site-packages" in file.parts for file in files)


@pytest.mark.parametrize(("options", "fraction"), [([], 0.1), (["--val_fraction=0.3"], 0.3)])
def test_single_text_is_split_into_train_and_val(tmp_path, capsys, options, fraction):
    text = "".join(f"line {number} of a text\n" for number in range(200))
    (tmp_path / "one.txt").write_text(text)
    run("tokens", "--inputs", str(tmp_path / "one.txt"), f"--out={tmp_path / 'c'}", *options)
    assert "warning" not in capsys.readouterr().out
    corpus = Corpus(tmp_path / "c")
    train, val = (corpus.split(split)[:] for split in ("train", "val"))
    assert train[-1] == val[-1] == 256  # each part ends with the end token
    assert bytes(train[:-1].astype("uint8")).decode() + bytes(val[:-1].astype("uint8")).decode() == text
    assert bytes(train[-2:-1].astype("uint8")) == b"\n" and len(val) / len(text) == pytest.approx(fraction, abs=0.01)
    (counts,) = np.load(tmp_path / "c/val-0000-documents.npy").tolist()
    assert counts == [len(val), len(val) - 1]


@pytest.mark.parametrize("text", ["Title\n" + "word " * 2000, "x" * 10_000], ids=["one long line", "no break at all"])
def test_val_part_of_a_text_exceeds_its_fraction_by_at_most_half(tmp_path, text):
    (tmp_path / "one.txt").write_text(text)
    run("tokens", "--inputs", str(tmp_path / "one.txt"), f"--out={tmp_path / 'c'}", "--val_fraction=0.1")
    val = Corpus(tmp_path / "c").split("val")[:]
    assert 0.1 <= (len(val) - 1) / len(text) <= 0.15 and bytes(val[:4].astype("uint8")) in (b"word", b"xxxx")


def test_few_documents_are_each_split_into_train_and_val(tmp_path):
    lines = [json.dumps({"text": f"{number} " + "word " * 50}) for number in range(3)]
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    run("tokens", "--inputs", str(tmp_path / "few.jsonl"), f"--out={tmp_path / 'c'}", "--tokenizer=bpe:260")
    manifest = json.loads((tmp_path / "c/manifest.json").read_text())
    assert [manifest["splits"][split][0]["documents"] for split in ("train", "val")] == [3, 3]
    assert (
        run("tokens", "--inputs", str(tmp_path / "few.jsonl"), f"--out={tmp_path / 'c'}", "--tokenizer=bpe:260") is None
    )


def test_corpus_of_one_text_can_be_trained_on(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"line {number} of a text\n" for number in range(200)))
    run("tokens", "--inputs", str(tmp_path / "one.txt"), f"--out={tmp_path / 'c'}")
    run("fit", *small(tmp_path / "c", tmp_path / "runs"), "--trainer.max_steps=2", "--trainer.max_epochs=-1")
    assert list((tmp_path / "runs/t/version_0/checkpoints").glob("best-*"))


def test_folder_of_a_failed_preparation_can_be_reused(tmp_path, capsys):
    (tmp_path / "empty.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "one.txt").write_text("a text\n" * 100)
    with pytest.raises(SystemExit):
        run("tokens", "--inputs", str(tmp_path / "empty.txt"), f"--out={tmp_path / 'c'}", "--val_fraction=0")
    assert "no training document" in capsys.readouterr().err
    run("tokens", "--inputs", str(tmp_path / "one.txt"), f"--out={tmp_path / 'c'}")
    assert (tmp_path / "c/manifest.json").is_file()
