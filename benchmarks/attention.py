"""Composed attention alone: every implementation against plain SDPA, forward and forward + backward, interleaved.

python benchmarks/attention.py --batch-size 8 --heads 6 --tokens 196
python benchmarks/attention.py --batch-size 1 --heads 16 --tokens 1024 --causal --device cuda --dtype bfloat16
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from measure import environment, interleaved, median_ratio, peak_mib, save

from dcmha import ComposeWeights, composed_attention

IMPLS = ("sdpa", "reference", "compiled", "triton")


def make_call(impl: str, backward: bool, options: argparse.Namespace) -> Callable[[], None]:
    """Make a call of one implementation on random operands of rank 2 with gates, both sides, pre and post."""
    torch.manual_seed(0)
    B, H, T, D, R = options.batch_size, options.heads, options.tokens, options.head_dim, 2

    def rand(*shape: int) -> torch.Tensor:
        dtype = getattr(torch, options.dtype)
        return torch.randn(*shape, device=options.device, dtype=dtype).requires_grad_(backward)

    def weights() -> ComposeWeights:
        side = [(B, T, R, H), (B, T, R, H), (B, T, H)]
        return ComposeWeights(*(rand(*shape) for shape in side + side))

    q, k, v = (rand(B, H, T, D) for _ in range(3))
    pre, post = (None, None) if impl == "sdpa" else (weights(), weights())
    cotangent = torch.randn(B, H, T, D, device=options.device, dtype=q.dtype)
    leaves = [q, k, v, *(w for side in (pre, post) if side for w in side if w is not None)]

    def call() -> None:
        name = "auto" if impl == "sdpa" else impl
        out = composed_attention(q, k, v, pre, post, is_causal=options.causal, window=options.window, impl=name)
        if backward:
            torch.autograd.grad(out, leaves, cotangent)

    return call


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=196)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--impls", nargs="+", choices=IMPLS, help="default: all that the device runs")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="file for the raw result")
    options = parser.parse_args()
    options.impls = options.impls or [impl for impl in IMPLS if impl != "triton" or options.device == "cuda"]
    device = torch.device(options.device)
    results = []
    for backward in (False, True):
        memory = {impl: peak_mib(make_call, impl, backward, options) for impl in options.impls}
        calls = {impl: make_call(impl, backward, options) for impl in options.impls}
        times = interleaved(calls, options.repeats, device)
        for impl in options.impls:
            kind = "forward + backward" if backward else "forward"
            ratio = median_ratio(times, impl, options.impls[0])
            median = 1e3 * statistics.median(times[impl])
            print(f"{kind:18} {impl:10} {median:9.2f} ms {ratio:6.2f} x {options.impls[0]} {memory[impl]:8.0f} MiB")
            row = {"kind": kind, "impl": impl, "ratio": ratio, "peak_mib": memory[impl], "seconds": times[impl]}
            results.append(row)
    save(options.json, {"environment": environment(device), "options": vars(options), "results": results})


if __name__ == "__main__":
    main()
