"""ImageText: a tower for images and a decoder for texts, contrasted with each other, and a text told from its image."""

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

SCALES = {"sigmoid": 10.0, "softmax": 1 / 0.07}  # that multiply cosines at first: SigLIP's and CLIP's
SIGMOID_BIAS = -10.0
MAX_SOFTMAX_SCALE = 100.0  # CLIP's; SigLIP's has no limit


class ImageFeatures(NamedTuple):
    """What the image tower makes of images.

    Attributes:
        patches: Its patches, and the tokens that it puts before them [B, S, width].
        pooled: All of it together [B, width]; None where nothing is contrasted.
    """

    patches: Tensor
    pooled: Tensor | None


class Texts(NamedTuple):
    """Texts of images.

    Attributes:
        input_ids: What begins a text, its tokens, what ends it, and padding [M, T].
        targets: What is to be told at each place [M, T]; -100 does not count.
        ends: Where each text ends [M].
        owners: Which image each is of [M].
    """

    input_ids: Tensor
    targets: Tensor
    ends: Tensor
    owners: Tensor


class Outputs(NamedTuple):
    """What a step needs.

    Attributes:
        images: Embeddings [B, E] of length 1; None if nothing is contrasted.
        texts: Embeddings [M, E] of length 1; None likewise.
        scale: What multiplies their cosines [1]; None likewise.
        bias: What is added then [1]; None likewise, or if there is none.
        caption_loss: Summed over the targets that count, in nats, a scalar; None if nothing is told.
    """

    images: Tensor | None
    texts: Tensor | None
    scale: Tensor | None
    bias: Tensor | None
    caption_loss: Tensor | None


class ImageText(nn.Module):
    """Two towers. With both losses it is CoCa (Yu et al., 2022): the text tower's first layers do not know the image,
    and the state at the text's end is its embedding; the last ones look at the patches and tell the text. With one of
    the losses it is SigLIP or CLIP, or a captioner.

    Args:
        image: A model of timm without a head (`num_classes=0`).
        text: The decoder; it tells texts if it has layers that look at a context.
        embed_dim: Width E of the embeddings; None contrasts nothing.
        contrastive: The loss that will be taken, which says how scale and bias begin.

    Raises:
        ValueError: If the decoder sees both ways, or looks at a context of another width than that of the image tower.
    """

    def __init__(
        self, image: nn.Module, text: Decoder, embed_dim: int | None, contrastive: Contrastive = "sigmoid"
    ) -> None:
        super().__init__()
        width = text.config.context_dim
        if width not in (None, image.num_features):
            raise ValueError(
                f"context_dim={width} of the text tower; the image tower's patches have {image.num_features}."
            )
        text.check_causal()
        if contrastive not in SCALES:
            raise ValueError(f"{contrastive=} is unknown; expected {', '.join(map(repr, SCALES))}.")
        check_integers(embed_dim=embed_dim, may_be_none=True)
        self.image, self.text, self.embed_dim = image, text, embed_dim
        if not self.is_captioner:
            for module in (text.norm, text.output):  # data-parallel training waits for every gradient
                module.requires_grad_(False)
        if embed_dim is None:
            return
        if self.is_captioner and text.config.cross_layers == text.config.num_layers:
            raise ValueError(
                f"cross_layers={text.config.cross_layers}: a text is embedded before the layers that look at the "
                f"image, and all {text.config.num_layers} of the text tower do."
            )
        self.image_proj = nn.Linear(getattr(image, "head_hidden_size", image.num_features), embed_dim, bias=False)
        self.text_norm = make_norm(text.config)
        self.text_proj = nn.Linear(text.config.dim, embed_dim, bias=False)
        self.log_scale = nn.Parameter(torch.tensor([math.log(SCALES[contrastive])]))
        self.bias = nn.Parameter(torch.tensor([SIGMOID_BIAS])) if contrastive == "sigmoid" else None

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of both towers."""
        return [*getattr(self.image, "blocks", ()), *self.text.blocks]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the blocks' inputs for the backward pass, and compute the rest again, in both towers."""
        with as_user_error(f"model.recompute='block': {type(self.image).__name__} cannot"):
            self.image.set_grad_checkpointing(enable)
        self.text.set_grad_checkpointing(enable)

    @property
    def is_captioner(self) -> bool:
        """Whether texts are told from images."""
        return self.text.config.cross_layers > 0

    def encode_images(self, images: Tensor) -> ImageFeatures:
        """Look at normalised images [B, 3, size, size]."""
        features = self.image.forward_features(images)
        pooled = None if self.embed_dim is None else self.image.forward_head(features, pre_logits=True)
        return ImageFeatures(as_tokens(features, self.image.num_features), pooled)

    def embed_images(self, seen: ImageFeatures) -> Tensor:
        """Embed images [B, E], of length 1."""
        return _of_length_one(self.image_proj(seen.pooled))

    def embed_texts(self, before: Tensor, ends: Tensor) -> Tensor:
        """Embed texts [M, E], of length 1, by their states before the layers that look at the image [M, T, C]."""
        at_end = before[torch.arange(len(ends), device=ends.device), ends]
        return _of_length_one(self.text_proj(self.text_norm(at_end)))

    def encode_texts(self, input_ids: Tensor, ends: Tensor) -> Tensor:
        """Embed texts [M, E], of length 1, by their tokens [M, T]."""
        return self.embed_texts(self.text.states_before_context(input_ids), ends)

    def context(self, seen: ImageFeatures, owners: Tensor | None = None) -> CrossContext:
        """Make of the patches what the text tower looks at; a row for each of `owners`, if they are given."""
        return CrossContext(seen.patches if owners is None else seen.patches[owners])

    def forward(self, images: Tensor, texts: Texts) -> Outputs:
        """Embed images [B, 3, size, size] and texts, and tell the texts from their images."""
        seen = self.encode_images(images)
        if self.is_captioner:
            context = self.context(seen, texts.owners)
            before, after = self.text.hidden_and_final(texts.input_ids, context=context)
            count = (texts.targets != IGNORED).sum()
            caption_loss = token_loss(after, self.text.output.weight, texts.targets) * count
        else:
            before, caption_loss = self.text.states_before_context(texts.input_ids), None
        if self.embed_dim is None:
            return Outputs(None, None, None, None, caption_loss)
        bias = None if self.bias is None else self.bias.clone()  # what FSDP2 gathers is gone after this call
        embedded = (self.embed_images(seen), self.embed_texts(before, texts.ends))
        return Outputs(*embedded, self.log_scale.exp(), bias, caption_loss)

    @torch.no_grad()
    def limit_scale(self) -> None:
        """Take the softmax's scale back to its limit; before each step, so that it can also fall again."""
        if self.embed_dim is not None and self.bias is None:
            self.log_scale.clamp_(max=math.log(MAX_SOFTMAX_SCALE))


def _of_length_one(x: Tensor) -> Tensor:
    """Scale vectors to length 1, in float32 at least: cosines of half precision are too coarse to be contrasted."""
    with without_autocast(x):
        return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)


def as_tokens(features: Tensor, width: int) -> Tensor:
    """Put a tower's features, a map or tokens, as tokens [B, S, width].

    Raises:
        UserError: If they are neither.
    """
    if not isinstance(features, Tensor):
        raise UserError(f"the image tower makes {type(features).__name__}s of features; expected a map, or tokens.")
    shape = list(features.shape)
    if features.dim() == 3 and shape[2] == width:
        return features
    if features.dim() == 4 and width in (shape[1], shape[3]):
        return features.flatten(2).mT if shape[1] == width else features.flatten(1, 2)
    raise UserError(f"the image tower makes features {shape}: expected a map, or tokens, of width {width}.")
