"""Put composed attention into a timm model that exists, keeping its pretrained projections.

Each of timm's attention classes has a counterpart here that takes over its parameters and methods, and attends as
`DCAttention` does. State-dict keys stay as they are; what is new lies under `compose.`.
"""

# B batch, T tokens, H heads, D head dim, C model width

import re
from collections.abc import Iterable
from functools import partial

import timm
import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent, apply_rot_embed_cat
from timm.layers.attention import Attention, AttentionRope
from timm.models import build_model_with_cfg, register_model
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from dcmha import DCAttention, DCCrossAttention
from dcmha.choice import check_impl
from dcmha.cross import SidedProjection


class Adopted(DCAttention):
    """`DCAttention` with the parameters, buffers, parts and attributes of a timm attention module, which it shares.

    Args:
        attention: The module that it takes the place of.
        **options: Those of `DCAttention.OPTIONS`.
    """

    def __init__(self, attention: nn.Module, **options) -> None:
        nn.Module.__init__(self)
        _share(self, attention)
        self._set_options(options)
        projection = attention.qkv if attention.qkv is not None else attention.q_proj
        self.dim, self.attn_dim = projection.in_features, attention.proj.in_features
        self.head_dim = self.attn_dim // self.num_heads
        for name in ("q_norm", "k_norm", "norm"):
            if not hasattr(self, name):
                setattr(self, name, nn.Identity())
        self.gate = getattr(attention, "gate", None)
        self.resolved_impl = None
        self.compose = self._make_projection(
            self.dim, {"device": projection.weight.device, "dtype": projection.weight.dtype}
        )


class AdoptedAttention(Adopted, Attention):
    """Of `VisionTransformer` (ViT, DeiT, DeiT3, BEiT3, CLIP, SigLIP, DINOv2) and NaFlexViT."""


class WithBiases(Adopted):
    """What the families whose biases of q and v are parameters of their own share."""

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qkv is None:
            return tuple(self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        bias = None if self.q_bias is None else torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return tuple(self._heads(part) for part in F.linear(x, self.qkv.weight, bias).chunk(3, -1))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H D] to [B, H, T, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class WithRotation(Adopted):
    """What the families with rotary positions share: `forward` takes timm's table of rotations."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend within `x` [B, T, C]; `rope` is the table [T - prefix, 2 D] or [B, 1, T - prefix, 2 D], or None."""
        rotate = None if rope is None else partial(self._rotate, rope)
        return super().forward(x, attn_mask, is_causal, rope=rotate)

    def _rotate(self, rope: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate all but the prefix tokens."""
        prefix, half = self.num_prefix_tokens, self.rotate_half
        return tuple(
            torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)], 2).type_as(x)
            for x in (q, k)
        )


class AdoptedEvaAttention(WithRotation, WithBiases, EvaAttention):
    """Of EVA, EVA-02 and DINOv3."""


class AdoptedRopeAttention(WithRotation, AttentionRope):
    """Of EVA's other block and of NaFlexViT with rotary positions; k and v may have fewer heads."""

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qkv is not None:
            return super()._project(x)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        return q, *(part.repeat_interleave(self.num_kv_groups, 1) for part in (k, v))


class AdoptedBeitAttention(WithBiases, BeitAttention):
    """Of BEiT: relative position bias, of the layer or shared."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Attend within `x` [B, T, C]; the bias is [1, H, T, T] or None."""
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        return Adopted.forward(self, x, bias)


class AdoptedWindowAttention(Adopted, WindowAttention):
    """Of Swin: windows with relative position bias, and masks where they are shifted."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within windows `x` [B windows, T, C]; the mask is [windows, T, T], added to the scores, or None."""
        bias = self._get_rel_pos_bias()
        if mask is not None:
            bias = bias + mask.repeat(x.shape[0] // mask.shape[0], 1, 1).unsqueeze(1)
        return Adopted.forward(self, x, bias)


class AdoptedPooling(DCCrossAttention, AttentionPoolLatent):
    """Attention pooling (`global_pool="map"`): learned queries attend to the tokens, composed.

    Args:
        pooling: The module that it takes the place of, whose parameters it shares.
        **options: Those of `DCCrossAttention` from `rank` on.
    """

    def __init__(self, pooling: AttentionPoolLatent, **options) -> None:
        nn.Module.__init__(self)
        _share(self, pooling)
        self.impl = options.pop("impl", "auto")
        check_impl(self.impl)
        self.dim, self.context_dim = self.latent_dim, self.kv.in_features
        self.num_groups = options.get("num_groups", 1)
        self.attn_drop = nn.Dropout(0.0)
        given = {name: getattr(DCAttention, name) for name in COMPOSE_OPTIONS} | options
        dd = {"device": self.kv.weight.device, "dtype": self.kv.weight.dtype}
        self.compose = SidedProjection(self.dim, self.context_dim, self.num_heads, **given, **dd)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Pool tokens [B, T, C] to [B, out_features]; the mask is broadcastable to [B, H, queries, T]."""
        if self.pos_embed is not None:
            x = x + self.pos_embed.unsqueeze(0).to(x.dtype)
        x = DCCrossAttention.forward(self, self.latent.expand(x.shape[0], -1, -1), x, attn_mask=attn_mask)
        if self.mlp is not None:
            x = x + self.mlp(self.norm(x))
        return {"token": lambda: x[:, 0], "avg": lambda: x.mean(1)}.get(self.pool, lambda: x)()


COMPOSE_OPTIONS = tuple(name for name in DCAttention.OPTIONS if name not in ("window", "impl"))


def _share(module: nn.Module, other: nn.Module) -> None:
    """Give a module the parameters, buffers, parts and attributes of another."""
    module.__dict__.update({n: v.copy() if isinstance(v, dict | set) else v for n, v in vars(other).items()})


FAMILIES: dict[type[nn.Module], type[Adopted]] = {
    Attention: AdoptedAttention,
    AttentionRope: AdoptedRopeAttention,
    EvaAttention: AdoptedEvaAttention,
    BeitAttention: AdoptedBeitAttention,
    WindowAttention: AdoptedWindowAttention,
}
SUPPORTED = (
    "VisionTransformer (ViT, DeiT, DeiT3, BEiT3, CLIP, SigLIP, DINOv2), Eva (EVA, EVA-02, DINOv3), "
    "Beit (BEiT, BEiT v2), SwinTransformer, NaFlexVit"
)


def swap_attention(
    model: nn.Module, *, layers: Iterable[int] | None = None, pooling: bool = False, **options
) -> nn.Module:
    """Replace the self-attention of a timm model by `DCAttention`, in place.

    All that was learned stays: projections of q, k, v and output, biases, norms of q and k, scale, dropout, relative
    position bias, rotary positions. The compose weights start as the paper says (section 3.4), near the identity. To
    load a state dict of a swapped model: create the model, swap with the same options, `load_state_dict`. What
    `timm.models.save_for_hf` writes is made again by `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    Args:
        model: A timm model of a supported family; see `SUPPORTED`.
        layers: Which attention layers, counted from the input, from 0 (negative: from the end); all if None.
        pooling: Compose its attention pooling too (`global_pool="map"`), by `DCCrossAttention`.
        **options: Those of `DCAttention.OPTIONS`, such as `rank`, `num_groups` or `query_wise`.

    Returns:
        The model.

    Raises:
        ValueError: If the model has no self-attention or one that is not supported, a layer is out of range, an option
            is unknown or its value does not fit (heads that do not divide into groups). The model is then as it was.
    """
    options = {name: value for name, value in options.items() if value is not None}
    unknown = sorted(set(options) - set(DCAttention.OPTIONS))
    if unknown:
        raise ValueError(f"unknown options {unknown}; accepted: {', '.join(DCAttention.OPTIONS)}.")
    if options.get("pre_compose") is False and options.get("post_compose") is False:
        raise ValueError("pre_compose=False and post_compose=False leave nothing to compose; accepted: at least one.")
    layers = list(layers) if isinstance(layers, Iterable) else layers
    swapped = {}
    for name in _chosen(model, layers, pooling):
        attention = model.get_submodule(name)
        swapped[name] = _adopt(name, FAMILIES[type(attention)], attention, options)
    if pooling:
        pools = {name: module for name, module in model.named_modules() if type(module) is AttentionPoolLatent}
        if not pools:
            raise ValueError(f"pooling=True; {type(model).__name__} has no attention pooling (global_pool='map').")
        pool_options = {name: value for name, value in options.items() if name != "window"}
        swapped |= {name: _adopt(name, AdoptedPooling, module, pool_options) for name, module in pools.items()}
    for name, attention in swapped.items():
        attention.train(model.get_submodule(name).training)
        model.set_submodule(name, attention)
    _record(model, {"layers": layers, "pooling": pooling} | options)
    return model


def _record(model: nn.Module, options: dict) -> None:
    """Tell timm how to make a model of its own again: the entry point, the model it was, and the options, in turn."""
    cfg, args = getattr(model, "pretrained_cfg", None), getattr(model, "_model_args", None)
    if cfg is None or args is None:
        return
    if cfg["architecture"] != dcmha_swapped.__name__:
        args = args | {"base": cfg["architecture"], "swaps": []}
    model._model_args = args | {"swaps": [*args["swaps"], options]}
    model.pretrained_cfg = model.default_cfg = cfg | {"architecture": dcmha_swapped.__name__}


@register_model
def dcmha_swapped(
    pretrained: bool = False, *, base: str, swaps: Iterable[dict] = ({},), pretrained_cfg: dict | None = None, **kwargs
) -> nn.Module:
    """Any supported model of timm's with composed attention; saved ones are loaded by this name.

    Args:
        pretrained: Take the base's pretrained weights, or of a saved model its own.
        base: The model's name in timm.
        swaps: Options of `swap_attention`, of each call in turn.
        pretrained_cfg: Of a saved model.
        **kwargs: The base's.
    """
    if pretrained_cfg is None:
        return _make_swapped(base, swaps, pretrained=pretrained, **kwargs)
    return build_model_with_cfg(
        partial(_make_swapped, base, swaps), dcmha_swapped.__name__, pretrained, pretrained_cfg=pretrained_cfg, **kwargs
    )


def _make_swapped(base: str, swaps: Iterable[dict], **kwargs) -> nn.Module:
    model = timm.create_model(base, **kwargs)
    for options in swaps:
        swap_attention(model, **options)
    return model


def _adopt(name: str, cls: type[nn.Module], module: nn.Module, options: dict) -> nn.Module:
    """Make the counterpart of a module; an error names it."""
    try:
        return cls(module, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def _attention_names(model: nn.Module) -> list[str]:
    """Find the attention layers that can be swapped; refuse a model with others."""
    modules = dict(model.named_modules())
    others = {type(m).__name__ for m in modules.values() if _is_other_attention(m)}
    if others:
        raise ValueError(f"{type(model).__name__} has {', '.join(sorted(others))}; supported are {SUPPORTED}.")
    names = [name for name, m in modules.items() if type(m) in FAMILIES or isinstance(m, Adopted)]
    if not names:
        has = (
            "its layers are DCAttention" if any(isinstance(m, DCAttention) for m in modules.values()) else "none found"
        )
        raise ValueError(f"{type(model).__name__} has no self-attention to swap ({has}); supported are {SUPPORTED}.")
    return names


def _is_other_attention(module: nn.Module) -> bool:
    """Tell whether a module looks like self-attention of a kind that is not known here."""
    name = type(module).__name__
    is_attention = re.search("Attention|Attn|ParallelScalingBlock", name) is not None
    is_pooling = re.search("Pool", name) is not None
    return is_attention and not is_pooling and type(module) not in FAMILIES and not isinstance(module, DCAttention)


def _chosen(model: nn.Module, layers: Iterable[int] | None, pooling: bool) -> list[str]:
    """Return the names of the layers that are asked for; without `layers`, of all that are not swapped yet."""
    names = _attention_names(model)
    swapped = [isinstance(model.get_submodule(name), Adopted) for name in names]
    if layers is None:
        left = [name for name, done in zip(names, swapped, strict=True) if not done]
        if not left and not pooling:
            raise ValueError(f"the attention layers of {type(model).__name__} are swapped already.")
        return left
    accepted = f"accepted: some of 0 to {len(names) - 1}, the model's attention layers"
    layers = list(layers) if isinstance(layers, Iterable) else [layers]
    is_integer = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
    if not layers or not is_integer or not all(-len(names) <= layer < len(names) for layer in layers):
        raise ValueError(f"layers={layers}; {accepted}.")
    done = sorted({layer for layer in layers if swapped[layer]})
    if done:
        raise ValueError(f"layers={layers}; {accepted}, of which {done} are swapped already.")
    return list(dict.fromkeys(names[layer] for layer in layers))
