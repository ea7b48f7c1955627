"""swap_attention: add composition to a trained plain decoder (paper, section 4.3, adaptation)."""

from dataclasses import replace

from dcmha.checks import check_module
from dcmha.options import COMPOSE_OPTIONS

from .decoder import Decoder

OPTIONS = (*COMPOSE_OPTIONS, "windows", "impl")


def swap_attention(decoder: Decoder, **options) -> Decoder:
    """Create a decoder with composed attention from a plain one, with the same weights and new compose weights.

    The compose weights are initialized near the identity, so that the new decoder is close to the old one. To train it,
    use `dclm fit --init FOLDER` with a composed model, or with these options in `model.overrides`.

    Args:
        decoder: A decoder without composition; not modified.
        **options: Fields of `ComposeOptions`; `windows` and `impl` as in `DecoderConfig`. By default both scores and
            weights are composed, as in the paper.

    Returns:
        A decoder with the same dtype, device and mode; frozen weights stay frozen.

    Raises:
        TypeError: If `decoder` is not a `Decoder`.
        ValueError: If the decoder is already composed, or an option is unknown or out of range.
    """
    check_module(Decoder, decoder=decoder)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"unknown options {unknown}; expected {', '.join(OPTIONS)}.")
    if decoder.config.is_composed:
        raise ValueError("the decoder is already composed; expected a plain one.")
    config = replace(decoder.config, **{"pre_compose": True, "post_compose": True} | options)
    if not config.is_composed:
        raise ValueError("pre_compose=False and post_compose=False: expected at least one of them to be True.")
    weight = decoder.output.weight
    swapped = Decoder(config, device=weight.device, dtype=weight.dtype)
    swapped.load_state_dict(decoder.state_dict(), strict=False)
    swapped.set_grad_checkpointing(decoder.grad_checkpointing)
    for name, parameter in decoder.named_parameters():
        swapped.get_parameter(name).requires_grad_(parameter.requires_grad)
    return swapped.train(decoder.training)
