"""Self-check on first use: before the first call of each kind on a GPU, kernels are compared with the reference.

Both solve a small problem. Kernels that fail are not used again in this process for that dtype and device, and a
warning is issued. Calls under `torch.compile` are checked during tracing. `DCMHA_SELF_CHECK=0` in the environment
disables the check.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from ..weights import ComposeWeights, SideWeights
from . import reference
from .call import AttentionCall
from .dropout import WORD
from .flatten import TENSORS, tensors_of, with_tensors
from .masking import DocumentBounds, document_bounds

ENV_SWITCH = "DCMHA_SELF_CHECK"
DEVICES = ("cuda",)  # device types that are checked
ROWS, KEYS, WINDOW, DROPOUT = 2, 72, 20, 0.3  # sizes of the small problem
SLACK = 4  # tolerance, relative to the reference's own error in the dtype
MIN_NORM = 0.1  # minimum norm, relative to the output's gradient: smaller gradients may be rounding noise only
NAMES = ("out", *(f"the gradient of {name}" for name in TENSORS))
Solver = Callable[[AttentionCall, Tensor | None, Tensor | None], list[Tensor | None]]
SOLVERS: dict[
    str, Solver
] = {}  # by kernel name: compute the output and, given its gradient, the gradients of `tensors_of` the call
_lock = Lock()  # one check at a time
_seen: set["Kind"] = set()
_findings: dict[tuple[str, torch.device, torch.dtype], str] = {}


class Kind(NamedTuple):
    """Properties of a call for which kernels are specialized."""

    kernels: str  # name in `SOLVERS`
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, int, int, int, int]  # H, heads of the keys, G, and T and D of the small problem
    pre: tuple[int, bool, int, bool, bool] | None  # rank and gate of the queries, of the keys, and base
    post: tuple[int, bool, int, bool, bool] | None
    mask: str | None  # "boolean", "floating", or "gradient" for a floating mask that requires a gradient
    is_causal: bool
    has_window: bool
    has_documents: bool
    dropout_p: float  # 0, or `DROPOUT` if the call has dropout
    gradients: bool


def finding_of(kernels: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what the self-check found wrong with kernels; None if nothing."""
    return _findings.get((kernels, device, dtype))


@torch.compiler.assume_constant_result
def check(*fields) -> bool:
    """Check the kernels of a `Kind` unless already done or impossible now; return whether they may be used."""
    kind, place, is_cuda = Kind(*fields), fields[:3], fields[1].type == "cuda"
    is_off = kind.device.type not in DEVICES or os.environ.get(ENV_SWITCH) == "0"
    cannot_run = is_cuda and (not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing())
    if is_off or cannot_run or kind in _seen or place in _findings:
        return place not in _findings
    with _lock, ThreadPoolExecutor(1) as pool:  # a new thread has default tracing, inference and autocast modes
        if kind in _seen or place in _findings:
            return place not in _findings
        finding = pool.submit(_finding, kind).result()
        masks = ("gradient", "floating") if kind.mask == "gradient" else (kind.mask,)
        _seen.update(kind._replace(mask=mask, gradients=g) for mask in masks for g in {kind.gradients, False})
        if finding is None:
            return True
        _findings[place] = finding
    warnings.warn(
        f"the {kind.kernels} kernels disagree with the reference on {kind.device}: {finding}. Calls in {kind.dtype} use"
        f" slower kernels on this device. Please report this with your versions of torch and Triton: {kind}.",
        stacklevel=2,
    )
    return False


def _finding(kind: Kind) -> str | None:
    """Compare kernels with the reference on a small problem; return the difference, None if there is none."""
    random = torch.Generator().manual_seed(0)
    problem = _problem(kind, random)
    d_out = torch.randn(problem.q.shape, generator=random).to(kind.dtype) if kind.gradients else None
    seed = torch.randint(WORD, (2,), generator=random)
    exact, usual = (_solve_by_reference(_copy(problem, dtype), seed, d_out) for dtype in (torch.float64, kind.dtype))
    try:
        with torch.no_grad(), torch.cuda.device_of(torch.empty(0, device=kind.device)):
            call, *rest = _copy(problem, kind.dtype, kind.device), seed if kind.dropout_p > 0.0 else None, d_out
            got = SOLVERS[kind.kernels](call, *(None if x is None else x.to(kind.device) for x in rest))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error of a compiler, driver or launch: it must not stop a run
        return f"{type(error).__name__}: {str(error)[:300]}"
    least = 0.0 if d_out is None else MIN_NORM * float(d_out.double().norm())
    for name, right, *others in zip(NAMES, exact, got, usual, strict=False):
        if right is not None:
            error, bound = (float((x.cpu().double() - right).norm() / right.norm().clamp_min(least)) for x in others)
            if not error <= SLACK * bound + 16 * torch.finfo(kind.dtype).eps:
                return f"{name} has a relative error of {error:.1e}, the reference {bound:.1e}"
    return None


@torch.enable_grad()
def _solve_by_reference(call: AttentionCall, seed: Tensor, d_out: Tensor | None) -> Sequence[Tensor | None]:
    """Compute output and gradients on the CPU: autograd's thread for the GPU may be waiting for this check."""
    tensors = tensors_of(call)
    wanted = [x.requires_grad_() for x in tensors if x is not None]
    out = reference.attention(call, seed)
    grads = iter(() if d_out is None else torch.autograd.grad(out, wanted, d_out.to(out.dtype)))
    return [out.detach(), *(None if x is None else next(grads, None) for x in tensors)]


def _copy(call: AttentionCall, dtype: torch.dtype, device: str | torch.device = "cpu") -> AttentionCall:
    """Copy a problem to a device, in a dtype."""
    tensors = [None if x is None else x.to(device, dtype, copy=True) for x in tensors_of(call)]
    visible = None if call.visible is None else call.visible.to(device)
    document_ids = None if call.document_ids is None else DocumentBounds(*(x.to(device) for x in call.document_ids))
    return with_tensors(call, tensors)._replace(visible=visible, document_ids=document_ids)


def _problem(kind: Kind, random: torch.Generator) -> AttentionCall:
    """Create a small random problem on the CPU."""
    H, kv_heads, G, T, D = kind.shape

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=random)).to(kind.dtype)

    def side(tokens: int, rank: int, has_gate: bool) -> SideWeights:
        down, up = (rand(ROWS, tokens, rank, H, scale=0.5) if rank else None for _ in range(2))
        return SideWeights(down, up, rand(ROWS, tokens, H, scale=0.5) if has_gate else None)

    def weights(rank: int, has_gate: bool, key_rank: int, has_key_gate: bool, has_base: bool) -> ComposeWeights:
        base = rand(G, H // G, H // G, scale=0.5) if has_base else None
        return ComposeWeights(side(T, rank, has_gate), side(KEYS, key_rank, has_key_gate), base)

    k, v = rand(2, ROWS, KEYS, kv_heads, D).transpose(2, 3)  # memory layout of a decoding cache
    visible = None if kind.mask is None else torch.rand(ROWS, H, T, KEYS, generator=random) < 0.7
    bias = rand(ROWS, H, T, KEYS) if kind.mask in ("floating", "gradient") else None
    document_ids = document_bounds((torch.arange(KEYS) // 17).expand(ROWS, KEYS)) if kind.has_documents else None
    options = (WINDOW if kind.has_window else None, D**-0.5, kind.dropout_p, G)
    compositions = (None if branches is None else weights(*branches) for branches in (kind.pre, kind.post))
    return AttentionCall(
        rand(ROWS, H, T, D), k, v, *compositions, visible, bias, document_ids, kind.is_causal, *options
    )
