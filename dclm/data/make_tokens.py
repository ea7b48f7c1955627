"""Conversion of texts to token files, `python -m dclm tokens`; an interrupted conversion continues.

One process reads and writes, while the tokenizer's threads encode a batch of documents. Documents are processed in
order and fill segments (a train and a val file); completed segments are recorded.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from dctrain.data.dataset_cache import Preparation, digest_lines, file_digest, preparing, verify_files
from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import atomic_write, write_json

from .texts import SUFFIXES, Document, find_inputs, read_documents
from .token_files import DTYPES, FORMAT, SPLITS, TOKENIZER, TOKENIZER_DIGEST, Corpus, token_dtype
from .tokenizers import BYTES, Tokenizer, open_tokenizer, tokenizer_from_spec, train_bpe

BATCH_BYTES = 2**22  # text per batch for the tokenizer's threads
BPE_SAMPLE_BYTES = 2**27
VAL_FRACTION, VAL_FRACTION_WITHIN = 0.005, 0.1
PLAN = "plan.json"
MAX_PEEKED = 10_000  # maximum documents searched for a validation document


@dataclass(frozen=True)
class CorpusOptions:
    """Settings that determine the content of a corpus, in addition to its inputs.

    Attributes:
        tokenizer: "bytes", "bpe:SIZE" (trained on the inputs), a `tokenizer.json`, or a hub name.
        eos: End-of-text token; None for the tokenizer's usual one.
        text_key: Key of the text in JSONL and parquet.
        val_fraction: Fraction of the documents, selected by a hash of their content, for the split "val".
        segment_tokens: Training tokens per file.
        num_val: Number of inputs, the last ones, whose documents are all in the split "val".
        is_within: Whether the split "val" is the last part of every document, because there are too few documents.
    """

    tokenizer: str = BYTES
    eos: str | None = None
    text_key: str = "text"
    val_fraction: float = 0.005
    segment_tokens: int = 10**8
    num_val: int = 0
    is_within: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.val_fraction < 1 or self.segment_tokens < 1:
            raise UserError(
                f"val_fraction={self.val_fraction} must be in [0, 1), segment_tokens={self.segment_tokens} at least 1."
            )
        kind, _, size = self.tokenizer.partition(":")
        if kind == "bpe" and not (size.isdecimal() and len(size) <= 8):
            raise UserError(f"tokenizer={self.tokenizer!r}; expected bpe:SIZE, such as bpe:16384.")
        if self.tokenizer == BYTES and self.eos is not None:
            raise UserError(f"eos={self.eos!r} is not supported with bytes; remove it.")


class CorpusPosition(NamedTuple):
    """Position of a preparation: number of documents read from input `file`."""

    file: int = 0
    documents: int = 0


def make_tokens(
    inputs: Sequence[str],
    out: str,
    tokenizer: str = BYTES,
    eos: str | None = None,
    suffix: Sequence[str] = SUFFIXES,
    text_key: str = "text",
    val_fraction: float | None = None,
    segment_tokens: int = 10**8,
    val: Sequence[str] = (),
) -> None:
    """Convert texts to token files.

    Args:
        inputs: Text files, JSONL, JSONL.zst (the Pile's format), .json.gz (C4's) and parquet, or folders of them.
        out: Folder of the corpus.
        tokenizer: "bytes", "bpe:SIZE" to train one on the inputs, a tokenizer.json, or a hub name.
        eos: End-of-text token; default: the tokenizer's usual one.
        suffix: File suffixes used in folders.
        text_key: Key of the text in JSONL and parquet.
        val_fraction: Fraction of the documents of `inputs`, selected by content, for validation; default: 0.005, or 0
            with `val`. If no document is selected because there are few, the last part of each document is used;
            default: 0.1.
        segment_tokens: Approximate training tokens per file.
        val: Files or folders whose documents are all for validation, such as the Pile's val.jsonl.zst.
    """
    files = find_inputs([Path(path) for path in inputs], tuple(suffix))
    val_files = find_inputs([Path(path) for path in val], tuple(suffix)) if val else []
    twice = {file.resolve() for file in files} & {file.resolve() for file in val_files}
    if twice:
        raise UserError(f"{min(twice)} is in both inputs and val; expected one of the two.")
    is_default = val_fraction is None
    if is_default:
        val_fraction = 0.0 if val else VAL_FRACTION
    options = CorpusOptions(tokenizer, eos, text_key, val_fraction, segment_tokens, len(val_files))
    if val_fraction and _is_split_within(files, Path(out), options):
        options = replace(options, is_within=True, val_fraction=VAL_FRACTION_WITHIN if is_default else val_fraction)
        print(f"few documents: the last {options.val_fraction:.1%} of each is used for validation")
    manifest = prepare(files + val_files, Path(out), options)
    counts = ", ".join(f"{count:,} {split} tokens" for split, count in manifest["tokens"].items())
    print(f"{counts}; vocabulary {manifest['vocab_size']}; manifest {Path(out) / 'manifest.json'}")
    if manifest["tokens"]["val"] == 0:
        print("warning: there are no validation tokens; to validate on this corpus, remove it and set --val_fraction")
    if manifest["skipped"]:
        print(f"skipped files that are not UTF-8 (listed in the manifest): {len(manifest['skipped'])}")


def verify(tokens: str) -> None:
    """Verify the checksums of a corpus; takes two to three seconds per GB.

    Args:
        tokens: Folder written by `dclm tokens`.
    """
    corpus = Corpus(tokens)
    entries = [entry for split in SPLITS for entry in corpus.manifest["splits"].get(split, [])]
    counts = [
        {"file": entry["documents_file"], "sha256": entry["documents_sha256"]}
        for entry in entries
        if "documents_file" in entry
    ]
    digest = corpus.manifest.get(TOKENIZER_DIGEST)
    words = [] if digest is None else [{"file": TOKENIZER, "sha256": digest}]
    verify_files(corpus.folder, entries + counts + words)


def prepare(
    files: list[Path], out: Path, options: CorpusOptions, *, progress: bool = True, batch_bytes: int = BATCH_BYTES
) -> dict:
    """Prepare a corpus; repeating the call changes nothing.

    Args:
        files: Texts, JSONL and JSONL.zst, in a fixed order.
        out: Folder of the corpus.
        options: Settings of the corpus.
        progress: Whether to show a progress bar over the bytes read.
        batch_bytes: Approximate text per batch for the tokenizer's threads.

    Returns:
        The manifest.

    Raises:
        UserError: If an input cannot be read, `out` was prepared from different inputs or options, or another process
            is preparing it.
    """
    inputs = digest_lines(f"{file.resolve()} {file.stat().st_size}" for file in files)
    described = {"inputs": inputs, **asdict(options)}
    for name in ("num_val", "is_within"):
        if not described[name]:
            del described[name]  # not recorded in corpora from before the option existed
    with preparing(out, described, ("*.bin", "*-documents.npy", "progress.json")) as preparation:
        manifest = preparation.manifest() or _prepare(files, preparation, options, progress, batch_bytes)
    for entry in (entry for entries in manifest["splits"].values() for entry in entries):
        if not (out / entry["file"]).is_file():
            raise UserError(
                f"{out / entry['file']} is missing; remove {out / 'manifest.json'} to write all files again."
            )
    return manifest


def _prepare(
    files: list[Path], preparation: Preparation, options: CorpusOptions, progress: bool, batch_bytes: int
) -> dict:
    tokenizer = _make_tokenizer(files, preparation, options)
    preparation.begin()
    path = preparation.out / "progress.json"
    notes = {"place": CorpusPosition(), "segments": [], "skipped": []}
    if path.is_file():
        with as_user_error(f"{path} is damaged; remove the folder to start again"):
            notes = json.loads(path.read_text())
    total = sum(file.stat().st_size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokens", disable=not progress) as bar:
        documents = _read(files, options.text_key, CorpusPosition(*notes["place"]), bar.update)
        split = ValidationSplit(options, len(files) - options.num_val)
        _write(
            _encode(tokenizer, _batches(documents, batch_bytes, split)),
            files,
            preparation.out,
            tokenizer,
            options,
            notes,
        )
    if not any("train" in segment for segment in notes["segments"]):
        preparation.forget()
        skipped = len(notes["skipped"])
        unread = f"; {skipped} of {len(files)} files are not UTF-8 text" if skipped else ""
        raise UserError(f"the inputs have no training documents (val_fraction={options.val_fraction}){unread}.")
    manifest = _manifest(notes, tokenizer, options)
    if tokenizer.spec != BYTES:
        manifest[TOKENIZER_DIGEST] = file_digest(preparation.out / TOKENIZER)
    preparation.finish(manifest)
    path.unlink()
    return manifest


def _make_tokenizer(files: list[Path], preparation: Preparation, options: CorpusOptions) -> Tokenizer:
    """Open the tokenizer, or train it on the first documents of every input; write its JSON next to the tokens."""
    path = preparation.out / "tokenizer.json"
    if path.is_file() and preparation.has_begun:
        return tokenizer_from_spec(path.read_text(), options.eos)
    kind, _, size = options.tokenizer.partition(":")
    if kind == "bpe":
        tokenizer = train_bpe(_sample(files, options), int(size))
    else:
        tokenizer = open_tokenizer(options.tokenizer, options.eos)
    if tokenizer.spec != BYTES:
        write_json(path, json.loads(tokenizer.spec))
    return tokenizer


def _sample(files: list[Path], options: CorpusOptions) -> Iterator[str]:
    """Yield training documents for a tokenizer, with the same maximum number of bytes per input."""
    files = files[: len(files) - options.num_val]
    split = ValidationSplit(options, len(files))
    share = max(1, BPE_SAMPLE_BYTES // len(files))
    for file in files:
        taken = 0
        for document in read_documents(file, options.text_key):
            if taken >= share:
                break
            for text, is_val in split.parts(document.text, 0) if document.text is not None else ():
                if not is_val:
                    taken += len(text)
                    yield text


def _read(
    files: list[Path], text_key: str, start: CorpusPosition, advance: Callable[[int], object]
) -> Iterator[tuple[CorpusPosition, Document]]:
    """Read the documents from a position on, each with the position after it."""
    advance(sum(file.stat().st_size for file in files[: start.file]))
    for number in range(start.file, len(files)):
        taken = start.documents if number == start.file else 0
        position = 0
        for count, document in enumerate(read_documents(files[number], text_key), 1):
            if count > taken:
                yield CorpusPosition(number, count), document
            advance(document.position - position)
            position = document.position


@dataclass(frozen=True)
class ValidationSplit:
    """Split of documents into training and validation parts.

    Attributes:
        options: Settings of the split.
        num_files: Number of training inputs; all later inputs are for validation.
    """

    options: CorpusOptions
    num_files: int

    def parts(self, text: str, file: int) -> list[tuple[str, bool]]:
        """Return the parts of a document of input `file`, each with whether it is for validation."""
        if file >= self.num_files:
            return [(text, True)]
        if not self.options.is_within:
            return [(text, _is_val(text, self.options.val_fraction))]
        cut = _cut(text, math.ceil(len(text) * self.options.val_fraction))
        return [(part, is_val) for part, is_val in ((text[:cut], False), (text[cut:], True)) if part]


def _cut(text: str, count: int) -> int:
    """Return the start of the last `count` characters, moved back to a line or word boundary if one is near."""
    position = len(text) - count
    start = max(0, position - count // 2)
    return next((at + 1 for end in "\n " if (at := text.rfind(end, start, position)) >= 0), position)


def _is_split_within(files: list[Path], out: Path, options: CorpusOptions) -> bool:
    """Whether documents are split within: as recorded for an existing corpus, else if no document is selected."""
    plan = out / PLAN
    if plan.is_file():
        with suppress(ValueError, AttributeError):  # a damaged plan raises an error in a later comparison
            return bool(json.loads(plan.read_text()).get("is_within", False))
    return not _has_val(files, options)


def _has_val(files: list[Path], options: CorpusOptions) -> bool:
    """Whether any document is selected for validation; True if there are too many to check."""
    count = 0
    for file in files:
        for document in read_documents(file, options.text_key):
            count += 1
            if count > MAX_PEEKED or (document.text is not None and _is_val(document.text, options.val_fraction)):
                return True
    return False


class DocumentBatch(NamedTuple):
    """A batch of documents or parts of documents.

    Attributes:
        texts: The documents.
        is_val: Whether each is for validation.
        unreadable: Indices of files that are not UTF-8.
        place: Position after the batch.
    """

    texts: list[str]
    is_val: list[bool]
    unreadable: list[int]
    place: CorpusPosition


def _batches(
    documents: Iterable[tuple[CorpusPosition, Document]], batch_bytes: int, split: ValidationSplit
) -> Iterator[DocumentBatch]:
    """Group documents into batches for the tokenizer's threads."""
    batch, size = DocumentBatch([], [], [], CorpusPosition()), 0
    for place, document in documents:
        if document.text is None:
            batch.unreadable.append(place.file)
        else:
            for text, is_val in split.parts(document.text, place.file):
                batch.texts.append(text)
                batch.is_val.append(is_val)
            size += len(document.text)
        batch = batch._replace(place=place)
        if size >= batch_bytes:
            yield batch
            batch, size = DocumentBatch([], [], [], place), 0
    if batch.texts or batch.unreadable:
        yield batch


def _encode(tokenizer: Tokenizer, batches: Iterable[DocumentBatch]) -> Iterator[tuple[DocumentBatch, list[np.ndarray]]]:
    """Encode each batch while the previous one is written and the next one is read."""
    before = None
    with ThreadPoolExecutor(1) as pool:
        for batch in batches:
            encoding = batch, pool.submit(tokenizer.encode, batch.texts)
            if before is not None:
                yield before[0], before[1].result()
            before = encoding
        if before is not None:
            yield before[0], before[1].result()


def _write(
    encoded: Iterator[tuple[DocumentBatch, list[np.ndarray]]],
    files: list[Path],
    out: Path,
    tokenizer: Tokenizer,
    options: CorpusOptions,
    notes: dict,
) -> None:
    """Write segments; record each completed one in `notes` and in `progress.json`."""
    segment, skipped = None, []
    try:
        for batch, rows in encoded:
            segment = segment or TokenSegment(out, len(notes["segments"]), tokenizer)
            segment.add(batch, rows)
            skipped += [str(files[number]) for number in batch.unreadable]
            if segment.num_tokens >= options.segment_tokens:
                _note(segment, batch.place, skipped, out, notes)
                segment, skipped = None, []
        if segment is not None:
            _note(segment, CorpusPosition(len(files)), skipped, out, notes)
    except BaseException:
        if segment is not None:
            segment.discard()
        raise


def _note(segment: "TokenSegment", place: CorpusPosition, skipped: list[str], out: Path, notes: dict) -> None:
    notes["segments"].append(segment.close())
    notes["skipped"] += skipped
    notes["place"] = place
    write_json(out / "progress.json", notes)


class TokenSegment:
    """A segment being written: a train and a val file.

    Args:
        out: Folder of the corpus.
        number: Index of the segment.
        tokenizer: The corpus's tokenizer.
    """

    def __init__(self, out: Path, number: int, tokenizer: Tokenizer) -> None:
        self.out, self.eos_id = out, tokenizer.eos_id
        self.dtype = DTYPES[token_dtype(tokenizer.vocab_size)]
        self.names = {split: f"{split}-{number:04d}.bin" for split in SPLITS}
        self.files = {
            split: open(out / f"{name}.partial", "wb")  # noqa: SIM115  closed by close()
            for split, name in self.names.items()
        }
        self.hashes = {split: hashlib.sha256() for split in SPLITS}
        self.counts = {split: {"tokens": 0, "bytes": 0, "documents": 0, "max_token": -1} for split in SPLITS}
        self.val_documents: list[tuple[int, int]] = []  # tokens and bytes per document

    @property
    def num_tokens(self) -> int:
        """Training tokens so far."""
        return self.counts["train"]["tokens"]

    def add(self, batch: DocumentBatch, rows: list[np.ndarray]) -> None:
        """Add documents, each as text and as tokens."""
        for text, is_val, ids in zip(batch.texts, batch.is_val, rows, strict=True):
            split = "val" if is_val else "train"
            data = np.append(ids.astype(self.dtype), self.dtype.type(self.eos_id)).tobytes()
            self.files[split].write(data)
            self.hashes[split].update(data)
            count = self.counts[split]
            count["tokens"] += len(ids) + 1
            count["bytes"] += len(text.encode())
            count["documents"] += 1
            count["max_token"] = max(count["max_token"], self.eos_id, int(ids.max(initial=0)))
            if split == "val":
                self.val_documents.append((len(ids) + 1, len(text.encode())))

    def close(self) -> dict:
        """Finish the files and return their entries for the manifest; empty files are removed."""
        entries = {}
        for split, name in self.names.items():
            file = self.files[split]
            file.flush()
            os.fsync(file.fileno())
            file.close()
            if self.counts[split]["tokens"]:
                os.replace(file.name, self.out / name)
                entries[split] = {"file": name, **self.counts[split], "sha256": self.hashes[split].hexdigest()}
            else:
                os.remove(file.name)
        if self.val_documents:
            path = self.out / self.names["val"].replace(".bin", "-documents.npy")
            with atomic_write(path) as file:
                np.save(file, np.array(self.val_documents, dtype="<i8"))
            entries["val"] |= {"documents_file": path.name, "documents_sha256": file_digest(path)}
        return entries

    def discard(self) -> None:
        """Remove unfinished files."""
        for file in self.files.values():
            with suppress(OSError):  # flushing fails on a full disk
                file.close()
            Path(file.name).unlink(missing_ok=True)


def _is_val(text: str, fraction: float) -> bool:
    """Select by a hash of the content, so that equal documents are in the same split."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _manifest(notes: dict, tokenizer: Tokenizer, options: CorpusOptions) -> dict:
    splits = {split: [segment[split] for segment in notes["segments"] if split in segment] for split in SPLITS}
    return {
        "format": FORMAT,
        "dtype": token_dtype(tokenizer.vocab_size),
        "vocab_size": tokenizer.vocab_size,
        "eos": options.eos,
        "eos_id": tokenizer.eos_id,
        "tokens": {split: sum(entry["tokens"] for entry in entries) for split, entries in splits.items()},
        "skipped": notes["skipped"],
        "splits": splits,
    }
