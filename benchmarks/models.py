"""Comparison of a composed decoder with its MHA baselines, shared by the language model benchmarks."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from measure import measure_singly, save, show

import dclm
from dctrain.utils.environment import environment


def language_parser(description: str) -> argparse.ArgumentParser:
    """Create a parser with the arguments shared by the language model benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dcformer_pp_405m", help="name of a composed configuration of dclm")
    parser.add_argument("--overrides", type=json.loads, default={}, help="configuration fields to replace, as JSON")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--impls", nargs="+", default=["auto"], help="implementations of composed attention")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; each creates the models one at a time")
    parser.add_argument("--calls", type=int, default=3, help="calls per model and round")
    parser.add_argument("--json", help="file for the raw results")
    return parser


def language_configs(name: str, overrides: dict, impls: list[str]) -> dict[str, dclm.DecoderConfig]:
    """Return the composed model for each implementation, and its MHA baselines with the same windows and without."""
    composed = dclm.decoder_config(name, **overrides)
    if not composed.is_composed:
        raise SystemExit(f"--model={name} is not composed; choose a dcformer or dcpythia configuration.")
    same_windows = replace(composed, pre_compose=False, post_compose=False)
    configs = {f"composed, {impl}": replace(composed, impl=impl) for impl in impls}
    return configs | {"plain": same_windows, "plain, all global": replace(same_windows, windows=(None,))}


def compare(make: Callable[..., Callable[[], None]], options: argparse.Namespace, num_tokens: int) -> None:
    """Time a call of each model alternately, print rates and ratios, and save them.

    Args:
        make: Function that creates the call from a configuration and the options.
        options: Command-line options.
        num_tokens: Number of tokens per call.
    """
    configs = language_configs(options.model, options.overrides, options.impls)
    device = torch.device(options.device)
    makers = {name: (make, config, options) for name, config in configs.items()}
    results = measure_singly(makers, options.rounds, options.calls, device)
    if dist.is_initialized() and dist.get_rank():
        return
    composed = [name for name in configs if name.startswith("composed")]
    print(f"{'':22} {'tokens/s':>9} {'MiB':>7}   throughput of {', '.join(composed)} over this")
    ratios = {}
    for name, result in results.items():
        ratios[name] = {base: result.ratio(results[base]) for base in composed}
        rate = None if result.median is None else num_tokens / result.median
        over = "  ".join(show(ratio and 100 * ratio, "6.1f", " %") for ratio in ratios[name].values())
        print(f"{name:22} {show(rate, '9.1f', '')} {show(result.peak_mib, '7.0f', '')}   {over}")
    world = dist.get_world_size() if dist.is_initialized() else 1
    record = {"environment": environment(device), "world": world, "options": vars(options), "ratios": ratios}
    seconds = {name: result.seconds for name, result in results.items()}
    save(options.json, record | {"seconds": seconds, "peak_mib": {n: r.peak_mib for n, r in results.items()}})
