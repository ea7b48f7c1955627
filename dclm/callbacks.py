"""Trainer callbacks for language models: bigram baseline, text samples, accuracy on unseen tasks."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from dctrain.data.sampler import SampleRef
from dctrain.distributed.strategy import FSDP2Strategy
from dctrain.errors import UserError, as_user_error

from .bigram import ByteBigram
from .data import TokenDataModule
from .data.samples import collate
from .generate import generate
from .sampling import Sampling
from .synthetic_tasks.stream import TaskStream

BASELINE_TOKENS = 2**23


class BigramBaseline(Callback):
    """Prints the bits per byte of a byte-bigram model on the validation text, and at the end those of the model."""

    def __init__(self) -> None:
        self.bits = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise UserError for models without bits per byte."""
        with as_user_error("BigramBaseline"):
            pl_module.model.check_causal()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Train the bigram model on the first 8 million tokens of the training text."""
        data: TokenDataModule = trainer.datamodule
        tokenizer = data.corpus.tokenizer()
        train = tokenizer.decode(data.train_samples.row[:BASELINE_TOKENS].tolist()).encode()
        count = data.num_val_samples * data.context_length
        val = tokenizer.decode(data.val_samples.row[1 : count + 1].tolist()).encode()
        self.bits = ByteBigram(train).bits_per_byte(val)
        if trainer.is_global_zero:
            print(f"byte-bigram baseline: {self.bits:.3f} bits per byte on the validation text")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the comparison."""
        ours = trainer.callback_metrics.get("val/bits_per_byte")
        if trainer.is_global_zero and ours is not None:
            print(f"bits per byte: {float(ours):.3f}, byte-bigram baseline {self.bits:.3f}")


class UnseenAccuracy(Callback):
    """Logs the accuracy on synthetic tasks that do not occur in training, at every validation.

    `val/accuracy` is for combinations of pattern and transformation that occur in training (`data.tokens: tasks`); this
    callback logs `val/unseen_accuracy` for the others.

    Args:
        texts: Number of texts, the same ones at every validation.

    Raises:
        UserError: If `texts` is less than 1.
    """

    def __init__(self, texts: int = 256) -> None:
        if texts < 1:
            raise UserError(f"UnseenAccuracy's {texts=} must be at least 1.")
        self.texts = texts

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that the data are synthetic tasks."""
        if not isinstance(getattr(trainer.datamodule, "corpus", None), TaskStream):
            raise UserError("UnseenAccuracy requires data.tokens=tasks.")

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure and log; all ranks process the same texts."""
        data, device = trainer.datamodule, pl_module.device
        texts = data.corpus.texts("unseen", data.context_length)
        is_right = []
        for start in range(0, self.texts, data.batch_size):
            numbers = range(start, min(start + data.batch_size, self.texts))
            batch = collate([texts[SampleRef(number, 0)] for number in numbers])
            scores = pl_module.model(batch.input_ids.to(device), targets=batch.targets.to(device), per_token=True)
            is_right.append(scores.is_greedy)
        accuracy = torch.cat(is_right).float().mean()
        pl_module.log("val/unseen_accuracy", accuracy, prog_bar=True, sync_dist=True)


class TextSample(Callback):
    """Continues a prompt after training; prints the text and logs it to TensorBoard. Not supported under FSDP.

    Args:
        prompt: Prompt.
        max_new_tokens: Tokens to add.
        temperature: Sampling temperature; 0 for greedy decoding.
        top_p: Nucleus sampling: smallest set of top tokens whose probabilities sum to this.

    Raises:
        UserError: If the prompt is empty, or a number is out of range.
    """

    def __init__(self, prompt: str, max_new_tokens: int = 200, temperature: float = 0.8, top_p: float = 0.95) -> None:
        if not prompt:
            raise UserError("TextSample's prompt='': expected a text.")
        if max_new_tokens < 1:
            raise UserError(f"TextSample's {max_new_tokens=} must be at least 1.")
        with as_user_error("TextSample"):
            Sampling(temperature, top_p=top_p)
        self.prompt, self.max_new_tokens = prompt, max_new_tokens
        self.temperature, self.top_p = temperature, top_p

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise UserError for models that cannot generate."""
        with as_user_error("TextSample"):
            pl_module.model.check_causal()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sample deterministically."""
        if not trainer.is_global_zero:
            return
        if isinstance(trainer.strategy, FSDP2Strategy):
            print("no text sample, because the weights are sharded; use `dclm generate`.")
            return
        tokenizer = trainer.datamodule.corpus.tokenizer()
        prompt = torch.from_numpy(tokenizer.encode([self.prompt])[0].astype("int64"))
        options = {"temperature": self.temperature, "top_p": self.top_p, "seed": 0}
        (row,) = generate(pl_module.model, [prompt], self.max_new_tokens, **options, stop_tokens=[tokenizer.eos_id])
        text = tokenizer.decode(row.tolist())
        print(f"sample after {trainer.global_step} steps:\n{text}\n")
        if isinstance(trainer.logger, TensorBoardLogger):
            trainer.logger.experiment.add_text("sample", f"```\n{text}\n```", trainer.global_step)
