"""Any causal language model of `transformers`, as far as scoring texts asks for one."""

# B batch, T tokens, M tokens that are scored

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dctrain.errors import UserError, as_user_error

from ..loss import Likelihood, score_logits


@dataclass(frozen=True)
class ScoredConfig:
    """What is known of a model.

    Attributes:
        model_type: Its kind.
        vocab_size: Token ids are below it.
        context_length: Most tokens that it reads.
        position: "learned": longer texts are refused, for whether it could read them is not known.
        is_causal: It is.
    """

    model_type: str
    vocab_size: int
    context_length: int
    position: str = "learned"
    is_causal: bool = True


class ScoredModel(nn.Module):
    """A model of a folder, which `dclm.likelihood` asks like a `Decoder`.

    Args:
        folder: As `AutoModelForCausalLM.from_pretrained` takes it. Code in the folder is never run, without a question.
        dtype: Dtype of the parameters; None keeps that of the files.

    Raises:
        UserError: If it cannot be loaded, does not say how many tokens it reads, or is not causal.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        with as_user_error(f"{folder} cannot be read by transformers either"):
            self.model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False
            )
        config = self.model.config.get_text_config()
        length = getattr(config, "max_position_embeddings", None)
        if length is None:
            raise UserError(f"{folder}/config.json does not say how many tokens the model reads.")
        self.config = ScoredConfig(config.model_type, config.vocab_size, length)
        self.eval()
        self._check_causal(folder)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(self.parameters()).device

    def check_causal(self) -> None:
        """Do what `Decoder.check_causal` does; it has been checked."""

    def make_cache(self, *args: object) -> None:
        """Refuse to continue texts.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"a model of type {self.config.model_type!r} scores texts here, and continues none.")

    def likelihood(self, input_ids: Tensor, places: tuple[Tensor, Tensor], targets: Tensor) -> Likelihood:
        """Do what `Decoder.likelihood` does."""
        return score_logits(self._logits(input_ids)[places], targets)

    @torch.no_grad()
    def _logits(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits

    def _check_causal(self, folder: Path) -> None:
        """Ask whether a token changes what is predicted before it: models of masked tokens load without a word."""
        ids = torch.arange(8)[None] % self.config.vocab_size
        other = ids.clone()
        other[0, -1] = self.config.vocab_size - 1
        before, after = (self._logits(tokens)[0, :-1] for tokens in (ids, other))
        rounding = 16 * torch.finfo(before.dtype).eps * before.abs().max()
        if (before - after).abs().max() > rounding:
            raise UserError(f"{folder} sees later tokens: it is no causal language model, and cannot be scored as one.")
