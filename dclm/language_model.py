"""LanguageModel: LightningModule for a `Decoder`."""

# B batch, T tokens

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from dctrain.activation_checkpointing import Recompute, set_recompute
from dctrain.checkpointing.init_from import check_initial, is_of_composition
from dctrain.distributed.meta_init import weights_device
from dctrain.distributed.tensor_parallel import TensorParallelPlan
from dctrain.errors import UserError, as_user_error
from dctrain.lightning_internals import attached_trainer
from dctrain.training_module import Example, TrainingModule

from .config import DEFAULT_MODEL, build_config, check_same
from .data import TokenBatch, TokenDataModule
from .data.samples import as_batch
from .decoder import Decoder
from .load import load_decoder
from .loss import IGNORED, Likelihood
from .tensor_parallel import split_decoder


def _may_be_drawn(name: str) -> bool:
    """Whether a parameter may be missing in initial weights: those of composition and QK-norm."""
    return is_of_composition(name) or ".q_norm." in name or ".k_norm." in name


def check_objective(is_causal: bool, mask_fraction: float | None) -> None:
    """Check that the objective matches the model: next tokens for causal models, masked tokens for bidirectional ones.

    Raises:
        UserError: If they do not match.
    """
    if (mask_fraction is None) != is_causal:
        raise UserError(
            f"model.overrides.is_causal={is_causal} with data.mask_fraction={mask_fraction}: a causal model predicts "
            "the next token (mask_fraction null), a bidirectional one masked tokens (such as 0.15)."
        )


class LanguageModel(TrainingModule):
    """Trains a decoder to predict next or masked tokens, on batches of `TokenDataModule` or of any other loader.

    Batches of other loaders are (input_ids, targets), both int64 [B, T]; targets of -100 are ignored. For decoders with
    `is_causal: false` the targets must be masked in the input.

    Args:
        model: Name of a configuration (`dclm.CONFIGS`).
        vocab_size: Number of embedding rows.
        context_length: Tokens per sequence.
        overrides: Other fields of `DecoderConfig`.
        recompute: Activation checkpointing: "none", "attention" (each attention layer) or "block" (each block).
        lr: Peak learning rate.
        weight_decay: AdamW's weight decay, multiplied by the learning rate.
        betas: Decay rates of AdamW's moments.
        decay_all: Decay every parameter, as the paper's code does; otherwise norms, biases and compose gates are not
            decayed.
        warmup_fraction: Fraction of the steps with linear warm-up.
        final_lr_fraction: Fraction of the peak at which the cosine ends.
        compile: Compile the decoder in place, which does not change checkpoint keys.
        seed: Seed of the random numbers in the training step.

    Raises:
        UserError: If the model is unknown or an argument is out of range.
    """

    speed_unit = "tokens"

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        vocab_size: int = 257,
        context_length: int = 256,
        overrides: dict[str, Any] | None = None,
        recompute: Recompute = "none",
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        decay_all: bool = True,
        warmup_fraction: float = 0.01,
        final_lr_fraction: float = 0.1,
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.check_ranges()
        if not 0 <= warmup_fraction < 1:
            raise UserError(f"{warmup_fraction=} must be in [0, 1).")
        self.config = build_config(model, vocab_size, context_length, overrides or {})
        with as_user_error(f"model {model!r} cannot be built with {overrides}"):
            self.model = Decoder(self.config, device=weights_device())
        set_recompute(self.model, recompute)
        self.val_loss, self.val_accuracy = (MeanMetric(nan_strategy="disable") for _ in range(2))
        self.forward_flops: int | None = None

    def count_units(self, batch: TokenBatch) -> int:
        """Count the tokens of a batch."""
        return batch.input_ids.numel()

    def example(self, batch_size: int) -> Example:
        """Create token ids [B, T] and targets."""
        ids = torch.zeros(batch_size, self.config.context_length, dtype=torch.long, device="meta")
        return Example((ids,), {"targets": ids}, ids.numel())

    def setup(self, stage: str) -> None:
        """Check that the data match the objective."""
        if isinstance(self.trainer.datamodule, TokenDataModule):
            check_objective(self.config.is_causal, self.trainer.datamodule.mask_fraction)

    def check_architecture(self, theirs: Mapping[str, torch.Size], trained: Mapping[str, object]) -> None:
        """Compare a checkpoint with this module: tensors, and properties such as the number of heads."""
        super().check_architecture(theirs, trained)
        if "overrides" not in trained:  # saved by a subclass with different arguments
            return
        named = [trained[name] for name in ("model", "vocab_size", "context_length")]
        before = build_config(*named, trained["overrides"] or {})
        check_same(
            before, self.config, "the checkpoint was trained with a different model", "model.model, model.overrides"
        )

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps."""
        return min(math.ceil(self.hparams.warmup_fraction * total_steps), total_steps - 1)

    def configure_model(self) -> None:
        """Count FLOPs, shard (FSDP2, per block) and compile; Lightning calls it on every rank before training."""
        if self.forward_flops is not None or attached_trainer(self) is None:  # no trainer: `load_from_checkpoint`
            return
        (example,), _, units = self.example(1)
        self.forward_flops = self.count_flops(Decoder(self.config, device="meta"), example) // units
        self.shard_and_compile(self.model.blocks)

    def read_initial(self, source: str) -> tuple[dict[str, Tensor], list[str]]:
        """Read a decoder of any format; missing compose weights keep their random initialization."""
        decoder = load_decoder(source)
        settings = "data.vocab_size, model.model, model.overrides"
        check_same(decoder.config, self.config, f"init={source} is a different model", settings)
        weights = decoder.state_dict()
        return weights, check_initial(source, weights, self.model, _may_be_drawn)

    def split_model(self, rank: int, ranks: int) -> TensorParallelPlan:
        """Change the decoder to compute a rank's share; return how it is split."""
        with as_user_error(f"trainer.strategy.tensor_parallel={ranks}"):
            return split_decoder(self.model, rank, ranks)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Predict a token at each position: ids [B, T] to logits [B, T, V]."""
        return self.model(input_ids)

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """Compute the loss of a batch, in nats per token."""
        batch = as_batch(batch)
        loss = self.model(batch.input_ids, targets=batch.targets, document_ids=batch.document_ids)
        return self.log_step(loss, batch_size=len(batch.input_ids))

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Update the means over tokens, which are reduced over ranks at the end."""
        self._evaluate(batch, "val")

    def test_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Same as `validation_step`, logged under "test"."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: TokenBatch, prefix: str) -> None:
        batch = as_batch(batch)
        scores = self.model(batch.input_ids, targets=batch.targets, document_ids=batch.document_ids, per_token=True)
        self.val_loss.update(-scores.log_likelihoods.float())
        self.val_accuracy.update(scores.is_greedy.float())
        self._keep_items(batch, scores, prefix)

    def _keep_items(self, batch: TokenBatch, scores: Likelihood, prefix: str) -> None:
        """Record the mean loss and accuracy of each sequence, without padding."""
        is_scored = batch.targets != IGNORED
        counts = is_scored.sum(1)
        rows = is_scored.nonzero()[:, 0]
        for metric, values in {"loss": -scores.log_likelihoods, "accuracy": scores.is_greedy}.items():
            sums = torch.zeros(len(counts), device=rows.device, dtype=torch.float32).index_add_(0, rows, values.float())
            kept = counts.nonzero()[:, 0]
            names = [batch.samples[row] for row in kept.tolist()] if batch.samples else []
            self.items.add(f"{prefix}/{metric}", names, (sums / counts)[kept], counts[kept])

    def on_validation_epoch_end(self) -> None:
        """Log loss, perplexity and accuracy per token, and bits per byte for next-token prediction."""
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        """Same as `on_validation_epoch_end`, logged under "test"."""
        self._log_metrics("test")

    def _log_metrics(self, prefix: str) -> None:
        loss = self.val_loss.compute()
        self.val_loss.reset()
        metrics = {"loss": loss, "perplexity": loss.exp(), "accuracy": self.val_accuracy.compute()}
        self.val_accuracy.reset()
        data = self.trainer.datamodule
        bytes_per_token = None if data is None else data.bytes_per_token  # unknown for other loaders
        if bytes_per_token is not None:
            metrics["bits_per_byte"] = loss / math.log(2) / bytes_per_token
        self.log_dict({f"{prefix}/{name}": value for name, value in metrics.items()}, prog_bar=True, sync_dist=True)
