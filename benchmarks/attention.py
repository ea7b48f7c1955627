"""Time of composed attention by implementation, relative to SDPA: forward and forward + backward, interleaved.

python benchmarks/attention.py --batch-size 8 --heads 6 --tokens 196
python benchmarks/attention.py --batch-size 1 --heads 16 --tokens 1024 --causal --device cuda --dtype bfloat16
"flex" is compiled flex_attention of torch: MHA that skips keys outside the window. "older" selects the Triton kernels,
which the Gluon kernels replace for 16-bit dtypes.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from measure import ceilings, measure, save, show
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dcmha import ComposeWeights, SideWeights, attention_flops, composed_attention, visible_pairs
from dcmha.impl import triton
from dctrain.utils.environment import environment

IMPLS = {"cpu": ("sdpa", "reference", "compiled", "cpu"), "cuda": ("sdpa", "compiled", "triton", "older")}
PLAIN = ("sdpa", "flex")


def flex(options: argparse.Namespace, tokens: int) -> Callable[..., torch.Tensor]:
    """Compile flex_attention with the causal and window mask of the options."""

    def is_visible(row, head, query, key):
        seen = query >= key if options.causal else query == query
        return seen & ((query - key).abs() < options.window) if options.window else seen

    mask = create_block_mask(is_visible, None, None, tokens, tokens, device=options.device)
    return torch.compile(partial(flex_attention, block_mask=mask))


@contextmanager
def older_kernels(is_wanted: bool) -> Iterator[None]:
    """Use the Triton kernels for 16-bit dtypes if `is_wanted`."""
    chosen = triton._takes_gluon
    triton._takes_gluon = (lambda q: False) if is_wanted else chosen
    yield
    triton._takes_gluon = chosen


def make_call(impl: str, backward: bool, tokens: int, options: argparse.Namespace) -> Callable[[], None]:
    """Create a call of one implementation on random operands, with pre- and post-composition, both sides and gates."""
    torch.manual_seed(0)
    B, H, T, D, R = options.batch_size, options.heads, tokens, options.head_dim, options.rank

    def rand(*shape: int) -> torch.Tensor:
        dtype = getattr(torch, options.dtype)
        return torch.randn(*shape, device=options.device, dtype=dtype).requires_grad_(backward)

    def side() -> SideWeights:
        return SideWeights(rand(B, T, R, H), rand(B, T, R, H), rand(B, T, H))

    def weights() -> ComposeWeights:
        return ComposeWeights(side()) if options.query_wise else ComposeWeights(side(), side())

    q, k, v = (rand(B, H, T, D) for _ in range(3))
    pre, post = (None, None) if impl in PLAIN else (weights(), weights())
    cotangent = torch.randn(B, H, T, D, device=options.device, dtype=q.dtype)
    leaves = [q, k, v]
    for composition in filter(None, (pre, post)):
        composition.map(leaves.append)

    name = {"sdpa": "auto", "older": "triton"}.get(impl, impl)
    kind = {"is_causal": options.causal, "window_size": options.window, "num_groups": options.groups}
    attend = partial(composed_attention, pre=pre, post=post, **kind, impl=name)
    if impl == "flex":
        attend = flex(options, tokens)

    def call() -> None:
        with older_kernels(impl == "older"):
            out = attend(q, k, v)
            if backward:
                torch.autograd.grad(out, leaves, cotangent)

    return call


def work(options: argparse.Namespace, tokens: int, backward: bool) -> dict[str, float]:
    """Count the elements, the FLOPs of the matrix products, and the bytes of a call.

    An element is a query, a visible key and a head. Bytes are those that the fused kernels and the matrix products move
    through the workspace: 10 per element forward, 26 backward (`docs/kernels.md`).
    """
    pairs = options.batch_size * visible_pairs(tokens, tokens, is_causal=options.causal, window_size=options.window)
    elements = pairs * options.heads
    plain = {"pre_compose": False, "post_compose": False}
    products = attention_flops(options.head_dim, options.heads, pairs, **plain)  # 2 products forward, 5 more backward
    traffic = 36 if backward else 10
    return {
        "elements": elements,
        "flops": products * 7 / 2 if backward else products,
        "bytes": traffic * elements * getattr(torch, options.dtype).itemsize / 2,
    }


def sweep(options: argparse.Namespace, device: torch.device) -> list[dict]:
    """Measure and print all lengths, forward and forward + backward."""
    rows = []
    for tokens, backward in itertools.product(options.tokens, (False, True)):
        makers = {impl: (make_call, impl, backward, tokens, options) for impl in options.impls}
        results = measure(makers, options.repeats, device)
        kind = "forward + backward" if backward else "forward"
        for impl, result in results.items():
            row = {"tokens": tokens, "kind": kind, "impl": impl, "ratio": result.ratio(results[options.impls[0]])}
            counts = work(options, tokens, backward)
            if result.median is not None:
                row |= {f"{name}_per_second": count / result.median for name, count in counts.items()}
            print(
                f"{tokens:6} {kind:18} {impl:10} {show(result.median and 1e3 * result.median, '9.2f', ' ms')}"
                f" {show(row['ratio'], '6.2f', '')} x {options.impls[0]} {show(result.peak_mib, '8.0f', ' MiB')}"
                f" {show(row.get('flops_per_second', 0) / 1e12 or None, '7.2f', ' TFLOP/s')}"
            )
            rows.append(row | {"peak_mib": result.peak_mib, "seconds": result.seconds})
    return rows


def operator_parser(description: str) -> argparse.ArgumentParser:
    """Create a parser with the arguments of an attention call."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[196], help="sequence lengths")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int)
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--query-wise", action="store_true", help="omit the key-side weights")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="file for the raw results")
    return parser


def main() -> None:
    """Run the benchmark and print the results."""
    parser = operator_parser(__doc__)
    parser.add_argument("--impls", nargs="+", help=f"implementations, from {IMPLS}; default: all of the device")
    options = parser.parse_args()
    options.impls = options.impls or IMPLS[options.device]
    device = torch.device(options.device)
    best = ceilings(device, getattr(torch, options.dtype))
    print(f"ceilings: {best['bytes_per_second'] / 1e9:.0f} GB/s, {best['flop_per_second'] / 1e12:.2f} TFLOP/s")
    results = sweep(options, device)
    record = {"environment": environment(device), "options": vars(options), "ceilings": best}
    save(options.json, record | {"results": results})


if __name__ == "__main__":
    main()
