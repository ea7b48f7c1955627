"""Higher derivatives and torch.func transforms either match the reference or raise an error."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp
from torch.func import grad, jacrev, jvp, vmap

from dcmha import DCAttention
from dcmha.impl.compiled.chunking import CHUNK, WHOLE_LENGTH

EXACT = ("reference", "compiled")
LENGTHS = (9, WHOLE_LENGTH + CHUNK // 2)  # one chunk; several chunks that are recomputed


def make_layer(impl: str, dtype: torch.dtype | None = None) -> DCAttention:
    """Make a layer with non-trivial compositions, by default in the widest dtype that the implementation supports."""
    torch.manual_seed(0)
    dtype = dtype or (torch.float64 if impl in EXACT else torch.float32)
    layer = DCAttention(16, 4, impl=impl, dtype=dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer


def make_inputs(layer: DCAttention, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a random input and a random direction."""
    shape, dtype = (1, tokens, layer.dim), layer.qkv.weight.dtype
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


def energy(layer: DCAttention):
    return lambda x: layer(x).square().sum()


def penalty_of_input(layer, x, u):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy(layer)(x), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), x)[0]


def penalty_of_weights(layer, x, u):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy(layer)(x), x, create_graph=True)
    slope.square().sum().backward()
    return layer.qkv.weight.grad


def slope_of_a_linear_loss(layer, x, u):
    """Differentiate the gradient of a linear loss.

    The gradient of the output does not require a gradient itself. The error must not depend on that.
    """
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((layer(x) * u).sum(), x, create_graph=True)
    return torch.autograd.grad((slope * u).sum(), x)[0]


SECOND = {
    "hvp": lambda layer, x, u: hvp(energy(layer), x, u)[1],
    "hessian": lambda layer, x, u: hessian(energy(layer), x[:, :2]),
    "penalty of the input": penalty_of_input,
    "penalty of the weights": penalty_of_weights,
    "slope of a linear loss": slope_of_a_linear_loss,
}


def make_dual(layer, x, u):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, u))).tangent


TRANSFORMS = {
    "grad": lambda layer, x, u: grad(energy(layer))(x),
    "jvp": lambda layer, x, u: jvp(layer, (x,), (u,))[1],
    "vmap": lambda layer, x, u: vmap(layer)(torch.stack([x, u])),
    "grad of each sample": lambda layer, x, u: vmap(grad(energy(layer)))(torch.stack([x, u])),
    "jacrev": lambda layer, x, u: jacrev(energy(layer))(x),
    "grad of grad": lambda layer, x, u: grad(lambda y: grad(energy(layer))(y).square().sum())(x),
}


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_of_compiled_equal_the_reference(name, tokens):
    expected, got = (SECOND[name](layer, *make_inputs(layer, tokens)) for layer in map(make_layer, EXACT))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("impl", ["auto", "cpu", "triton"])
@pytest.mark.parametrize("name", SECOND)
def test_unsupported_second_derivatives_raise_error(name, impl):
    layer = make_layer(impl)
    with pytest.raises(NotImplementedError, match="has no second derivatives; use impl='reference'"):
        SECOND[name](layer, *make_inputs(layer, 9))


@pytest.mark.parametrize("impl", ["cpu", "triton"])
def test_create_graph_without_second_derivatives_matches_the_reference(impl):
    layer = make_layer(impl)
    x = make_inputs(layer, 9)[0].requires_grad_()
    slopes = []
    for layer.impl in (impl, "reference"):
        slopes += torch.autograd.grad(energy(layer)(x), x, create_graph=True)
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("impl", ["auto", "compiled"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_transforms_equal_the_reference(name, impl, tokens):
    layers = (make_layer(name, torch.float64) for name in (EXACT[0], impl))
    expected, got = (TRANSFORMS[name](layer, *make_inputs(layer, tokens)) for layer in layers)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("impl", ["cpu", "triton"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_unsupported_torch_func_transforms_raise_error(name, impl):
    layer = make_layer(impl)
    with pytest.raises(ValueError, match=f"impl='{impl}' cannot run: transforms of torch.func"):
        TRANSFORMS[name](layer, *make_inputs(layer, 9))


def test_forward_mode_equals_the_reference_or_raises_error():
    expected, got = (make_dual(layer, *make_inputs(layer, 9)) for layer in map(make_layer, EXACT))
    torch.testing.assert_close(got, expected)
    for impl in ("cpu", "triton"):
        layer = make_layer(impl)
        with pytest.raises(NotImplementedError):
            make_dual(layer, *make_inputs(layer, 9))


@pytest.mark.parametrize("tokens", [3, 20])
def test_triton_forward_mode_raises_error_for_inputs_without_gradient(tokens):
    """Tangents of inputs that require no gradient must not be dropped silently."""
    layer = make_layer("triton").requires_grad_(False)
    x, u = make_inputs(layer, tokens)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="impl='triton' has no forward-mode"):
        layer(forward_ad.make_dual(x, u))
