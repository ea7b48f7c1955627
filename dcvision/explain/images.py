"""Loading a classifier with an image."""

from pathlib import Path

from torch import Tensor

from dctrain.errors import as_user_error
from dctrain.utils.device import check_device
from dctrain.utils.files import check_regular

from ..evaluation.networks import Classifier, load_classifier


def load_with_image(checkpoint: str, image: str, device: str) -> tuple[Classifier, Tensor]:
    """Load a classifier and a preprocessed image [1, 3, size, size].

    Raises:
        UserError: If an input cannot be read, or the device cannot be used.
    """
    network = load_on(checkpoint, device)
    with as_user_error(f"cannot read the image {image}"):
        return network, network.prepare(check_regular(Path(image)).read_bytes())[None].to(device)


def load_on(checkpoint: str, device: str) -> Classifier:
    """Load a classifier onto a device.

    Raises:
        UserError: If it cannot be read, or the device cannot be used.
    """
    network = load_classifier(checkpoint)
    with as_user_error(f"device={device!r} cannot be used"):
        network.model.to(check_device(device))
    return network
