"""`dcvision explain mixing`: composition statistics of a classifier over images."""

from itertools import islice

import torch
from tqdm import tqdm

from dcmha.analysis import measure_mixing
from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import as_user_error
from dctrain.evaluation.run import check_at_least_one
from dctrain.explain.explanation import origin_of, write_explanation
from dctrain.explain.mixing_report import explain_mixing

from ..evaluation.images import readable_images
from .images import load_on


def mixing(
    checkpoint: str, images: str, limit: int = 256, out: str = "mixing", batch_size: int = 8, device: str = "cpu"
) -> None:
    """Report the size of the branches of each composition, its effective rank, and its dependence on the patches.

    In addition to the model, one layer at a time needs nine H x H matrices per token of a batch. Images are sampled
    from the whole set.

    Args:
        checkpoint: A model, as in `evaluate`.
        images: An image set, as in `evaluate`.
        limit: Maximum number of images.
        out: Folder for mixing.csv and mixing.png.
        batch_size: Images per batch.
        device: Device, such as cuda.

    Raises:
        UserError: If an input cannot be read, or the model composes nothing.
    """
    asked = locals().copy()
    folder = make_folder(out)
    check_at_least_one(limit=limit, batch_size=batch_size)
    network = load_on(checkpoint, device)
    model = network.model
    shown = iter(tqdm(readable_images(network, images, limit), "images", total=limit, leave=False))
    count = 0
    with as_user_error(checkpoint, ValueError), torch.inference_mode(), measure_mixing(model) as meters:
        while batch := list(islice(shown, batch_size)):
            model(torch.stack([image for _, image in batch]).to(device))
            count += len(batch)
    write_explanation(
        explain_mixing(meters, f"compositions over {count} images of {images}"),
        folder,
        [origin_of(checkpoint, model)],
        asked,
    )
