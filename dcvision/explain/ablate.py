"""`dcvision explain ablate`: what a classifier loses where parts of it are switched off."""

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
    """Measure a trained classifier without branches or layers of its composition, or without a head.

    All images are classified once more for each part: a model of L layers has up to 13 + L measurements for branches
    and layers, and L H for heads. Results are kept as they come; the same command goes on where it was interrupted.

    Args:
        checkpoint: Models, as `evaluate` takes them; plain ones have heads alone.
        images: Sets of images, as `evaluate` takes them.
        off: What is switched off, one by one: "branches" (each of the pre- and the post-composition in all layers, each
            composition, and all), "layers" (the composition of each layer), "heads" (each head of each layer). By
            default branches and layers, of plain attention heads.
        out: Folder of the results: MODEL.json, ablation.csv, MODEL-ablation.png.
        limit: Only this many images of each set, the first.
        batch_size: Images classified at a time.
        num_workers: Processes that load images, of each rank.
        device: Where to run, such as cuda.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        UserError: If something is not there, or a model has no such parts.
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
