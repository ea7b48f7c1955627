"""Print the errors of the Gluon kernels, compiled for compute capability 9.0 and executed on CPU tensors.

python -m tests.dcmha.gluon.solve CASE...
"""

import json
import sys

import pytest
import torch
from torch import Tensor

from dcmha import dispatch
from dcmha.impl import chunks, triton
from dcmha.impl.gluon import call, products
from tests.dcmha.inputs import Case, make_mask, make_operands, relative_error, run
from tests.ptx import launch

from .cases import CASES, Problem


def multiply(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Multiply like `products.multiply` on a GPU, but with sums in float64."""
    out.copy_(scale * (a.double() @ b.double()))


def accumulate(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Multiply and add like `products.accumulate`, whose matrix product is not available on a CPU."""
    out.add_(scale * (a.double() @ b.double()))


def results(case: Case, operands: dict[str, Tensor], impl: str, mask: Tensor | None) -> dict[str, Tensor]:
    """Compute the output and the gradients of all operands. Return them in float64."""
    out = run(case, operands, impl, mask)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).to(out.dtype)
    grads = torch.autograd.grad(out, list(operands.values()), cotangent)
    return {"out": out.detach().double()} | {name: g.double() for name, g in zip(operands, grads, strict=True)}


def large_values(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a floating-point mask of large values that is equivalent to a boolean mask [B, 1, T, S].

    All visible keys of a query have the same value. Hidden keys have -inf, or the lowest finite number if it is far
    below that value.
    """
    lowest = torch.finfo(dtype).min
    of_query = torch.tensor([0.0, -1e6, -1e9, 1e20, 3e38, lowest])[torch.arange(visible.shape[2]) % 6, None]
    hidden = torch.where((of_query >= 0) & visible.any(-1, keepdim=True), lowest, -torch.inf)
    return torch.where(visible, of_query, hidden).to(dtype)


def displaced(x: Tensor) -> Tensor:
    """Copy a tensor to memory that starts one element after an aligned address."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def errors(problem: Problem) -> dict[str, tuple[float, float]]:
    """Return relative errors against float64 by name, of the kernels and of the reference in the same dtype."""
    torch.manual_seed(0)
    rounded = {name: x.detach().to(problem.dtype) for name, x in make_operands(problem.case).items()}
    mask = make_mask(problem.case)

    def solve(impl: str, dtype: torch.dtype, mask: Tensor | None = mask) -> dict[str, Tensor]:
        operands = {name: x.to(dtype, copy=True) for name, x in rounded.items()}
        if problem.has_hidden_nan and impl == "triton":
            operands["k"][0] = torch.nan
        if problem.is_displaced and impl == "triton":
            operands, mask = {name: displaced(x) for name, x in operands.items()}, displaced(mask)
        return results(problem.case, {name: x.requires_grad_() for name, x in operands.items()}, impl, mask)

    exact, usual = solve("reference", torch.float64), solve("reference", problem.dtype)
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    got = solve("triton", problem.dtype, large_values(mask, problem.dtype) if problem.has_large_values else mask)
    torch.use_deterministic_algorithms(False)
    rows = slice(1 if problem.has_hidden_nan else 0, None)
    return {
        name: (relative_error(got[name][rows], right[rows]), relative_error(usual[name][rows], right[rows]))
        for name, right in exact.items()
    }


def main(names: list[str]) -> None:
    """Print the errors of some problems by name as JSON."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        launch.install(patch)
        patch.setenv("DCMHA_SELF_CHECK", "0")
        patch.setattr(products, "multiply", multiply)
        patch.setattr(products, "accumulate", accumulate)
        patch.setattr(dispatch, "_what_is_missing", lambda device: None)
        patch.setattr(triton, "_takes_gluon", lambda q: True)
        for name in names:
            with patch.context() as sizes:
                for constant, value in CASES[name].constants.items():
                    sizes.setattr(chunks if hasattr(chunks, constant) else call, constant, value)
                found[name] = errors(CASES[name])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
