"""`dclm explain ablate`: evaluation of language models with parts disabled."""

from collections.abc import Sequence
from functools import partial

from dctrain.evaluation.run import check_asked, check_at_least_one, find_dtype, measure_models
from dctrain.explain.ablation import KINDS, ablations
from dctrain.explain.ablation_report import report_ablation
from dctrain.explain.selectors import check_kinds

from ..evaluation.command import measure_model, named
from ..evaluation.masked import MaskedTexts
from ..evaluation.measures import PILE_KEY, TextSet
from ..evaluation.synthetic_tasks import SuiteFile


def ablate(
    checkpoint: Sequence[str],
    texts: Sequence[str] = (),
    suites: Sequence[str] = (),
    masked: Sequence[str] = (),
    off: Sequence[str] = (),
    out: str = "ablation",
    tokenizer: str | None = None,
    context_length: int | None = None,
    text_key: str = "text",
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
    dtype: str | None = None,
) -> None:
    """Evaluate a trained model with branches or layers of its composition, or heads, disabled.

    Everything is measured once for each part: a model with L layers has up to 13 + L measurements for branches and
    layers, and L H for heads. Results are stored immediately; an interrupted evaluation continues when the command is
    repeated.

    Args:
        checkpoint: Models, as in `evaluate`; plain models have only heads.
        texts: Files or folders of texts, measured separately.
        suites: Files (JSONL) of synthetic tasks, written by `dclm suite`.
        masked: Files or folders of texts, for masked tokens of bidirectional models.
        off: Parts to disable, one at a time: "branches" (each branch of the pre- and post-composition in all layers,
            each composition, and all), "layers" (the composition of each layer), "heads" (each head of each layer).
            Default: branches and layers, or heads for plain attention.
        out: Folder of the results: MODEL.json, ablation.csv, MODEL-ablation.png.
        tokenizer: "bytes", a tokenizer.json or a hub name; default: the tokenizer of the checkpoint or folder.
        context_length: Maximum tokens per sequence. Default: the model's.
        text_key: Key of the text in records.
        limit: Maximum number of documents of each, the first ones.
        batch_size: Texts per batch.
        device: Device, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; default: the dtype of the weights.

    Raises:
        UserError: If an input does not exist, there is nothing to measure, or a model has no such parts.
    """
    check_asked(checkpoint, [*texts, *suites, *masked], (), "texts, suites or masked")
    check_at_least_one(limit=limit, batch_size=batch_size, context_length=context_length)
    if off:
        check_kinds("off", off, KINDS)
    measures = [
        *(TextSet(name, path, text_key, PILE_KEY, None, limit) for name, path in named(texts)),
        *(SuiteFile(name, path, limit) for name, path in named(suites)),
        *(MaskedTexts(name, path, text_key, 0.15, 1, limit) for name, path in named(masked)),
    ]
    how = {"tokenizer": tokenizer, "dtype": find_dtype(dtype), "device": device}
    how |= {"batch_size": batch_size, "context_length": context_length, "expand": partial(ablations, kinds=off)}
    measure_models(checkpoint, measures, (), out, partial(measure_model, **how), report_ablation)
