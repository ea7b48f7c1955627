"""From texts to token files, in parallel; an interrupted preparation goes on where it stopped.

The inputs are cut into parts: a large file alone, small ones together. Each part is worked through in order by one
process, which writes segments (a train and a val file) and notes each whole one, so that the result does not depend on
the number of processes or on interruptions.
"""

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from dctrain.errors import UserError
from dctrain.files import write_json

from .texts import Document, read_documents
from .token_files import DTYPES, FORMAT, SPLITS, token_dtype
from .tokenizers import BYTES, Tokenizer, open_tokenizer, tokenizer_from_spec, train_bpe

PART_BYTES = 2**26
BATCH_DOCUMENTS = 256
BPE_SAMPLE_BYTES = 2**27


@dataclass(frozen=True)
class Options:
    """What decides the content of a corpus, beside its inputs.

    Attributes:
        tokenizer: "bytes", "bpe:SIZE" (trained on the inputs), a `tokenizer.json`, or a hub name.
        eos: Token that ends documents; None takes the tokenizer's usual one.
        text_key: Key of the text in JSONL.
        val_fraction: Part of the documents, chosen by their content, that becomes the split "val".
        segment_tokens: Training tokens after which a new file begins.
    """

    tokenizer: str = BYTES
    eos: str | None = None
    text_key: str = "text"
    val_fraction: float = 0.005
    segment_tokens: int = 10**8

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.val_fraction < 1 or self.segment_tokens < 1:
            raise UserError(
                f"val_fraction={self.val_fraction} must be in [0, 1), segment_tokens={self.segment_tokens} at least 1."
            )
        kind, _, size = self.tokenizer.partition(":")
        if kind == "bpe" and not size.isdigit():
            raise UserError(f"tokenizer={self.tokenizer!r}; accepted: bpe:SIZE, such as bpe:16384.")


@dataclass(frozen=True)
class Part:
    """A share of the inputs that one process works through."""

    number: int
    files: tuple[Path, ...]
    out: Path
    options: Options
    tokenizer_spec: str

    @property
    def notes(self) -> Path:
        """File that tells how far the part is."""
        return self.out / "parts" / f"{self.number:04d}.json"


def prepare(files: list[Path], out: Path, options: Options, num_workers: int, *, progress: bool = True) -> dict:
    """Prepare a corpus; again, it changes nothing.

    Args:
        files: Texts, JSONL and JSONL.zst, in an order that stays the same.
        out: Folder of the corpus.
        options: What to make.
        num_workers: Processes; 0 works in this one.
        progress: Show a bar over the bytes read.

    Returns:
        The manifest.

    Raises:
        UserError: If an input cannot be read, `out` was made from other inputs or options, or another process is at it.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / ".lock", timeout=0):
            return _prepare(files, out, options, num_workers, progress)
    except Timeout as error:
        raise UserError(f"{out} is being prepared by another process.") from error


def _prepare(files: list[Path], out: Path, options: Options, num_workers: int, progress: bool) -> dict:
    plan = _make_plan(files, options)
    _check_plan(out, plan)
    manifest = out / "manifest.json"
    if not manifest.is_file():
        tokenizer = _make_tokenizer(files, out, options)
        (out / "parts").mkdir(exist_ok=True)
        write_json(out / "plan.json", plan)
        parts = [Part(number, tuple(group), out, options, tokenizer.spec) for number, group in enumerate(_group(files))]
        total = sum(file.stat().st_size for file in files)
        with tqdm(total=total, unit="B", unit_scale=True, desc="tokens", disable=not progress) as bar:
            notes = _run(parts, num_workers, bar.update)
        write_json(manifest, _manifest(notes, tokenizer, options))
    return json.loads(manifest.read_text())


def _make_plan(files: list[Path], options: Options) -> dict:
    """Tell what a folder is made from."""
    listing = "\n".join(f"{file.resolve()} {file.stat().st_size}" for file in files)
    return {"inputs": hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest(), **asdict(options)}


def _check_plan(out: Path, plan: dict) -> None:
    """Refuse a folder made from something else."""
    path = out / "plan.json"
    if path.is_file():
        before = json.loads(path.read_text())
        changed = [name for name in plan if plan[name] != before.get(name)]
        if changed:
            raise UserError(f"{out} was made with other {', '.join(changed)}; nothing was overwritten.")
    elif (out / "manifest.json").exists():
        raise UserError(f"{out} holds a corpus whose making is not known (no plan.json); nothing was overwritten.")


def _make_tokenizer(files: list[Path], out: Path, options: Options) -> Tokenizer:
    """Open the tokenizer, or train it on documents from the start of every input; keep its JSON beside the tokens."""
    path = out / "tokenizer.json"
    if path.is_file() and (out / "plan.json").is_file():
        return tokenizer_from_spec(path.read_text(), options.eos)
    kind, _, size = options.tokenizer.partition(":")
    if kind == "bpe":
        tokenizer = train_bpe(_sample(files, options), int(size))
    else:
        tokenizer = open_tokenizer(options.tokenizer, options.eos)
    if tokenizer.spec != BYTES:
        write_json(path, json.loads(tokenizer.spec))
    return tokenizer


def _sample(files: list[Path], options: Options) -> Iterator[str]:
    """Yield training documents for a tokenizer, equally many bytes of every input at most."""
    share = max(1, BPE_SAMPLE_BYTES // len(files))
    for file in files:
        taken = 0
        for document in read_documents(file, options.text_key):
            if taken >= share:
                break
            if document.text is not None and not _is_val(document.text, options.val_fraction):
                taken += len(document.text)
                yield document.text


def _group(files: list[Path]) -> Iterator[list[Path]]:
    group: list[Path] = []
    size = 0
    for file in files:
        if group and size + file.stat().st_size > PART_BYTES:
            yield group
            group, size = [], 0
        group.append(file)
        size += file.stat().st_size
    yield group


def _run(parts: list[Part], num_workers: int, advance: Callable[[int], object]) -> list[dict]:
    """Work through all parts; return their notes in order."""
    if num_workers == 0:
        return [run_part(part, advance) for part in parts]
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    shown = 0
    with ProcessPoolExecutor(num_workers, context, _start_worker, (counter,)) as pool:
        futures = [pool.submit(_run_part_in_worker, part) for part in parts]
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                advance(counter.value - shown)
                shown = counter.value
                for future in done:
                    future.result()
        except BaseException:
            for worker in multiprocessing.active_children():  # their notes tell where to go on
                worker.terminate()
            raise
    return [future.result() for future in futures]


_counter = None  # of the bytes that all workers have read


def _start_worker(counter) -> None:
    global _counter
    _counter = counter
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Let no worker go on writing when the process that started it was killed."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _run_part_in_worker(part: Part) -> dict:
    def advance(num_bytes: int) -> None:
        with _counter.get_lock():
            _counter.value += num_bytes

    return run_part(part, advance)


def run_part(part: Part, advance: Callable[[int], object]) -> dict:
    """Work through a part from where its notes say; return them when it is done."""
    notes = {"documents": 0, "skipped": [], "segments": [], "done": False}
    if part.notes.is_file():
        notes = json.loads(part.notes.read_text())
    tokenizer = tokenizer_from_spec(part.tokenizer_spec, part.options.eos)
    documents = _all_documents(part, advance)
    for _ in islice(documents, notes["documents"]):
        pass
    while not notes["done"]:
        segment = _Segment(part, len(notes["segments"]), tokenizer)
        while not segment.is_full():
            batch = list(islice(documents, BATCH_DOCUMENTS))
            if not batch:
                notes["done"] = True
                break
            notes["documents"] += len(batch)
            notes["skipped"] += [str(file) for file, document in batch if document.text is None]
            segment.add([document.text for _, document in batch if document.text is not None])
        notes["segments"].append(segment.close())
        write_json(part.notes, notes)
    return notes


def _all_documents(part: Part, advance: Callable[[int], object]) -> Iterator[tuple[Path, Document]]:
    for file in part.files:
        before = 0
        for document in read_documents(file, part.options.text_key):
            yield file, document
            advance(document.position - before)
            before = document.position


class _Segment:
    """A train and a val file that are being written."""

    def __init__(self, part: Part, number: int, tokenizer: Tokenizer) -> None:
        self.part, self.tokenizer = part, tokenizer
        self.dtype = DTYPES[token_dtype(tokenizer.vocab_size)]
        self.names = {split: f"{split}-{part.number:04d}-{number:03d}.bin" for split in SPLITS}
        self.files = {
            split: open(part.out / f"{name}.partial", "wb")  # noqa: SIM115  closed by close()
            for split, name in self.names.items()
        }
        self.hashes = {split: hashlib.sha256() for split in SPLITS}
        self.counts = {split: {"tokens": 0, "bytes": 0, "documents": 0, "max_token": -1} for split in SPLITS}

    def is_full(self) -> bool:
        return self.counts["train"]["tokens"] >= self.part.options.segment_tokens

    def add(self, texts: list[str]) -> None:
        for text, ids in zip(texts, self.tokenizer.encode(texts), strict=True):
            split = "val" if _is_val(text, self.part.options.val_fraction) else "train"
            data = np.append(ids.astype(self.dtype), self.dtype.type(self.tokenizer.eos_id)).tobytes()
            self.files[split].write(data)
            self.hashes[split].update(data)
            count = self.counts[split]
            count["tokens"] += len(ids) + 1
            count["bytes"] += len(text.encode())
            count["documents"] += 1
            count["max_token"] = max(count["max_token"], self.tokenizer.eos_id, int(ids.max(initial=0)))

    def close(self) -> dict:
        """Put the files in their places and return their entries of the manifest; empty ones are dropped."""
        entries = {}
        for split, name in self.names.items():
            file = self.files[split]
            file.flush()
            os.fsync(file.fileno())
            file.close()
            if self.counts[split]["tokens"]:
                os.replace(file.name, self.part.out / name)
                entries[split] = {"file": name, **self.counts[split], "sha256": self.hashes[split].hexdigest()}
            else:
                os.remove(file.name)
        return entries


def _is_val(text: str, fraction: float) -> bool:
    """Choose by content, so that equal documents lie in one split."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _manifest(notes: list[dict], tokenizer: Tokenizer, options: Options) -> dict:
    segments = [segment for part in notes for segment in part["segments"]]
    splits = {split: [segment[split] for segment in segments if split in segment] for split in SPLITS}
    if not splits["train"]:
        raise UserError("the inputs hold no training document.")
    return {
        "format": FORMAT,
        "dtype": token_dtype(tokenizer.vocab_size),
        "vocab_size": tokenizer.vocab_size,
        "eos": options.eos,
        "eos_id": tokenizer.eos_id,
        "tokens": {split: sum(entry["tokens"] for entry in entries) for split, entries in splits.items()},
        "skipped": [file for part in notes for file in part["skipped"]],
        "splits": splits,
    }
