"""Callbacks for images."""

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from dcmha import record_attention
from dctrain.errors import UserError

from .attention_plots import draw_attention, log_figures, read_image
from .classifier import ImageClassifier
from .visualize import check_layers, make_view


class AttentionImages(Callback):
    """Draws attention on an image into TensorBoard at every validation, the one before the first step included.

        python -m dcvision fit ... --trainer.callbacks+=AttentionImages --trainer.callbacks.image=photo.jpg

    Averaged weights are looked at if the run keeps them. Steps of training are as without it; a validation takes some
    seconds more.

    Args:
        image: An image file; it is resized and cropped to the model's size.
        query: Which patch looks, counted row by row; the middle one if None.

    Raises:
        UserError: Before training starts, if the image cannot be read, the model has no composed layer or the run no
            TensorBoard logger; at the first validation, if layers attend within windows or there is no such patch.
    """

    def __init__(self, image: str, query: int | None = None) -> None:
        self.image = image
        self.query = query

    def setup(self, trainer: L.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Read the image, and see whether there is something to draw and a place for it."""
        if stage not in ("fit", "validate"):
            return
        if not isinstance(pl_module, ImageClassifier):
            raise UserError(f"AttentionImages is for an ImageClassifier, not {type(pl_module).__name__}.")
        check_layers(pl_module.evaluated)
        self._pixels = read_image(self.image, pl_module.hparams.image_size)
        if not trainer.fast_dev_run and not any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            raise UserError("AttentionImages needs a TensorBoard logger; leave trainer.logger as it is.")

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: ImageClassifier) -> None:
        """Draw: all ranks compute, for they may hold the weights together, and the first one writes."""
        images = self._pixels[None].to(pl_module.device)
        view = make_view(pl_module.evaluated, self._pixels, self.query)
        with trainer.precision_plugin.forward_context(), record_attention(pl_module.evaluated) as recorded:
            pl_module(images)
        view.check(recorded)
        if not trainer.is_global_zero:
            return
        figures = draw_attention(recorded, view)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                log_figures(logger.experiment, figures, trainer.global_step)
