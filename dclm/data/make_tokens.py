"""Conversion of texts to token files, `python -m dclm tokens`; an interrupted conversion continues.

One process reads and writes, while the tokenizer's threads encode a batch of documents. Documents are processed in
order and fill segments (a train and a val file); completed segments are recorded.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dctrain.data.dataset_cache import Preparation, digest_lines, file_digest, preparing, verify_files
from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import write_json

from .corpus_options import CorpusOptions
from .texts import SUFFIXES, Document, find_inputs, read_documents
from .token_files import FORMAT, SPLITS, TOKENIZER, TOKENIZER_DIGEST, Corpus, token_dtype
from .token_segments import CorpusPosition, DocumentBatch, TokenSegment
from .tokenizers import BYTES, Tokenizer, open_tokenizer, tokenizer_from_spec, train_bpe
from .validation_split import ValidationSplit, is_split_within

BATCH_BYTES = 2**22  # text per batch for the tokenizer's threads
BPE_SAMPLE_BYTES = 2**27
VAL_FRACTION, VAL_FRACTION_WITHIN = 0.005, 0.1


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
    if val_fraction and is_split_within(files, Path(out), options):
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


def _note(segment: TokenSegment, place: CorpusPosition, skipped: list[str], out: Path, notes: dict) -> None:
    notes["segments"].append(segment.close())
    notes["skipped"] += skipped
    notes["place"] = place
    write_json(out / "progress.json", notes)


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
