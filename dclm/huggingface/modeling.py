"""Hugging Face model classes around a `Decoder`, for folders in the published or in the native format."""

# B batch, T tokens, V vocabulary

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput

from dcmha.checks import is_integer

from ..decoder import Decoder
from ..hub import load_pretrained
from ..hub.published_weights import join_qkv, weights_from_hub, weights_to_hub
from ..loss import IGNORED, token_loss
from .configuration import DCFormerConfig, DCLMConfig, DCPythiaConfig, PublishedConfig
from .decoding import DecodingState, check_mask, padding_documents

Config = PublishedConfig | DCLMConfig
FAMILIES = {
    DCFormerConfig.model_type: "DCFormerForCausalLM",
    DCPythiaConfig.model_type: "DCPythiaForCausalLM",
    DCLMConfig.model_type: "DCLMForCausalLM or DCLMForMaskedLM",
}
PREFIX = "decoder."
CPU = torch.device("cpu")
OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
OF_GENERATE = ("tokenizer", "assistant_tokenizer")  # passed by `generate` without effect
DOWNLOADED = ("*.json", "*.safetensors", "*.bin", "*.model", "*.txt")


class ModelOutputs(NamedTuple):
    """Output of a forward pass over full sequences."""

    loss: Tensor | None
    logits: Tensor | None
    hidden_states: tuple[Tensor, ...] | None


@contextmanager
def _collecting(decoder: Decoder | None) -> Iterator[list[Tensor]]:
    """Collect the inputs of a decoder's blocks while the context is active; nothing for None."""
    states: list[Tensor] = []
    blocks = () if decoder is None else decoder.blocks
    handles = [block.register_forward_pre_hook(lambda _, args: states.append(args[0])) for block in blocks]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


class DecoderModel(PreTrainedModel):
    """Base of the model classes around a decoder.

    Args:
        config: Configuration of the class.
    """

    config_class = PublishedConfig
    base_model_prefix = "decoder"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderBlock"]
    sees_both_ways: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        if not isinstance(config, self.config_class):
            raise ValueError(
                f"config={type(config).__name__}: expected a {self.config_class.__name__} for {type(self).__name__}."
            )
        super().__init__(config)
        self.gradient_checkpointing = False
        self.decoder = Decoder(config.decoder_config())
        if self.decoder.config.is_causal == self.sees_both_ways:
            raise ValueError(
                f"is_causal={self.decoder.config.is_causal}: {type(self).__name__} is for "
                f"{'masked' if self.sees_both_ways else 'causal'} models."
            )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize weights that were not loaded, as `Decoder` does."""
        names = [name for name, each in self.decoder.named_modules() if each is module]
        if names:
            self.decoder.init_module(names[0], module)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding."""
        return self.decoder.embed

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.decoder.embed = value
        self.decoder.config = replace(self.decoder.config, vocab_size=value.num_embeddings)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output layer."""
        return self.decoder.output

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the output layer."""
        self.decoder.output = new_embeddings

    def _run(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        targets: Tensor | None,
        num_items: Tensor | int | None,
        kept: slice | Tensor,
        returns_states: bool,
    ) -> ModelOutputs:
        """Run the decoder on full texts; `targets` are at the positions of the logits that predict them."""
        check_mask(attention_mask, *input_ids.shape)
        is_known = num_items is not None and getattr(num_items, "device", CPU).type == "cpu"
        if is_known and num_items < 1:
            raise ValueError(f"num_items_in_batch={num_items}: expected a number of at least 1.")
        if targets is not None and targets.shape != input_ids.shape:
            raise ValueError(f"labels are {list(targets.shape)}; expected {list(input_ids.shape)}, as input_ids.")
        self.decoder.set_grad_checkpointing(self.gradient_checkpointing and self.training)
        with _collecting(self.decoder if returns_states else None) as states:
            hidden = self.decoder.hidden_states(input_ids, document_ids=padding_documents(attention_mask))
        loss = None if targets is None else self._loss(hidden, targets, num_items)
        logits = None if loss is not None and self.training else self.decoder.output(hidden[:, kept])
        return ModelOutputs(loss, logits, (*states, hidden) if returns_states else None)

    def _loss(self, hidden: Tensor, targets: Tensor, num_items: Tensor | int | None) -> Tensor:
        output = self.decoder.output
        if type(output) is nn.Linear:
            loss = token_loss(hidden, output.weight, targets)
        else:  # wrapped by an adapter, which computes more than a matrix product
            loss = F.cross_entropy(output(hidden).flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        return loss if num_items is None else loss * (targets != IGNORED).sum() / num_items

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False):
        """Load weights by their names in this class, or in folders, as the library's trainer does."""
        if not any(name.startswith(PREFIX) for name in state_dict):
            ours = self._from_folder(dict(state_dict))
            state_dict = {f"{PREFIX}{name}": weight for name, weight in ours.items()}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _from_folder(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of a folder to a decoder's state dict."""
        join_qkv(tensors)
        return weights_from_hub(tensors, self.decoder.config)

    def _to_folder(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert a decoder's state dict to the tensors of a folder."""
        return weights_to_hub(weights, self.decoder.config)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs) -> "DecoderModel":
        """Load a folder in the format of the class, or a name on the hub; arguments as in `transformers`.

        Raises:
            ValueError: As in `dclm.load_pretrained`.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *args, config=config, **kwargs)
        of_hub = {name: kwargs.pop(name) for name in OF_THE_HUB if name in kwargs}
        folder = _find_folder(pretrained_model_name_or_path, of_hub)
        if config is None:
            names = {*cls.config_class.field_names(), *cls.config_class.attribute_map}
            changes = {name: kwargs.pop(name) for name in names if name in kwargs}
            _check_family(cls, folder)
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
        """Write a folder in the format of the class; arguments as in `transformers`."""
        weights = self.state_dict() if state_dict is None else state_dict
        weights = {name.removeprefix(PREFIX): weight for name, weight in weights.items()}
        super().save_pretrained(save_directory, *args, state_dict=self._to_folder(weights), **kwargs)


class DecoderForCausalLM(DecoderModel, GenerationMixin):
    """A causal decoder with the interface of `transformers`.

    `generate` uses the low-rank cache. Padding is supported before and after the tokens of a row.

    Args:
        config: Configuration of the class.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: DecodingState | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others,
    ) -> CausalLMOutputWithPast | tuple:
        """Predict every next token.

        Args:
            input_ids: Token ids [B, T].
            attention_mask: 0 for padding [B, T], before or after the tokens of a row; with a cache only before them,
                and for all tokens of the cache and the new ones.
            cache: Cache from `generate`; `input_ids` follow its tokens.
            labels: Unshifted ids [B, T]; -100 is ignored.
            use_cache: Create and return a cache of `block_size` tokens; no effect with labels.
            logits_to_keep: Number of last tokens with logits, 0 for all; or their positions.
            num_items_in_batch: Divisor of the summed loss, instead of the number of labels in this batch.
            output_hidden_states: Also return the inputs of all blocks and the final hidden states; not with a cache.
            return_dict: False for a tuple.
            **others: Arguments of other models; only None and False are accepted.

        Returns:
            `logits` [B, T, V], `loss` with labels (without logits in training), and the cache.

        Raises:
            ValueError: If an argument is not supported, or padding is at an unsupported position.
        """
        _refuse(others)
        _check_ids(input_ids, labels)
        kept = _kept_places(logits_to_keep)
        if cache is None and use_cache and labels is None:
            cache = DecodingState(self.decoder, self.config.max_position_embeddings)
        if cache is not None:
            _check_cached(cache, labels)
            if output_hidden_states:
                raise ValueError("output_hidden_states=True is not supported with a cache.")
            is_last = isinstance(kept, slice) and logits_to_keep == 1
            logits = cache.decode(input_ids, attention_mask, last_only=is_last)
            out = CausalLMOutputWithPast(logits=logits[:, kept], cache=cache)
        else:
            targets = None if labels is None else F.pad(labels[:, 1:].long(), (0, 1), value=IGNORED)
            made = self._run(input_ids, attention_mask, targets, num_items_in_batch, kept, bool(output_hidden_states))
            out = CausalLMOutputWithPast(**made._asdict())
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict,
        generation_mode,
        batch_size,
        max_cache_length: int,
    ) -> None:
        """Provide the low-rank cache to `generate`."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r}; expected None, as these models "
                "have their own cache."
            )
        if generation_config.use_cache is not False and model_kwargs.get("cache") is None:
            model_kwargs["cache"] = DecodingState(self.decoder, max_cache_length)


class DecoderForMaskedLM(DecoderModel):
    """A bidirectional decoder with the interface of `transformers`, for masked language modeling.

    Args:
        config: Configuration of the class.
    """

    sees_both_ways = True

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others,
    ) -> MaskedLMOutput | tuple:
        """Predict masked tokens.

        Args:
            input_ids: Token ids [B, T].
            attention_mask: 0 for padding [B, T], before or after the tokens of a row.
            labels: Original ids of masked tokens [B, T]; -100 is ignored.
            num_items_in_batch: Divisor of the summed loss, instead of the number of labels in this batch.
            output_hidden_states: Also return the inputs of all blocks and the final hidden states.
            return_dict: False for a tuple.
            **others: Arguments of other models; only None and False are accepted.

        Returns:
            `logits` [B, T, V], and `loss` with labels (without logits in training).

        Raises:
            ValueError: If an argument is not supported, or there is padding between tokens.
        """
        _refuse(others)
        _check_ids(input_ids, labels)
        states = bool(output_hidden_states)
        targets = None if labels is None else labels.long()
        made = self._run(input_ids, attention_mask, targets, num_items_in_batch, slice(None), states)
        out = MaskedLMOutput(**made._asdict())
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()


class OfOurFormat:
    """Mixin for folders in the native format: the state dict, and the fields of `DecoderConfig`."""

    config_class = DCLMConfig

    def _from_folder(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors

    def _to_folder(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights


def _refuse(others: dict) -> None:
    given = sorted(name for name, value in others.items() if value is not None and value is not False)
    given = [name for name in given if name not in OF_GENERATE]
    if given:
        raise ValueError(f"{', '.join(given)}: not supported by these models.")


def _check_ids(input_ids: Tensor, labels: Tensor | None) -> None:
    """Check the type and the shape of token ids, and the type of labels."""
    for name, ids in (("input_ids", input_ids), ("labels", labels)):
        if ids is None and name == "labels":
            continue
        if not isinstance(ids, Tensor):
            raise ValueError(f"{name}: expected a tensor of token ids [B, T], not {type(ids).__name__}.")
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} is {ids.dtype} {list(ids.shape)}: expected int64 or int32 token ids [B, T].")


def _kept_places(logits_to_keep: int | Tensor) -> slice | Tensor:
    """Convert `logits_to_keep` to an index of tokens."""
    if is_integer(logits_to_keep) and logits_to_keep >= 0:
        return slice(-int(logits_to_keep), None)
    if isinstance(logits_to_keep, Tensor) and logits_to_keep.dim() == 1 and not logits_to_keep.is_floating_point():
        return logits_to_keep
    raise ValueError(f"logits_to_keep={logits_to_keep!r}: expected an integer of at least 0, or positions [N].")


def _check_family(kind: type, folder: Path) -> None:
    """Raise ValueError for a folder of a different family, whose weights could match by chance."""
    path = folder / "config.json"
    found = json.loads(path.read_text()).get("model_type") if path.is_file() else None
    if found in FAMILIES and found != kind.config_class.model_type:
        raise ValueError(
            f"{folder} has a model of type {found!r}: expected {kind.config_class.model_type!r} for {kind.__name__}. "
            f"Use {FAMILIES[found]}."
        )


def _check_cached(cache: object, labels: Tensor | None) -> None:
    if not isinstance(cache, DecodingState):
        raise ValueError(f"cache is a {type(cache).__name__}; expected the cache of an earlier call, or None.")
    if labels is not None:
        raise ValueError("labels and cache cannot be combined; expected one of the two.")


def _find_folder(name: str | Path, options: dict) -> Path:
    """Return a local folder; names on the hub are downloaded."""
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


class DCLMForCausalLM(OfOurFormat, DecoderForCausalLM):
    """Any causal decoder, in the native format."""


class DCLMForMaskedLM(OfOurFormat, DecoderForMaskedLM):
    """Any bidirectional decoder, in the native format."""
