"""A check on first use: the first call of a kind on a device solves a small problem twice, by the reference too.

That all is well is remembered for each kind of call, in the process and in `first_use` of the cache folder; that
something is not, for all calls of a dtype on that kind of device, until torch, Triton or the kernels change. The check
never runs while something is traced or captured; what was traced unchecked is checked when it first runs.
`DCMHA_FIRST_USE_CHECK=0` in the environment switches it off.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank

import hashlib
import json
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...folders import cache_dir
from ...weights import ComposeWeights, SideWeights
from .. import reference
from ..call import Call
from ..dropout import draw_seed
from ..masking import Documents, documents_of
from . import arguments_of, attention
from .op import composed, composed_backward
from .operands import Operands

SWITCH = "DCMHA_FIRST_USE_CHECK"
DEVICES = ("cuda",)  # that are checked
ROWS, MANY, FEW, VERY_FEW, WINDOW, CHANNELS = 2, 72, 40, 3, 20, 64  # sizes of the small problem
SLACK = 4  # times the reference's own error in the dtype
LEAST = 0.1  # of the norm of the output's gradient: what other norms count as at least
WARNING = (
    "the fused kernels disagree with the reference on {device}: {finding}. Calls in {dtype} take impl='compiled' "
    "there, which is slower but right. Please report this, with {path}."
)
_seen: set[tuple] = set()  # kinds of calls that were checked


def finding_of(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say what was found to be wrong with calls of a dtype on a kind of device; None if nothing was.

    Warns of it once in a process.
    """
    return None if is_off(device) else _remembered_finding(device, dtype)


def check(call: Call, gradients: bool, is_few: bool) -> None:
    """Check the kernels on a small problem of a call's kind, unless that was done, or nothing can be run now.

    Args:
        call: The call.
        gradients: Whether gradients are wanted, too.
        is_few: Whether it goes through the kernels of few queries, which have none.
    """
    q = call.q
    if is_off(q.device) or _is_recording(q) or _is_checking.is_set():
        return
    gradients = gradients and not is_few
    kinds = [_kind(call, gradients, is_few)] if is_few else [_kind(call, True, False), _kind(call, gradients, False)]
    if not _seen.isdisjoint(kinds) or finding_of(q.device, q.dtype) is not None:
        return
    if any(_is_written(kind) for kind in kinds):  # gradients contain what there is without
        _seen.add(kinds[-1])
        return
    finding, text = _find(call, gradients, is_few), _text(kinds[-1])
    if finding is None:
        _seen.add(kinds[-1])
        _write(_path(text), {"kind": json.loads(text)})
        return
    environment = _environment(q.device, q.dtype)
    _write(_path(environment), {"finding": finding, "kind": json.loads(text)})
    _findings[environment] = finding
    _warn(q.device, q.dtype, finding)


def is_trusted(q: Tensor) -> bool:
    """Tell whether calls like one of these queries may take the kernels; those of a check do."""
    return _is_checking.is_set() or finding_of(q.device, q.dtype) is None


def _is_written(kind: tuple) -> bool:
    """Tell whether another process has checked a kind of call."""
    path = _path(_text(kind))
    return path is not None and path.exists()


_is_checking = threading.Event()


def _find(call: Call, gradients: bool, is_few: bool) -> str | None:
    """Check in a thread of its own: inside of an operator there is no autograd."""

    def run() -> str | None:
        with torch.set_grad_enabled(gradients), torch.cuda.device_of(call.q):
            return _finding(call, is_few)

    _is_checking.set()
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()
    finally:
        _is_checking.clear()


def is_off(device: torch.device) -> bool:
    """Tell whether a device is not checked: it is none of a GPU's, is not there, or the check is switched off."""
    is_there = device.type != "cuda" or torch.cuda.is_available()
    return device.type not in DEVICES or not is_there or os.environ.get(SWITCH, "1") == "0"


def _is_recording(q: Tensor) -> bool:
    """Tell whether calls are recorded rather than made."""
    is_captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
    return is_captured or isinstance(q, FakeTensor) or torch.compiler.is_compiling()


_findings: dict[str, str | None] = {}


def _remembered_finding(device: torch.device, dtype: torch.dtype) -> str | None:
    environment = _environment(device, dtype)
    if environment not in _findings:
        _findings[environment] = _read(_path(environment))
        if _findings[environment] is not None:
            _warn(device, dtype, _findings[environment])
    return _findings[environment]


def _warn(device: torch.device, dtype: torch.dtype, finding: str) -> None:
    name = json.loads(_environment(device, dtype))["device"]
    path = _path(_environment(device, dtype)) or "your versions of torch and Triton"
    warnings.warn(WARNING.format(device=name, finding=finding, dtype=dtype, path=path), stacklevel=2)


def _path(content: str) -> Path | None:
    """Name the file that says something of a kind or an environment; None where there is no folder for it."""
    try:
        folder = cache_dir() / "first_use"
        folder.mkdir(exist_ok=True)
    except (OSError, RuntimeError):  # not to be written to, or no home
        return None
    return folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else json.loads(path.read_text())["finding"]
    except (OSError, ValueError, KeyError):  # there is none, or a torn one
        return None


def _write(path: Path | None, content: dict) -> None:
    """Write a file at once or not at all: the next process checks again."""
    if path is None:
        return
    part = path.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(json.dumps(content, indent=1))
        part.replace(path)
    except OSError:  # no room
        part.unlink(missing_ok=True)


def _kind(call: Call, gradients: bool, is_few: bool) -> tuple:
    """Describe all that kernels are compiled anew for, and where they run."""
    q, T, S = call.q, call.q.shape[2], call.k.shape[2]
    heads = (q.shape[1] // call.num_groups, call.num_groups > 1, q.shape[1] // call.k.shape[1])
    axes = [_axes(mask) for mask in (call.visible, call.bias) if mask is not None]
    differs = (call.bias is not None, *map(any, zip(*axes, strict=True))) if axes else ()  # they become one mask
    hiding = (call.is_causal, call.window is not None, call.documents is not None, differs, call.dropout_p > 0)
    branches = (_branches(call.pre), _branches(call.post))
    return q.device, q.dtype, heads, branches, (T > S) - (T < S), hiding, gradients, is_few and (min(T, 2), q.shape[3])


def _axes(mask: Tensor) -> tuple[bool, ...]:
    """Tell along which of [B, H, T, S] a mask differs."""
    return *(False,) * (4 - mask.dim()), *(n > 1 for n in mask.shape)


def _branches(weights: ComposeWeights | None) -> tuple | None:
    if weights is None:
        return None
    parts = [part for side in (weights.query, weights.key) for part in (side.down, side.gate)]
    sizes = [0 if part is None else part.shape[2] if part.dim() == 4 else 1 for part in parts]
    return *sizes, weights.base is not None


def _text(kind: tuple) -> str:
    """Write a kind of call down, of any device of its sort."""
    device, dtype, *rest = kind
    names = ("heads", "branches", "more queries than keys", "hiding", "gradients", "few queries and head dim")
    environment = {"environment": json.loads(_environment(device, dtype))}
    return json.dumps(environment | dict(zip(names, rest, strict=True)), sort_keys=True)


@cache
def _environment(device: torch.device, dtype: torch.dtype) -> str:
    """Describe a device and a dtype, and what makes code for them."""
    is_cuda = device.type == "cuda"
    return json.dumps(
        {
            "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
            "capability": torch.cuda.get_device_capability(device) if is_cuda else None,
            "dtype": str(dtype),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "kernels": _fingerprint(),
        }
    )


@cache
def _fingerprint() -> str:
    """Name the source of the kernels and of what launches them."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def _finding(call: Call, is_few: bool) -> str | None:
    """Say what the kernels do wrong on a small problem of a call's kind; None if nothing.

    The reference runs on the CPU: a check may be asked for by the thread in which autograd works for a GPU, and whoever
    waits for another gradient there waits for ever.
    """
    devices = [call.q.device] if call.q.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.autocast(call.q.device.type, enabled=False):
        torch.manual_seed(0)
        problem = _small(call, is_few)
        try:
            got = _results_of_kernels(problem, is_few)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler, a driver or a launch: whatever it is, it must not stop a run
            return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        usual, exact = (_results(_converted(problem, dtype)) for dtype in (call.q.dtype, torch.float64))
    slack = 16 * torch.finfo(call.q.dtype).eps
    least = LEAST * float(_cotangent(exact["out"]).norm())  # a gradient may be zero but for rounding
    for name, right in exact.items():
        error, bound = (_error(x[name].cpu(), right, least) for x in (got, usual))
        if not error <= SLACK * bound + slack:
            return f"{name} has a relative error of {error:.1e}, the reference one of {bound:.1e}"
    return None


def _error(got: Tensor, right: Tensor, least: float) -> float:
    return float((got.double() - right).norm() / right.norm().clamp_min(least))


def _small(call: Call, is_few: bool) -> Call:
    """Make a problem of a call's kind, of few tokens; its tensors are random."""
    q, T, S = call.q, call.q.shape[2], call.k.shape[2]
    if is_few:
        T, S = (1 if T == 1 else VERY_FEW), MANY
    else:
        few, many = (MANY, MANY) if T == S else (FEW, MANY)
        T, S = (few, many) if T <= S else (many, few)

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        x = scale * torch.randn(shape, device=q.device)
        return x.to(q.dtype).requires_grad_(torch.is_grad_enabled())

    def side(weights: SideWeights, tokens: int) -> SideWeights:
        return weights.map(lambda w: rand(ROWS, tokens, *w.shape[2:], scale=0.5))

    def of_keys() -> Tensor:
        heads = call.k.shape[1]
        return rand(ROWS, S, heads, D).transpose(1, 2) if is_few else rand(ROWS, heads, S, D)  # as a cache lies

    def of(weights: ComposeWeights | None) -> ComposeWeights | None:
        if weights is None:
            return None
        base = None if weights.base is None else rand(*weights.base.shape, scale=0.5)
        return ComposeWeights(side(weights.query, T), side(weights.key, S), base)

    D = q.shape[3] if is_few else min(q.shape[3], CHANNELS)
    visible = bias = None
    if call.visible is not None:
        visible = torch.rand(_pairs(call.visible, (ROWS, q.shape[1], T, S)), device=q.device) < 0.7
    if call.bias is not None:
        bias = rand(*_pairs(call.bias, (ROWS, q.shape[1], T, S)))
    return call._replace(
        q=rand(ROWS, q.shape[1], T, D),
        k=of_keys(),
        v=of_keys(),
        pre=of(call.pre),
        post=of(call.post),
        visible=visible,
        bias=bias,
        documents=None if call.documents is None else _documents(S, q.device),
        window=None if call.window is None else WINDOW,
        scale=D**-0.5,
    )


def _pairs(mask: Tensor, full: tuple[int, ...]) -> list[int]:
    """Give the axes of a mask the sizes of another problem."""
    return [1 if n == 1 else wanted for n, wanted in zip(mask.shape, full[-mask.dim() :], strict=True)]


def _documents(S: int, device: torch.device) -> Documents:
    return documents_of((torch.arange(S, device=device) // 17).expand(ROWS, S))


def _tensors(call: Call) -> dict[str, Tensor]:
    """Name the floating tensors of a call."""
    named = {"q": call.q, "k": call.k, "v": call.v, "attn_mask": call.bias}
    for composition in ("pre", "post"):
        named |= _named(composition, getattr(call, composition) or ComposeWeights())
    return {name: x for name, x in named.items() if x is not None}


def _named(composition: str, weights: ComposeWeights) -> dict[str, Tensor | None]:
    sides = {side: getattr(weights, side)._asdict() for side in ("query", "key")}
    named = {f"{composition}.{side}.{part}": w for side, parts in sides.items() for part, w in parts.items()}
    return named | {f"{composition}.base": weights.base}


def _converted(call: Call, dtype: torch.dtype) -> Call:
    """Copy a problem to the CPU, in another dtype."""

    def convert(x: Tensor) -> Tensor:
        return x.detach().to("cpu", dtype if x.is_floating_point() else None).requires_grad_(x.requires_grad)

    documents = None if call.documents is None else Documents(*map(convert, call.documents))
    parts = {name: None if (w := getattr(call, name)) is None else w.map(convert) for name in ("pre", "post")}
    names = ("q", "k", "v", "visible", "bias")
    parts |= {name: None if (x := getattr(call, name)) is None else convert(x) for name in names}
    return call._replace(**parts, documents=documents)


def _results(call: Call) -> dict[str, Tensor]:
    """Compute the output, and the gradients of all that takes one, by name, as the reference does."""
    torch.manual_seed(1)  # of dropout
    out = reference.attention(call)
    wanted = {name: x for name, x in _tensors(call).items() if x.requires_grad}
    if not wanted:
        return {"out": out}
    grads = torch.autograd.grad(out, list(wanted.values()), _cotangent(out))
    return {"out": out.detach()} | {_of(name): grad for name, grad in zip(wanted, grads, strict=True)}


def _of(name: str) -> str:
    return f"the gradient of {name}"


def _cotangent(out: Tensor) -> Tensor:
    """Make the gradient of an output, the same on all devices."""
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return cotangent.to(out.device, out.dtype)


@torch.no_grad()
def _results_of_kernels(call: Call, is_few: bool) -> dict[str, Tensor]:
    """Compute the same by the kernels, through their operators: autograd has no part in it."""
    torch.manual_seed(1)  # of dropout: the seed that the reference draws on the CPU
    seed = draw_seed(torch.device("cpu")).to(call.q.device) if call.dropout_p > 0.0 else None
    if is_few:
        return {"out": attention(call)}
    arguments = arguments_of(call, seed)
    out, log_sum = composed(*arguments)
    if not call.q.requires_grad:
        return {"out": out}
    has_bias = call.bias is not None
    dq, dk, dv, *operands, d_mask = composed_backward(_cotangent(out), *arguments, log_sum, has_bias)
    grads = {"q": dq, "k": dk, "v": dv}
    packed = Operands(*(None if grad.numel() == 0 else grad for grad in operands))
    for composition in ("pre", "post"):
        grads |= _named(composition, packed.weights(composition) or ComposeWeights())
    if has_bias:
        grads["attn_mask"] = d_mask.sum_to_size((1,) * (4 - call.bias.dim()) + call.bias.shape).view(call.bias.shape)
    return {"out": out} | {_of(name): grad for name, grad in grads.items() if grad is not None}
