"""Activation checkpointing: recomputing activations in the backward pass to save memory."""

from typing import Literal, get_args

from torch import nn

from dcmha import ComposedAttentionBase

from .errors import UserError

Recompute = Literal["none", "attention", "block"]


def set_recompute(model: nn.Module, choice: Recompute) -> None:
    """Select what a model recomputes in the backward pass.

    Args:
        model: The network.
        choice: "none"; "attention": store only the input of each composed attention layer; "block": of each block.

    Raises:
        UserError: If the model does not support the choice.
    """
    if choice not in get_args(Recompute):
        raise UserError(f"model.recompute={choice!r}; expected {', '.join(map(repr, get_args(Recompute)))}.")
    layers = [module for module in model.modules() if isinstance(module, ComposedAttentionBase)]
    if choice == "attention" and not layers:
        raise UserError("model.recompute='attention': the model has no composed attention layer.")
    if choice == "block" and not hasattr(model, "set_grad_checkpointing"):
        raise UserError(f"model.recompute='block': {type(model).__name__} does not define its blocks.")
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(choice == "block")
    for layer in layers:
        layer.recompute = choice == "attention"
