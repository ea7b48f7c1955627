"""ComposedAttentionBase: options, the operator call and the selected implementation of all attention layers."""

# B batch, T query tokens, S key tokens, H heads, D head dim

import logging
from collections.abc import Callable
from functools import cache
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .checks import check_module, plain_number
from .dispatch import Impl, ImplChoice, ResolvedImpl, check_impl, resolve_impl
from .functional import NO_TORCHSCRIPT, composed_attention
from .impl.call import ComposeRanks
from .impl.checks import check_window_size
from .impl.masking import DocumentBounds
from .options import COMPOSE_OPTIONS, ComposeOptions, check_names
from .weights import ComposeWeights

logger = logging.getLogger(__name__)


LAYER_OPTIONS = (*COMPOSE_OPTIONS, "window_size", "impl")


def check_options(*, window_size: int | None = None, impl: Impl = "auto", **options) -> ComposeOptions:
    """Check the options of a layer; return its `ComposeOptions`.

    Raises:
        ValueError: If an option is unknown, of the wrong type or out of range.
    """
    check_names(options, LAYER_OPTIONS)
    check_window_size(window_size)
    check_impl(impl)
    return ComposeOptions(**options)


def check_kv_heads(num_heads: int, num_kv_heads: int | None) -> None:
    """Raise ValueError unless `num_kv_heads` is None or divides `num_heads`."""
    if num_kv_heads is not None and (type(num_kv_heads) is not int or num_kv_heads < 1 or num_heads % num_kv_heads):
        raise ValueError(f"num_kv_heads={num_kv_heads!r} must be a positive divisor of num_heads={num_heads}, or None.")


class ComposedAttentionBase(nn.Module):
    """Base class of the layers that call the operator. Subclasses set `num_heads`, `scale` and `attn_drop`.

    Attributes:
        options: Options of the composition.
        window: `window_size` as in `composed_attention`.
        impl: As in `composed_attention`; can be changed at any time.
        recompute: Activation checkpointing: store only the layer's input for the backward pass; can be changed at any
            time.
        resolved_impl: The implementation used by the layer's first call; None before.
    """

    num_heads: int
    scale: float
    attn_drop: nn.Dropout

    def _set_options(self, *, window_size: int | None = None, impl: Impl = "auto", **options) -> None:
        """Check and store the options of a layer."""
        self.options = check_options(window_size=window_size, impl=impl, **options)
        self.window = plain_number(window_size)  # not window_size, an attribute of timm's window attention
        self.impl, self.recompute = impl, False
        self.resolved_impl: ResolvedImpl | None = None

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise in `torch.jit.script`, which calls this method."""
        raise NotImplementedError("torch.jit.script " + NO_TORCHSCRIPT)

    @property
    def num_groups(self) -> int:
        """Number of head groups; 1 if nothing is composed."""
        return self.options.num_groups if self.options.is_composed else 1

    @property
    def _ranks(self) -> ComposeRanks:
        """The ranks of the layer's compositions."""
        options, sides = self.options, self.options.sides
        return ComposeRanks(options.rank if "query" in sides else 0, options.rank if "key" in sides else None)

    def _run(self, function: Callable[..., Tensor], *args) -> Tensor:
        """Call the layer's computation, with activation checkpointing if `recompute` is set."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=False)
        return function(*args)

    def check_device(self, device: torch.device) -> None:
        """Check that this layer's implementation supports a device, for the dtype of its weights.

        Raises:
            ValueError: If it does not.
        """
        dtype = next(self.parameters()).dtype
        q = torch.empty(1, self.num_heads, 2, 1, device=device, dtype=dtype)
        resolve_impl(self.impl, q, is_composed=self.options.is_composed, num_groups=self.num_groups, ranks=self._ranks)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pre: ComposeWeights | None,
        post: ComposeWeights | None,
        attn_mask: Tensor | None,
        document_ids: Tensor | DocumentBounds | None = None,
        is_causal: bool = False,
        window_size: int | None = None,
    ) -> Tensor:
        """Call the operator with this layer's options: [B, H, T, D]."""
        dropout_p = self.attn_drop.p if self.training else 0.0
        out = composed_attention(
            q,
            k,
            v,
            pre,
            post,
            attn_mask=attn_mask,
            document_ids=document_ids,
            is_causal=is_causal,
            window_size=window_size,
            scale=self.scale,
            dropout_p=dropout_p,
            num_groups=self.num_groups,
            impl=self.impl,
        )
        self._record_impl(q, dropout_p)
        return out

    def _record_impl(self, q: Tensor, dropout_p: float) -> None:
        """Record the implementation of the first call, and log it once for all equal layers."""
        if torch.compiler.is_compiling() or self.resolved_impl is not None:
            return
        call = {"dropout_p": dropout_p, "num_groups": self.num_groups, "ranks": self._ranks}
        choice = resolve_impl(self.impl, q, is_composed=self.options.is_composed, **call)
        self.resolved_impl = choice.impl
        _log_choice(self.impl, choice)


def composed_layers(model: nn.Module) -> dict[str, ComposedAttentionBase]:
    """Return the layers of a model that compose heads, by name.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If there is none.
    """
    check_module(model=model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ComposedAttentionBase)}
    layers = {name: layer for name, layer in layers.items() if layer.options.is_composed}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layer that composes heads.")
    return layers


@cache
def _log_choice(impl: Impl, choice: ImplChoice) -> None:
    because = "" if choice.reason is None else f": {choice.reason}"
    logger.log(
        logging.INFO if choice.reason is None else logging.WARNING, "impl=%r runs as %r%s.", impl, choice.impl, because
    )
