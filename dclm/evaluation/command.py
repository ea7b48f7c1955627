"""`dclm evaluate`: measures models one after the other, keeps every result at once, prints one table."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from dctrain.cli import relative
from dctrain.errors import UserError, told_as

from ..data.texts import find_inputs
from ..decoder import Decoder
from ..load import LoadedModel, load_model
from .journal import Journal
from .measures import Measurable, SpanFile, TextFile
from .ranks import Ranks, joined_ranks
from .results import IDENTITY, Results, describe_model, open_results, read_results, write_csv
from .scorer import Scorer
from .table import evaluation_table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def evaluate(
    checkpoint: Sequence[str] = (),
    texts: Sequence[str] = (),
    spans: Sequence[str] = (),
    tasks: Sequence[str] = (),
    num_fewshot: Sequence[int] = (0,),
    compare: Sequence[str] = (),
    out: str = "evaluation",
    tokenizer: str | None = None,
    context_length: int | None = None,
    stride: int | None = None,
    text_key: str = "text",
    subset_key: str = "meta.pile_set_name",
    prompt_key: str = "prompt",
    target_key: str = "target",
    task_folder: str | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
    dtype: str | None = None,
) -> None:
    """Measure models: perplexity of texts and of target spans, and tasks of the lm-evaluation-harness.

    Results are kept as they come; the same command goes on where it was interrupted. Several processes share the work:
    torchrun --nproc_per_node N -m dclm evaluate ...

    Args:
        checkpoint: Models: .ckpt files, folders of runs, or folders of DCFormer, DCPythia, Pythia or Llama models.
        texts: Files or folders whose texts are scored: text files, JSONL, JSONL.zst, .json.gz, parquet.
        spans: Files of records (JSONL or parquet) with a prompt and a target, which is scored.
        tasks: Names of tasks, groups or tags of the lm-evaluation-harness.
        num_fewshot: Examples before each question; several numbers ask each task with each.
        compare: Results (JSON) of earlier evaluations, which stand in the table before these models; differences are to
            the first of the table.
        out: Folder of the results: MODEL.json, table.csv, table.md.
        tokenizer: "bytes", a tokenizer.json or a hub name; by default the one in the checkpoint or folder.
        context_length: Most tokens that a model reads; longer texts lose their beginning. By default the model's own.
        stride: Tokens that a window of a text adds to the one before; by default windows are disjoint.
        text_key: Key of the text in records.
        subset_key: Key of the name of the part of a data set that a record is of.
        prompt_key: Key of the prompt in records of spans.
        target_key: Key of the target in records of spans.
        task_folder: Folder of task files of one's own, beside the harness's tasks.
        limit: Only this many documents, records and questions of each, to try things out.
        batch_size: Texts read at a time.
        device: Where to run, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; by default that of the weights.
    """
    _check_asked(checkpoint, [*texts, *spans, *tasks], compare)
    _check_ranges(limit=limit, batch_size=batch_size, context_length=context_length, stride=stride)
    if any(shots < 0 for shots in num_fewshot):
        raise UserError(f"num_fewshot={list(num_fewshot)} must not be negative.")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r}; accepted: {', '.join(DTYPES)}.")
    measures = [
        *(TextFile(str(path), text_key, subset_key, stride, limit) for path in _files(texts)),
        *(SpanFile(str(path), prompt_key, target_key, limit) for path in _files(spans)),
        *_tasks(tasks, num_fewshot, limit, task_folder),
    ]
    earlier = [read_results(Path(path)) for path in compare]
    with joined_ranks() as ranks:
        folder, found = Path(out), []
        if checkpoint:
            folder.mkdir(parents=True, exist_ok=True)
        for path, name in zip(checkpoint, _names(checkpoint), strict=True):
            load = partial(load_model, path, tokenizer, dtype=DTYPES.get(dtype), device=ranks.device(device))
            evaluation = Evaluation(name, folder, measures, ranks, batch_size, context_length)
            found.append(evaluation.run(load(), path))
        if ranks.is_first:
            _report([*earlier, *found], folder if checkpoint else None)


def _check_asked(checkpoint: Sequence[str], asked: Sequence[str], compare: Sequence[str]) -> None:
    if asked and not checkpoint:
        raise UserError("checkpoint names no model to measure.")
    if not checkpoint and not compare:
        raise UserError("checkpoint must name at least one model, or compare results of earlier evaluations.")
    if checkpoint and not asked:
        raise UserError("nothing to measure: name texts, spans or tasks.")


def _check_ranges(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise UserError(f"{name}={number} must be at least 1.")


def _files(paths: Sequence[str]) -> list[Path]:
    return find_inputs([Path(path) for path in paths]) if paths else []


def _tasks(names: Sequence[str], num_fewshot: Sequence[int], limit: int | None, folder: str | None) -> list:
    """Find the tasks of the harness, which is loaded only then."""
    if not names:
        return []
    try:
        from .harness import find_tasks
    except ModuleNotFoundError as error:
        raise UserError(f'tasks need the lm-evaluation-harness: pip install "dcmha[evaluate]" ({error})') from error
    return find_tasks(names, num_fewshot, limit, folder)


def _names(checkpoints: Sequence[str]) -> list[str]:
    """Name models after their folders: a run after its experiment too, a checkpoint after its run."""
    names = []
    for checkpoint in checkpoints:
        parts = [part for part in Path(checkpoint).resolve().parts if part != "checkpoints"]
        is_folder_of_weights = (Path(checkpoint) / "config.json").is_file()
        count = 1 if is_folder_of_weights else 3 if Path(checkpoint).is_file() else 2
        names.append("-".join(parts[-count:]).removesuffix(".ckpt"))
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"two models are called {min(twice)}; evaluate them one by one, each with an out of its own.")
    return names


class Evaluation(NamedTuple):
    """What is measured of a model, and how.

    Attributes:
        name: Of the model.
        folder: Of the results.
        measures: What is measured.
        ranks: The processes that share the work.
        batch_size: Texts read at a time.
        context_length: Most tokens that the model reads; None for its own.
    """

    name: str
    folder: Path
    measures: Sequence[Measurable]
    ranks: Ranks
    batch_size: int
    context_length: int | None

    def run(self, model: LoadedModel, checkpoint: str) -> Results:
        """Measure all that is not measured already, and write each result at once."""
        path = self.folder / f"{self.name}.json"
        described = describe_model(self.name, checkpoint, model, next(model.decoder.parameters()).device)
        length = _context_length(model.decoder, self.context_length)
        results = self.ranks.gather(open_results(path, described))[0]  # one rank's view, should their disks differ
        belongs_to = {key: described[key] for key in IDENTITY}
        with _kept_journal(self.folder, self.name, belongs_to, self.ranks) as journal:
            scorer = Scorer(model, self.ranks, journal, self.batch_size, length)
            for measure in self.measures:
                settings, before = measure.settings(length), scorer.num_cut
                if results.has(measure.title, settings):
                    continue
                results.add(measure.title, settings, measure.run(scorer), scorer.num_cut - before)
                if self.ranks.is_first:
                    results.write(path)
                    _tell(self.name, measure.title, scorer.num_cut - before, length)
        return results


@contextmanager
def _kept_journal(folder: Path, name: str, belongs_to: dict, ranks: Ranks) -> Iterator[Journal]:
    """Keep single answers until all is measured."""
    journal = Journal(folder, name, belongs_to, ranks)
    is_done = False
    try:
        yield journal
        is_done = True
    finally:
        journal.close(is_done)


def _context_length(decoder: Decoder, asked: int | None) -> int:
    own = decoder.config.context_length
    if asked is not None and asked > own and decoder.config.position == "learned":
        raise UserError(f"context_length={asked} exceeds the model's position table of {own}.")
    return asked or own


def _tell(name: str, title: str, num_cut: int, limit: int) -> None:
    cut = f"; {num_cut} texts were longer than {limit} tokens and lost their beginning" if num_cut else ""
    print(f"{name}: {title} measured{cut}", flush=True)


def _report(models: Sequence[Results], folder: Path | None) -> None:
    """Print the table; write it where results are written."""
    table = evaluation_table(models)
    print(f"\n{table}")
    if folder is not None:
        with told_as():
            (folder / "table.md").write_text(table + "\n")
            write_csv(folder / "table.csv", models)
        print(f"\nresults in {relative(folder)}")
