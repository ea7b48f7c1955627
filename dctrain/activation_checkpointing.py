"""Memory for time: what is not kept for the backward pass, and computed again there."""

from typing import Literal, get_args

from torch import nn

from dcmha import ComposedAttentionBase

from .errors import UserError

Recompute = Literal["none", "attention", "block"]


def set_recompute(model: nn.Module, choice: Recompute) -> None:
    """Choose what a model computes again in the backward pass.

    Args:
        model: The network.
        choice: "none"; "attention": of each composed layer keep the input alone; "block": of each block.

    Raises:
        UserError: If the model cannot.
    """
    if choice not in get_args(Recompute):
        raise UserError(f"model.recompute={choice!r}; expected {', '.join(map(repr, get_args(Recompute)))}.")
    layers = [module for module in model.modules() if isinstance(module, ComposedAttentionBase)]
    if choice == "attention" and not layers:
        raise UserError("model.recompute='attention': the model has no layer of composed attention.")
    if choice == "block" and not hasattr(model, "set_grad_checkpointing"):
        raise UserError(f"model.recompute='block': {type(model).__name__} does not say what its blocks are.")
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(choice == "block")
    for layer in layers:
        layer.recompute = choice == "attention"
