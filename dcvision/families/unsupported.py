"""Attention classes that cannot be composed, with the reason."""

from timm.layers import SelectiveKernel, SplitAttn
from timm.layers.cbam import ChannelAttn, LightChannelAttn, LightSpatialAttn, SpatialAttn
from timm.layers.coord_attn import CoordAttn, EfficientLocalAttn, SimpleCoordAttn, StripAttn
from timm.layers.non_local_attn import BatNonLocalAttn, BilinearAttnTransform, NonLocalAttn
from timm.layers.selective_kernel import SelectiveKernelAttn
from timm.models.coat import FactorAttnConvRelPosEnc
from timm.models.convit import GPSA
from timm.models.davit import ChannelAttention, ChannelAttentionV2
from timm.models.edgenext import CrossCovarianceAttn
from timm.models.efficientvit_mit import LiteMLA
from timm.models.efficientvit_msra import CascadedGroupAttention
from timm.models.iformer import SHMA
from timm.models.mobilevit import LinearSelfAttention
from timm.models.nextvit import ConvAttention
from timm.models.shvit import SHSA
from timm.models.swiftformer import EfficientAdditiveAttention
from timm.models.volo import OutlookAttention
from timm.models.xcit import XCA
from torch import nn

OF_CHANNELS = "channel attention: channels attend to channels, so there are no token pairs to compose"
LINEAR = "linear attention: the scores of pairs of tokens are never computed"
GATES = "gates of channels or positions: tokens do not attend to tokens"
ONE_HEAD = "a single head: there are no heads to mix"

CONVOLUTIONS = (ConvAttention,)  # convolutions named attention

UNSUPPORTED: dict[type[nn.Module], str] = {
    **dict.fromkeys((XCA, ChannelAttention, ChannelAttentionV2, CrossCovarianceAttn), OF_CHANNELS),
    **dict.fromkeys((FactorAttnConvRelPosEnc, LinearSelfAttention, LiteMLA, EfficientAdditiveAttention), LINEAR),
    **dict.fromkeys((SplitAttn, SelectiveKernel, SelectiveKernelAttn, ChannelAttn, LightChannelAttn), GATES),
    **dict.fromkeys((SpatialAttn, LightSpatialAttn, CoordAttn, SimpleCoordAttn, EfficientLocalAttn, StripAttn), GATES),
    **dict.fromkeys((SHSA, SHMA, NonLocalAttn, BatNonLocalAttn, BilinearAttnTransform), ONE_HEAD),
    GPSA: "gated positional attention: weights are a learned blend of content and position after the softmax",
    CascadedGroupAttention: "cascaded heads: each head depends on the output of the previous one",
    OutlookAttention: "outlook attention: weights are computed from one token, without keys",
}
