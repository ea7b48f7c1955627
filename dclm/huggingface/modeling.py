"""Causal language models for Hugging Face's library, around a `Decoder`; folders are in the published format."""

# B batch, T tokens, V vocabulary

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch.nn.functional as F
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..decoder import Decoder
from ..hub import load_pretrained
from ..hub.published_config import field_defaults
from ..hub.published_weights import join_qkv, weights_from_hub, weights_to_hub
from ..loss import IGNORED, token_loss
from .configuration import DCFormerConfig, DCPythiaConfig, PublishedConfig
from .decoding import DecodingState, documents_of

PREFIX = "decoder."
OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
OF_GENERATE = ("tokenizer", "assistant_tokenizer")  # which `generate` hands on without need
DOWNLOADED = ("*.json", "*.safetensors", "*.bin", "*.model", "*.txt")


class DecoderForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder with the library's interface.

    `generate` decodes through the low-rank cache. Padding may stand before and after the tokens of a row.

    Args:
        config: In the published format.
    """

    config_class = PublishedConfig
    base_model_prefix = "decoder"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def __init__(self, config: PublishedConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.decoder = Decoder(config.decoder_config())
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Draw what was not loaded, as `Decoder` does."""
        names = [name for name, each in self.decoder.named_modules() if each is module]
        if names:
            self.decoder.init_module(names[0], module)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding of tokens."""
        return self.decoder.embed

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding of tokens."""
        self.decoder.embed = value
        self.decoder.config = replace(self.decoder.config, vocab_size=value.num_embeddings)

    def get_output_embeddings(self) -> nn.Linear:
        """Return what makes logits."""
        return self.decoder.output

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace what makes logits."""
        self.decoder.output = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DecodingState | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **others,
    ) -> CausalLMOutputWithPast | tuple:
        """Predict every next token.

        Args:
            input_ids: Token ids [B, T].
            attention_mask: 0 for padding [B, T], before or after the tokens of a row; with a cache before them, for all
                tokens that are in it and the new ones.
            past_key_values: What `generate` keeps; `input_ids` come after it.
            labels: The ids themselves [B, T], -100 where they do not count; shifted here.
            use_cache: Keep a cache of `block_size` tokens and return it.
            logits_to_keep: Only the logits of the last so many tokens, 0 for all; or of these places.
            num_items_in_batch: Divides the sum of losses, instead of the labels of this batch.
            return_dict: False for a tuple.
            **others: Arguments of other models; only None and False are accepted.

        Returns:
            `logits` [B, T, V], `loss` with labels (in training without the logits), and the cache.

        Raises:
            ValueError: If an argument is not supported, or padding is where it cannot be.
        """
        _refuse(others)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if past_key_values is None and use_cache and labels is None:
            past_key_values = DecodingState(self.decoder, self.config.block_size)
        if past_key_values is not None:
            _check_cached(past_key_values, labels)
            is_last = isinstance(logits_to_keep, int) and logits_to_keep == 1
            logits = past_key_values.decode(input_ids, attention_mask, last_only=is_last)
            out = CausalLMOutputWithPast(logits=logits[:, kept], past_key_values=past_key_values)
        else:
            self.decoder.set_grad_checkpointing(self.gradient_checkpointing and self.training)
            hidden = self.decoder.hidden_states(input_ids, documents=documents_of(attention_mask))
            loss = None if labels is None else self._loss(hidden, labels, num_items_in_batch)
            logits = None if loss is not None and self.training else self.decoder.output(hidden[:, kept])
            out = CausalLMOutputWithPast(loss=loss, logits=logits)
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()

    def _loss(self, hidden: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        output = self.decoder.output
        if type(output) is nn.Linear:
            loss = token_loss(hidden, output.weight, targets)
        else:  # an adapter around it, which computes more than a product
            loss = F.cross_entropy(output(hidden).flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        return loss if num_items is None else loss * (targets != IGNORED).sum() / num_items

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False):
        """Load weights by their names here, or by those of published folders, as the library's trainer does."""
        if not any(name.startswith(PREFIX) for name in state_dict):
            tensors = dict(state_dict)
            join_qkv(tensors)
            ours = weights_from_hub(tensors, self.decoder.config)
            state_dict = {f"{PREFIX}{name}": weight for name, weight in ours.items()}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict,
        generation_mode,
        batch_size,
        max_cache_length: int,
    ) -> None:
        """Give `generate` the low-rank cache."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r}; accepted: None, as these models "
                "have a cache of their own."
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = DecodingState(self.decoder, max_cache_length)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs) -> "DecoderForCausalLM":
        """Load a folder in the published format, or a name on the hub; arguments are the library's.

        Raises:
            ValueError: As `dclm.load_pretrained`.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *args, config=config, **kwargs)
        of_hub = {name: kwargs.pop(name) for name in OF_THE_HUB if name in kwargs}
        folder = _find_folder(pretrained_model_name_or_path, of_hub)
        if config is None:
            names = {*field_defaults({"model_type": cls.config_class.model_type}), *cls.config_class.attribute_map}
            changes = {name: kwargs.pop(name) for name in names if name in kwargs}
            config = cls.config_class.from_pretrained(folder, **changes)
        weights = load_pretrained(folder).state_dict()
        weights = {f"{PREFIX}{name}": weight for name, weight in weights.items()}
        wants_info = kwargs.get("output_loading_info", False)
        loaded = super().from_pretrained(None, *args, config=config, state_dict=weights, **kwargs)
        model = loaded[0] if wants_info else loaded
        model.name_or_path = str(pretrained_model_name_or_path)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return loaded

    def save_pretrained(self, save_directory, *args, state_dict: dict | None = None, **kwargs) -> None:
        """Write a folder in the published format; arguments are the library's."""
        weights = self.state_dict() if state_dict is None else state_dict
        weights = {name.removeprefix(PREFIX): weight for name, weight in weights.items()}
        published = weights_to_hub(weights, self.decoder.config)
        super().save_pretrained(save_directory, *args, state_dict=published, **kwargs)


def _refuse(others: dict) -> None:
    given = sorted(name for name, value in others.items() if value is not None and value is not False)
    given = [name for name in given if name not in OF_GENERATE]
    if given:
        raise ValueError(f"{', '.join(given)}: not supported by these models.")


def _check_cached(cache: object, labels: Tensor | None) -> None:
    if not isinstance(cache, DecodingState):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}; accepted: what an earlier call returned, or None."
        )
    if labels is not None:
        raise ValueError("labels are given with past_key_values; accepted: one of the two.")


def _find_folder(name: str | Path, options: dict) -> Path:
    """Return a folder on this disk; names on the hub are downloaded."""
    subfolder = options.pop("subfolder", None) or ""
    if Path(name).is_dir():
        return Path(name) / subfolder
    return Path(snapshot_download(str(name), allow_patterns=list(DOWNLOADED), **options)) / subfolder


class DCFormerForCausalLM(DecoderForCausalLM):
    """DCFormer."""

    config_class = DCFormerConfig


class DCPythiaForCausalLM(DecoderForCausalLM):
    """DCPythia."""

    config_class = DCPythiaConfig
