"""What the benchmarks of language models share: a composed decoder and its plain twins, measured in turn."""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from measure import environment, interleaved, median_ratio, peak_mib, save

import dclm


def language_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with the arguments that all of them take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dcformer_pp_405m", help="a composed configuration of dclm")
    parser.add_argument("--overrides", type=json.loads, default={}, help="JSON of fields to replace")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", help="file for the raw result")
    return parser


def language_configs(name: str, overrides: dict) -> dict[str, dclm.DecoderConfig]:
    """Return the composed model, plain attention with the same windows, and plain attention without windows."""
    composed = dclm.decoder_config(name, **overrides)
    if not composed.is_composed:
        raise SystemExit(f"--model={name} is not composed; choose a dcformer or dcpythia configuration.")
    same_windows = replace(composed, pre_compose=False, post_compose=False)
    return {"composed": composed, "plain": same_windows, "plain, all global": replace(same_windows, windows=(None,))}


def compare(make: Callable[..., Callable[[], None]], options: argparse.Namespace, num_tokens: int) -> None:
    """Time a call of each model in turn, print rates and ratios, and save them.

    Args:
        make: Makes the call from a configuration and the options.
        options: Of the command line.
        num_tokens: Tokens of a call.
    """
    configs = language_configs(options.model, options.overrides)
    memory = {name: peak_mib(make, config, options) for name, config in configs.items()}
    device = torch.device(options.device)
    times = interleaved({name: make(config, options) for name, config in configs.items()}, options.repeats, device)
    ratios = {}
    for name in configs:
        rate = num_tokens / statistics.median(times[name])
        ratios[name] = 1 / median_ratio(times, "composed", name)
        print(f"{name:18} {rate:9.1f} tokens/s {memory[name]:8.0f} MiB   composed runs at {100 * ratios[name]:5.1f} %")
    result = {"environment": environment(device), "options": vars(options), "ratios": ratios}
    save(options.json, result | {"seconds": times, "peak_mib": memory})
