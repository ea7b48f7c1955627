"""See what composition does to an image: `python -m dcvision look`, or during training by `AttentionImages`."""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from dcmha import ComposedLayer, record_attention
from dctrain.checkpoint import make_folder
from dctrain.errors import UserError

from .classifier import ImageClassifier
from .compatible import normalisation
from .export import load_network
from .pictures import View, draw_attention, log_pictures, patch_grid, prefix_tokens, read_image


class AttentionImages(Callback):
    """Draws attention on an image into TensorBoard at every validation, the one before the first step included.

        python -m dcvision fit ... --trainer.callbacks+=AttentionImages --trainer.callbacks.image=photo.jpg

    Averaged weights are looked at if the run keeps them. Steps of training are as without it; a validation takes some
    seconds more.

    Args:
        image: An image file; it is resized and cropped to the model's size.
        query: Which patch looks, counted row by row; the middle one if None.

    Raises:
        UserError: Before training starts, if the image cannot be read, the model has no `ComposedLayer` or the run no
            TensorBoard logger; at the first validation, if layers attend within windows or there is no such patch.
    """

    def __init__(self, image: str, query: int | None = None) -> None:
        self.image = image
        self.query = query

    def setup(self, trainer: L.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Read the image, and see whether there is something to draw and a place for it."""
        if stage not in ("fit", "validate"):
            return
        _check_layers(pl_module.evaluated)
        self._pixels = read_image(self.image, pl_module.hparams.image_size)
        if not trainer.fast_dev_run and not any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            raise UserError("AttentionImages needs a TensorBoard logger; leave trainer.logger as it is.")

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: ImageClassifier) -> None:
        """Draw: all ranks compute, for they may hold the weights together, and the first one writes."""
        images = self._pixels[None].to(pl_module.device)
        view = _view(pl_module.evaluated, self._pixels, self.query)
        with trainer.precision_plugin.forward_context(), record_attention(pl_module.evaluated) as recorded:
            pl_module(images)
        view.check(recorded)
        if not trainer.is_global_zero:
            return
        figures = draw_attention(recorded, view)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                log_pictures(logger.experiment, figures, trainer.global_step)


def look(checkpoint: str, image: str, out: str, query: int | None = None) -> list[Path]:
    """Draw what composition does to an image.

    Args:
        checkpoint: A .ckpt file, or the folder of a run.
        image: An image file; it is resized and cropped to the model's size.
        out: Folder for the pictures, as PNG and for TensorBoard.
        query: Which patch looks, counted row by row; the middle one if None.

    Returns:
        The pictures, which are printed too.

    Raises:
        UserError: If a file cannot be read or written, the model has no `ComposedLayer` or attends within windows, or
            there is no such patch.
    """
    model, size, _ = load_network(checkpoint)
    _check_layers(model)
    pixels = read_image(image, size)
    view = _view(model, pixels, query)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in normalisation(model).values())
    with torch.no_grad(), record_attention(model.eval()) as recorded:
        model(((pixels / 255 - mean) / std)[None])
    figures = draw_attention(recorded, view)
    root = make_folder(out)
    for name, figure in figures.items():
        figure.savefig(root / f"{name}.png", dpi=100)
    with SummaryWriter(str(root)) as writer:
        log_pictures(writer, figures, step=0)
    paths = [root / f"{name}.png" for name in figures]
    print(*paths, f"tensorboard --logdir {out}", sep="\n")
    return paths


def _check_layers(model: nn.Module) -> None:
    """Check that there is something to look at.

    Raises:
        UserError: If not.
    """
    if not any(isinstance(module, ComposedLayer) for module in model.modules()):
        raise UserError(f"{type(model).__name__} has no DCAttention, nor other composed layers, to look at.")


def _view(model: nn.Module, pixels: Tensor, query: int | None) -> View:
    return View(pixels, patch_grid(model, pixels.shape[-1]), prefix_tokens(model), query)
