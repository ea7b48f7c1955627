"""ImageClassifier: loss, metrics, optimiser and schedule around any timm classifier."""

# B batch

import difflib
import math
from typing import Any

import lightning as L
import numpy as np
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchvision.transforms.v2 import MixUp

from .data import Batch
from .errors import UserError
from .flops import forward_flops


def build_model(name: str, num_classes: int, image_size: int, model_kwargs: dict) -> nn.Module:
    """Create a timm model by name.

    Raises:
        UserError: If the name is unknown or an argument does not fit the model.
    """
    if name not in timm.list_models():
        close = difflib.get_close_matches(name, timm.list_models(), n=4)
        raise UserError(f"model {name!r} is unknown to timm; close names: {', '.join(close) or 'none'}.")
    size = {"img_size": image_size} if timm.get_pretrained_cfg(name).fixed_input_size else {}
    try:
        return timm.create_model(name, num_classes=num_classes, **size, **model_kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"model {name!r} cannot be built with {model_kwargs | size}: {error}") from error


def warmup_cosine(step: int, warmup_steps: int, total_steps: int, final_fraction: float) -> float:
    """Return the learning rate's factor: linear from 0 over the warm-up, then a cosine to `final_fraction`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


class ImageClassifier(L.LightningModule):
    """Trains a timm classifier on uint8 images.

    Random numbers of a step (dropout, mixup) are a function of (seed, step, rank), so that a resumed run draws the
    same.

    Args:
        model: timm model name; `dcvit_*` and `mhavit_*` are this package's.
        num_classes: Classes of the head.
        image_size: Side of the images, in pixels.
        model_kwargs: More arguments for the model; options of `DCAttention` are accepted by `dcvit_*`.
        lr: Peak learning rate.
        weight_decay: As torch's AdamW: multiplied by the learning rate. 1e-4 in big_vision's units is 0.1 at lr 1e-3.
        betas: AdamW's.
        decay_all: Decay every parameter, as big_vision does; otherwise norms, biases and compose gates are left out.
        warmup_steps: Optimiser steps of linear warm-up.
        final_lr_fraction: Fraction of the peak at which the cosine ends.
        label_smoothing: Of the cross-entropy.
        mixup_alpha: Parameter of mixup's Beta distribution; 0 for none.
        ema_decay: Decay of a weight average that is then what is evaluated; None for none.
        compile: Compile the model in place (checkpoint keys stay clean).
        seed: Seed of the random numbers in the training step.

    Raises:
        UserError: If the model is unknown or an argument is out of range.
    """

    def __init__(
        self,
        model: str = "dcvit_digits_patch2_8",
        num_classes: int = 10,
        image_size: int = 8,
        model_kwargs: dict[str, Any] | None = None,
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
        for name, value in (("label_smoothing", label_smoothing), ("final_lr_fraction", final_lr_fraction)):
            if not 0 <= value <= 1:
                raise UserError(f"{name}={value} must be in [0, 1].")
        if num_classes < 2:
            raise UserError(f"{num_classes=} must be at least 2.")
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("mixup_alpha", mixup_alpha)):
            if value < 0:
                raise UserError(f"{name}={value} must not be negative.")
        if not all(0 <= beta < 1 for beta in betas) or not 0 < (0.5 if ema_decay is None else ema_decay) < 1:
            raise UserError(f"{betas=} must be in [0, 1) and {ema_decay=} in (0, 1).")
        self.save_hyperparameters()
        self.model = build_model(model, num_classes, image_size, model_kwargs or {})
        self.ema = None if ema_decay is None else ModelEmaV3(self.model, decay=ema_decay, use_warmup=True)
        self.mixup = MixUp(alpha=mixup_alpha, num_classes=num_classes) if mixup_alpha > 0 else None
        cfg = self.model.pretrained_cfg
        for name in ("mean", "std"):
            self.register_buffer(name, 255 * torch.tensor(cfg[name]).view(3, 1, 1), persistent=False)
        self.val_loss = MeanMetric()
        self.val_top1 = MulticlassAccuracy(num_classes, average="micro")
        self.val_top5 = MulticlassAccuracy(num_classes, average="micro", top_k=min(5, num_classes))
        self.forward_flops: int | None = None

    def configure_model(self) -> None:
        """Count FLOPs, shard (FSDP2, per block) and compile; Lightning calls it on every rank before training."""
        if self.forward_flops is not None:
            return
        self.forward_flops = forward_flops(self.model, self.hparams.image_size)
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            if self.ema is not None:
                raise UserError("model.ema_decay is not available under FSDP; leave it out or use DDP.")
            mesh = self.device_mesh["data_parallel"]
            for block in getattr(self.model, "blocks", ()):
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        if self.hparams.compile:
            self.model.compile()

    def forward(self, images: Tensor) -> Tensor:
        """Classify uint8 images [B, 3, size, size]; returns logits [B, num_classes]. Uses averaged weights if kept."""
        network = self.model if self.ema is None or self.training else self.ema.module
        return network(self.normalise(images))

    def normalise(self, images: Tensor) -> Tensor:
        """Scale uint8 images to the model's mean and standard deviation, on their device."""
        return (images.to(self.mean.dtype) - self.mean) / self.std

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed this step's random numbers."""
        step = self.trainer.fit_loop.epoch_loop.batch_progress.total.processed
        key = np.random.SeedSequence([self.hparams.seed, step, self.global_rank])
        torch.manual_seed(int(key.generate_state(1, np.uint64)[0] >> 1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the loss of one batch; zero where no image of it could be read."""
        images, labels = self.normalise(batch.images), batch.labels
        if not batch.names:
            return self.model(images).sum() * 0.0
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
        logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=self.hparams.label_smoothing)
        size = len(images)
        self.log("train/loss", loss, prog_bar=True, batch_size=size)
        self.log("train/lr", self.optimizers().param_groups[0]["lr"], batch_size=size)
        return loss

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Clip the global norm (`trainer.gradient_clip_val`) and log what it was."""
        if gradient_clip_algorithm not in (None, "norm"):
            raise UserError(f"trainer.gradient_clip_algorithm={gradient_clip_algorithm!r}; accepted: 'norm'.")
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(parameters, gradient_clip_val or math.inf)
        self.log("train/grad_norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def optimizer_step(self, *args, **kwargs) -> None:
        """Step, then average the weights."""
        super().optimizer_step(*args, **kwargs)
        if self.ema is not None:
            self.ema.update(self.model, step=self.trainer.global_step)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add one batch to the metrics, which Lightning reduces over ranks and logs at the end."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As `validation_step`, under other names."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Batch, prefix: str) -> None:
        """Update and log the metrics; samples that only pad a rank's share are left out."""
        logits = self(batch.images).float()
        counts = batch.labels >= 0
        logits, labels = logits[counts], batch.labels[counts]
        if len(labels):
            self.val_loss.update(F.cross_entropy(logits, labels), weight=len(labels))
            self.val_top1.update(logits, labels)
            self.val_top5.update(logits, labels)
        for name in ("loss", "top1", "top5"):
            self.log(f"{prefix}/{name}", getattr(self, f"val_{name}"), prog_bar=True, on_step=False, on_epoch=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict]:
        """Return, for each image that counts, its name, the likeliest class and that class's probability."""
        if not batch.names:
            return []
        probabilities = self(batch.images).float().softmax(-1)
        best, classes = probabilities.max(-1)
        rows = zip(batch.names, classes.tolist(), best.tolist(), batch.labels.tolist(), strict=True)
        return [{"name": n, "class": c, "probability": p} for n, c, p, label in rows if label >= 0]

    def configure_optimizers(self) -> dict:
        """AdamW; warm-up and cosine per step."""
        hp = self.hparams
        total_steps = self._total_steps()
        if hp.warmup_steps >= total_steps and not self.trainer.fast_dev_run:
            raise UserError(f"model.warmup_steps={hp.warmup_steps} must be less than the run's {total_steps} steps.")
        optimizer = torch.optim.AdamW(self._parameter_groups(), lr=hp.lr, betas=tuple(hp.betas))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, hp.warmup_steps, total_steps, hp.final_lr_fraction)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _total_steps(self) -> int:
        """Count the optimiser steps of the whole run.

        Not by `trainer.estimated_stepping_batches`: it starts the training loader before a checkpoint's position is
        known.
        """
        trainer = self.trainer
        if trainer.max_steps > 0:
            return trainer.max_steps
        if trainer.max_epochs is None or trainer.max_epochs < 1:
            raise UserError("the cosine schedule needs an end: set trainer.max_epochs or trainer.max_steps.")
        return trainer.max_epochs * -(-trainer.datamodule.steps_per_epoch // trainer.accumulate_grad_batches)

    def _parameter_groups(self) -> list[dict]:
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

        def decays(name: str, p: nn.Parameter) -> bool:
            return self.hparams.decay_all or (p.ndim > 1 and not name.endswith("compose.gate"))

        groups = [
            {"params": [p for n, p in named if decays(n, p)], "weight_decay": self.hparams.weight_decay},
            {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Refuse a checkpoint of another architecture with one message, before torch lists every key."""
        ours, theirs = self.state_dict(), checkpoint["state_dict"]
        different = sorted(ours.keys() ^ theirs.keys()) or sorted(k for k in ours if ours[k].shape != theirs[k].shape)
        if different:
            trained = checkpoint.get("hyper_parameters", {}).get("model", "unknown")
            raise UserError(
                f"the checkpoint is of another architecture: it holds model {trained!r}, this run builds "
                f"{self.hparams.model!r}; {len(different)} tensors differ, the first is {different[0]}."
            )
