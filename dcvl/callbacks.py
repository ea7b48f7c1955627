"""Trainer callbacks for captions: exact-match accuracy, and plots of cross-attention."""

# B images

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from dctrain.distributed.strategy import FSDP2Strategy
from dctrain.errors import UserError

from .caption_plots import beside, draw_captions, draw_words
from .captioning import exact_matches, generate_captions
from .data.captions import CaptionSource
from .data.datamodule import CaptionDataModule

SHOWN, IN_TERMINAL = 8, 2  # images


class ExactCaptions(Callback):
    """Generates captions of a set greedily at every validation, and logs the exact-match accuracy.

    At the end some captions are printed, and plotted with their images (`captions-NAME.png` in the run's folder,
    TensorBoard). All ranks process all images. Unreadable images are skipped and reported. Not supported under FSDP.

    Args:
        data: Data set in the notation of `dcvl.data.captions`.
        name: Name of the set; `NAME/exact_match` is logged.
        count: Number of images, the first ones of the set.

    Raises:
        UserError: If `count` is less than 1, or no image can be read.
    """

    def __init__(self, data: str = "scenes:unseen", name: str = "unseen", count: int = 256) -> None:
        if count < 1:
            raise UserError(f"ExactCaptions's {count=} must be at least 1.")
        self.data, self.name, self.count = data, name, count
        self.source: CaptionSource | None = None
        self._unreadable: set[int] = set()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Open the set; check that the model is a captioner without sharded weights."""
        if not getattr(pl_module.model, "is_captioner", False):
            raise UserError("ExactCaptions requires a captioner (model.caption_weight above 0).")
        if isinstance(trainer.strategy, FSDP2Strategy):
            raise UserError("ExactCaptions does not support sharded weights (fsdp2).")
        self.source = trainer.datamodule.open(self.data, is_train=False)
        self.count = min(self.count, len(self.source))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Generate captions and log the accuracy."""
        data, is_exact = trainer.datamodule, []
        for start in range(0, self.count, data.batch_size):
            generated, captions, _ = self._generate(trainer, pl_module, start, min(start + data.batch_size, self.count))
            is_exact += exact_matches(generated, captions, data.words)
        if not is_exact:
            raise UserError(f"ExactCaptions: none of the first {self.count} images of {self.data} can be read.")
        share = sum(is_exact) / len(is_exact)
        pl_module.log(f"{self.name}/exact_match", share, prog_bar=True, sync_dist=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print and plot some captions."""
        folder = trainer.log_dir  # a collective operation: called on all ranks
        if not trainer.is_global_zero:
            return
        generated, captions, images = self._generate(trainer, pl_module, 0, min(SHOWN, self.count))
        print(f"generated captions of {self.data}:")
        for number in range(min(IN_TERMINAL, len(generated))):
            print("\n".join(beside(images[number], [generated[number], f"(is: {captions[number][0]})"])), end="\n\n")
        figure = draw_captions(images, generated, captions)
        if folder is not None:
            figure.savefig(Path(folder) / f"captions-{self.name}.png", dpi=120)
        if isinstance(trainer.logger, TensorBoardLogger):
            trainer.logger.experiment.add_figure(f"captions/{self.name}", figure, trainer.global_step)

    def _generate(
        self, trainer: L.Trainer, pl_module: L.LightningModule, start: int, end: int
    ) -> tuple[list[str], list[list[str]], Tensor]:
        """Generate captions of some images; return them, the reference captions, and the images, uint8."""
        data = trainer.datamodule
        found = [pair for index in range(start, end) if (pair := self._read(data, index)) is not None]
        if not found:
            return [], [], torch.empty(0, 3, data.image_size, data.image_size, dtype=torch.uint8)
        images = torch.stack([image for image, _ in found])
        was_training = pl_module.training
        pl_module.eval()
        normalized = pl_module.normalize(images.to(pl_module.device))
        generated = generate_captions(pl_module.model, normalized, data.words, data.context_length - 1)
        pl_module.train(was_training)
        return generated, [captions for _, captions in found], images

    def _read(self, data: CaptionDataModule, index: int) -> tuple[Tensor, list[str]] | None:
        """Read an image and its captions; None, with a message once, if it cannot be read."""
        try:
            return data.read(self.source, index)
        except UserError as error:
            if index not in self._unreadable:
                rank_zero_only(print)(f"ExactCaptions skips an image: {error}", flush=True)
            self._unreadable.add(index)
            return None


class CrossAttentionImages(Callback):
    """Plots the cross-attention of each word of a caption before and after composition to TensorBoard, at every
    validation; one figure per layer with cross-attention.

    Args:
        data: Data set in the notation of `dcvl.data.captions`.
        index: Index of the image, whose first caption is used.

    Raises:
        UserError: Before training, if the image does not exist, the model is not a captioner, or the run has no
            TensorBoard logger.
    """

    def __init__(self, data: str = "scenes:unseen", index: int = 0) -> None:
        self.data, self.index = data, index

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Read the image, and check the model and the logger."""
        if not getattr(pl_module.model, "is_captioner", False):
            raise UserError("CrossAttentionImages requires a captioner (model.caption_weight above 0).")
        if not trainer.fast_dev_run and not any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            raise UserError("CrossAttentionImages requires a TensorBoard logger; keep the default trainer.logger.")
        data = trainer.datamodule
        source = data.open(self.data, is_train=False)
        if not 0 <= self.index < len(source):
            raise UserError(f"CrossAttentionImages's index={self.index}; expected 0 to {len(source) - 1}.")
        self._image, captions = data.read(source, self.index)
        self._caption = data.encode(captions[0])

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Plot: all ranks compute, because weights may be sharded, and the first one writes."""
        normalized = pl_module.normalize(self._image[None].to(pl_module.device))[0]
        with trainer.precision_plugin.forward_context():
            figures = draw_words(pl_module.model, self._image, normalized, self._caption, trainer.datamodule.words)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, TensorBoardLogger):
                for name, figure in figures.items():
                    logger.experiment.add_figure(f"words/{name}", figure, trainer.global_step)
