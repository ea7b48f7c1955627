"""Measurements: perplexity of texts and of target spans."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from dctrain.data.dataset_cache import file_digest
from dctrain.errors import UserError
from dctrain.evaluation.results import Measure

from ..data.texts import (
    RECORDS,
    Document,
    find_inputs,
    gathered,
    read_documents,
    read_records,
    without_lone_surrogates,
)
from ..data.tokenizers import Tokenizer
from ..likelihood import Pair
from .scorer import Scorer

PILE_KEY = "meta.pile_set_name"


def windows(ids: Sequence[int], begin: Sequence[int], length: int, stride: int) -> Iterator[Pair]:
    """Split a text into windows that predict each token once.

    The first window predicts up to `length` tokens, the others at most `stride`, each with as much preceding context as
    fits. With `stride` equal to `length` windows are disjoint, except the last, which is extended to the left.

    Args:
        ids: Tokens of a text.
        begin: Tokens before the text.
        length: Context length of the model.
        stride: Tokens from the end of a window to the end of the next.
    """
    tokens = [*begin, *ids]
    first, end = len(begin), min(len(begin) + length, len(tokens))
    while first < len(tokens):
        yield tokens[max(0, end - length - 1) : first], tokens[first:end]
        first, end = end, min(end + stride, len(tokens))


def text_windows(tokenizer: Tokenizer, texts: list[str], length: int, stride: int) -> list[list[Pair]]:
    """Encode texts, and split each into `windows`."""
    begin = tokenizer.begin_ids or [tokenizer.eos_id]
    return [list(windows(row.tolist(), begin, length, stride)) for row in tokenizer.encode(texts)]


class TextSet(NamedTuple):
    """Perplexity per token and bits per byte of texts, in total and per subset.

    Documents are processed separately, after the token that begins a text; end tokens are not counted.

    Attributes:
        name: Name in the table.
        path: A file for `read_documents`, or a folder of such files.
        text_key: As in `read_documents`.
        subset_key: As in `read_documents`.
        stride: Stride of the windows; None for disjoint ones.
        limit: Maximum number of documents.
    """

    name: str
    path: str
    text_key: str
    subset_key: str
    stride: int | None
    limit: int | None

    @property
    def title(self) -> str:
        """Name the measure, uniquely."""
        return f"texts {self.path}"

    @property
    def files(self) -> list[Path]:
        """The file, or the files of the folder."""
        return find_inputs([Path(self.path)])

    def settings(self, scorer: Scorer) -> dict:
        """Settings that the numbers depend on, other than the model.

        Raises:
            UserError: If the stride exceeds the context length.
        """
        length = scorer.context_length
        stride = self.stride or length
        if stride > length:
            raise UserError(f"stride={stride} must be at most the context of {length}.")
        return {
            "text_key": self.text_key,
            "subset_key": self.subset_key,
            "limit": self.limit,
            "sha256": [file_digest(file) for file in self.files],
            "context_length": length,
            "stride": stride,
            "windows": "disjoint" if stride == length else "sliding",
        }

    def run(self, scorer: Scorer) -> tuple[list[Measure], str | None]:
        """Score all documents; the note reports the windows, and files that are not UTF-8.

        Raises:
            UserError: If a file cannot be read, or there is no text.
        """
        sums: dict[str | None, LossSums] = {}
        files, skipped = self.files, 0
        total = sum(file.stat().st_size for file in files)
        hidden = not scorer.ranks.is_first
        with tqdm(total=total, desc=self.name, unit="B", unit_scale=True, leave=False, disable=hidden) as bar:
            for documents, unreadable in gathered(islice(self._documents(files, bar), self.limit)):
                skipped += unreadable
                self._add(scorer, documents, sums)
        if not sums:
            raise UserError(f"{self.path} has no text to score{' (it is not UTF-8)' if skipped else ''}.")
        nats, num_tokens, num_bytes = zip(*sums.values(), strict=True)
        parts = {f"{self.name}: {p or '(no part)'}": sums[p] for p in sorted(sums, key=str)} if len(sums) > 1 else {}
        everything = {self.name: LossSums(math.fsum(nats), sum(num_tokens), sum(num_bytes))}
        measures = [measure for label, summed in (everything | parts).items() for measure in summed.measures(label)]
        notes = [self._windows(scorer.context_length)]
        notes += [f"skipped {skipped} files that are not UTF-8"] if skipped else []
        notes += [f"no record has {self.subset_key}"] if set(sums) == {None} and self.subset_key != PILE_KEY else []
        return measures, "; ".join(notes)

    def _windows(self, length: int) -> str:
        if (self.stride or length) == length:
            return f"disjoint windows of {length} tokens"
        return f"windows of {length} tokens with stride {self.stride}"

    def _documents(self, files: list[Path], bar: tqdm) -> Iterator[Document]:
        for file in files:
            before = 0
            for document in read_documents(file, self.text_key, self.subset_key):
                yield document
                bar.update(document.position - before)
                before = document.position

    def _add(self, scorer: Scorer, documents: list[Document], sums: dict[str | None, "LossSums"]) -> None:
        length = scorer.context_length
        texts = [document.text for document in documents]
        rows = text_windows(scorer.tokenizer, texts, length, self.stride or length)
        scores = iter(scorer.score([pair for row in rows for pair in row], "windows"))
        for (text, _, subset), row in zip(documents, rows, strict=True):
            if not row:
                continue
            before = sums.get(subset, LossSums(0.0, 0, 0))
            nats = math.fsum([before.nats, *(-next(scores).log_likelihood for _ in row)])
            num_tokens = before.num_tokens + sum(len(targets) for _, targets in row)
            sums[subset] = LossSums(nats, num_tokens, before.num_bytes + len(text.encode()))


def perplexity_of(nats: float, num_tokens: int) -> float:
    """Perplexity of a mean loss; infinite on overflow."""
    try:
        return math.exp(nats / num_tokens)
    except OverflowError:
        return math.inf


def standard_error(share: float, count: int) -> float | None:
    """Standard error of a fraction of `count` answers; None for one answer."""
    return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None


class LossSums(NamedTuple):
    """Negative log-likelihood in nats, tokens and bytes of texts."""

    nats: float
    num_tokens: int
    num_bytes: int

    def measures(self, name: str) -> list[Measure]:
        """Return perplexity and bits per byte."""
        perplexity = perplexity_of(self.nats, self.num_tokens)
        bits = self.nats / math.log(2) / self.num_bytes
        return [
            Measure(name, "perplexity", perplexity, None, False, self.num_tokens, "tokens"),
            Measure(name, "bits_per_byte", bits, None, False, self.num_bytes, "bytes"),
        ]


class SpanFile(NamedTuple):
    """Perplexity of targets given their prompts, per target token (paper, section 4.2, Flan).

    Prompt and target are encoded separately; an empty prompt is replaced by the token that begins a text.

    Attributes:
        name: In the table.
        path: JSONL, compressed or not, or parquet.
        prompt_key: Key of the prompt, which may be empty.
        target_key: Key of the target.
        limit: Maximum number of records.
    """

    name: str
    path: str
    prompt_key: str
    target_key: str
    limit: int | None

    @property
    def title(self) -> str:
        """Name the measure, uniquely."""
        return f"spans {self.path}"

    def settings(self, scorer: Scorer) -> dict:
        """Tell what the numbers depend on beside the model."""
        own = {"prompt_key": self.prompt_key, "target_key": self.target_key, "limit": self.limit}
        return own | {"sha256": file_digest(Path(self.path)), "context_length": scorer.context_length}

    def run(self, scorer: Scorer) -> tuple[list[Measure], str | None]:
        """Score all targets; the note reports truncated prompts.

        Raises:
            UserError: If the file cannot be read or is empty, or a record has no prompt, no target, or a target longer
                than the context.
        """
        prompts, targets, places = self._records()
        tokenizer, encoded = scorer.tokenizer, scorer.tokenizer.encode(prompts)
        contexts = [tokenizer.begin_ids + row.tolist() or [tokenizer.eos_id] for row in encoded]
        pairs = list(zip(contexts, [row.tolist() for row in tokenizer.encode(targets)], strict=True))
        for place, (_, target) in zip(places, pairs, strict=True):
            if not 0 < len(target) <= scorer.context_length:
                raise UserError(f"{place}: a target of {len(target)} tokens; expected 1 to {scorer.context_length}.")
        before = scorer.num_cut
        scores = scorer.score(pairs, self.name)
        num_tokens = sum(len(target) for _, target in pairs)
        perplexity = perplexity_of(-math.fsum(score.log_likelihood for score in scores), num_tokens)
        measure = Measure(self.name, "target_perplexity", perplexity, None, False, num_tokens, "tokens")
        return [measure], scorer.tell_cut(before)

    def _records(self) -> tuple[list[str], list[str], list[str]]:
        """Read prompts, targets and their locations."""
        path = Path(self.path)
        if not path.name.endswith(RECORDS):
            raise UserError(f"{path} is not a file of records; expected {', '.join(RECORDS)}.")
        prompts, targets, places = [], [], []
        for number, record in enumerate(read_records(path, [self.prompt_key, self.target_key])):
            if number == self.limit:
                break
            for key in (self.prompt_key, self.target_key):
                if not isinstance(record.content.get(key), str):
                    raise UserError(f"{record.place}: no text with key {key!r}.")
            prompts.append(without_lone_surrogates(record.content[self.prompt_key]))
            targets.append(without_lone_surrogates(record.content[self.target_key]))
            places.append(record.place)
        if not places:
            raise UserError(f"{path} has no records.")
        return prompts, targets, places
