"""Attention of timm's families beyond the plain vision transformers: what each computes, in parts that can be composed.

`FAMILIES_BY_PARTS` names the classes that can be composed, `LEFT` those that cannot, with the reason.
"""

from timm.models.cait import ClassAttn, TalkingHeadAttn
from timm.models.hiera import MaskUnitAttention
from timm.models.hieradet_sam2 import MultiScaleAttention as Sam2Attention
from timm.models.maxxvit import Attention2d, AttentionCl
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.nextvit import EfficientAttention
from timm.models.pvt_v2 import Attention as PvtAttention
from timm.models.swin_transformer_v2 import WindowAttention as SwinV2Attention
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from timm.models.twins import GlobalSubSampleAttn, LocallyGroupedAttn
from timm.models.vision_transformer_relpos import RelPosAttention
from timm.models.vision_transformer_sam import Attention as SamAttention
from torch import nn

from . import biases, pooled, talking_heads, windows
from .left import CONVOLUTIONS, LEFT
from .parts import ComposedParts, Family, Parts, composed_class

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
}

__all__ = ["CONVOLUTIONS", "FAMILIES_BY_PARTS", "LEFT", "ComposedParts", "Family", "Parts", "composed_class"]
