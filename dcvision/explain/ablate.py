"""`dcvision explain ablate`: evaluation of classifiers with parts disabled."""

from collections.abc import Sequence
from functools import partial

from dctrain.cli.argument_types import check_workers
from dctrain.evaluation.run import (
    check_asked,
    check_at_least_one,
    find_dtype,
    measure_models,
    short_names,
)
from dctrain.explain.ablation import KINDS, ablations
from dctrain.explain.ablation_report import report_ablation
from dctrain.explain.selectors import check_kinds

from ..evaluation.command import measure_network
from ..evaluation.images import ImageSet


def ablate(
    checkpoint: Sequence[str],
    images: Sequence[str],
    off: Sequence[str] = (),
    out: str = "ablation",
    limit: int | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
) -> None:
    """Evaluate a trained classifier with branches or layers of its composition, or heads, disabled.

    All images are classified once for each part: a model with L layers has up to 13 + L measurements for branches and
    layers, and L H for heads. Results are stored immediately; an interrupted evaluation continues when the command is
    repeated.

    Args:
        checkpoint: Models, as in `evaluate`; plain models have only heads.
        images: Image sets, as in `evaluate`.
        off: Parts to disable, one at a time: "branches" (each branch of the pre- and post-composition in all layers,
            each composition, and all), "layers" (the composition of each layer), "heads" (each head of each layer).
            Default: branches and layers, or heads for plain attention.
        out: Folder of the results: MODEL.json, ablation.csv, MODEL-ablation.png.
        limit: Maximum number of images per set, the first ones.
        batch_size: Images per batch.
        num_workers: Loader workers per rank.
        device: Device, such as cuda.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        UserError: If an input does not exist, or a model has no such parts.
    """
    check_asked(checkpoint, images, (), "images")
    check_at_least_one(limit=limit, batch_size=batch_size)
    if off:
        check_kinds("off", off, KINDS)
    check_workers(num_workers)
    how = {"batch_size": batch_size, "num_workers": num_workers, "device": device, "dtype": find_dtype(dtype)}
    sets = [ImageSet(name, spec, None, limit) for name, spec in zip(short_names(images), images, strict=True)]
    measure = partial(measure_network, **how, expand=partial(ablations, kinds=off))
    measure_models(checkpoint, sets, (), out, measure, report_ablation)
