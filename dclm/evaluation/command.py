"""`dclm evaluate`: measures language models one after the other, keeps every result at once, prints one table."""

import zlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from dctrain.errors import UserError
from dctrain.evaluation.journal import Journal
from dctrain.evaluation.ranks import Ranks, joined_ranks
from dctrain.evaluation.results import Results, describe, read_results
from dctrain.evaluation.run import Evaluation, check_asked, check_at_least_one, name_models, report, short_names

from ..data.texts import find_inputs
from ..decoder import Decoder
from ..load import LoadedModel, load_model
from .measures import PILE_KEY, SpanFile, TextSet
from .scorer import Scorer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def evaluate(
    checkpoint: Sequence[str] = (),
    texts: Sequence[str] = (),
    spans: Sequence[str] = (),
    tasks: Sequence[str] = (),
    num_fewshot: Sequence[int] = (),
    compare: Sequence[str] = (),
    out: str = "evaluation",
    tokenizer: str | None = None,
    context_length: int | None = None,
    stride: int | None = None,
    text_key: str = "text",
    subset_key: str = PILE_KEY,
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
        texts: Files or folders, each for itself, whose texts are scored: text files, JSONL, JSONL.zst, parquet, ...
        spans: Files of records (JSONL or parquet) with a prompt and a target, which is scored.
        tasks: Names of tasks, groups or tags of the lm-evaluation-harness.
        num_fewshot: Examples before each question; several numbers ask each task with each. By default each task's own.
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
    check_asked(checkpoint, [*texts, *spans, *tasks], compare, "texts, spans or tasks")
    check_at_least_one(limit=limit, batch_size=batch_size, context_length=context_length, stride=stride)
    if any(shots < 0 for shots in num_fewshot):
        raise UserError(f"num_fewshot={list(num_fewshot)} must not be negative.")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r}; accepted: {', '.join(DTYPES)}.")
    measures = [
        *(TextSet(name, path, text_key, subset_key, stride, limit) for name, path in _named(texts)),
        *(SpanFile(name, path, prompt_key, target_key, limit) for name, path in _named(spans)),
        *_tasks(tasks, num_fewshot, limit, task_folder),
    ]
    earlier = [read_results(Path(path)) for path in compare]
    folder = Path(out)
    with joined_ranks() as ranks:
        found = []
        for path, name in zip(checkpoint, name_models(checkpoint), strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            load = partial(load_model, path, tokenizer, dtype=DTYPES.get(dtype), device=ranks.device(device))
            make = partial(_make_scorer, ranks=ranks, batch_size=batch_size, context_length=context_length)
            found.append(_evaluate(load(), path, Evaluation(name, folder, measures, ranks), make))
        if ranks.is_first:
            report([*earlier, *found], folder if checkpoint else None)


def _named(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Name files and folders for the table, which must be there."""
    for path in paths:
        find_inputs([Path(path)])
    return list(zip(short_names(paths), paths, strict=True))


def _tasks(names: Sequence[str], num_fewshot: Sequence[int], limit: int | None, folder: str | None) -> list:
    """Find the tasks of the harness, which is loaded only then."""
    if not names:
        return []
    try:
        from .harness import find_tasks
    except ModuleNotFoundError as error:
        raise UserError(f'tasks need the lm-evaluation-harness: pip install "dcmha[evaluate]" ({error})') from error
    return find_tasks(names, num_fewshot, limit, folder)


def _evaluate(model: LoadedModel, path: str, evaluation: Evaluation, make_scorer: partial) -> Results:
    decoder, words = model
    known = {"crc32": zlib.crc32(words.spec.encode()), "eos_id": words.eos_id, "vocab_size": words.vocab_size}
    described = describe(evaluation.name, str(path), decoder, config=asdict(decoder.config), tokenizer=known)
    return evaluation.run(described, partial(make_scorer, model))


def _make_scorer(
    model: LoadedModel, journal: Journal, *, ranks: Ranks, batch_size: int, context_length: int | None
) -> Scorer:
    return Scorer(model, ranks, journal, batch_size, _context_length(model.decoder, context_length))


def _context_length(decoder: Decoder, asked: int | None) -> int:
    own = decoder.config.context_length
    if asked is not None and asked > own and decoder.config.position == "learned":
        raise UserError(f"context_length={asked} exceeds the model's position table of {own}.")
    return asked or own
