"""DCViT and its MHA baselines, registered with timm (paper, section 4.5, tables 7 and 8).

They follow big_vision's ViT, which the paper uses: no class token, fixed sin-cos 2-D positions, a final norm followed
by average pooling, biases on q, k, v, Xavier-uniform projections, a zero-initialized head. `mhavit_*` differs from
`dcvit_*` only in the attention, and both are built from `DCAttention`.
"""

# B batch, T tokens, C model width

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from dcmha import DCAttention

from .families import ComposedParts

PLAIN_OPTIONS = {"pre_compose": False, "post_compose": False}
FIXED = {"pos_embed": "none", "class_token": False, "final_norm": True, "fc_norm": False, "qkv_bias": True}

register_notrace_module(ComposedParts)
register_notrace_module(DCAttention)  # a leaf module for torch.fx, which cannot trace its checks


def sincos_positions(height: int, width: int, dim: int) -> Tensor:
    """Compute fixed 2-D position embeddings as in big_vision.

    Args:
        height: Rows of patches.
        width: Columns of patches.
        dim: Model width C, a multiple of 4 and at least 8.

    Returns:
        [1, height * width, dim]: sin and cos of the column, then of the row, at dim / 4 frequencies from 1 to 1e-4.

    Raises:
        ValueError: If `dim` is not a multiple of 4, or too small.
    """
    if dim % 4 or dim < 8:
        raise ValueError(f"dim={dim} must be a multiple of 4, at least 8, for sin-cos 2-D positions.")
    frequency = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4 - 1))
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = [position.flatten()[:, None] * frequency for position in (column, row)]
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1).float()[None]


class SinCosVisionTransformer(VisionTransformer):
    """timm's `VisionTransformer` with fixed sin-cos positions for any image size.

    Register tokens (`reg_tokens`) come before the patches, have no position, and are not pooled.

    Args:
        img_size: Image height and width, or a single number.
        patch_size: Patch size.
        embed_dim: Width C.
        **kwargs: Arguments of timm's `VisionTransformer`, except those with fixed values (`FIXED`).

    Raises:
        ValueError: If an argument differs from its fixed value.
    """

    def __init__(self, img_size=224, patch_size=16, embed_dim: int = 384, **kwargs) -> None:
        for name, value in FIXED.items():
            if kwargs.get(name) not in (None, value):
                raise ValueError(f"{name}={kwargs[name]!r}: dcvit_* and mhavit_* models have {name}={value!r}.")
        defaults = {"global_pool": "avg", "weight_init": "jax"}
        super().__init__(
            img_size=img_size, patch_size=patch_size, embed_dim=embed_dim, **{**defaults, **kwargs, **FIXED}
        )
        self.register_buffer("positions", self._make_positions(), persistent=False)
        self.register_load_state_dict_post_hook(_make_positions_anew)

    def _make_positions(self) -> Tensor:
        device = self.patch_embed.proj.weight.device
        return sincos_positions(*self.patch_embed.grid_size, self.embed_dim).to(device)

    def set_input_size(self, img_size=None, patch_size=None) -> None:
        """Change the image or patch size, and recompute the positions."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        self.positions = self._make_positions()

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialize as in timm, then q, k and v separately by their own fan-out (timm treats them as one matrix)."""
        super().init_weights(mode, needs_reset=needs_reset)
        if (mode or self.weight_init_mode).startswith("jax"):
            for block in self.blocks:
                for weight in block.attn.qkv.weight.chunk(3):
                    nn.init.xavier_uniform_(weight)
        if hasattr(self, "positions"):
            self.positions = self._make_positions()

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Add positions to patches [B, T, C], or [B, rows, columns, C] with `dynamic_img_size`, and prepend the
        registers.
        """
        positions = self.positions
        if self.dynamic_img_size:
            positions = sincos_positions(*x.shape[1:3], self.embed_dim).to(x.device)
            x = x.flatten(1, 2)
        x = x + positions.to(x.dtype)
        if self.reg_token is not None:
            x = torch.cat([self.reg_token.expand(len(x), -1, -1), x], 1)
        return self.pos_drop(x)


def _make_positions_anew(model: SinCosVisionTransformer, _keys: object) -> None:
    """Recompute the positions of a model built on the meta device, because checkpoints do not contain them."""
    if not model.patch_embed.proj.weight.is_meta:
        model.positions = model._make_positions()


def _cfg(size: int = 224, num_classes: int = 1000) -> dict:
    return {
        "num_classes": num_classes,
        "input_size": (3, size, size),
        "fixed_input_size": True,
        "crop_pct": 224 / 256 if size > 64 else 1.0,
        "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }


_SIZES = {
    "tiny_patch16_224": _cfg(),
    "small_patch16_224": _cfg(),
    "medium_patch16_224": _cfg(),
    "base_patch16_224": _cfg(),
    "small_patch4_32": _cfg(32, num_classes=10),
    "digits_patch2_8": _cfg(8, num_classes=10),
}
default_cfgs = generate_default_cfgs(
    {f"{kind}_{size}": cfg for kind in ("dcvit", "mhavit") for size, cfg in _SIZES.items()}
)


def current_names(options: dict) -> dict:
    """Rename the option `window` of runs and models saved before it was called `window_size`."""
    return {"window_size" if name == "window" else name: value for name, value in options.items()}


def _create(variant: str, pretrained: bool, options: dict, **kwargs) -> SinCosVisionTransformer:
    """Build a registered model. Options of `DCAttention` are passed to the attention."""
    kwargs = current_names(kwargs)
    given = {name: kwargs.pop(name) for name in DCAttention.OPTIONS if name in kwargs}
    return build_model_with_cfg(
        SinCosVisionTransformer,
        variant,
        pretrained,
        attn_layer=DCAttention.with_options(**{**given, **options}),
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **kwargs,
    )


def _dcvit(size: str, pretrained: bool, kwargs: dict, **shape) -> SinCosVisionTransformer:
    return _create(f"dcvit_{size}", pretrained, {}, **{**shape, **kwargs})


def _mhavit(size: str, pretrained: bool, kwargs: dict, **shape) -> SinCosVisionTransformer:
    return _create(f"mhavit_{size}", pretrained, PLAIN_OPTIONS, **{**shape, **kwargs})


TINY = {"embed_dim": 192, "depth": 12, "num_heads": 3}
SMALL = {"embed_dim": 384, "depth": 12, "num_heads": 6}
MEDIUM = {"embed_dim": 512, "depth": 12, "num_heads": 8}
BASE = {"embed_dim": 768, "depth": 12, "num_heads": 12}
SMALL_32 = {**SMALL, "patch_size": 4}
DIGITS = {"embed_dim": 64, "depth": 4, "num_heads": 4, "patch_size": 2}


@register_model
def dcvit_tiny_patch16_224(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """DCViT Ti/16 at 224 pixels."""
    return _dcvit("tiny_patch16_224", pretrained, kwargs, **TINY)


@register_model
def dcvit_small_patch16_224(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """DCViT S/16 at 224 pixels, table 7."""
    return _dcvit("small_patch16_224", pretrained, kwargs, **SMALL)


@register_model
def dcvit_medium_patch16_224(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """DCViT M/16 at 224 pixels, table 7."""
    return _dcvit("medium_patch16_224", pretrained, kwargs, **MEDIUM)


@register_model
def dcvit_base_patch16_224(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """DCViT B/16 at 224 pixels."""
    return _dcvit("base_patch16_224", pretrained, kwargs, **BASE)


@register_model
def dcvit_small_patch4_32(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """DCViT S/4 for 32-pixel images."""
    return _dcvit("small_patch4_32", pretrained, kwargs, **SMALL_32)


@register_model
def dcvit_digits_patch2_8(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """DCViT for 8-pixel handwritten digits."""
    return _dcvit("digits_patch2_8", pretrained, kwargs, **DIGITS)


@register_model
def mhavit_tiny_patch16_224(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """ViT (MHA baseline) Ti/16 at 224 pixels."""
    return _mhavit("tiny_patch16_224", pretrained, kwargs, **TINY)


@register_model
def mhavit_small_patch16_224(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """ViT (MHA baseline) S/16 at 224 pixels, table 7."""
    return _mhavit("small_patch16_224", pretrained, kwargs, **SMALL)


@register_model
def mhavit_medium_patch16_224(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """ViT (MHA baseline) M/16 at 224 pixels, table 7."""
    return _mhavit("medium_patch16_224", pretrained, kwargs, **MEDIUM)


@register_model
def mhavit_base_patch16_224(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """ViT (MHA baseline) B/16 at 224 pixels."""
    return _mhavit("base_patch16_224", pretrained, kwargs, **BASE)


@register_model
def mhavit_small_patch4_32(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """ViT (MHA baseline) S/4 for 32-pixel images."""
    return _mhavit("small_patch4_32", pretrained, kwargs, **SMALL_32)


@register_model
def mhavit_digits_patch2_8(pretrained: bool = False, **kwargs) -> SinCosVisionTransformer:
    """ViT (MHA baseline) for 8-pixel handwritten digits."""
    return _mhavit("digits_patch2_8", pretrained, kwargs, **DIGITS)
