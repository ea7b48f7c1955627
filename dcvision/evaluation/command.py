"""`dcvision evaluate`: evaluates classifiers, stores every result immediately, and prints one table."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from dctrain.cli.argument_types import check_workers
from dctrain.errors import UserError, as_user_error
from dctrain.evaluation.results import EvaluationResults, describe
from dctrain.evaluation.run import (
    Evaluation,
    Measurable,
    check_asked,
    check_at_least_one,
    find_dtype,
    measure_models,
    short_names,
)

from .images import ImageScorer, ImageSet
from .networks import load_classifier


def evaluate(
    checkpoint: Sequence[str] = (),
    images: Sequence[str] = (),
    real: str | None = None,
    compare: Sequence[str] = (),
    out: str | None = None,
    limit: int | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
) -> None:
    """Evaluate classifiers: accuracy on image sets with ImageNet's original and ReaL labels, and throughput.

    Each model uses its own preprocessing: runs that of their settings, others that of timm. Results are stored
    immediately; an interrupted evaluation continues when the command is repeated. Several processes can share the work:
    torchrun --nproc_per_node N -m dcvision evaluate ...

    Args:
        checkpoint: Models: .ckpt files, folders of runs or exports, or timm names with a tag of pretrained weights.
        images: Image sets: "shards:PATTERN", "folder:DIR" (class folders with numeric names, as in ImageNet-V2, are
            class numbers), "torchvision:NAME:DIR" or "digits".
        real: JSON file of ImageNet's ReaL labels, for sets with image names ILSVRC2012_val_NNNNNNNN.
        compare: Results (JSON) of earlier evaluations, shown in the table before these models; differences are to the
            first model of the table.
        out: Folder of the results: MODEL.json, table.csv, table.md; default: `evaluation`.
        limit: Maximum number of images per set, for quick tests.
        batch_size: Images per batch.
        num_workers: Loader workers per rank.
        device: Device, such as cuda.
        dtype: "float32", "bfloat16" or "float16".
    """
    check_asked(checkpoint, images, compare, "images")
    check_at_least_one(limit=limit, batch_size=batch_size)
    check_workers(num_workers)
    how = {"batch_size": batch_size, "num_workers": num_workers, "device": device, "dtype": find_dtype(dtype)}
    if real is not None and not Path(real).is_file():
        raise UserError(f"real={real} does not exist.")
    sets = [ImageSet(name, spec, real, limit) for name, spec in zip(short_names(images), images, strict=True)]
    measure_models(checkpoint, sets, compare, out, partial(measure_network, **how))


def measure_network(
    checkpoint: str,
    evaluation: Evaluation,
    *,
    batch_size: int,
    num_workers: int,
    device: str,
    dtype: torch.dtype,
    expand: Callable[[nn.Module, Sequence[Measurable]], Sequence[Measurable]] | None = None,
) -> EvaluationResults:
    """Load and evaluate a model; `expand` converts the measurements to those of this model."""
    network, ranks = load_classifier(checkpoint), evaluation.ranks
    place = ranks.device(device)
    with as_user_error(f"device={device!r} cannot be used"):
        network.model.to(place, dtype)
    if expand is not None:
        evaluation = evaluation._replace(measures=expand(network.model, evaluation.measures))
    described = describe(evaluation.name, checkpoint, network.model, preprocessing=network.preprocessing)
    return evaluation.run(
        described, lambda journal: ImageScorer(network, journal, ranks, batch_size, num_workers, place, dtype)
    )
