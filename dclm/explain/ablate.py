"""`dclm explain ablate`: what a language model loses where parts of it are switched off."""

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
    """Measure a trained model without branches or layers of its composition, or without a head.

    Everything is measured once more for each part: a model of L layers has up to 13 + L measurements for branches and
    layers, and L H for heads. Results are kept as they come; the same command goes on where it was interrupted.

    Args:
        checkpoint: Models, as `evaluate` takes them; plain ones have heads alone.
        texts: Files or folders, each for itself, whose texts are scored.
        suites: Files (JSONL) of synthetic tasks, which `dclm suite` writes.
        masked: Files or folders of texts of which models that see both ways are asked for masked tokens.
        off: What is switched off, one by one: "branches" (each of the pre- and the post-composition in all layers, each
            composition, and all), "layers" (the composition of each layer), "heads" (each head of each layer). By
            default branches and layers, of plain attention heads.
        out: Folder of the results: MODEL.json, ablation.csv, MODEL-ablation.png.
        tokenizer: "bytes", a tokenizer.json or a hub name; by default the one in the checkpoint or folder.
        context_length: Most tokens that a model reads. By default the model's own.
        text_key: Key of the text in records.
        limit: Only this many documents of each, the first.
        batch_size: Texts read at a time.
        device: Where to run, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; by default that of the weights.

    Raises:
        UserError: If something is not there, nothing is to be measured, or a model has no such parts.
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
