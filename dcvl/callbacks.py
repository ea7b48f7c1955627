"""Trainer callbacks for captions: how many are told exactly, and where words look."""

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

SHOWN, IN_TERMINAL = 8, 2  # pictures


class ExactCaptions(Callback):
    """Tells captions of a set at every validation, greedily, and logs how many are one of the image's own.

    At the end some are printed, and drawn beside the pictures (`captions-NAME.png` in the run's folder, TensorBoard).
    Every rank tells all. Images that cannot be read are left out, and named. Not under FSDP.

    Args:
        data: The set, in the notation of `dcvl.data.captions`.
        name: What it is called: `NAME/exact_match` is logged.
        count: Images, the first of the set.

    Raises:
        UserError: If there are none, or none that can be read.
    """

    def __init__(self, data: str = "scenes:unseen", name: str = "unseen", count: int = 256) -> None:
        if count < 1:
            raise UserError(f"ExactCaptions's {count=} must be at least 1.")
        self.data, self.name, self.count = data, name, count
        self.source: CaptionSource | None = None
        self._unreadable: set[int] = set()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Open the set; refuse a model that tells nothing, or whose weights are spread over ranks."""
        if not getattr(pl_module.model, "is_captioner", False):
            raise UserError("ExactCaptions is for a model that tells captions (model.caption_weight above 0).")
        if isinstance(trainer.strategy, FSDP2Strategy):
            raise UserError("ExactCaptions cannot tell captions with weights that are sharded over ranks (fsdp2).")
        self.source = trainer.datamodule.open(self.data, is_train=False)
        self.count = min(self.count, len(self.source))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell and log."""
        data, is_exact = trainer.datamodule, []
        for start in range(0, self.count, data.batch_size):
            told, captions, _ = self._tell(trainer, pl_module, start, min(start + data.batch_size, self.count))
            is_exact += exact_matches(told, captions, data.words)
        if not is_exact:
            raise UserError(f"ExactCaptions: of the first {self.count} images of {self.data} none can be read.")
        share = sum(is_exact) / len(is_exact)
        pl_module.log(f"{self.name}/exact_match", share, prog_bar=True, sync_dist=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print and draw some."""
        folder = trainer.log_dir  # a broadcast: all ranks ask
        if not trainer.is_global_zero:
            return
        told, captions, images = self._tell(trainer, pl_module, 0, min(SHOWN, self.count))
        print(f"captions of {self.data}, told by this model:")
        for number in range(min(IN_TERMINAL, len(told))):
            print("\n".join(beside(images[number], [told[number], f"(is: {captions[number][0]})"])), end="\n\n")
        figure = draw_captions(images, told, captions)
        if folder is not None:
            figure.savefig(Path(folder) / f"captions-{self.name}.png", dpi=120)
        if isinstance(trainer.logger, TensorBoardLogger):
            trainer.logger.experiment.add_figure(f"captions/{self.name}", figure, trainer.global_step)

    def _tell(
        self, trainer: L.Trainer, pl_module: L.LightningModule, start: int, end: int
    ) -> tuple[list[str], list[list[str]], Tensor]:
        """Tell captions of some images; return them, those that the images have, and the images, uint8."""
        data = trainer.datamodule
        found = [pair for index in range(start, end) if (pair := self._read(data, index)) is not None]
        if not found:
            return [], [], torch.empty(0, 3, data.image_size, data.image_size, dtype=torch.uint8)
        images = torch.stack([image for image, _ in found])
        was_training = pl_module.training
        pl_module.eval()
        normalised = pl_module.normalise(images.to(pl_module.device))
        told = generate_captions(pl_module.model, normalised, data.words, data.context_length - 1)
        pl_module.train(was_training)
        return told, [captions for _, captions in found], images

    def _read(self, data: CaptionDataModule, index: int) -> tuple[Tensor, list[str]] | None:
        """Read an image and its captions; None, which is said once, if it cannot be."""
        try:
            return data.read(self.source, index)
        except UserError as error:
            if index not in self._unreadable:
                rank_zero_only(print)(f"ExactCaptions leaves out an image: {error}", flush=True)
            self._unreadable.add(index)
            return None


class CrossAttentionImages(Callback):
    """Draws into TensorBoard, at every validation, where each word of a caption looks when it is told, before and after
    composition; a picture for each layer that looks at the image.

    Args:
        data: A set, in the notation of `dcvl.data.captions`.
        index: Which of its images; its first caption is told.

    Raises:
        UserError: Before training starts, if there is no such image, the model tells nothing, or the run has no
            TensorBoard logger.
    """

    def __init__(self, data: str = "scenes:unseen", index: int = 0) -> None:
        self.data, self.index = data, index

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Read the image; see whether there is something to draw, and a place for it."""
        if not getattr(pl_module.model, "is_captioner", False):
            raise UserError("CrossAttentionImages is for a model that tells captions (model.caption_weight above 0).")
        if not trainer.fast_dev_run and not any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            raise UserError("CrossAttentionImages needs a TensorBoard logger; leave trainer.logger as it is.")
        data = trainer.datamodule
        source = data.open(self.data, is_train=False)
        if not 0 <= self.index < len(source):
            raise UserError(f"CrossAttentionImages's index={self.index}; expected 0 to {len(source) - 1}.")
        self._image, captions = data.read(source, self.index)
        self._caption = data.encode(captions[0])

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw: all ranks compute, for they may hold the weights together, and the first one writes."""
        normalised = pl_module.normalise(self._image[None].to(pl_module.device))[0]
        with trainer.precision_plugin.forward_context():
            figures = draw_words(pl_module.model, self._image, normalised, self._caption, trainer.datamodule.words)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, TensorBoardLogger):
                for name, figure in figures.items():
                    logger.experiment.add_figure(f"words/{name}", figure, trainer.global_step)
