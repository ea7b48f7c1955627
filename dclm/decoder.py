"""Decoder: language model for the paper's three architectures, with and without composition."""

# B batch, T tokens, C model width, V vocabulary

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dcmha import ComposeProjection, ContextKV, DecodingCache, rotary_embedding
from dcmha.attention import Rope
from dcmha.checks import check_factory
from dcmha.impl.masking import DocumentBounds, document_bounds

from .blocks import CrossContext, DecoderBlock, make_norm
from .config import DecoderConfig
from .loss import IGNORED, Likelihood, score_targets, token_loss


class Decoder(nn.Module):
    """A language model: causal, or bidirectional (`is_causal=False`) for masked language modeling.

    Args:
        config: Architecture of the model.
        device: Where the parameters live.
        dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, DecoderConfig):
            raise ValueError(f"config={config!r} must be a DecoderConfig, such as decoder_config(NAME).")
        check_factory(device, dtype)
        dd = {"device": "meta", "dtype": dtype}  # built without initialization, which follows below
        self.config, self.grad_checkpointing = config, False
        self.embed = nn.Embedding(config.vocab_size, config.dim, **dd)
        learned = config.position == "learned"
        self.position_embed = nn.Embedding(config.context_length, config.dim, **dd) if learned else None
        self.first_cross_layer = config.num_layers - config.cross_layers  # the first block with cross-attention
        self.blocks = nn.ModuleList(
            DecoderBlock(config, window_size, number >= self.first_cross_layer, **dd)
            for number, window_size in enumerate(config.layer_windows)
        )
        self.norm = make_norm(config, **dd)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False, **dd)
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable activation checkpointing of the blocks."""
        self.grad_checkpointing = enable

    def init_weights(self) -> None:
        """Initialize all weights: N(0, init_std), zero biases, compose weights as in the paper.

        With `init_std=None`, as in GPT-NeoX for Pythia: variance 2 / 5C, and (2 / L)^2 / C for the output projections
        of residual branches.
        """
        for name, module in self.named_modules():
            self.init_module(name, module)

    def init_module(self, name: str, module: nn.Module) -> None:
        """Initialize the direct parameters of one module with the given name."""
        config = self.config
        std = math.sqrt(0.4 / config.dim) if config.init_std is None else config.init_std
        if isinstance(module, nn.Linear):
            if config.init_std is None and name.endswith((".attn.proj", ".cross.proj", ".mlp.down")):
                std = 2 / (config.num_layers * math.sqrt(config.dim))
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, ComposeProjection | nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()

    def forward(
        self,
        input_ids: Tensor,
        *,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        context: CrossContext | None = None,
        per_token: bool = False,
    ) -> Tensor | Likelihood:
        """Predict a token at each position: the next one, or the token itself if `is_causal=False`.

        Args:
            input_ids: Token ids [B, T], int64 or int32.
            targets: Target ids [B, T], int64; -100 is ignored.
            document_ids: Document id of each token [B, T], ascending: tokens attend within their document, and
                positions restart in each.
            context: Context of the cross-attention layers; for models with `cross_layers` only.
            per_token: Whether to return the likelihood of each target, without a gradient.

        Returns:
            Logits [B, T, V]; with `targets` the mean loss, a scalar; with `per_token` the `Likelihood` of the M targets
            that are not ignored, in batch order.

        Raises:
            ValueError: If shapes or dtypes are wrong, a position exceeds the position table, a token is outside of the
                vocabulary (checked on the CPU only), a context is missing or not supported, or `per_token` is set
                without targets.
        """
        if per_token:
            return self._score(input_ids, targets, document_ids, context)
        if targets is not None:
            _check_like("targets", targets, input_ids)
        x = self.hidden_states(input_ids, document_ids=document_ids, context=context)
        if targets is None:
            return self.output(x)
        return token_loss(x, self.output.weight, targets)

    @torch.no_grad()
    def _score(
        self, input_ids: Tensor, targets: Tensor | None, document_ids: Tensor | None, context: CrossContext | None
    ) -> Likelihood:
        if targets is None:
            raise ValueError("per_token=True requires targets.")
        _check_like("targets", targets, input_ids)
        x, counts = self.hidden_states(input_ids, document_ids=document_ids, context=context), targets != IGNORED
        return score_targets(x[counts], self.output.weight, targets[counts])

    def hidden_states(
        self, input_ids: Tensor, *, document_ids: Tensor | None = None, context: CrossContext | None = None
    ) -> Tensor:
        """Compute the final hidden states [B, T, C], the input of `output`; arguments as in `forward`."""
        return self.hidden_and_final(input_ids, document_ids=document_ids, context=context)[1]

    def hidden_and_final(
        self, input_ids: Tensor, *, document_ids: Tensor | None = None, context: CrossContext | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the hidden states before the first cross-attention layer, without norm, and the final ones.

        Without cross-attention the former are those before the final norm. Arguments as in `forward`; [B, T, C] each.
        """
        self._check_ids(input_ids)
        self._check_context(context, len(input_ids))
        found = self._documents(document_ids, input_ids)
        before, rope = self._before_context(input_ids, found)
        after = self._through(slice(self.first_cross_layer, None), before, rope, found, context=context)
        return before, self.norm(after)

    def states_before_context(self, input_ids: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
        """Compute the first result of `hidden_and_final`, which needs no context."""
        self._check_ids(input_ids)
        return self._before_context(input_ids, self._documents(document_ids, input_ids))[0]

    def _documents(self, document_ids: Tensor | None, input_ids: Tensor) -> DocumentBounds | None:
        """Compute the document bounds, once for all layers."""
        if document_ids is None:
            return None
        _check_like("document_ids", document_ids, input_ids)
        return document_bounds(document_ids)

    def _before_context(self, input_ids: Tensor, document_ids: DocumentBounds | None) -> tuple[Tensor, Rope | None]:
        self._check_length(input_ids.shape[1])
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        if document_ids is not None:
            positions = positions - document_ids.starts
        x, rope = self._begin(input_ids, positions)
        return self._through(slice(0, self.first_cross_layer), x, rope, document_ids), rope

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.output.weight.device

    @torch.no_grad()
    def likelihood(self, input_ids: Tensor, places: tuple[Tensor, Tensor], targets: Tensor) -> Likelihood:
        """Compute the likelihood of tokens at given positions of a batch, without a gradient.

        Args:
            input_ids: Token ids [B, T].
            places: Rows and columns in the batch [M].
            targets: Target ids [M].

        Raises:
            ValueError: If the sizes differ.
        """
        shapes = [list(part.shape) for part in (*places, targets)]
        if any(shape != shapes[0] or len(shape) != 1 for shape in shapes):
            raise ValueError(f"places and targets have the shapes {shapes}; expected [M], all of them.")
        return score_targets(self.hidden_states(input_ids)[places], self.output.weight, targets)

    def decode(self, input_ids: Tensor, cache: DecodingCache, *, last_only: bool = False) -> Tensor:
        """Predict the tokens after new tokens that follow those in a cache, and add the new tokens to the cache.

        Args:
            input_ids: Token ids [B, T].
            cache: Cache from `make_cache`. It is unchanged after a ValueError, and unusable after any other error.
            last_only: Whether to predict only after the last token.

        Returns:
            Logits [B, T, V], or [B, 1, V] if `last_only`.

        Raises:
            ValueError: As in `forward`, or if the cache is full, of a different model, or has a different number of
                rows.
        """
        self._check_ids(input_ids)
        if cache.windows != tuple(self.config.layer_windows):
            raise ValueError("the cache does not match the model's layers or windows; use make_cache.")
        B, T = input_ids.shape
        self._check_length(cache.num_tokens + T)
        positions = cache.advance(B, T, input_ids.device)
        try:
            return self.step(input_ids, positions, cache, last_only=last_only)
        except BaseException:
            cache.is_broken = True
            raise

    def step(self, input_ids: Tensor, positions: Tensor, cache: DecodingCache, *, last_only: bool = False) -> Tensor:
        """`decode` without checks, given the positions from `cache.advance`; this is the function to compile."""
        x, rope = self._begin(input_ids, positions)
        x = self.norm(self._through(slice(None), x, rope, cache=cache))
        return self.output(x[:, -1:] if last_only else x)

    def check_causal(self) -> None:
        """Check that the model is causal.

        Raises:
            ValueError: If it is bidirectional.
        """
        if not self.config.is_causal:
            raise ValueError(
                "the model is bidirectional (is_causal=False), so it cannot generate or score continuations."
            )

    def _check_ids(self, input_ids: Tensor) -> None:
        if not isinstance(input_ids, Tensor):
            raise ValueError(f"input_ids is {type(input_ids).__name__}; expected a tensor [B, T], int64 or int32.")
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"input_ids has shape {list(input_ids.shape)} and dtype {input_ids.dtype}; expected [B, T], int64 or "
                "int32."
            )
        if input_ids.device.type == "cpu" and input_ids.numel() and not torch.compiler.is_compiling():
            low, high = map(int, input_ids.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                wrong = low if low < 0 else high
                raise ValueError(f"input_ids has token {wrong}; expected 0 to {self.config.vocab_size - 1}.")

    def _check_length(self, num_tokens: int) -> None:
        if self.position_embed is not None and num_tokens > self.config.context_length:
            raise ValueError(
                f"{num_tokens} tokens exceed the position table of {self.config.context_length} (context_length)."
            )

    def _check_context(self, context: CrossContext | None, rows: int | None) -> None:
        width = self.config.context_dim
        if context is not None and not isinstance(context, CrossContext):
            raise ValueError(
                f"context={type(context).__name__}: expected a dclm.blocks.CrossContext(tokens, mask), or None."
            )
        if context is None and width is not None:
            raise ValueError(
                f"context=None: the last {self.config.cross_layers} layers require a context of width {width}."
            )
        if context is not None and width is None:
            raise ValueError("context: expected None, as the model has no cross-attention (cross_layers=0).")
        if context is not None and rows not in (None, len(context.tokens)):
            raise ValueError(f"context has {len(context.tokens)} rows; expected {rows}, as in input_ids.")

    def _begin(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rope | None]:
        """Embed tokens [B, T, C], and create the rotary embedding."""
        x = self.embed(input_ids)
        if self.position_embed is not None:
            return x + self.position_embed(positions), None
        dtype = torch.promote_types(x.dtype, torch.float32)
        return x, rotary_embedding(positions, self.config.rotary_dim, self.config.rotary_base, dtype)

    def _through(
        self,
        part: slice,
        x: Tensor,
        rope: Rope | None,
        document_ids: DocumentBounds | None = None,
        *,
        context: CrossContext | None = None,
        cache: DecodingCache | None = None,
    ) -> Tensor:
        """Apply some of the blocks to hidden states [B, T, C]."""
        blocks = self.blocks[part]
        caches = [None] * len(blocks) if cache is None else cache.layers
        contexts = [context] * len(blocks) if cache is None else cache.contexts
        for block, layer_cache, seen in zip(blocks, caches, contexts, strict=True):
            if self.grad_checkpointing and cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, document_ids, rope, None, seen, use_reentrant=False)
            else:
                x = block(x, document_ids, rope, layer_cache, seen)
        return x

    def make_cache(
        self, capacity: int, padding: Tensor | None = None, context: CrossContext | None = None
    ) -> DecodingCache:
        """Create an empty cache for decoding up to `capacity` tokens per row, with the precomputed context.

        Args:
            capacity: As in `DecodingCache`.
            padding: As in `DecodingCache`.
            context: As in `forward`.

        Raises:
            ValueError: If the model is bidirectional, or the context does not match.
        """
        self.check_causal()
        self._check_context(context, None if padding is None else len(padding))
        return DecodingCache(self.config.layer_windows, capacity, padding, self._see(context))

    def _see(self, context: CrossContext | None) -> list[ContextKV | None]:
        """Precompute the context for each cross-attention layer."""
        return [None if block.cross is None else block.cross.precompute_kv(*context) for block in self.blocks]


def _check_like(name: str, given: Tensor, input_ids: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise ValueError(f"{name}: expected a tensor of the shape of input_ids, not {type(given).__name__}.")
    if given.shape != input_ids.shape or given.dtype != torch.long:
        raise ValueError(
            f"{name} has shape {list(given.shape)} and dtype {given.dtype}; expected that of input_ids, "
            f"{list(input_ids.shape)}, and torch.int64."
        )
