"""swap_attention: replace the attention of an existing timm model by composed attention."""

import re
import sys
from collections.abc import Iterable
from functools import partial
from numbers import Integral

import timm
from timm.layers import AttentionPoolLatent
from timm.models import build_model_with_cfg, register_model
from torch import nn

from dcmha import DCAttention
from dcmha.checks import check_module
from dcmha.options import check_names

from .families import CONVOLUTIONS, FAMILIES_BY_PARTS, UNSUPPORTED, ComposedParts, composed_class
from .models import current_names
from .timm_attention import FAMILIES, ComposedPooling, ComposedTimmModule

SUPPORTED = (
    "ViT, DeiT, BEiT, CLIP, SigLIP, DINO, EVA, NaFlexViT, Swin, SAM, CaiT, TNT, CrossViT, NesT, GC ViT, PVT v2, Twins, "
    "Next-ViT, MViT v2, Hiera, MaxViT, CoAtNet, CAFormer, Visformer, FastViT, LeViT, TinyViT, EfficientFormer, "
    "MobileNet v4 hybrid (see dcvision/families/README.md)"
)


def swap_attention(
    model: nn.Module, *, layers: Iterable[int] | None = None, pooling: bool = False, **options
) -> nn.Module:
    """Replace the self-attention of a timm model by `DCAttention`, in place.

    All parameters are kept: projections of q, k, v and output, biases, norms of q and k, scale, dropout, relative
    position bias, rotary positions. The compose weights are initialized near the identity (paper, section 3.4). To load
    a state dict of a swapped model, create the model, swap with the same options, and call `load_state_dict`. A model
    saved by `timm.models.save_for_hf` is loaded by `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    Args:
        model: A timm model of a supported family; see `SUPPORTED`.
        layers: Indices of attention layers from the input (negative: from the end); all remaining layers if None; []
            with `pooling` for the pooling only.
        pooling: Whether to also compose the attention pooling (`global_pool="map"`), by `DCCrossAttention`.
        **options: Options of `DCAttention` (`DCAttention.OPTIONS`), such as `rank`, `num_groups` or `query_wise`;
            `window_size` for families without windows.

    Returns:
        The model.

    Raises:
        TypeError: If the model is not a module.
        ValueError: If the model has no supported self-attention, a layer is out of range, or an option is unknown or
            invalid (such as heads that do not divide into groups). The model is then unchanged.
    """
    check_module(model=model)
    check_names(options, DCAttention.OPTIONS)
    options = {name: value for name, value in options.items() if value is not None}
    if options.get("pre_compose") is False and options.get("post_compose") is False:
        raise ValueError("pre_compose=False and post_compose=False: expected at least one of them to be True.")
    names = attention_names(model)
    chosen = _choose(model, names, layers)
    if not chosen and not pooling:
        raise ValueError(f"layers={layers}: nothing to swap in {type(model).__name__}; {_accepted(names)}.")
    _check_unshared(model, [names[layer] for layer in chosen])
    swapped = {}
    for name in (names[layer] for layer in chosen):
        attention = model.get_submodule(name)
        swapped[name] = _compose(name, _counterpart(type(attention)), attention, options)
    if pooling:
        pools = {name: module for name, module in model.named_modules() if type(module) is AttentionPoolLatent}
        if not pools:
            raise ValueError(f"pooling=True; {type(model).__name__} has no attention pooling (global_pool='map').")
        pool_options = {name: value for name, value in options.items() if name != "window_size"}
        swapped |= {name: _compose(name, ComposedPooling, module, pool_options) for name, module in pools.items()}
    for name, attention in swapped.items():
        attention.train(model.get_submodule(name).training)
        model.set_submodule(name, attention)
    _record(model, {"layers": chosen, "pooling": pooling} | options)
    return model


def _check_unshared(model: nn.Module, names: list[str]) -> None:
    """Raise ValueError for layers that the model shares, because only one of their occurrences would be replaced."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    for name in names:
        same = places[id(model.get_submodule(name))]
        if len(same) > 1:
            raise ValueError(f"{' and '.join(same)} are the same module; expected distinct layers.")


def _record(model: nn.Module, options: dict) -> None:
    """Record in timm's configuration how to rebuild the model: entry point, base model, and options of each swap."""
    cfg, args = getattr(model, "pretrained_cfg", None), getattr(model, "_model_args", None)
    if cfg is None or args is None:
        return
    if cfg["architecture"] != dcmha_swapped.__name__:
        args = args | {"base": cfg["architecture"], "swaps": []}
    model._model_args = args | {"swaps": [*args["swaps"], options]}
    model.pretrained_cfg = model.default_cfg = cfg | {"architecture": dcmha_swapped.__name__}


@register_model
def dcmha_swapped(
    pretrained: bool = False,
    *,
    base: str,
    swaps: Iterable[dict] = ({},),
    pretrained_cfg: dict | str | None = None,
    pretrained_model_args: dict | None = None,
    **kwargs,
) -> nn.Module:
    """A supported timm model with composed attention; saved models are loaded by this name.

    Args:
        pretrained: Load the base model's pretrained weights, or those of a saved model.
        base: Name of the base model in timm.
        swaps: Options of each call of `swap_attention`.
        pretrained_cfg: Pretrained configuration of the base model, or of a saved model.
        pretrained_model_args: Arguments of a saved model, passed by timm.
        **kwargs: Arguments of the base model.

    Raises:
        ValueError: If the base model is unknown, or a swap is not supported.
    """
    if not timm.is_model(base):
        raise ValueError(f"base={base!r} is unknown to timm; expected a model name.")
    if pretrained_model_args is None:
        model = timm.create_model(base, pretrained, pretrained_cfg, **kwargs)
        for options in swaps:
            swap_attention(model, **current_names(options))
        return model
    return build_model_with_cfg(
        partial(_rebuild, base, swaps),
        dcmha_swapped.__name__,
        pretrained,
        pretrained_cfg=pretrained_cfg,
        pretrained_model_args=pretrained_model_args,
        pretrained_filter_fn=partial(fit_weights, base=base),
        # a different pooling has different parameters
        pretrained_strict=kwargs.get("global_pool") == pretrained_model_args.get("global_pool"),
        feature_cfg={"feature_cls": "getter", "out_indices": 3},
        **kwargs,
    )


def _rebuild(base: str, swaps: Iterable[dict], **kwargs) -> nn.Module:
    """Rebuild a saved model, without a swapped pooling that was removed later (`reset_classifier`)."""
    model = timm.create_model(base, **kwargs)
    has_pooling = any(isinstance(module, AttentionPoolLatent) for module in model.modules())
    for options in swaps:
        options = options | {"pooling": options.get("pooling", False) and has_pooling}
        if options["pooling"] or _choose(model, attention_names(model), options.get("layers")):
            swap_attention(model, **current_names(options))
    return model


def fit_weights(weights: dict, model: nn.Module, base: str) -> dict:
    """Adapt saved weights to a different image or patch size, as the base model's family does in timm."""
    # timm resamples FlexiViT depending on the model name
    options = {"interpolation": "bilinear", "antialias": False} if "flexi" in base else {}
    for cls in type(model).__mro__:
        fit = getattr(sys.modules[cls.__module__], "checkpoint_filter_fn", None)
        if fit is not None:
            return fit(weights, model, **options)
    return weights


def _counterpart(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the composed class that replaces a timm attention class."""
    return FAMILIES[kind] if kind in FAMILIES else composed_class(kind, FAMILIES_BY_PARTS[kind])


def _compose(name: str, cls: type[nn.Module], module: nn.Module, options: dict) -> nn.Module:
    """Create the composed counterpart of a module; errors name the module."""
    try:
        return cls(module, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def attention_names(model: nn.Module) -> list[str]:
    """Return the attention layers that can be swapped; raise ValueError if there are unsupported ones."""
    modules = dict(model.named_modules())
    reasons = {f"{type(m).__name__} is {UNSUPPORTED[type(m)]}" for m in modules.values() if type(m) in UNSUPPORTED}
    if reasons:
        raise ValueError(f"{type(model).__name__} cannot be composed: {'; '.join(sorted(reasons))}.")
    others = {type(m).__name__ for m in modules.values() if _is_other_attention(m)}
    if others:
        raise ValueError(
            f"{type(model).__name__} has {', '.join(sorted(others))}; expected a supported family: {SUPPORTED}."
        )
    names = [name for name, m in modules.items() if _is_known(m) or isinstance(m, SWAPPED)]
    if not names:
        has = (
            "its layers are DCAttention" if any(isinstance(m, DCAttention) for m in modules.values()) else "none found"
        )
        raise ValueError(
            f"{type(model).__name__} has no self-attention to swap ({has}); expected a supported family: {SUPPORTED}."
        )
    return names


SWAPPED = (ComposedTimmModule, ComposedParts)


def _is_known(module: nn.Module) -> bool:
    """Whether a module is a supported timm attention."""
    return type(module) in FAMILIES or type(module) in FAMILIES_BY_PARTS


def _is_other_attention(module: nn.Module) -> bool:
    """Whether a module looks like self-attention of an unknown class."""
    name = type(module).__name__
    is_attention = re.search("Attention|Attn|MHSA|SHMA|ParallelScalingBlock", name) is not None
    is_pooling = re.search("Pool", name) is not None
    if not is_attention or is_pooling or isinstance(module, (DCAttention, ComposedParts, *CONVOLUTIONS)):
        return False
    return not any(
        _is_known(part) or isinstance(part, SWAPPED) for part in module.modules()
    )  # blocks may have such names


def _choose(model: nn.Module, names: list[str], layers: Iterable[int] | None) -> list[int]:
    """Return the indices of the selected layers; all layers that are not swapped yet if `layers` is None."""
    swapped = [isinstance(model.get_submodule(name), SWAPPED) for name in names]
    if layers is None:
        return [layer for layer, done in enumerate(swapped) if not done]
    layers = list(layers) if isinstance(layers, Iterable) else [layers]
    is_integer = all(isinstance(layer, Integral) and not isinstance(layer, bool) for layer in layers)
    if not is_integer or not all(-len(names) <= layer < len(names) for layer in layers):
        raise ValueError(f"layers={layers}; {_accepted(names)}.")
    done = sorted({int(layer) for layer in layers if swapped[layer]})
    if done:
        raise ValueError(f"layers={layers}; {_accepted(names)}; {done} are.")
    return sorted({int(layer) % len(names) for layer in layers})


def _accepted(names: list[str]) -> str:
    return f"expected indices 0 to {len(names) - 1} of attention layers that are not swapped yet"
