"""`dclm evaluate`: evaluates language models, stores every result immediately, and prints one table."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import nn

from dctrain.cli.named_configs import find_config
from dctrain.errors import UserError
from dctrain.evaluation.results import EvaluationResults, describe
from dctrain.evaluation.run import (
    Evaluation,
    Measurable,
    check_asked,
    check_at_least_one,
    find_dtype,
    measure_models,
    report,
    short_names,
)

from ..data.masking import check_masking
from ..data.texts import find_inputs
from ..decoder import Decoder
from ..load import load_scored
from .masked import MaskedTexts
from .measures import PILE_KEY, SpanFile, TextSet
from .scorer import Scorer
from .synthetic_plots import draw_suites
from .synthetic_tasks import SuiteFile


def evaluate(
    checkpoint: Sequence[str] = (),
    texts: Sequence[str] = (),
    spans: Sequence[str] = (),
    suites: Sequence[str] = (),
    masked: Sequence[str] = (),
    tasks: Sequence[str] = (),
    num_fewshot: Sequence[int] = (),
    compare: Sequence[str] = (),
    out: str | None = None,
    tokenizer: str | None = None,
    context_length: int | None = None,
    stride: int | None = None,
    text_key: str = "text",
    subset_key: str = PILE_KEY,
    prompt_key: str = "prompt",
    target_key: str = "target",
    mask_fraction: float = 0.15,
    mask_span: float = 1,
    task_folder: str | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
    dtype: str | None = None,
) -> None:
    """Evaluate models: perplexity of texts and target spans, synthetic tasks, tasks of the lm-evaluation-harness.

    Results are stored immediately; an interrupted evaluation continues when the command is repeated. Several processes
    can share the work: torchrun --nproc_per_node N -m dclm evaluate ...

    Args:
        checkpoint: Models: .ckpt files, folders of runs, or folders of DCFormer, DCPythia, Pythia or Llama models. With
            transformers installed, folders of its other causal models are supported for scoring.
        texts: Files or folders of texts, measured separately: text files, JSONL, JSONL.zst, parquet, ...
        spans: Files of records (JSONL or parquet) with a prompt and a target, whose perplexity is measured.
        suites: Files (JSONL) of synthetic tasks with answers in brackets, written by `dclm suite`.
        masked: Files or folders of texts, for masked tokens of bidirectional models.
        tasks: Tasks, groups or tags of the lm-evaluation-harness.
        num_fewshot: Examples before each question; with several numbers each task is evaluated with each. Default:
            defined by the task.
        compare: Results (JSON) of earlier evaluations, shown in the table before these models; differences are to the
            first model of the table.
        out: Folder of the results: MODEL.json, table.csv, table.md; default: `evaluation`.
        tokenizer: "bytes", a tokenizer.json or a hub name; default: the tokenizer of the checkpoint or folder.
        context_length: Maximum tokens per sequence; longer texts are truncated on the left. Default: the model's.
        stride: Tokens that a window of a text advances; default: disjoint windows.
        text_key: Key of the text in records.
        subset_key: Key of a record's subset name.
        prompt_key: Key of the prompt in records of spans.
        target_key: Key of the target in records of spans.
        mask_fraction: Fraction of masked tokens for `masked`.
        mask_span: Mean length of its masked spans, 1 to 5.
        task_folder: Folder of additional task files for the harness.
        limit: Maximum documents, records and questions of each, for quick tests.
        batch_size: Texts per batch.
        device: Device, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; default: the dtype of the weights.
    """
    asked = [*texts, *spans, *suites, *masked, *tasks]
    check_asked(checkpoint, asked, compare, "texts, spans, suites, masked or tasks")
    check_at_least_one(limit=limit, batch_size=batch_size, context_length=context_length, stride=stride)
    if any(shots < 0 for shots in num_fewshot):
        raise UserError(f"num_fewshot={list(num_fewshot)} must not be negative.")
    check_masking(mask_fraction, mask_span)
    how = {"tokenizer": tokenizer, "dtype": find_dtype(dtype), "device": device}
    measures = [
        *(TextSet(name, path, text_key, subset_key, stride, limit) for name, path in named(texts)),
        *(SpanFile(name, path, prompt_key, target_key, limit) for name, path in named(spans)),
        *(SuiteFile(name, path, limit) for name, path in named(suites)),
        *(MaskedTexts(name, path, text_key, mask_fraction, mask_span, limit) for name, path in named(masked)),
        *_tasks(tasks, num_fewshot, limit, task_folder),
    ]
    measure = partial(measure_model, batch_size=batch_size, context_length=context_length, **how)
    measure_models(checkpoint, measures, compare, out, measure, _report)


def named(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return names for the table with existing files and folders."""
    for path in paths:
        find_inputs([Path(path)])
    return list(zip(short_names(paths), paths, strict=True))


def _report(models: Sequence[EvaluationResults], folder: Path | None) -> None:
    """Print the table; write it, and figures of suites, to the folder of the results."""
    report(models, folder)
    if folder is not None:
        draw_suites(models, folder)


def _tasks(names: Sequence[str], num_fewshot: Sequence[int], limit: int | None, folder: str | None) -> list:
    """Return the tasks of the harness, which is imported only here."""
    if not names:
        return []
    try:
        from .harness import find_tasks
    except ModuleNotFoundError as error:
        raise UserError(f'tasks require the lm-evaluation-harness: pip install "dcmha[evaluate]" ({error})') from error
    return find_tasks(names, num_fewshot, limit, None if folder is None else find_config(folder))


def measure_model(
    checkpoint: str,
    evaluation: Evaluation,
    *,
    tokenizer: str | None,
    dtype: torch.dtype | None,
    device: str,
    batch_size: int,
    context_length: int | None,
    expand: Callable[[nn.Module, Sequence[Measurable]], Sequence[Measurable]] | None = None,
) -> EvaluationResults:
    """Load and evaluate a model; `expand` converts the measurements to those of this model."""
    ranks = evaluation.ranks
    model = load_scored(checkpoint, tokenizer, dtype=dtype, device=ranks.device(device))
    decoder, words = model
    length = _context_length(decoder, context_length)
    known = {"crc32": zlib.crc32(words.spec.encode()), "eos_id": words.eos_id, "vocab_size": words.vocab_size}
    if expand is not None:
        evaluation = evaluation._replace(measures=expand(decoder, evaluation.measures))
    described = describe(evaluation.name, checkpoint, decoder, config=asdict(decoder.config), tokenizer=known)
    return evaluation.run(described, lambda journal: Scorer(model, ranks, journal, batch_size, length))


def _context_length(decoder: Decoder, asked: int | None) -> int:
    own = decoder.config.context_length
    if asked is not None and asked > own and decoder.config.position == "learned":
        raise UserError(f"context_length={asked} exceeds the model's position table of {own}.")
    return asked or own
