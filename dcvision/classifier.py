"""ImageClassifier: LightningModule for any timm classifier."""

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
from dctrain.lightning_internals import attached_trainer
from dctrain.training_module import Example, TrainingModule
from dctrain.utils.files import write_json
from dctrain.utils.weighted_mean import WeightedMean

from .compat_checks import compare_heads, compare_normalization, normalization
from .data import ImageBatch
from .data.samples import as_batch
from .factory import build_model, without_weights
from .tensor_parallel import split_vit


class ImageClassifier(TrainingModule):
    """Trains a timm classifier on batches of `ImageDataModule`, or of any loader of (images, labels).

    Images of other loaders are uint8, or floating and already normalized: [B, 3, size, size]; labels int64 [B].

    Args:
        model: timm model name, optionally with a tag of pretrained weights, or a saved model (`local-dir:FOLDER`);
            `dcvit_*` and `mhavit_*` are defined in this package. Alternatively a module that returns logits
            [B, num_classes]; it is not part of checkpoints and has to be passed to `load_from_checkpoint`.
        num_classes: Number of classes.
        image_size: Side of the images, in pixels.
        model_kwargs: Additional arguments of the model; `dcvit_*` accept options of `DCAttention`.
        swap: Options of `swap_attention`, to use composed attention in a timm model; {} for the defaults, None for no
            swap.
        recompute: Activation checkpointing: "none", "attention" (each composed attention layer) or "block" (each
            block).
        lr: Peak learning rate.
        weight_decay: Weight decay of AdamW, multiplied by the learning rate. 1e-4 in big_vision's units is 0.1 at lr
            1e-3.
        betas: Decay rates of AdamW's moments.
        decay_all: Decay every parameter, as big_vision does; otherwise norms, biases and compose gates are not decayed.
        warmup_steps: Optimizer steps of linear warm-up.
        final_lr_fraction: Fraction of the peak at which the cosine ends.
        label_smoothing: Label smoothing of the cross-entropy.
        mixup_alpha: Parameter of mixup's Beta distribution; 0 for no mixup.
        ema_decay: Decay of an exponential moving average of the weights, which is then evaluated; None for none.
        compile: Compile the model in place, which does not change checkpoint keys.
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
            raise UserError(f"{num_classes=} must be at least 2, and {mixup_alpha=} finite and not negative.")
        if warmup_steps < 0:
            raise UserError(f"{warmup_steps=} must not be negative.")
        if not 0 < (0.5 if ema_decay is None else ema_decay) < 1:
            raise UserError(f"{ema_decay=} must be in (0, 1).")
        self.model = build_model(model, num_classes, image_size, model_kwargs or {}, swap)
        set_recompute(self.model, recompute)
        self.ema = None if ema_decay is None else ModelEmaV3(self.model, decay=ema_decay, use_warmup=True)
        if self.ema is not None:
            self.ema.requires_grad_(False)  # DDP waits for the gradients of all parameters that require one
        self.mixup = MixUp(alpha=mixup_alpha, num_classes=num_classes) if mixup_alpha > 0 else None
        for name, values in normalization(self.model).items():
            self.register_buffer(name, 255 * torch.tensor(values).view(3, 1, 1), persistent=False)
        self.val_loss = WeightedMean()
        self.val_top1 = MulticlassAccuracy(num_classes, average="micro")
        self.val_top5 = MulticlassAccuracy(num_classes, average="micro", top_k=min(5, num_classes))
        self.forward_flops: int | None = None

    def count_units(self, batch: ImageBatch) -> int:
        """Count the images of a batch."""
        return len(batch.labels)

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps."""
        return self.hparams.warmup_steps

    def on_train_start(self) -> None:
        """Apply the settings of a resumed run; write the class names to the run's folder."""
        super().on_train_start()
        classes, folder = getattr(self.trainer.datamodule, "classes", None), self.trainer.log_dir
        if classes and folder and self.trainer.is_global_zero and not self.trainer.fast_dev_run:
            make_folder(folder)
            write_json(Path(folder) / "classes.json", classes)

    def example(self, batch_size: int) -> Example:
        """Create normalized images [B, 3, size, size]."""
        size = self.hparams.image_size
        return Example((torch.empty(batch_size, 3, size, size, device="meta"),), {}, batch_size)

    def configure_model(self) -> None:
        """Count FLOPs, shard (FSDP2, per block) and compile; Lightning calls it on every rank before training."""
        if self.forward_flops is not None or attached_trainer(self) is None:  # no trainer: `load_from_checkpoint`
            return
        self.forward_flops = self.count_flops(self.model, *self.example(1).args)
        if self.ema is not None and isinstance(self.trainer.strategy, FSDP2Strategy):
            raise UserError("model.ema_decay is not supported with FSDP; remove it or use DDP.")
        self.shard_and_compile(getattr(self.model, "blocks", ()))

    def check_architecture(self, theirs: Mapping[str, torch.Size], trained: Mapping[str, object]) -> None:
        """Compare a checkpoint with this module: tensors, and properties such as the number of heads."""
        super().check_architecture(theirs, trained)
        name, theirs, ours = trained.get("model"), trained.get("model_kwargs") or {}, self.hparams.model_kwargs or {}
        if (name, theirs) == (self.hparams.get("model"), ours) or not isinstance(name, str) or not timm.is_model(name):
            return
        with torch.device("meta"):
            network = build_model(name, trained["num_classes"], trained["image_size"], without_weights(theirs))
        compare_heads("the checkpoint", network, self.model)
        compare_normalization("the checkpoint", network, self.model)

    def read_initial(self, source: str) -> tuple[dict[str, Tensor], list[str]]:
        """Read the weights of a run, an exported folder, or timm's pretrained weights."""
        from .init_from import read_initial  # imports this module to load runs

        return read_initial(source, self.model)

    def start_from(self, source: str) -> None:
        """Load initial weights, also into the moving average."""
        super().start_from(source)
        if self.ema is not None:
            self.ema.set(self.model)

    def split_model(self, rank: int, ranks: int) -> TensorParallelPlan:
        """Change the network to compute a rank's share; return how it is split."""
        with as_user_error(f"trainer.strategy.tensor_parallel={ranks}"):
            return split_vit(self.model, ranks)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, num_classes] for uint8 images [B, 3, size, size]. Uses the averaged weights if there are
        any.
        """
        return (self.model if self.training else self.evaluated)(self.normalize(images))

    @property
    def evaluated(self) -> nn.Module:
        """The network for evaluation: the averaged one if there is one."""
        return self.model if self.ema is None else self.ema.module

    def normalize(self, images: Tensor) -> Tensor:
        """Normalize uint8 images by the model's mean and standard deviation; floating images are returned unchanged."""
        if images.dim() != 4 or images.shape[1] != 3:
            raise ValueError(f"images have shape {list(images.shape)}: expected [B, 3, height, width].")
        if images.is_floating_point():
            return images.to(self.mean.dtype)
        return (images.to(self.mean.dtype) - self.mean) / self.std

    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        """Compute the loss of a batch; zero if none of its images could be read."""
        batch = as_batch(batch)
        images, labels = self.normalize(batch.images), batch.labels
        if not batch.names:
            return self.model(images).sum() * 0.0
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
        logits = _widened(self.model(images))
        loss = F.cross_entropy(logits, labels, label_smoothing=self.hparams.label_smoothing)
        return self.log_step(loss, batch_size=len(images))

    def optimizer_step(self, *args, **kwargs) -> None:
        """Run the optimizer step, and update the moving average."""
        super().optimizer_step(*args, **kwargs)
        if self.ema is not None and not self.skipped_in_a_row:
            self.ema.update(self.model, step=self.trainer.global_step)

    def validation_step(self, batch: ImageBatch, batch_idx: int) -> None:
        """Update the metrics, which Lightning reduces over ranks and logs at the end."""
        self._evaluate(batch, "val")

    def test_step(self, batch: ImageBatch, batch_idx: int) -> None:
        """Same as `validation_step`, logged under "test"."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: ImageBatch, prefix: str) -> None:
        """Update and log the metrics, without padding samples."""
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
        """Return name, predicted class and its probability for each image, without padding."""
        batch = as_batch(batch)
        if not batch.names:
            return []
        probabilities = self(batch.images).float().softmax(-1)
        if probabilities.isnan().any():
            raise UserError("the logits have NaN: the weights are damaged or too large.")
        best, classes = probabilities.max(-1)
        rows = zip(batch.names, classes.tolist(), best.tolist(), batch.labels.tolist(), strict=True)
        return [{"name": n, "class": c, "probability": p} for n, c, p, label in rows if label >= 0]


def _nan_is_wrong(logits: Tensor, labels: Tensor) -> Tensor:
    """Rank the label last in rows with NaN, which would otherwise be predicted as class 0."""
    wrong = 1.0 - F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    return torch.where(logits.isnan().any(1, keepdim=True), wrong, logits)


def _widened(logits: Tensor) -> Tensor:
    """Convert logits to at least 32 bits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
