"""ImageClassifier: loss, metrics, optimiser and schedule around any timm classifier."""

# B batch

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from torchvision.transforms.v2 import MixUp

from dctrain.activation_checkpointing import Recompute, set_recompute
from dctrain.checkpointing.checkpoint import make_folder
from dctrain.distributed.strategy import FSDP2Strategy
from dctrain.distributed.tensor_parallel import TensorParallelPlan
from dctrain.errors import UserError, as_user_error
from dctrain.training_module import Example, TrainingModule
from dctrain.utils.files import write_json
from dctrain.utils.weighted_mean import WeightedMean

from .compat_checks import compare_heads, compare_normalisation, normalisation
from .data import ImageBatch
from .data.samples import as_batch
from .factory import build_model, without_weights
from .tensor_parallel import split_vit


class ImageClassifier(TrainingModule):
    """Trains a timm classifier on uint8 images, of `ImageDataModule` or of any loader of (images, labels).

    Of other loaders images are uint8, or floating and normalised already: [B, 3, size, size]; labels int64 [B].

    Args:
        model: timm model name, with a tag of pretrained weights or not, or a saved one (`local-dir:FOLDER`); `dcvit_*`
            and `mhavit_*` are this package's. Or a module that gives logits [B, num_classes]; checkpoints then do not
            say how to build it, and `load_from_checkpoint` needs it again.
        num_classes: Classes of the head.
        image_size: Side of the images, in pixels.
        model_kwargs: More arguments for the model; options of `DCAttention` are accepted by `dcvit_*`.
        swap: Options of `swap_attention`, to put composed attention into a model of timm's; {} takes the defaults, None
            leaves the model as it is.
        recompute: What is computed again in the backward pass, to keep less until then: "none"; "attention", each layer
            of composed attention; "block", each block.
        lr: Peak learning rate.
        weight_decay: As torch's AdamW: multiplied by the learning rate. 1e-4 in big_vision's units is 0.1 at lr 1e-3.
        betas: AdamW's decay rates of the moments.
        decay_all: Decay every parameter, as big_vision does; otherwise norms, biases and compose gates are left out.
        warmup_steps: Optimiser steps of linear warm-up.
        final_lr_fraction: Fraction of the peak at which the cosine ends.
        label_smoothing: Label smoothing of the cross-entropy.
        mixup_alpha: Parameter of mixup's Beta distribution; 0 for none.
        ema_decay: Decay of a weight average that is then what is evaluated; None for none.
        compile: Compile the model in place (checkpoint keys stay clean).
        seed: Seed of the random numbers in the training step.

    Raises:
        UserError: If the model is unknown or an argument is out of range.
    """

    speed_unit = "images"

    def __init__(
        self,
        model: str | nn.Module = "dcvit_digits_patch2_8",
        num_classes: int = 10,
        image_size: int = 8,
        model_kwargs: dict[str, Any] | None = None,
        swap: dict[str, Any] | None = None,
        recompute: Recompute = "none",
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        decay_all: bool = False,
        warmup_steps: int = 0,
        final_lr_fraction: float = 0.0,
        label_smoothing: float = 0.0,
        mixup_alpha: float = 0.0,
        ema_decay: float | None = None,
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=[] if isinstance(model, str) else ["model"])
        self.check_ranges()
        if not 0 <= label_smoothing <= 1:
            raise UserError(f"{label_smoothing=} must be in [0, 1].")
        if num_classes < 2 or (mixup_alpha and not 1e-6 <= mixup_alpha < math.inf):
            raise UserError(f"{num_classes=} must be at least 2 and {mixup_alpha=} not negative, and finite.")
        if warmup_steps < 0:
            raise UserError(f"{warmup_steps=} must not be negative.")
        if not 0 < (0.5 if ema_decay is None else ema_decay) < 1:
            raise UserError(f"{ema_decay=} must be in (0, 1).")
        self.model = build_model(model, num_classes, image_size, model_kwargs or {}, swap)
        set_recompute(self.model, recompute)
        self.ema = None if ema_decay is None else ModelEmaV3(self.model, decay=ema_decay, use_warmup=True)
        if self.ema is not None:
            self.ema.requires_grad_(False)  # data-parallel training waits for the gradients of all that require one
        self.mixup = MixUp(alpha=mixup_alpha, num_classes=num_classes) if mixup_alpha > 0 else None
        for name, values in normalisation(self.model).items():
            self.register_buffer(name, 255 * torch.tensor(values).view(3, 1, 1), persistent=False)
        self.val_loss = WeightedMean()
        self.val_top1 = MulticlassAccuracy(num_classes, average="micro")
        self.val_top5 = MulticlassAccuracy(num_classes, average="micro", top_k=min(5, num_classes))
        self.forward_flops: int | None = None

    def count_units(self, batch: ImageBatch) -> int:
        """Count the images of a batch."""
        return len(batch.labels)

    def warmup_steps(self, total_steps: int) -> int:
        """Tell how many optimiser steps the warm-up takes."""
        return self.hparams.warmup_steps

    def on_train_start(self) -> None:
        """Take over the settings of a resumed run; keep the names of the classes in the run's folder."""
        super().on_train_start()
        classes, folder = getattr(self.trainer.datamodule, "classes", None), self.trainer.log_dir
        if classes and folder and self.trainer.is_global_zero and not self.trainer.fast_dev_run:
            make_folder(folder)
            write_json(Path(folder) / "classes.json", classes)

    def example(self, batch_size: int) -> Example:
        """Make normalised images [B, 3, size, size]."""
        size = self.hparams.image_size
        return Example((torch.empty(batch_size, 3, size, size, device="meta"),), {}, batch_size)

    def configure_model(self) -> None:
        """Count FLOPs, shard (FSDP2, per block) and compile; Lightning calls it on every rank before training."""
        if self.forward_flops is not None or self._trainer is None:  # none: `load_from_checkpoint`
            return
        self.forward_flops = self.count_flops(self.model, *self.example(1).args)
        if self.ema is not None and isinstance(self.trainer.strategy, FSDP2Strategy):
            raise UserError("model.ema_decay is not available under FSDP; leave it out or use DDP.")
        self.shard_and_compile(getattr(self.model, "blocks", ()))

    def check_architecture(self, theirs: Mapping[str, torch.Size], trained: Mapping[str, object]) -> None:
        """Compare a checkpoint with this module: its tensors, and what no tensor tells, such as the number of heads."""
        super().check_architecture(theirs, trained)
        name, theirs, ours = trained.get("model"), trained.get("model_kwargs") or {}, self.hparams.model_kwargs or {}
        if (name, theirs) == (self.hparams.get("model"), ours) or not isinstance(name, str) or not timm.is_model(name):
            return
        with torch.device("meta"):
            network = build_model(name, trained["num_classes"], trained["image_size"], without_weights(theirs))
        compare_heads("the checkpoint", network, self.model)
        compare_normalisation("the checkpoint", network, self.model)

    def read_initial(self, source: str) -> tuple[dict[str, Tensor], list[str]]:
        """Read the weights of a run, of an exported folder, or timm's own."""
        from .init_from import read_initial  # which loads runs, by what is defined here

        return read_initial(source, self.model)

    def start_from(self, source: str) -> None:
        """Take other weights for those that were drawn, and let the average begin with them."""
        super().start_from(source)
        if self.ema is not None:
            self.ema.set(self.model)

    def split_model(self, rank: int, ranks: int) -> TensorParallelPlan:
        """Tell the network to compute a rank's share; return how it is split then."""
        with as_user_error(f"trainer.strategy.tensor_parallel={ranks}"):
            return split_vit(self.model, ranks)

    def forward(self, images: Tensor) -> Tensor:
        """Classify uint8 images [B, 3, size, size]; returns logits [B, num_classes]. Uses averaged weights if kept."""
        return (self.model if self.training else self.evaluated)(self.normalise(images))

    @property
    def evaluated(self) -> nn.Module:
        """The network that is evaluated: the averaged one if kept."""
        return self.model if self.ema is None else self.ema.module

    def normalise(self, images: Tensor) -> Tensor:
        """Scale uint8 images to the model's mean and standard deviation, on their device; floating ones are so."""
        if images.dim() != 4 or images.shape[1] != 3:
            raise ValueError(f"images have shape {list(images.shape)}: expected [B, 3, height, width].")
        if images.is_floating_point():
            return images.to(self.mean.dtype)
        return (images.to(self.mean.dtype) - self.mean) / self.std

    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        """Compute the loss of one batch; zero where no image of it could be read."""
        batch = as_batch(batch)
        images, labels = self.normalise(batch.images), batch.labels
        if not batch.names:
            return self.model(images).sum() * 0.0
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
        logits = _widened(self.model(images))
        loss = F.cross_entropy(logits, labels, label_smoothing=self.hparams.label_smoothing)
        return self.log_step(loss, batch_size=len(images))

    def optimizer_step(self, *args, **kwargs) -> None:
        """Step, then average the weights."""
        super().optimizer_step(*args, **kwargs)
        if self.ema is not None and not self.skipped_in_a_row:
            self.ema.update(self.model, step=self.trainer.global_step)

    def validation_step(self, batch: ImageBatch, batch_idx: int) -> None:
        """Add one batch to the metrics, which Lightning reduces over ranks and logs at the end."""
        self._evaluate(batch, "val")

    def test_step(self, batch: ImageBatch, batch_idx: int) -> None:
        """Do what `validation_step` does, and log it under "test"."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: ImageBatch, prefix: str) -> None:
        """Update and log the metrics; samples that only pad a rank's share are left out."""
        batch = as_batch(batch)
        logits = _widened(self(batch.images))
        counts = batch.labels >= 0
        logits, labels = logits[counts], batch.labels[counts]
        if len(labels):
            losses = F.cross_entropy(logits, labels, reduction="none")
            self.val_loss.update(losses.mean(), len(labels))
            logits = _nan_is_wrong(logits, labels)
            self.val_top1.update(logits, labels)
            self.val_top5.update(logits, labels)
            names = [name for name, is_counted in zip(batch.names, counts.tolist(), strict=True) if is_counted]
            best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            self.items.add(f"{prefix}/loss", names, losses)
            self.items.add(f"{prefix}/top1", names, best[:, 0])
            self.items.add(f"{prefix}/top5", names, best.any(1))
        for name in ("loss", "top1", "top5"):
            self.log(f"{prefix}/{name}", getattr(self, f"val_{name}"), prog_bar=True, on_step=False, on_epoch=True)

    def predict_step(self, batch: ImageBatch, batch_idx: int) -> list[dict]:
        """Return, for each image that counts, its name, the likeliest class and that class's probability."""
        batch = as_batch(batch)
        if not batch.names:
            return []
        probabilities = self(batch.images).float().softmax(-1)
        if probabilities.isnan().any():
            raise UserError("the logits hold NaN: the weights are damaged, or too large.")
        best, classes = probabilities.max(-1)
        rows = zip(batch.names, classes.tolist(), best.tolist(), batch.labels.tolist(), strict=True)
        return [{"name": n, "class": c, "probability": p} for n, c, p, label in rows if label >= 0]


def _nan_is_wrong(logits: Tensor, labels: Tensor) -> Tensor:
    """Rank the label last in rows that hold NaN, which would otherwise count as class 0."""
    wrong = 1.0 - F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    return torch.where(logits.isnan().any(1, keepdim=True), wrong, logits)


def _widened(logits: Tensor) -> Tensor:
    """Give logits at least 32 bits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
