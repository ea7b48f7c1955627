"""Attention classes of timm's families beyond plain vision transformers, as parts that can be composed.

`FAMILIES_BY_PARTS` lists the supported classes, `UNSUPPORTED` the others with the reason.
"""

from timm.layers.attention2d import Attention2d as ImageAttention
from timm.layers.attention2d import MultiQueryAttention2d
from timm.models.cait import ClassAttn, TalkingHeadAttn
from timm.models.crossvit import CrossAttention
from timm.models.efficientformer import Attention as EfficientFormerAttention
from timm.models.efficientformer_v2 import Attention2d as EfficientFormerV2Attention
from timm.models.efficientformer_v2 import Attention2dDownsample
from timm.models.fastvit import Attention as FastVitAttention
from timm.models.gcvit import WindowAttentionGlobal
from timm.models.gemma4_vit import Gemma4Attention
from timm.models.hiera import MaskUnitAttention
from timm.models.hieradet_sam2 import MultiScaleAttention as Sam2Attention
from timm.models.levit import Attention as LevitAttention
from timm.models.levit import AttentionDownsample
from timm.models.maxxvit import Attention2d, AttentionCl
from timm.models.metaformer import Attention as MetaFormerAttention
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.nest import Attention as NestAttention
from timm.models.nextvit import EfficientAttention
from timm.models.pvt_v2 import Attention as PvtAttention
from timm.models.swin_transformer_v2 import WindowAttention as SwinV2Attention
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from timm.models.tiny_vit import Attention as TinyVitAttention
from timm.models.tnt import Attention as TntAttention
from timm.models.twins import GlobalSubSampleAttn, LocallyGroupedAttn
from timm.models.visformer import Attention as VisformerAttention
from timm.models.vision_transformer_relpos import RelPosAttention
from timm.models.vision_transformer_sam import Attention as SamAttention
from torch import nn

from . import base, biases, mobile, offsets, plain, pooled, talking_heads, windows
from .base import AttentionParts, ComposedParts, Family, composed_class
from .unsupported import CONVOLUTIONS, UNSUPPORTED

FAMILIES_BY_PARTS: dict[type[nn.Module], Family] = {
    SwinV2Attention: windows.SWIN_V2,
    WindowMultiHeadAttention: windows.SWIN_V2_CR,
    LocallyGroupedAttn: windows.TWINS_LOCAL,
    SamAttention: biases.SAM,
    RelPosAttention: biases.REL_POS,
    AttentionCl: biases.MAXVIT,
    Attention2d: biases.COATNET,
    TalkingHeadAttn: talking_heads.CAIT,
    ClassAttn: talking_heads.CLASS_ATTENTION,
    PvtAttention: pooled.PVT,
    GlobalSubSampleAttn: pooled.TWINS_GLOBAL,
    EfficientAttention: pooled.NEXTVIT,
    MultiScaleAttention: pooled.MVIT,
    MaskUnitAttention: pooled.HIERA,
    Sam2Attention: pooled.SAM2,
    MetaFormerAttention: plain.METAFORMER,
    NestAttention: plain.NEST,
    FastVitAttention: plain.FASTVIT,
    VisformerAttention: plain.VISFORMER,
    TntAttention: plain.TNT,
    CrossAttention: plain.CROSSVIT,
    WindowAttentionGlobal: plain.GCVIT,
    Gemma4Attention: plain.GEMMA4,
    TinyVitAttention: offsets.TINY_VIT,
    LevitAttention: offsets.LEVIT,
    AttentionDownsample: offsets.LEVIT_DOWN,
    EfficientFormerAttention: offsets.EFFICIENTFORMER,
    EfficientFormerV2Attention: offsets.EFFICIENTFORMER_V2,
    Attention2dDownsample: offsets.EFFICIENTFORMER_V2_DOWN,
    MultiQueryAttention2d: mobile.MULTI_QUERY,
    ImageAttention: mobile.OF_IMAGES,
}
base.FAMILIES.update(FAMILIES_BY_PARTS)

__all__ = [
    "CONVOLUTIONS",
    "FAMILIES_BY_PARTS",
    "UNSUPPORTED",
    "AttentionParts",
    "ComposedParts",
    "Family",
    "composed_class",
]
