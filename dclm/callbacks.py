"""Trainer callbacks for text: a baseline to compare with, a sample of what the model writes, unseen tasks."""

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
    """Prints the bits per byte of a byte-bigram model on the validation text, and at the end the model's beside it."""

    def __init__(self) -> None:
        self.bits = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a model that has no bits per byte."""
        with as_user_error("BigramBaseline"):
            pl_module.model.check_causal()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the bigrams of the training text (its first 8 million tokens)."""
        data: TokenDataModule = trainer.datamodule
        tokenizer = data.corpus.tokenizer()
        train = tokenizer.decode(data.train_samples.row[:BASELINE_TOKENS].tolist()).encode()
        count = data.num_val_samples * data.context_length
        val = tokenizer.decode(data.val_samples.row[1 : count + 1].tolist()).encode()
        self.bits = ByteBigram(train).bits_per_byte(val)
        if trainer.is_global_zero:
            print(f"byte-bigram baseline: {self.bits:.3f} bits per byte on the validation text")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare."""
        ours = trainer.callback_metrics.get("val/bits_per_byte")
        if trainer.is_global_zero and ours is not None:
            print(f"bits per byte: {float(ours):.3f}, byte-bigram baseline {self.bits:.3f}")


class UnseenAccuracy(Callback):
    """Logs at every validation how many answers of synthetic tasks that training never shows are the likeliest token.

    `val/accuracy` is of combinations of pattern and transformation that training shows (`data.tokens: tasks`); this is
    `val/unseen_accuracy`, of the others.

    Args:
        texts: Their number; which they are is the same at every validation.

    Raises:
        UserError: If there are none.
    """

    def __init__(self, texts: int = 256) -> None:
        if texts < 1:
            raise UserError(f"UnseenAccuracy's {texts=} must be at least 1.")
        self.texts = texts

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that the data are tasks."""
        if not isinstance(getattr(trainer.datamodule, "corpus", None), TaskStream):
            raise UserError("UnseenAccuracy is for data.tokens=tasks.")

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ask and log; every rank asks the same."""
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
    """Continues a prompt after training; prints the text and logs it to TensorBoard. Not under FSDP.

    Args:
        prompt: What to continue.
        max_new_tokens: Tokens to add.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_p: Sample among the likeliest tokens whose probabilities first sum to this.

    Raises:
        UserError: If the prompt is empty, or a number is out of range.
    """

    def __init__(self, prompt: str, max_new_tokens: int = 200, temperature: float = 0.8, top_p: float = 0.95) -> None:
        if not prompt:
            raise UserError("TextSample's prompt='' must hold some text to go on from.")
        if max_new_tokens < 1:
            raise UserError(f"TextSample's {max_new_tokens=} must be at least 1.")
        with as_user_error("TextSample"):
            Sampling(temperature, top_p=top_p)
        self.prompt, self.max_new_tokens = prompt, max_new_tokens
        self.temperature, self.top_p = temperature, top_p

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a model that continues no text."""
        with as_user_error("TextSample"):
            pl_module.model.check_causal()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sample, the same for every run of the same weights."""
        if not trainer.is_global_zero:
            return
        if isinstance(trainer.strategy, FSDP2Strategy):
            print("no sample: the weights are sharded over ranks; see `dclm generate`.")
            return
        tokenizer = trainer.datamodule.corpus.tokenizer()
        prompt = torch.from_numpy(tokenizer.encode([self.prompt])[0].astype("int64"))
        options = {"temperature": self.temperature, "top_p": self.top_p, "seed": 0}
        (row,) = generate(pl_module.model, [prompt], self.max_new_tokens, **options, stop_tokens=[tokenizer.eos_id])
        text = tokenizer.decode(row.tolist())
        print(f"sample after {trainer.global_step} steps:\n{text}\n")
        if isinstance(trainer.logger, TensorBoardLogger):
            trainer.logger.experiment.add_text("sample", f"```\n{text}\n```", trainer.global_step)
