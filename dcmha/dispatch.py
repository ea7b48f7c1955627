"""Selection of the implementation for a call."""

# B batch, T query tokens, S key tokens, H heads, D head dim, G head groups

from importlib.util import find_spec
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .checks import check_booleans, check_integers, check_numbers
from .impl.call import ComposeRanks, is_exporting, is_transformed

Impl = Literal["auto", "reference", "compiled", "cpu", "triton"]
ResolvedImpl = Literal["sdpa", "reference", "compiled", "cpu", "triton"]

MAX_GROUP_HEADS = 64  # maximum heads per group in the fused kernels
OLDEST_TRITON = (3, 5)  # the version that the oldest supported torch requires
MAX_RANK = 4  # maximum rank that the C++ is compiled for
PAPER_RANKS = ComposeRanks()
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_TRANSFORMS = "transforms of torch.func (vmap, grad, jvp) cannot go through it"


class ImplChoice(NamedTuple):
    """The implementation of a call. If "auto" fell back to "compiled", `reason` says why the fused one cannot run."""

    impl: ResolvedImpl
    reason: str | None = None


def check_impl(impl: str) -> None:
    """Raise ValueError if `impl` is unknown."""
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r} is unknown; expected {', '.join(map(repr, get_args(Impl)))}.")


def resolve_impl(
    impl: Impl,
    q: Tensor,
    *,
    is_composed: bool,
    dropout_p: float = 0.0,
    num_groups: int = 1,
    ranks: ComposeRanks = PAPER_RANKS,
) -> ImplChoice:
    """Select the implementation of a call.

    Args:
        impl: The requested implementation.
        q: Queries [B, H, T, D]; only shape, dtype and device are used.
        is_composed: Whether there is a composition; plain attention always uses PyTorch's SDPA.
        dropout_p: As in `composed_attention`.
        num_groups: As in `composed_attention`.
        ranks: Ranks of the compositions; the paper's by default.

    Raises:
        ValueError: If `impl` is unknown, or is "triton" or "cpu" and does not support the call.
    """
    check_impl(impl)
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise ValueError(f"q is {type(q).__name__}; expected a tensor [B, H, T, D].")
    check_booleans(is_composed=is_composed)
    check_integers(num_groups=num_groups)
    check_numbers(low=0, high=1, dropout_p=dropout_p)
    if not is_composed:
        return ImplChoice("sdpa")
    if impl in ("reference", "compiled"):
        return ImplChoice(impl)
    name = impl if impl != "auto" else "triton" if q.is_cuda else "cpu"
    reason = why_not_cpu(q, dropout_p, ranks) if name == "cpu" else why_not_triton(q, num_groups)
    if reason is None:
        return ImplChoice(name)
    if impl == "auto":
        return ImplChoice("compiled", f"{name!r} does not support the call: {reason}")
    raise ValueError(f"impl={impl!r} cannot run: {reason}; use impl='compiled' or 'reference'.")


def why_not_cpu(q: Tensor, dropout_p: float, ranks: ComposeRanks) -> str | None:
    """Return why "cpu" does not support a call; None if it does. Arguments as in `composed_attention`."""
    if q.device.type != "cpu":
        return f"it needs CPU tensors, got q on {q.device}"
    if is_transformed():
        return _NO_TRANSFORMS
    if q.dtype not in FUSED_DTYPES:
        return f"it takes float32, bfloat16 and float16, got q in {q.dtype}"
    if is_exporting():
        return "an exported program must run without its compiled library"
    if dropout_p > 0:
        return "it does not support dropout"
    if max(ranks.query, ranks.key or 0) > MAX_RANK:
        return f"it supports ranks up to {MAX_RANK}, got {ranks}"
    return _why_no_library(_constant(ranks.query), None if ranks.key is None else _constant(ranks.key))


def why_not_triton(q: Tensor, num_groups: int) -> str | None:
    """Return why "triton" does not support a call; None if it does. Arguments as in `composed_attention`."""
    if q.dtype not in FUSED_DTYPES:
        return f"it takes float32, bfloat16 and float16, got q in {q.dtype}"
    if q.shape[1] // num_groups > MAX_GROUP_HEADS:
        return f"it supports at most {MAX_GROUP_HEADS} heads per group, got {q.shape[1]} heads in {num_groups} groups"
    if is_transformed():
        return _NO_TRANSFORMS
    return _what_is_missing(q.device) or _what_was_found(q.device, q.dtype)


def _constant(rank: int) -> int:
    """Convert a rank that a compiler traces as symbolic to a constant."""
    for number in range(MAX_RANK):
        if number == rank:
            return number
    return MAX_RANK


@torch.compiler.assume_constant_result
def _why_no_library(query_rank: int, key_rank: int | None) -> str | None:
    """Return why the C++ library cannot be compiled or loaded; None if it can."""
    from .impl.cpu.library import why_unavailable

    return why_unavailable(ComposeRanks(query_rank, key_rank))


@torch.compiler.assume_constant_result
def _what_is_missing(device: torch.device) -> str | None:
    """Return why a device cannot run the fused kernels, or None if it can."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"it needs Triton {oldest}, got {triton.__version__} (a newer torch brings a newer one)"
    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU (or, on a CPU, TRITON_INTERPRET=1), got q on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0, got {capability[0]}.{capability[1]}"
    return None


@torch.compiler.assume_constant_result
def _what_was_found(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the error that the self-check on first use found in the fused kernels, or None."""
    from .impl.self_check import finding_of

    finding = finding_of("Triton", device, dtype) or finding_of("decoding", device, dtype)
    return finding and f"the self-check found wrong results on this device: {finding}"
