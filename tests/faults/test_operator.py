"""Error messages of the operator for one invalid argument, which must name an argument."""

import random

import pytest
import torch
from torch import Tensor

from dcmha import ComposeWeights, SideWeights, composed_attention

B, H, T, S, D, R = 2, 4, 5, 6, 8, 2
OPTIONS = ("is_causal", "window_size", "scale", "dropout_p", "num_groups")
WRONG_VALUES = (-1, 3, 2.5, "x", [1], {}, torch.tensor([1, 2]))


def good_arguments() -> dict:
    """Return valid arguments, with compose weights as lists."""

    def composition() -> list:
        sides = [[torch.randn(B, n, R, H), torch.randn(B, n, R, H), torch.randn(B, n, H)] for n in (T, S)]
        return [*sides, torch.randn(1, H, H)]

    q, k, v = torch.randn(B, H, T, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)
    return {"q": q, "k": k, "v": v, "pre": composition(), "post": composition(), "attn_mask": torch.rand(B, 1, T, S)}


def damage(x: Tensor, dice: random.Random) -> object:
    """Return a tensor of a different shape, dtype or device, or an object that is not a tensor."""
    axis = dice.randrange(x.dim())
    larger = [size + (i == axis) for i, size in enumerate(x.shape)]
    return dice.choice(
        [
            lambda: x.new_zeros(larger),
            lambda: x.select(axis, 0),
            lambda: x[..., :0],
            lambda: x.unsqueeze(0).expand(2, *x.shape),
            lambda: x.long(),
            lambda: x.to(torch.complex64),
            lambda: x.to("meta"),
            lambda: x.tolist(),
            lambda: "text",
        ]
    )()


def call(arguments: dict, impl: str) -> Tensor:
    compositions = {
        name: ComposeWeights(SideWeights(*arguments[name][0]), SideWeights(*arguments[name][1]), arguments[name][2])
        for name in ("pre", "post")
    }
    return composed_attention(**arguments | compositions, impl=impl)


@pytest.mark.parametrize("impl", ["auto", "reference", "compiled", "cpu"])
@pytest.mark.parametrize("name", ["q", "k", "v", "attn_mask", "pre", "post"])
def test_error_names_invalid_tensor(name, impl):
    dice = random.Random(f"{name} {impl}")
    for _ in range(60):
        arguments = good_arguments()
        if name in ("pre", "post"):
            which = dice.randrange(3)
            holder, place = (arguments[name], 2) if which == 2 else (arguments[name][which], dice.randrange(3))
        else:
            holder, place = arguments, name
        holder[place] = damage(holder[place], dice)
        if name == "attn_mask" and isinstance(holder[place], Tensor) and holder[place].dtype.is_floating_point:
            continue  # masks broadcast, so another shape can be valid
        with pytest.raises((ValueError, TypeError), match=rf"\b({name}|q|pre|attn_mask)\b"):
            call(arguments, impl)


@pytest.mark.parametrize("option", OPTIONS)
def test_error_names_invalid_option(option):
    for value in WRONG_VALUES:
        if option == "scale" and isinstance(value, int | float) or option == "window_size" and value is WRONG_VALUES[1]:
            continue
        with pytest.raises((ValueError, TypeError), match=rf"{option}="):
            call(good_arguments() | {option: value}, "auto")
