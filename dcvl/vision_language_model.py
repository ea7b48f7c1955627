"""VisionLanguageModel: LightningModule for an image tower and a text tower."""

# B images, M texts, T tokens

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from dclm.config import build_config, check_same
from dclm.loss import IGNORED
from dctrain.activation_checkpointing import Recompute, set_recompute
from dctrain.errors import UserError
from dctrain.lightning_internals import attached_trainer
from dctrain.training_module import Example, TrainingModule
from dctrain.utils.weighted_mean import WeightedMean
from dcvision.compat_checks import compare_heads, compare_normalization, normalization
from dcvision.factory import without_weights

from .contrastive import Contrastive, ContrastiveBatch, contrastive_loss
from .data import CaptionBatch
from .factory import build_pair, image_tower
from .init_from import read_initial
from .network import ImageTextOutputs, Texts
from .retrieval import RetrievalAt1


class VisionLanguageModel(TrainingModule):
    """Trains an image tower and a text tower on images with captions (`CaptionDataModule`).

    There are two losses, of which one can be disabled: a contrastive loss over the pairs of all ranks, and a captioning
    loss (next token given the image). Both together are CoCa, one alone is SigLIP or CLIP, or a captioner. Composition
    in the towers is selected by the model names, in the cross-attention by `cross_compose`.

    Args:
        model: timm name of the image tower; `dcvit_*` and `mhavit_*` are defined in dcvision.
        image_size: Side of the images, in pixels.
        model_kwargs: Additional arguments of the image tower.
        text_model: Name of a configuration of the text tower (`dclm.CONFIGS`).
        text_overrides: Other fields of its `DecoderConfig`.
        vocab_size: Number of embedding rows of the text tower.
        context_length: Tokens per text.
        cross_layers: Number of the text tower's last layers with cross-attention. None: half of them with both losses,
            all with captioning only, none without captioning.
        cross_compose: Compose the heads of the cross-attention.
        embed_dim: Width of the embeddings.
        contrastive: "sigmoid" (SigLIP), "softmax" (CLIP), or None for no contrastive loss.
        contrastive_weight: Weight of the contrastive loss.
        caption_weight: Weight of the captioning loss; 0 for none.
        recompute: Activation checkpointing: "none", "attention" (each attention layer) or "block" (each block of both
            towers).
        lr: Peak learning rate.
        weight_decay: AdamW's weight decay, multiplied by the learning rate.
        betas: Decay rates of AdamW's moments.
        decay_all: Decay every parameter; otherwise norms, biases, compose gates, scale and bias are not decayed.
        warmup_fraction: Fraction of the steps with linear warm-up.
        final_lr_fraction: Fraction of the peak at which the cosine ends.
        compile: Compile the towers in place, which does not change checkpoint keys.
        seed: Seed of the random numbers in the training step.

    Raises:
        UserError: If a model is unknown, an argument is out of range, or both losses are disabled.
    """

    speed_unit = "images"

    def __init__(
        self,
        model: str = "dcvit_small_patch4_32",
        image_size: int = 32,
        model_kwargs: dict[str, Any] | None = None,
        text_model: str = "dcformer_pp_debug",
        text_overrides: dict[str, Any] | None = None,
        vocab_size: int = 32,
        context_length: int = 16,
        cross_layers: int | None = None,
        cross_compose: bool = True,
        embed_dim: int = 64,
        contrastive: Contrastive | None = "sigmoid",
        contrastive_weight: float = 1.0,
        caption_weight: float = 1.0,
        recompute: Recompute = "none",
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.95),
        decay_all: bool = False,
        warmup_fraction: float = 0.1,
        final_lr_fraction: float = 0.0,
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.check_ranges()
        self._check_losses()
        if not 0 <= warmup_fraction < 1:
            raise UserError(f"{warmup_fraction=} must be in [0, 1).")
        if embed_dim < 1:
            raise UserError(f"{embed_dim=} must be at least 1.")
        self.model = build_pair(**{name: self.hparams[name] for name in inspect.signature(build_pair).parameters})
        set_recompute(self.model, recompute)
        for name, values in normalization(self.model.image).items():
            self.register_buffer(name, 255 * torch.tensor(values).view(3, 1, 1), persistent=False)
        self.val_contrastive_loss, self.val_caption_loss = (WeightedMean() for _ in range(2))
        self.val_retrieval = RetrievalAt1()
        self.num_cut: Tensor | float = 0.0  # truncated captions of all ranks
        self.forward_flops: int | None = None

    def _check_losses(self) -> None:
        hp = self.hparams
        for name in ("contrastive_weight", "caption_weight"):
            if not 0 <= hp[name] < math.inf:
                raise UserError(f"{name}={hp[name]} must be finite and not negative.")
        if hp.contrastive is not None and hp.contrastive not in ("sigmoid", "softmax"):
            raise UserError(f"contrastive={hp.contrastive!r}; expected 'sigmoid', 'softmax', or null.")
        if hp.contrastive is not None and not hp.contrastive_weight:
            raise UserError("contrastive_weight=0 leaves the embeddings untrained; use contrastive null.")
        if hp.contrastive is None and not hp.caption_weight:
            raise UserError("contrastive=null and caption_weight=0: expected at least one loss.")
        if hp.cross_layers is not None and bool(hp.cross_layers) != bool(hp.caption_weight):
            raise UserError(
                f"cross_layers={hp.cross_layers} with caption_weight={hp.caption_weight}: cross-attention "
                "and captioning require each other."
            )

    def count_units(self, batch: CaptionBatch) -> int:
        """Count the images of a batch."""
        return len(batch.images)

    def example(self, batch_size: int) -> Example:
        """Create images [B, 3, size, size] with one text each."""
        size, length = self.hparams.image_size, self.hparams.context_length
        images = torch.zeros(batch_size, 3, size, size, device="meta")
        ids = torch.zeros(batch_size, length, dtype=torch.long, device="meta")
        rows = torch.zeros(batch_size, dtype=torch.long, device="meta")
        return Example((images, Texts(ids, ids, rows, rows)), {}, batch_size)

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps."""
        return min(math.ceil(self.hparams.warmup_fraction * total_steps), total_steps - 1)

    def setup(self, stage: str) -> None:
        """Check that the global batch has at least two pairs for a contrastive loss."""
        data = self.trainer.datamodule
        if self.hparams.contrastive and data is not None and data.batch_size * data.world_size < 2:
            raise UserError("data.batch_size=1 on one rank: a contrastive loss requires at least two pairs.")

    def configure_model(self) -> None:
        """Count FLOPs, shard (FSDP2, per block) and compile; Lightning calls it on every rank before training."""
        if self.forward_flops is not None or attached_trainer(self) is None:  # no trainer: `load_from_checkpoint`
            return
        self.forward_flops = self.count_flops(self.model, *self.example(1).args)
        self.shard_and_compile(self.model.blocks)

    def read_initial(self, source: str) -> tuple[dict[str, Tensor], list[str]]:
        """Read both towers together or separately."""
        return read_initial(source, self.model)

    def forward(self, images: Tensor) -> Tensor:
        """Return normalized embeddings [B, embed_dim] of uint8 images [B, 3, size, size]."""
        return self.model.embed_images(self.model.encode_images(self.normalize(images)))

    def normalize(self, images: Tensor) -> Tensor:
        """Normalize uint8 images by the tower's mean and standard deviation."""
        return (images.to(self.mean.dtype) - self.mean) / self.std

    def training_step(self, batch: CaptionBatch, batch_idx: int) -> Tensor:
        """Compute the weighted sum of the losses of a batch."""
        self.model.limit_scale()
        outputs = self.model(self.normalize(batch.images), batch.texts)
        losses = self._losses(outputs, batch)
        for name, loss in losses.items():
            self.log(f"train/{name}_loss", loss, batch_size=len(batch.images))
        self.num_cut = self.num_cut + _mean_over_ranks(torch.tensor(batch.num_cut, device=self.device)) * _num_ranks()
        self.log("train/cut_captions", self.num_cut.float(), batch_size=len(batch.images))
        total = sum(self.hparams[f"{name}_weight"] * loss for name, loss in losses.items())
        return self.log_step(total, batch_size=len(batch.images))

    def _losses(self, outputs: ImageTextOutputs, batch: CaptionBatch) -> dict[str, Tensor]:
        """Compute this rank's share of each loss; the means over ranks equal the losses of one process."""
        losses = {}
        if outputs.images is not None:
            pairs = ContrastiveBatch(outputs.images, outputs.texts, batch.texts.input_ids, batch.counts)
            losses["contrastive"] = contrastive_loss(self.hparams.contrastive, pairs, outputs.scale, outputs.bias)
        if outputs.caption_loss is not None:
            count = (batch.texts.targets != IGNORED).sum()
            losses["caption"] = outputs.caption_loss / _mean_over_ranks(count).clamp(min=1).to(outputs.caption_loss)
        return losses

    def validation_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        """Update the metrics."""
        self._evaluate(batch)

    def test_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        """Same as `validation_step`, logged under "test"."""
        self._evaluate(batch)

    def _evaluate(self, batch: CaptionBatch) -> None:
        texts, counts = batch.texts, batch.counts
        outputs = self.model(self.normalize(batch.images), texts)
        if outputs.caption_loss is not None:
            count = (texts.targets != IGNORED).sum()
            self.val_caption_loss.update(outputs.caption_loss / count.clamp(min=1), count)
        if outputs.images is None:
            return
        first = torch.searchsorted(texts.owners, torch.arange(len(counts), device=counts.device))
        pairs = ContrastiveBatch(outputs.images, outputs.texts[first], texts.input_ids[first], counts)
        loss = contrastive_loss(self.hparams.contrastive, pairs, outputs.scale, outputs.bias)
        self.val_contrastive_loss.update(loss, _mean_over_ranks(counts.sum()))
        used, numbers = counts[texts.owners], counts.cumsum(0) - 1  # valid texts, and indices of valid images
        owners = numbers[texts.owners[used]]
        self.val_retrieval.update(outputs.images[counts], outputs.texts[used], texts.input_ids[used], owners)

    def on_validation_epoch_end(self) -> None:
        """Log the losses - per token of all captions, per pair of an image and its first caption (which depends on the
        batch size), and their weighted sum - and the recall at 1 over the whole set.
        """
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        """Same as `on_validation_epoch_end`, logged under "test"."""
        self._log_metrics("test")

    def _log_metrics(self, prefix: str) -> None:
        means = {"caption": self.val_caption_loss} if self.model.is_captioner else {}
        means |= {} if self.model.embed_dim is None else {"contrastive": self.val_contrastive_loss}
        losses = {name: mean.compute() for name, mean in means.items()}
        metrics = {f"{name}_loss": loss for name, loss in losses.items()}
        metrics["loss"] = sum(self.hparams[f"{name}_weight"] * loss for name, loss in losses.items())
        metrics |= {} if self.model.embed_dim is None else self.val_retrieval.compute()
        for metric in (*means.values(), self.val_retrieval):
            metric.reset()
        self.log_dict({f"{prefix}/{name}": value for name, value in metrics.items()}, prog_bar=True, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Also save the count of truncated captions."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["cut_captions"] = float(self.num_cut)

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Also restore the count of truncated captions."""
        super().on_load_checkpoint(checkpoint)
        self.num_cut = checkpoint.get("cut_captions", 0.0)

    def check_architecture(self, theirs: Mapping[str, torch.Size], trained: Mapping[str, object]) -> None:
        """Compare a checkpoint with this module: tensors, and properties such as the number of heads."""
        super().check_architecture(theirs, trained)
        if trained.get("contrastive") != self.hparams.contrastive:
            raise UserError(
                f"the checkpoint was trained with contrastive={trained.get('contrastive')!r}, here "
                f"{self.hparams.contrastive!r}."
            )
        with torch.device("meta"):
            image = image_tower(trained["model"], trained["image_size"], without_weights(trained["model_kwargs"]))
        compare_heads("the checkpoint", image, self.model.image)
        compare_normalization("the checkpoint", image, self.model.image)
        named = [trained[name] for name in ("text_model", "vocab_size", "context_length")]
        text = build_config(*named, trained["text_overrides"] or {})
        own = ("context_dim", "cross_layers", "cross_compose")
        ours = replace(self.model.text.config, **{name: getattr(text, name) for name in own})
        check_same(text, ours, "the checkpoint has a different text tower", "model.text_model, model.text_overrides")


def _num_ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _mean_over_ranks(count: Tensor) -> Tensor:
    """Mean of a count over the ranks, in float64."""
    count = count.double()
    if _num_ranks() > 1:
        torch.distributed.all_reduce(count)
    return count / _num_ranks()
