"""Conversion between the published `config.json` and `DecoderConfig`."""

from ..config import PYTHIA, TRANSFORMER_PP, DecoderConfig
from .fields import check_known, check_types, check_values

# window_type: the pattern, True = local
PATTERNS = {"LG": (True, False), "LGLL": (True, False, True, True), "LGL6": (True, False) + (True,) * 6}
DEFAULTS = {
    "vocab_size": 32000,
    "dim": 2560,
    "n_layer": 32,
    "n_head": 32,
    "n_local_heads": -1,
    "intermediate_size": None,
    "block_size": 2048,
    "norm_eps": 1e-5,
    "use_qk_norm": False,
    "window_size": 256,
    "window_type": None,
    "query_wise": False,
    "use_dcmha": True,
    "tie_word_embeddings": False,
    "use_sw": False,
}
FAMILY_DEFAULTS = {
    "dcformer": {"mgate": False, "mgate_dim": 44, "rope_base": 10000},
    "dcpythia": {"rotary_pct": 0.25, "use_parallel_residual": True, "use_linear_bias": True, "rope_base": 10000},
}
SECOND_VERSION = ("mgate", "mgate_dim", "prefill_pad")  # fields of the later DCFormer code, whose rope_base is 500000
WITHOUT_EFFECT = ("head_dim", "q_chunk_size", "is_training", "use_gradient_checkpointing", "prefill_pad")


def field_defaults(content: dict) -> dict:
    """Return the relevant fields of a `config.json` with their defaults."""
    defaults = DEFAULTS | FAMILY_DEFAULTS[content["model_type"]]
    if content["model_type"] == "dcformer" and any(name in content for name in SECOND_VERSION):
        defaults["rope_base"] = 500000
    return defaults


def config_from_hub(content: dict) -> DecoderConfig:
    """Convert the `config.json` of a "dcformer" or "dcpythia" model.

    Raises:
        ValueError: If a field is unknown, or a value is not defined by the format.
    """
    check_known(content, {*field_defaults(content), *WITHOUT_EFFECT})
    hub = field_defaults(content) | content
    _check_hub(hub)
    family = content["model_type"]
    composed = hub["use_dcmha"]
    return DecoderConfig(
        **(_pythia(hub) if family == "dcpythia" else _dcformer(hub)),
        dim=hub["dim"],
        num_layers=hub["n_layer"],
        num_heads=hub["n_head"],
        vocab_size=hub["vocab_size"],
        context_length=hub["block_size"],
        norm_eps=hub["norm_eps"],
        rotary_base=float(hub["rope_base"]),
        qk_norm=hub["use_qk_norm"],
        windows=_windows(hub),
        pre_compose=composed,
        post_compose=composed,
        key_wise=not hub["query_wise"],
    )


INTEGERS = ("vocab_size", "dim", "n_layer", "n_head", "n_local_heads", "block_size", "mgate_dim")
NUMBERS = ("norm_eps", "rope_base", "rotary_pct")
BOOLEANS = (
    *("use_qk_norm", "query_wise", "use_dcmha", "tie_word_embeddings", "use_sw", "mgate"),
    *("use_parallel_residual", "use_linear_bias"),
)
OPTIONAL_INTEGERS = ("intermediate_size", "window_size")
KINDS = {
    **dict.fromkeys(INTEGERS, (int,)),
    **dict.fromkeys(NUMBERS, (int, float)),
    **dict.fromkeys(BOOLEANS, (bool,)),
    **dict.fromkeys(OPTIONAL_INTEGERS, (int, type(None))),
}


def _check_hub(hub: dict) -> None:
    check_types(hub, KINDS)
    if hub["n_local_heads"] not in (-1, hub["n_head"]):
        raise ValueError(
            f"n_local_heads={hub['n_local_heads']}; expected -1 or n_head={hub['n_head']} (shared keys and values are "
            "not defined for these models)."
        )
    check_values(hub, {"tie_word_embeddings": (False,), "use_sw": (False,)})
    rank = hub["n_head"] // max(1, hub["n_head"] // 2)
    if hub["use_dcmha"] and rank != 2:
        raise ValueError(f"n_head={hub['n_head']}; expected 2, or more than 3 (the published code's rank is then 2).")


def _dcformer(hub: dict) -> dict:
    hidden = hub["intermediate_size"]
    if hidden is None:
        hidden = -(-(8 * hub["dim"] // 3) // 256) * 256
    groups = hub["mgate_dim"] if hub["mgate"] else 0
    return TRANSFORMER_PP | {"mlp_dim": hidden, "mlp_groups": groups}


def _pythia(hub: dict) -> dict:
    hidden = 4 * hub["dim"] if hub["intermediate_size"] is None else hub["intermediate_size"]
    return PYTHIA | {
        "mlp_dim": hidden,
        "rotary_fraction": hub["rotary_pct"],
        "parallel_residual": hub["use_parallel_residual"],
        "bias": hub["use_linear_bias"],
    }


def _windows(hub: dict) -> tuple[int | None, ...]:
    """Read the layer pattern; without a type, even layers are local if there is a window."""
    window, kind = hub["window_size"], hub["window_type"]
    if kind is None:
        return (None,) if window is None else (window, None)
    if kind not in PATTERNS:
        raise ValueError(f"window_type={kind!r} is unknown; expected null, {', '.join(map(repr, PATTERNS))}.")
    if window is None:
        raise ValueError(f"window_size must be a number with window_type={kind!r}.")
    return tuple(window if local else None for local in PATTERNS[kind])


def config_to_hub(config: DecoderConfig) -> dict:
    """Convert a `DecoderConfig`; the inverse of `config_from_hub`, except for training-only fields.

    Raises:
        ValueError: If the published format does not support a field's value.
    """
    is_pythia = config.mlp == "gelu"
    family = "dcpythia" if is_pythia else "dcformer"
    window, kind = _pattern(config.windows)
    content = {
        "model_type": family,
        "architectures": ["DCPythia" if is_pythia else "DCFormer"],
        "vocab_size": config.vocab_size,
        "dim": config.dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_local_heads": config.num_heads,
        "head_dim": config.dim // config.num_heads,
        "intermediate_size": config.mlp_dim,
        "block_size": config.context_length,
        "rope_base": config.rotary_base,
        "norm_eps": config.norm_eps,
        "use_qk_norm": config.qk_norm,
        "window_size": window,
        "window_type": kind,
        "query_wise": config.is_composed and not config.key_wise,
        "use_dcmha": config.is_composed,
        "tie_word_embeddings": False,
    }
    if is_pythia:
        content |= {
            "rotary_pct": config.rotary_fraction,
            "use_parallel_residual": config.parallel_residual,
            "use_linear_bias": config.bias,
        }
    elif config.mlp_groups:
        content |= {"mgate": True, "mgate_dim": config.mlp_groups}
    _check_expressible(config, config_from_hub(content))
    return content


def why_not_published(config: DecoderConfig) -> str | None:
    """Return why the published format does not support a model; None if it does."""
    try:
        config_to_hub(config)
    except ValueError as error:
        return str(error)
    return None


TRAINING_ONLY = ("init_std", "impl")  # besides the form of the windows, which `_pattern` checks


def _check_expressible(config: DecoderConfig, read_back: DecoderConfig) -> None:
    ignored = {*TRAINING_ONLY, "windows"}
    if not config.is_composed:
        ignored |= {"rank", "query_wise", "key_wise", "dynamic_gate", "static_base", "num_groups"}
    for name, value in vars(config).items():
        if name not in ignored and getattr(read_back, name) != value:
            raise ValueError(
                f"{name}={value!r} is not supported by the published format, which would read it as "
                f"{getattr(read_back, name)!r}; use native=True."
            )


def _pattern(windows: tuple[int | None, ...]) -> tuple[int | None, str | None]:
    """Return window size and name of a layer pattern, by its shortest period."""
    for period in range(1, len(windows)):
        if len(windows) % period == 0 and windows[:period] * (len(windows) // period) == windows:
            windows = windows[:period]
            break
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return None, None
    local = tuple(window is not None for window in windows)
    if len(sizes) == 1 and local == (True, False):
        return sizes.pop(), None
    if len(sizes) == 1 and local in PATTERNS.values():
        return sizes.pop(), next(name for name, pattern in PATTERNS.items() if pattern == local)
    raise ValueError(f"windows={list(windows)} is not supported by the published format; use native=True.")
