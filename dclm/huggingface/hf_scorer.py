"""Scoring texts with any causal language model of `transformers`."""

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
    """The configuration of a model that scoring needs.

    Attributes:
        model_type: Model type in `transformers`.
        vocab_size: Upper limit of token ids.
        context_length: Maximum tokens per sequence.
        position: "learned", so that longer texts are rejected, as it is unknown whether the model supports them.
        is_causal: True.
    """

    model_type: str
    vocab_size: int
    context_length: int
    position: str = "learned"
    is_causal: bool = True


class ScoredModel(nn.Module):
    """A model of a folder with the scoring interface of a `Decoder`.

    Args:
        folder: Folder for `AutoModelForCausalLM.from_pretrained`. Code in the folder is never executed.
        dtype: Dtype of the parameters; None for the dtype of the files.

    Raises:
        UserError: If it cannot be loaded, its context length is unknown, or it is not causal.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        with as_user_error(f"transformers cannot load {folder} either"):
            self.model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False
            )
        config = self.model.config.get_text_config()
        length = getattr(config, "max_position_embeddings", None)
        if length is None:
            raise UserError(f"{folder}/config.json does not contain the context length.")
        self.config = ScoredConfig(config.model_type, config.vocab_size, length)
        self.eval()
        self._check_causal(folder)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def check_causal(self) -> None:
        """Same as `Decoder.check_causal`; checked when the model is loaded."""

    def make_cache(self, *args: object) -> None:
        """Raise ValueError, because generation is not supported.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"a model of type {self.config.model_type!r} supports scoring only, not generation.")

    def likelihood(self, input_ids: Tensor, places: tuple[Tensor, Tensor], targets: Tensor) -> Likelihood:
        """Same as `Decoder.likelihood`."""
        return score_logits(self._logits(input_ids)[places], targets)

    @torch.no_grad()
    def _logits(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits

    def _check_causal(self, folder: Path) -> None:
        """Check that a token does not change earlier predictions; masked language models load without an error."""
        ids = torch.arange(8)[None] % self.config.vocab_size
        other = ids.clone()
        other[0, -1] = self.config.vocab_size - 1
        before, after = (self._logits(tokens)[0, :-1] for tokens in (ids, other))
        rounding = 16 * torch.finfo(before.dtype).eps * before.abs().max()
        if (before - after).abs().max() > rounding:
            raise UserError(f"{folder} is not a causal language model: its predictions depend on later tokens.")
