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
    """Plots attention on an image to TensorBoard at every validation, including the sanity check.

        python -m dcvision fit ... --trainer.callbacks+=AttentionImages --trainer.callbacks.image=photo.jpg

    The averaged weights are used if there are any. Training is not affected; a validation takes a few more seconds.

    Args:
        image: An image file; it is resized and cropped to the model's size.
        query: Index of the query patch, row by row; the middle one if None.

    Raises:
        UserError: Before training, if the image cannot be read, the model has no composed layer, or the run has no
            TensorBoard logger; at the first validation, if layers attend within windows or the patch does not exist.
    """

    def __init__(self, image: str, query: int | None = None) -> None:
        self.image = image
        self.query = query

    def setup(self, trainer: L.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Read the image, and check the model and the logger."""
        if stage not in ("fit", "validate"):
            return
        if not isinstance(pl_module, ImageClassifier):
            raise UserError(f"AttentionImages requires an ImageClassifier, not {type(pl_module).__name__}.")
        check_layers(pl_module.evaluated)
        self._pixels = read_image(self.image, pl_module.hparams.image_size)
        if not trainer.fast_dev_run and not any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            raise UserError("AttentionImages requires a TensorBoard logger; keep the default trainer.logger.")

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: ImageClassifier) -> None:
        """Plot: all ranks compute, because weights may be sharded, and the first one writes."""
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
