"""Solve problems by the Gluon kernels, compiled for compute capability 9.0 and executed on CPU tensors; print errors.

python -m tests.dcmha.gluon.solve CASE...
"""

import json
import sys

import pytest
import torch
from torch import Tensor

from dcmha import choice
from dcmha.impl import chunks, triton
from dcmha.impl.gluon import call, products
from tests.dcmha.inputs import Case, make_mask, make_operands, relative_error, run
from tests.ptx import launch

from .cases import CASES, Problem


def multiply(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Multiply as `products.multiply` does on a GPU, with sums that are not rounded."""
    out.copy_(scale * (a.double() @ b.double()))


def accumulate(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Multiply and add as `products.accumulate` does, for which a CPU has no product."""
    out.add_(scale * (a.double() @ b.double()))


def results(case: Case, operands: dict[str, Tensor], impl: str, mask: Tensor | None) -> dict[str, Tensor]:
    """Compute the output and the gradients of all operands, in float64."""
    out = run(case, operands, impl, mask)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).to(out.dtype)
    grads = torch.autograd.grad(out, list(operands.values()), cotangent)
    return {"out": out.detach().double()} | {name: g.double() for name, g in zip(operands, grads, strict=True)}


def errors(problem: Problem) -> dict[str, tuple[float, float]]:
    """Solve a problem: relative errors against float64 by name, of the kernels and of the reference in their dtype."""
    torch.manual_seed(0)
    rounded = {name: x.detach().to(problem.dtype) for name, x in make_operands(problem.case).items()}
    mask = make_mask(problem.case)

    def solve(impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
        operands = {name: x.to(dtype).requires_grad_() for name, x in rounded.items()}
        return results(problem.case, operands, impl, mask)

    exact, usual = solve("reference", torch.float64), solve("reference", problem.dtype)
    torch.use_deterministic_algorithms(True)  # fills memory that is allocated without values with NaN
    got = solve("triton", problem.dtype)
    torch.use_deterministic_algorithms(False)
    return {
        name: (relative_error(got[name], right), relative_error(usual[name], right)) for name, right in exact.items()
    }


def main(names: list[str]) -> None:
    """Print the errors of some problems, by name, as JSON."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        launch.install(patch)
        patch.setenv("DCMHA_FIRST_USE_CHECK", "0")
        patch.setattr(products, "multiply", multiply)
        patch.setattr(products, "accumulate", accumulate)
        patch.setattr(choice, "_what_is_missing", lambda device: None)
        patch.setattr(triton, "_takes_gluon", lambda q: True)
        for name in names:
            with patch.context() as sizes:
                for constant, value in CASES[name].constants.items():
                    sizes.setattr(chunks if hasattr(chunks, constant) else call, constant, value)
                found[name] = errors(CASES[name])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
