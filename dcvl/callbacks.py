"""Trainer callbacks for captions: how many are told exactly, with some pictures beside what is told of them."""

# B images

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from torch import Tensor

from dctrain.errors import UserError
from dctrain.strategy import FSDP2Strategy

from .captioning import exact_matches, tell_captions
from .data.captions import CaptionSource

SHADES = " .:-=+*#%@"
SHOWN, IN_TERMINAL = 8, 2  # pictures


class ExactCaptions(Callback):
    """Tells captions of a set at every validation, greedily, and logs how many are one of the image's own.

    At the end some are printed, and drawn beside the pictures (`captions-NAME.png` in the run's folder, TensorBoard).
    Every rank tells all. Not under FSDP.

    Args:
        data: The set, in the notation of `dcvl.data.captions`.
        name: What it is called: `NAME/exact_match` is logged.
        count: Images, the first of the set.

    Raises:
        UserError: If there are none.
    """

    def __init__(self, data: str = "scenes:unseen", name: str = "unseen", count: int = 256) -> None:
        if count < 1:
            raise UserError(f"ExactCaptions's {count=} must be at least 1.")
        self.data, self.name, self.count = data, name, count
        self.source: CaptionSource | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Open the set; refuse a model that tells nothing, or whose weights are spread over ranks."""
        if not pl_module.model.is_captioner:
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
        share = sum(is_exact) / len(is_exact)
        pl_module.log(f"{self.name}/exact_match", share, prog_bar=True, sync_dist=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print and draw some."""
        if not trainer.is_global_zero:
            return
        told, captions, images = self._tell(trainer, pl_module, 0, min(SHOWN, self.count))
        for number in range(min(IN_TERMINAL, len(told))):
            print("\n".join(_beside(images[number], [told[number], f"(is: {captions[number][0]})"])), end="\n\n")
        figure = _draw(images, told, captions)
        if trainer.log_dir is not None:
            figure.savefig(Path(trainer.log_dir) / f"captions-{self.name}.png", dpi=120)
        if isinstance(trainer.logger, TensorBoardLogger):
            trainer.logger.experiment.add_figure(f"captions/{self.name}", figure, trainer.global_step)

    def _tell(
        self, trainer: L.Trainer, pl_module: L.LightningModule, start: int, end: int
    ) -> tuple[list[str], list[list[str]], Tensor]:
        """Tell captions of some images; return them, those that the images have, and the images, uint8."""
        data = trainer.datamodule
        found = [data.read(self.source, index) for index in range(start, end)]
        images = torch.stack([image for image, _ in found])
        was_training = pl_module.training
        pl_module.eval()
        normalised = pl_module.normalise(images.to(pl_module.device))
        told = tell_captions(pl_module.model, normalised, data.words, data.context_length - 1)
        pl_module.train(was_training)
        return told, [captions for _, captions in found], images


def _beside(image: Tensor, said: list[str]) -> list[str]:
    """Draw an image in letters, with some lines beside it."""
    grey = image.float().mean(0)
    rows = torch.nn.functional.adaptive_avg_pool2d(grey[None], (grey.shape[0] // 2, grey.shape[1]))[0]
    lines = ["".join(SHADES[int(value) * len(SHADES) // 256] for value in row) for row in rows.tolist()]
    middle = (len(lines) - len(said)) // 2
    return [f"{line}  {said[n - middle] if 0 <= n - middle < len(said) else ''}" for n, line in enumerate(lines)]


def _draw(images: Tensor, told: list[str], captions: list[list[str]]) -> Figure:
    """Draw images with what is told of them, in red where it is not one of their captions."""
    figure = Figure(figsize=(12, 2.4 * -(-len(told) // 4)), layout="constrained")
    cells = figure.subplots(-(-len(told) // 4), 4, squeeze=False).flat
    for axes in cells:
        axes.axis("off")
    for axes, image, caption, known in zip(figure.axes, images, told, captions, strict=False):
        axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
        axes.set_title(caption, fontsize=7, color="black" if caption in known else "C3", parse_math=False)
    return figure
