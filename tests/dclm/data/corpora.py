"""Small corpora of numbered texts and tokens."""

import json
import struct
from pathlib import Path

import numpy as np

from dclm.data.corpus_options import CorpusOptions
from dclm.data.make_tokens import prepare
from dclm.data.texts import find_inputs


def texts(count: int, start: int = 0) -> list[str]:
    """Return documents of unequal lengths, some of which are not ASCII; every eleventh document is empty."""
    words = ["", "grün", "plain words", "\u65e5\u672c\u8a9e", "a\nb\tc"]
    return [f"{i} " + " ".join([words[i % 5]] * (i * 7 % 23)) if i % 11 else "" for i in range(start, start + count)]


def write_texts(folder: Path, documents: list[str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{i:03d}.txt" for i in range(len(documents))]
    for file, text in zip(files, documents, strict=True):
        file.write_bytes(text.encode())
    return files


def jsonl(documents: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text, "meta": {"n": i}}) + "\n" for i, text in enumerate(documents)).encode()


def numbered_corpus(folder: Path, num_tokens: int = 1000, num_val: int = 200) -> Path:
    """Write a corpus whose tokens count up modulo 250, with an end token (256) in place of every seventeenth token."""
    splits = {}
    (folder).mkdir(parents=True)
    for split, count in (("train", num_tokens), ("val", num_val)):
        tokens = np.arange(count) % 250
        tokens[16::17] = 256
        tokens.astype("<u2").tofile(folder / f"{split}-0000-000.bin")
        entry = {"file": f"{split}-0000-000.bin", "tokens": count, "bytes": int((tokens < 256).sum()), "max_token": 256}
        splits[split] = [entry | {"documents": count // 17, "sha256": ""}]
    manifest = {"format": "dclm-tokens-1", "dtype": "uint16", "vocab_size": 257, "eos": None, "eos_id": 256}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"splits": splits}))
    return folder


def write_indexed(prefix: Path, documents: list[list[list[int]]], dtype: str = "<u2", code: int = 8) -> Path:
    """Write documents, each of several sequences of ids, in Megatron's indexed format."""
    sequences = [ids for document in documents for ids in document]
    lengths = np.array([len(ids) for ids in sequences])
    places = np.concatenate([[0], lengths.cumsum()[:-1]]) * np.dtype(dtype).itemsize
    marks = np.cumsum([0] + [len(document) for document in documents])
    np.concatenate(sequences).astype(dtype).tofile(f"{prefix}.bin")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(marks))
    parts = (lengths.astype("<i4"), places.astype("<i8"), marks.astype("<i8"))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    return prefix


def prepared(inputs: list[Path], out: Path, batch_bytes: int = 300, **options) -> dict:
    return prepare(find_inputs(inputs), out, CorpusOptions(**options), progress=False, batch_bytes=batch_bytes)
