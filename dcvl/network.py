"""ImageText: an image tower and a text decoder for contrastive learning and captioning."""

# B images, M texts, T tokens, S patches, C width of the text tower, E embedding width

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dclm import Decoder
from dclm.blocks import CrossContext, make_norm
from dclm.loss import IGNORED, token_loss, without_autocast
from dcmha.checks import check_integers
from dctrain.errors import UserError, as_user_error

from .contrastive import Contrastive

SCALES = {"sigmoid": 10.0, "softmax": 1 / 0.07}  # initial scales of cosine similarities: SigLIP and CLIP
SIGMOID_BIAS = -10.0
MAX_SOFTMAX_SCALE = 100.0  # CLIP's limit; SigLIP has none


class ImageFeatures(NamedTuple):
    """Output of the image tower.

    Attributes:
        patches: Patches, including prefix tokens [B, S, width].
        pooled: Pooled features [B, width]; None without a contrastive loss.
    """

    patches: Tensor
    pooled: Tensor | None


class Texts(NamedTuple):
    """Captions of images.

    Attributes:
        input_ids: Begin token, tokens, end token, and padding [M, T].
        targets: Targets [M, T]; -100 is ignored.
        ends: Position of each end token [M].
        owners: Index of each text's image [M].
    """

    input_ids: Tensor
    targets: Tensor
    ends: Tensor
    owners: Tensor


class ImageTextOutputs(NamedTuple):
    """Outputs for the losses.

    Attributes:
        images: Normalized image embeddings [B, E]; None without a contrastive loss.
        texts: Normalized text embeddings [M, E]; None likewise.
        scale: Scale of the cosine similarities [1]; None likewise.
        bias: Bias [1]; None likewise, or if there is none.
        caption_loss: Sum of the captioning loss over the targets, in nats, a scalar; None without captioning.
    """

    images: Tensor | None
    texts: Tensor | None
    scale: Tensor | None
    bias: Tensor | None
    caption_loss: Tensor | None


class ImageText(nn.Module):
    """An image tower and a text tower.

    With both losses it is CoCa (Yu et al., 2022): the first layers of the text tower do not use the image, and their
    state at the end token is the text embedding; the last layers have cross-attention to the patches, for captioning.
    With one loss it is SigLIP or CLIP, or a captioner.

    Args:
        image: A timm model without a head (`num_classes=0`).
        text: The decoder; a captioner if it has cross-attention.
        embed_dim: Width E of the embeddings; None without a contrastive loss.
        contrastive: The contrastive loss, which determines the initial scale and bias.

    Raises:
        ValueError: If the decoder is bidirectional, or its `context_dim` differs from the width of the image tower.
    """

    def __init__(
        self, image: nn.Module, text: Decoder, embed_dim: int | None, contrastive: Contrastive = "sigmoid"
    ) -> None:
        super().__init__()
        width = text.config.context_dim
        if width not in (None, image.num_features):
            raise ValueError(
                f"context_dim={width} of the text tower does not match the image tower's width {image.num_features}."
            )
        text.check_causal()
        if contrastive not in SCALES:
            raise ValueError(f"{contrastive=} is unknown; expected {', '.join(map(repr, SCALES))}.")
        check_integers(embed_dim=embed_dim, may_be_none=True)
        self.image, self.text, self.embed_dim = image, text, embed_dim
        if not self.is_captioner:
            for module in (text.norm, text.output):  # DDP waits for all gradients
                module.requires_grad_(False)
        if embed_dim is None:
            return
        if self.is_captioner and text.config.cross_layers == text.config.num_layers:
            raise ValueError(
                f"cross_layers={text.config.cross_layers}: texts are embedded before the cross-attention layers, but "
                f"all {text.config.num_layers} layers of the text tower have cross-attention."
            )
        self.image_proj = nn.Linear(getattr(image, "head_hidden_size", image.num_features), embed_dim, bias=False)
        self.text_norm = make_norm(text.config)
        self.text_proj = nn.Linear(text.config.dim, embed_dim, bias=False)
        self.log_scale = nn.Parameter(torch.tensor([math.log(SCALES[contrastive])]))
        self.bias = nn.Parameter(torch.tensor([SIGMOID_BIAS])) if contrastive == "sigmoid" else None

    @property
    def blocks(self) -> list[nn.Module]:
        """Blocks of both towers."""
        return [*getattr(self.image, "blocks", ()), *self.text.blocks]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable activation checkpointing of the blocks of both towers."""
        with as_user_error(f"model.recompute='block' is not supported by {type(self.image).__name__}"):
            self.image.set_grad_checkpointing(enable)
        self.text.set_grad_checkpointing(enable)

    @property
    def is_captioner(self) -> bool:
        """Whether the model generates captions."""
        return self.text.config.cross_layers > 0

    def encode_images(self, images: Tensor) -> ImageFeatures:
        """Encode normalized images [B, 3, size, size]."""
        features = self.image.forward_features(images)
        pooled = None if self.embed_dim is None else self.image.forward_head(features, pre_logits=True)
        return ImageFeatures(as_tokens(features, self.image.num_features), pooled)

    def embed_images(self, seen: ImageFeatures) -> Tensor:
        """Compute normalized image embeddings [B, E]."""
        return _of_length_one(self.image_proj(seen.pooled))

    def embed_texts(self, before: Tensor, ends: Tensor) -> Tensor:
        """Compute normalized text embeddings [M, E] from hidden states before cross-attention [M, T, C]."""
        at_end = before[torch.arange(len(ends), device=ends.device), ends]
        return _of_length_one(self.text_proj(self.text_norm(at_end)))

    def encode_texts(self, input_ids: Tensor, ends: Tensor) -> Tensor:
        """Compute normalized text embeddings [M, E] from tokens [M, T]."""
        return self.embed_texts(self.text.states_before_context(input_ids), ends)

    def context(self, seen: ImageFeatures, owners: Tensor | None = None) -> CrossContext:
        """Return the patches as the context of the text tower; one row per entry of `owners`, if given."""
        return CrossContext(seen.patches if owners is None else seen.patches[owners])

    def forward(self, images: Tensor, texts: Texts) -> ImageTextOutputs:
        """Compute the outputs for images [B, 3, size, size] and texts."""
        seen = self.encode_images(images)
        if self.is_captioner:
            context = self.context(seen, texts.owners)
            before, after = self.text.hidden_and_final(texts.input_ids, context=context)
            count = (texts.targets != IGNORED).sum()
            caption_loss = token_loss(after, self.text.output.weight, texts.targets) * count
        else:
            before, caption_loss = self.text.states_before_context(texts.input_ids), None
        if self.embed_dim is None:
            return ImageTextOutputs(None, None, None, None, caption_loss)
        bias = (
            None if self.bias is None else self.bias.clone()
        )  # parameters gathered by FSDP2 are freed after this call
        embedded = (self.embed_images(seen), self.embed_texts(before, texts.ends))
        return ImageTextOutputs(*embedded, self.log_scale.exp(), bias, caption_loss)

    @torch.no_grad()
    def limit_scale(self) -> None:
        """Clamp the scale of the softmax loss to its limit; called before each step."""
        if self.embed_dim is not None and self.bias is None:
            self.log_scale.clamp_(max=math.log(MAX_SOFTMAX_SCALE))


def _of_length_one(x: Tensor) -> Tensor:
    """Normalize vectors, in at least float32, because half-precision cosine similarities are too coarse."""
    with without_autocast(x):
        return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)


def as_tokens(features: Tensor, width: int) -> Tensor:
    """Convert features of a tower, a feature map or tokens, to tokens [B, S, width].

    Raises:
        UserError: If they are neither.
    """
    if not isinstance(features, Tensor):
        raise UserError(f"the image tower's features are {type(features).__name__}; expected a feature map or tokens.")
    shape = list(features.shape)
    if features.dim() == 3 and shape[2] == width:
        return features
    if features.dim() == 4 and width in (shape[1], shape[3]):
        return features.flatten(2).mT if shape[1] == width else features.flatten(1, 2)
    raise UserError(
        f"the image tower's features have shape {shape}: expected a feature map or tokens of width {width}."
    )
