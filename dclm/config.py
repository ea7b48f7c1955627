"""DecoderConfig: architecture of a decoder, and named configurations of the paper (tables 3 and 6, section 4)."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from dcmha import ComposeOptions
from dcmha.dispatch import check_impl
from dcmha.layer import check_kv_heads
from dcmha.options import COMPOSE_OPTIONS, compose_options_of
from dcmha.rotary import MIN_BASE
from dctrain.errors import UserError, as_user_error


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ComposeOptions):
    """Architecture of a language model.

    It includes the fields of `ComposeOptions`; composition is disabled unless `pre_compose` or `post_compose` is set.

    Attributes:
        dim: Width C.
        num_layers: Number of blocks.
        num_heads: Heads H; the head dim is C / H.
        num_kv_heads: Heads of the keys and values, each shared by H / num_kv_heads heads (grouped-query attention);
            null for H.
        mlp_dim: Hidden width of the MLP.
        vocab_size: Rows V of the embedding and of the output layer.
        context_length: Sequence length of training; with learned positions also the maximum length.
        norm: LayerNorm or RMSNorm.
        norm_eps: Epsilon of the norms of blocks and output (QK-norm uses 1e-6).
        mlp: GELU, or SwiGLU: down(silu(gate x) * up x).
        mlp_groups: Groups of hidden channels, each scaled by a softmax gate of the input (mgate in the authors' 8B
            code); 0 for none.
        bias: Biases on all linear layers except the output layer.
        position: Learned absolute positions, or rotary embedding.
        rotary_fraction: Fraction of each head's channels that is rotated.
        rotary_base: Base of the rotary frequencies.
        parallel_residual: Attention and MLP in parallel, as in GPT-NeoX.
        qk_norm: RMSNorm of q and k per head.
        is_causal: Causal attention; false for bidirectional attention, for masked language modeling.
        windows: Pattern of window sizes, repeated over the layers: [256, null] alternates local and global attention. A
            window includes the token's own position; without `is_causal` it extends to both sides.
        context_dim: Width of the context of cross-attention, such as the patches of an image; null for none.
        cross_layers: Number of the last layers with cross-attention, after their self-attention.
        cross_compose: Compose the heads of the cross-attention, with the options above.
        init_std: Standard deviation of all weights; null for GPT-NeoX's initialization, as in Pythia.
        impl: Implementation of composed attention.

    Raises:
        ValueError: If a value is out of range, or sizes do not divide.
    """

    dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    vocab_size: int = 50257
    context_length: int = 2048
    num_kv_heads: int | None = None
    norm: Literal["layer", "rms"] = "rms"
    norm_eps: float = 1e-5
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    mlp_groups: int = 0
    bias: bool = False
    position: Literal["learned", "rotary"] = "rotary"
    rotary_fraction: float = 1.0
    rotary_base: float = 10000.0
    parallel_residual: bool = False
    qk_norm: bool = False
    is_causal: bool = True
    windows: tuple[int | None, ...] = (None,)
    context_dim: int | None = None
    cross_layers: int = 0
    cross_compose: bool = False
    init_std: float | None = 0.006
    impl: str = "auto"
    pre_compose: bool = False
    post_compose: bool = False

    def __post_init__(self) -> None:
        """Check values that the layers do not check, or check too late."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in NUMBERS and type(value) not in NUMBERS[field.type]:
                name = getattr(field.type, "__name__", None) or str(field.type).replace("|", "or")
                raise ValueError(f"{field.name}={value!r} must be of type {name}.")
        if not isinstance(self.windows, list | tuple) or not all(type(w) in (int, type(None)) for w in self.windows):
            raise ValueError(f"windows={self.windows!r} must be a list of numbers and nulls.")
        object.__setattr__(self, "windows", tuple(self.windows))
        super().__post_init__()
        for name, most in MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1 and at most {most}.")
        for name, accepted in CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected {', '.join(map(repr, accepted))}.")
        for name, least in (("norm_eps", SMALLEST), ("rotary_base", MIN_BASE), ("init_std", SMALLEST)):
            if getattr(self, name) is not None and not least <= getattr(self, name) <= LARGEST:
                raise ValueError(f"{name}={getattr(self, name)}: expected a number from {least:g} to {LARGEST:g}.")
        if self.dim % self.num_heads:
            raise ValueError(f"dim={self.dim} must be divisible by num_heads={self.num_heads}.")
        check_kv_heads(self.num_heads, self.num_kv_heads)
        if self.is_composed:
            self.group_heads(self.num_heads)
        check_impl(self.impl)
        if self.mlp_groups < 0 or (self.mlp_groups and self.mlp_dim % self.mlp_groups):
            raise ValueError(f"mlp_groups={self.mlp_groups} must be 0 or divide mlp_dim={self.mlp_dim}.")
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ValueError(
                f"windows={list(self.windows)} must have at least one entry, each a positive integer or null."
            )
        self._check_context()
        if self.position == "rotary" and not 0 < self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction={self.rotary_fraction} must be in (0, 1].")
        if self.position == "rotary" and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(
                f"rotary_fraction={self.rotary_fraction} of head dim {self.dim // self.num_heads} is "
                f"{self.rotary_dim} channels; it must be a positive even number."
            )

    def _check_context(self) -> None:
        if (self.context_dim is None) != (self.cross_layers == 0):
            raise ValueError(
                f"context_dim={self.context_dim} with cross_layers={self.cross_layers}; expected both, or neither."
            )
        if self.context_dim is not None and self.context_dim < 1:
            raise ValueError(f"context_dim={self.context_dim} must be at least 1, or null.")
        if not 0 <= self.cross_layers <= self.num_layers:
            raise ValueError(f"cross_layers={self.cross_layers} must be from 0 to num_layers={self.num_layers}.")
        if self.cross_compose:
            if not self.cross_layers:
                raise ValueError("cross_compose=True requires cross_layers of at least 1.")
            self.cross_options.check_composes()
            self.group_heads(self.num_heads)

    @property
    def cross_options(self) -> ComposeOptions:
        """Compose options of the cross-attention."""
        options = compose_options_of(self) | dict.fromkeys(("pre_compose", "post_compose"), self.cross_compose)
        return ComposeOptions(**options)

    @property
    def rotary_dim(self) -> int:
        """Rotated channels per head."""
        return int(self.dim // self.num_heads * self.rotary_fraction)

    @property
    def layer_windows(self) -> list[int | None]:
        """Window size of every layer."""
        return [self.windows[i % len(self.windows)] for i in range(self.num_layers)]


SMALLEST, LARGEST = 1e-30, 1e30  # range of numbers, so that their products are representable in float32

# Limits far above any model, so that damaged or hostile files are rejected before allocation.
MOST = {
    **{"dim": 2**17, "num_layers": 2**12, "num_heads": 2**12, "mlp_dim": 2**20},
    **{"vocab_size": 2**25, "context_length": 2**24},
}
NUMBERS = {
    **{bool: (bool,), int: (int,), float: (float, int)},
    **{int | None: (int, type(None)), float | None: (float, int, type(None))},
}
CHOICES = {"norm": ("layer", "rms"), "mlp": ("gelu", "swiglu"), "position": ("learned", "rotary")}
TRANSFORMER = {"norm": "layer", "mlp": "gelu", "bias": True, "position": "learned"}
TRANSFORMER_PP = {"norm": "rms", "mlp": "swiglu", "bias": False, "position": "rotary"}
PYTHIA = TRANSFORMER | {"position": "rotary", "rotary_fraction": 0.25, "parallel_residual": True, "init_std": None}
COMPOSED = {"pre_compose": True, "post_compose": True, "qk_norm": True, "windows": (256, None)}
DEBUG = {"context_length": 256, "init_std": 0.02}
DEBUG_WINDOWS = (64, None)

SIZES = {  # layers, width, heads, hidden width with GELU and with SwiGLU
    "debug": (4, 128, 4, 512, 384),
    "405m": (24, 1024, 16, 4096, 2816),
    "834m": (24, 1536, 24, 6144, 4096),
    "1b4": (24, 2048, 32, 8192, 5632),
    "2b8": (32, 2560, 32, 10240, 6912),
    "6b9": (32, 4096, 32, 16384, 11008),
    "12b": (36, 5120, 40, 20480, None),
    "13b": (40, 5120, 40, None, 13824),
    "33b": (60, 6656, 52, None, 17920),
}
FAMILIES = {  # name of the baseline and of the composed model, architecture, and sizes in the paper
    ("transformer", "dcformer"): (TRANSFORMER, ("debug", "405m", "834m", "1b4")),
    ("transformer_pp", "dcformer_pp"): (TRANSFORMER_PP, ("debug", "405m", "834m", "1b4", "2b8", "6b9", "13b", "33b")),
    ("pythia", "dcpythia"): (PYTHIA, ("debug", "2b8", "6b9", "12b")),
}


def _named_configs() -> dict[str, DecoderConfig]:
    configs = {}
    for (plain, composed), (family, sizes) in FAMILIES.items():
        for size in sizes:
            layers, dim, heads, gelu, swiglu = SIZES[size]
            shape = {"num_layers": layers, "dim": dim, "num_heads": heads}
            options = DEBUG if size == "debug" else {}
            options = options | shape | family | {"mlp_dim": swiglu if family["mlp"] == "swiglu" else gelu}
            configs[f"{plain}_{size}"] = DecoderConfig(**options)
            windows = {"windows": DEBUG_WINDOWS} if size == "debug" else {}
            configs[f"{composed}_{size}"] = DecoderConfig(**options | COMPOSED | windows)
    return configs


CONFIGS = _named_configs()
DEFAULT_MODEL = "dcformer_pp_debug"


def decoder_config(name: str, **overrides) -> DecoderConfig:
    """Return a named configuration, with some fields replaced.

    Args:
        name: One of `CONFIGS`: `transformer_*`, `transformer_pp_*`, `pythia_*`, and composed `dcformer_*`,
            `dcformer_pp_*`, `dcpythia_*`.
        **overrides: Fields of `DecoderConfig`.

    Raises:
        ValueError: If the name or a field is unknown, or a value out of range.
    """
    if not isinstance(name, str) or name not in CONFIGS:
        raise ValueError(f"model {name!r} is unknown; expected {', '.join(CONFIGS)}.")
    accepted = [field.name for field in fields(DecoderConfig)]
    unknown = sorted(set(overrides) - set(accepted))
    if unknown:
        raise ValueError(f"unknown fields {unknown} for model {name!r}; expected {', '.join(accepted)}.")
    return replace(CONFIGS[name], **overrides)


def build_config(model: str, vocab_size: int, context_length: int, overrides: dict[str, Any]) -> DecoderConfig:
    """Create the configuration of a named model.

    Raises:
        UserError: If the name or an override is unknown, or a value out of range.
    """
    fixed = {"vocab_size": vocab_size, "context_length": context_length}
    twice = sorted(set(overrides) & set(fixed))
    if twice:
        raise UserError(f"model.overrides must not contain {twice}: data.{twice[0]} sets it for model and data.")
    with as_user_error():
        return decoder_config(model, **fixed, **overrides)


OF_TRAINING = ("impl", "init_std", "context_length")  # fields that do not affect the meaning of weights
OF_CHOICE = ("windows",)  # fields that may change in further training


def check_same(before: DecoderConfig, now: DecoderConfig, message: str, settings: str) -> None:
    """Check that the weights of one model can be used in another.

    Composition and QK-norm may be added, but not changed. Windows may differ, and the context length, except with
    learned positions.

    Args:
        before: Configuration of the weights.
        now: Configuration of the other model.
        message: Start of the message.
        settings: Settings named in the message.

    Raises:
        UserError: If they cannot; the message has each differing field with both values.
    """
    free = {*OF_TRAINING, *OF_CHOICE}
    if not before.is_composed:
        free |= set(COMPOSE_OPTIONS)
    if not before.qk_norm:
        free.add("qk_norm")
    if before.position == "learned":
        free.remove("context_length")
    pairs = {field.name: (getattr(before, field.name), getattr(now, field.name)) for field in fields(DecoderConfig)}
    kv_heads = tuple(config.num_kv_heads or config.num_heads for config in (before, now))
    pairs["num_kv_heads"] = kv_heads
    others = {name: pair for name, pair in pairs.items() if name not in free and pair[0] != pair[1]}
    if others:
        difference = ", ".join(f"{name}={theirs!r}, here {ours!r}" for name, (theirs, ours) in others.items())
        raise UserError(f"{message}: {difference} ({settings}).")
