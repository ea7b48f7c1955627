"""Megatron's indexed format: tokens, documents, and rejection of damaged files."""

import numpy as np
import pytest

from dclm.data import TokenDataModule
from dclm.data.megatron_indexed import IndexedCorpus
from dclm.data.tokenizers import ByteTokenizer
from dctrain.errors import UserError

from .corpora import numbered_corpus, write_indexed

DTYPES = [("<u2", 8), ("<i4", 4), ("<i8", 5)]


def documents(count: int = 40, seed: int = 0) -> list[list[list[int]]]:
    """Return documents of one to three sequences of 0 to 20 bytes, without end tokens."""
    generator = np.random.default_rng(seed)
    return [
        [generator.integers(0, 256, generator.integers(0, 21)).tolist() for _ in range(generator.integers(1, 4))]
        for _ in range(count)
    ]


def module(prefix, validation, stage: str = "fit", **options) -> TokenDataModule:
    options = {"context_length": 16, "batch_size": 2, "tokenizer": "bytes"} | options
    data = TokenDataModule(f"idxmap:{prefix}", validation=validation, **options)
    data.setup(stage)
    return data


@pytest.mark.parametrize(("dtype", "code"), DTYPES)
def test_token_row_equals_concatenated_documents(dtype, code, tmp_path):
    made = documents()
    row = IndexedCorpus(write_indexed(tmp_path / "a", made, dtype, code), ByteTokenizer()).split("train")
    tokens = [i for document in made for sequence in document for i in sequence]
    numbers = np.array([n for n, document in enumerate(made) for sequence in document for _ in sequence])
    assert row[:].tolist() == tokens and row[:].dtype == np.int64
    for start in range(0, len(tokens), 13):
        part = row[start : start + 50]
        found, expected = row.documents(start, part), numbers[start : start + 50]
        assert part.tolist() == tokens[start : start + 50]
        assert np.array_equal(np.diff(found) != 0, np.diff(expected) != 0) and found[0] == 0


def test_data_module_loads_training_and_validation_data(tmp_path):
    made = documents()
    train, val = write_indexed(tmp_path / "a", made), write_indexed(tmp_path / "b", documents(9, seed=1))
    data = module(train, f"idxmap:{val}", separate_documents=True)
    tokens = [i for document in made for sequence in document for i in sequence]
    batches = list(data.train_dataloader())
    for batch in batches:
        for number, row, targets in zip(batch.samples, batch.input_ids, batch.targets, strict=True):
            assert row.tolist() == tokens[number * 16 : number * 16 + 16]
            assert targets.tolist() == tokens[number * 16 + 1 : number * 16 + 17]
    assert max(int(batch.document_ids.max()) for batch in batches) >= 1
    assert len(list(data.val_dataloader())) == -(-data.num_val_samples // 2)
    assert data.bytes_per_token == 1.0
    assert data.state_dict()["tokenizer"] == "bytes"
    folder = numbered_corpus(tmp_path / "c")
    assert module(train, str(folder)).num_val_samples == 199 // 16


def test_invalid_options_and_damaged_files_raise_user_error(tmp_path):
    train = write_indexed(tmp_path / "a", documents())
    val = f"idxmap:{write_indexed(tmp_path / 'b', documents(9, seed=1))}"
    for options, message in (
        ({"tokenizer": None}, "has no tokenizer; data.tokenizer is"),
        ({"vocab_size": 100}, "has a vocabulary of 257; data.vocab_size=100 must be at least that"),
    ):
        with pytest.raises(UserError, match=message):
            module(train, val, **options)
    with pytest.raises(UserError, match="is used for training only; data.validation is required"):
        module(train, None)
    with pytest.raises(UserError, match="nothing.idx is missing; expected idxmap:PREFIX of PREFIX.bin and PREFIX.idx"):
        module(tmp_path / "nothing", val)
    index, tokens = tmp_path / "a.idx", tmp_path / "a.bin"
    whole, words = index.read_bytes(), tokens.read_bytes()
    for content, message in (
        (b"{" + whole[1:], "is not an index in Megatron's format"),
        (whole[:20], "is not an index in Megatron's format"),
        (whole[:-8], "document boundaries require"),
        (whole[:9] + b"\x02" + whole[10:], "has version 2 and dtype code 8; expected version 1"),
        (whole[:17] + b"\x06" + whole[18:], "has version 1 and dtype code 6; expected version 1"),
    ):
        index.write_bytes(content)
        with pytest.raises(UserError, match=message):
            module(train, val)
    index.write_bytes(whole)
    tokens.write_bytes(words[:-2])
    with pytest.raises(UserError, match="the files do not belong together"):
        module(train, val)
    write_indexed(tmp_path / "a", [[[300] * 40]])
    data = module(train, val)
    with pytest.raises(UserError, match="has token 300 near token 0; expected 0 to 256"):
        data.train_samples[data.train_dataloader().batch_sampler.__iter__().__next__()[0]]


def test_tokens_equal_to_the_mask_id_are_rejected(tmp_path):
    """The embedding has spare rows, so no other check detects these tokens."""
    train = write_indexed(tmp_path / "a", [[[1, 2, 257, 3] * 10]])
    data = module(train, f"idxmap:{train}", mask_fraction=0.15, vocab_multiple=128)
    with pytest.raises(UserError, match="a has token 257 near token .*; expected 0 to 256"):
        list(data.train_dataloader())
