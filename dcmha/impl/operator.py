"""The PyTorch operator of an implementation: a custom operator with a gradient, built from two functions of a call."""

# B batch, T query tokens, S key tokens, H heads, D head dim

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .call import AttentionCall, needs_dispatcher, refuse_derivative
from .flatten import CONSTANTS, OPTIONS, SCHEMA, TENSORS, flatten, tensors_of, unflatten

NUM_TENSORS = len(TENSORS) + len(CONSTANTS)
BIAS = TENSORS.index("bias")


def place_gradients(grads: list[Tensor], call: AttentionCall) -> list[Tensor | None]:
    """Assign gradients of the tensors that are not None to `tensors_of` the call; the bias comes last, if at all."""
    given = iter(grads)
    return [None if x is None else next(given, None) for x in tensors_of(call)]


class Functions(NamedTuple):
    """Functions of an implementation.

    Attributes:
        forward: Compute the output [B, H, T, D] and one tensor of statistics for the backward pass, from a call and its
            dropout seed.
        backward: Compute the gradients, from the gradient of the output, the call, its seed, the statistics, and
            whether the bias has a gradient. No gradient is None or shares memory with another.
        empty_forward: Allocate the results of `forward`, given the call only.
        empty_backward: Allocate the results of `backward`, given the call and whether the bias has a gradient.
        prepare: Convert a call to the form that the other functions take, by differentiable operations.
        place_gradients: Assign the results of `backward` to `tensors_of` the call; None where there is none.
    """

    forward: Callable[[AttentionCall, Tensor | None], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, AttentionCall, Tensor | None, Tensor, bool], list[Tensor]]
    empty_forward: Callable[[AttentionCall], tuple[Tensor, Tensor]]
    empty_backward: Callable[[AttentionCall, bool], list[Tensor]]
    prepare: Callable[[AttentionCall], AttentionCall]
    place_gradients: Callable[[list[Tensor], AttentionCall], list[Tensor | None]] = place_gradients


class AttentionOperator:
    """Composed attention as the custom operator `dcmha::<name>`, with a gradient.

    In eager mode the functions are called directly, because a custom operator costs more host time than a small call.

    Args:
        name: Name of the operator. Cached compiled graphs survive an upgrade of this package and identify an operator
            by its name only: change it whenever the arguments, or the shapes, strides or dtypes of the results, change.
        impl: Name of the implementation, for errors.
        functions: The functions that it consists of.
        refused: Kind of derivatives that the gradient does not have, for errors.

    Attributes:
        forward_op: The custom operator. Its arguments are those of `flatten`.
        backward_op: The custom operator of its gradient.
    """

    def __init__(self, name: str, impl: str, functions: Functions, refused: str = "second") -> None:
        self.impl, self.functions = impl, functions
        self.forward_op = torch.library.custom_op(
            f"dcmha::{name}", self._forward, mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)"
        )
        self.backward_op = torch.library.custom_op(
            f"dcmha::{name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"(Tensor d_out, Tensor statistics, bool bias_gradient, {SCHEMA}) -> Tensor[]",
        )
        self.forward_op.register_fake(lambda *arguments: functions.empty_forward(unflatten(arguments)[0]))
        self.backward_op.register_fake(
            lambda d_out, statistics, bias_gradient, *arguments: functions.empty_backward(
                unflatten(arguments)[0], bias_gradient
            )
        )
        self.forward_op.register_autograd(self._differentiate, setup_context=self._setup)
        self.backward_op.register_autograd(lambda ctx, *grads: refuse_derivative(impl, refused))
        self._apply_eagerly = _eager_function(self).apply

    def __call__(self, call: AttentionCall, seed: Tensor | None) -> Tensor:
        """Compute composed attention [B, H, T, D]; `seed` is the dropout seed."""
        run = self.forward_op if torch.compiler.is_compiling() else self._apply_eagerly
        return run(*flatten(self.functions.prepare(call), seed))[0]

    def solve(self, call: AttentionCall, seed: Tensor | None, d_out: Tensor | None) -> list[Tensor | None]:
        """Compute the output and, given its gradient, the gradients of `tensors_of` the call, without autograd."""
        call = self.functions.prepare(call)
        out, statistics = self.functions.forward(call, seed)
        if d_out is None:
            return [out]
        grads = self.functions.backward(d_out, call, seed, statistics, call.bias is not None)
        return [out, *self.functions.place_gradients(grads, call)]

    def _forward(self, *arguments):
        return self.functions.forward(*unflatten(arguments))

    def _backward(self, d_out, statistics, bias_gradient, *arguments):
        return self.functions.backward(d_out, *unflatten(arguments), statistics, bias_gradient)

    @staticmethod
    def _setup(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:NUM_TENSORS], output[1])
        ctx.options = inputs[NUM_TENSORS:]
        ctx.mark_non_differentiable(output[1])

    def _differentiate(self, ctx, d_out: Tensor, _: Tensor | None):
        *tensors, statistics = ctx.saved_tensors
        bias_gradient = tensors[BIAS] is not None and ctx.needs_input_grad[BIAS]
        call, seed = unflatten((*tensors, *ctx.options))
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or needs_dispatcher(d_out, *tensors):
            grads = self.backward_op(d_out, statistics, bias_gradient, *tensors, *ctx.options)
        else:
            grads = self.functions.backward(d_out, call, seed, statistics, bias_gradient)
        return *self.functions.place_gradients(grads, call), *(None,) * (len(CONSTANTS) + len(OPTIONS))


def _eager_function(operator: AttentionOperator) -> type[torch.autograd.Function]:
    """Return the operator as an autograd function for eager mode."""

    class EagerAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            run = operator.forward_op if needs_dispatcher(*inputs[:NUM_TENSORS]) else operator._forward
            output = run(*inputs)
            operator._setup(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *d_outputs):
            return operator._differentiate(ctx, *d_outputs)

        @staticmethod
        def jvp(ctx, *tangents):
            refuse_derivative(operator.impl, "forward-mode")

    return EagerAttention
