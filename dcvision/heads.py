"""Numbers of heads, which no shape of a tensor tells."""

from torch import nn

from dctrain.errors import UserError


def compare_heads(source: str, network: nn.Module, model: nn.Module) -> None:
    """Compare the heads of layers of the same name.

    Args:
        source: What the message calls the network.
        network: Whose weights are to be used.
        model: What they are to be used in.

    Raises:
        UserError: If they are not as many.
    """
    theirs = {name: module.num_heads for name, module in network.named_modules() if hasattr(module, "num_heads")}
    for name, module in model.named_modules():
        if name in theirs and getattr(module, "num_heads", theirs[name]) != theirs[name]:
            raise UserError(f"{source} has {theirs[name]} heads in {name}; the model has {module.num_heads}.")
