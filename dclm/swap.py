"""swap_attention: composition for a decoder that was trained without (paper, section 4.3, adaptation)."""

from dataclasses import replace

from dcmha.checks import check_module
from dcmha.options import COMPOSE_OPTIONS

from .decoder import Decoder

OPTIONS = (*COMPOSE_OPTIONS, "windows", "impl")


def swap_attention(decoder: Decoder, **options) -> Decoder:
    """Make a decoder with composed attention out of a plain one: the same weights, and compose weights drawn anew.

    What is drawn is small, so that the new decoder begins near the old one. To train it: `dclm fit --init FOLDER` with
    a composed model, or these options in `model.overrides`.

    Args:
        decoder: A decoder without composition; stays as it is.
        **options: Fields of `ComposeOptions`; `windows` and `impl` as in `DecoderConfig`. By default scores and weights
            are composed, as in the paper.

    Returns:
        A decoder of the same dtype and device, in the same mode; weights that were frozen stay so.

    Raises:
        TypeError: If `decoder` is no `Decoder`.
        ValueError: If the decoder is composed already, or an option is unknown or out of range.
    """
    check_module(Decoder, decoder=decoder)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"unknown options {unknown}; expected {', '.join(OPTIONS)}.")
    if decoder.config.is_composed:
        raise ValueError("the decoder is composed already; expected a plain one.")
    config = replace(decoder.config, **{"pre_compose": True, "post_compose": True} | options)
    if not config.is_composed:
        raise ValueError("pre_compose=False and post_compose=False compose nothing; expected at least one of them.")
    weight = decoder.output.weight
    swapped = Decoder(config, device=weight.device, dtype=weight.dtype)
    swapped.load_state_dict(decoder.state_dict(), strict=False)
    swapped.set_grad_checkpointing(decoder.grad_checkpointing)
    for name, parameter in decoder.named_parameters():
        swapped.get_parameter(name).requires_grad_(parameter.requires_grad)
    return swapped.train(decoder.training)
