"""Random operands and error measures for the tests of the operator."""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

from dataclasses import dataclass

import torch
from torch import Tensor

from dcmha import ComposeWeights, SideWeights, composed_attention


@dataclass(frozen=True)
class Case:
    """Shape and features of a call of composed attention.

    `mask` is "bool", "heads" (one mask per head), "float", "float-inf" or "keys". "bias 1HTS" is a floating-point mask
    of this shape that is a differentiable operand. `shared` query heads share one key and value head.
    """

    B: int = 2
    T: int = 33
    S: int = 33
    H: int = 6
    D: int = 16
    R: int = 2
    G: int = 1
    is_causal: bool = False
    window_size: int | None = None
    mask: str | None = None
    shared: int = 1
    has_documents: bool = False
    dropout_p: float = 0.0
    branches: str = "qkgb"
    compositions: str = "pre+post"

    def __str__(self) -> str:
        kind = ("-causal" if self.is_causal else "") + (f"-w{self.window_size}" if self.window_size else "")
        mask = f"-{self.mask.replace(' ', '')}" if self.mask else ""
        mask += f"-shared{self.shared}" * (self.shared > 1) + "-documents" * self.has_documents
        mask += f"-dropout{self.dropout_p}" * (self.dropout_p > 0)
        shape = f"B{self.B}-T{self.T}-S{self.S}-H{self.H}-R{self.R}-G{self.G}"
        return f"{shape}{kind}{mask}-{self.branches}-{self.compositions}"


def make_weights(case: Case, dtype=torch.float64, scale: float = 0.5) -> ComposeWeights:
    def rand(*shape: int) -> Tensor:
        return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype)

    def side(letter: str, tokens: int) -> SideWeights:
        if letter not in case.branches:
            return SideWeights()
        shape = (case.B, tokens, case.R, case.H)
        down, up = (rand(*shape), rand(*shape)) if case.R > 0 else (None, None)
        return SideWeights(down, up, torch.tanh(rand(case.B, tokens, case.H)) if "g" in case.branches else None)

    query, key, heads = side("q", case.T), side("k", case.S), case.H // case.G
    return ComposeWeights(query, key, rand(case.G, heads, heads) if "b" in case.branches else None)


BRANCHES = ("query.down", "query.up", "query.gate", "key.down", "key.up", "key.gate", "base")


def named_branches(weights: ComposeWeights) -> dict[str, Tensor | None]:
    """Return the tensors of a composition by name, such as "query.down"."""
    return dict(zip(BRANCHES, (*weights.query, *weights.key, weights.base), strict=True))


def weights_from(branches: dict[str, Tensor]) -> ComposeWeights:
    """Return the composition with these tensors. Missing tensors are None."""
    sides = (
        SideWeights(**{name.split(".")[1]: x for name, x in branches.items() if name.startswith(side)})
        for side in ("query", "key")
    )
    return ComposeWeights(*sides, branches.get("base"))


def weights_of(operands: dict[str, Tensor], composition: str) -> ComposeWeights:
    """Return the composition "pre" or "post" of named operands."""
    prefix = f"{composition}."
    return weights_from({name.removeprefix(prefix): x for name, x in operands.items() if name.startswith(prefix)})


def make_mask(case: Case) -> Tensor | None:
    """Return a mask with hidden and visible cells in which one query has no visible key.

    For "keys", no query of the first batch row has a visible key if there are several rows. For "float", no cell is
    hidden.
    """
    if case.mask is None or case.mask.startswith("bias"):
        return None
    if case.mask == "keys":
        keys = torch.rand(case.B, 1, 1, case.S) > 0.3
        keys[0] = case.B == 1
        keys[0, ..., ::3] = False
        return keys
    visible = torch.rand(case.B, case.H if case.mask == "heads" else 1, case.T, case.S) > 0.3
    visible[..., 0] = True
    visible[0, :, case.T // 2] = False
    if case.mask in ("bool", "heads"):
        return visible
    bias = torch.randn(case.B, case.H, case.T, case.S, dtype=torch.float64)
    return bias.masked_fill(~visible, -torch.inf) if case.mask == "float-inf" else bias


def make_documents(case: Case) -> Tensor:
    """Return document ids [B, S] with about six tokens per document. The last row is one document."""
    generator = torch.Generator().manual_seed(1)
    numbers = (torch.rand(case.B, case.S, generator=generator) < 1 / 6).cumsum(1)
    numbers[-1:] = 2
    return numbers


def make_operands(case: Case, dtype=torch.float64) -> dict[str, Tensor]:
    """Return all differentiable operands by name."""
    torch.manual_seed(0)
    key_heads = case.H // case.shared
    operands = {
        name: torch.randn(case.B, heads, n, case.D, dtype=torch.float64).to(dtype)
        for name, heads, n in (("q", case.H, case.T), ("k", key_heads, case.S), ("v", key_heads, case.S))
    }
    if case.mask and case.mask.startswith("bias"):
        shape = [1 if axis == "1" else getattr(case, axis) for axis in case.mask.split()[1]]
        operands["mask"] = torch.randn(shape, dtype=torch.float64).to(dtype)
    for composition in case.compositions.split("+"):
        for branch, value in named_branches(make_weights(case, dtype)).items():
            if value is not None:
                operands[f"{composition}.{branch}"] = value
    return {name: x.requires_grad_() for name, x in operands.items()}


def run(case: Case, operands: dict[str, Tensor], impl: str, mask: Tensor | None = None) -> Tensor:
    """Call the operator on named operands.

    For "cpu", float64 operands are converted to float32, the widest dtype that it supports.
    """
    is_narrowed = impl == "cpu" and operands["q"].dtype == torch.float64
    if is_narrowed:
        operands = {name: x.float() for name, x in operands.items()}
    weights = {c: weights_of(operands, c) if c in case.compositions else None for c in ("pre", "post")}
    mask = operands.get("mask", mask)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(operands["q"].dtype)
    if case.dropout_p > 0:
        torch.manual_seed(3)
    out = composed_attention(
        *(operands[name] for name in "qkv"),
        **weights,
        attn_mask=mask,
        document_ids=make_documents(case) if case.has_documents else None,
        dropout_p=case.dropout_p,
        is_causal=case.is_causal,
        window_size=case.window_size,
        num_groups=case.G,
        impl=impl,
    )
    return out.double() if is_narrowed else out


def tolerance(impl: str) -> float:
    """Return the maximum relative error of an implementation for float64 operands."""
    return 2e-6 if impl == "cpu" else 1e-12


def output_and_gradients(case: Case, impl: str, dtype=torch.float64) -> dict[str, Tensor]:
    """Run forward and backward with a fixed random cotangent. Return all results in float64."""
    operands = make_operands(case, dtype)
    mask = make_mask(case)
    out = run(case, operands, impl, mask)
    cotangent = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad(out, list(operands.values()), cotangent)
    return {"out": out.detach().double()} | {k: g.double() for k, g in zip(operands, gradients, strict=True)}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error, or the absolute error if the expected tensor is all zeros."""
    scale = expected.detach().norm()
    return float((got - expected).detach().norm() / (scale if scale > 0 else 1.0))
