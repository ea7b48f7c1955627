"""Decoding with a cache: a composed decoder against plain attention with the same windows and without, interleaved.

python benchmarks/decode.py --prompt 256 --new 32 --overrides '{"num_layers": 4, "vocab_size": 4096}'
python benchmarks/decode.py --model dcformer_pp_2b8 --prompt 1024 --new 128 --device cuda --dtype bfloat16 --compile
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from measure import environment, interleaved, median_ratio, peak_mib, save
from models import add_language_arguments, language_configs

import dclm


def make_decode(config: dclm.DecoderConfig, options: argparse.Namespace) -> Callable[[], None]:
    """Make a call that decodes the new tokens, greedily, after a prompt that is in the cache already."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    decoder = dclm.Decoder(config, device=device, dtype=getattr(torch, options.dtype)).eval()
    cache = decoder.make_cache(options.prompt + options.new)
    prompt = torch.randint(config.vocab_size, (options.batch_size, options.prompt), device=device)
    step = torch.compile(decoder.step, fullgraph=True) if options.compile else decoder.step
    with torch.no_grad():
        first = decoder.decode(prompt, cache, last_only=True).argmax(-1)

    @torch.no_grad()
    def decode() -> None:
        cache.num_tokens = options.prompt
        tokens = first
        for _ in range(options.new):
            tokens = step(tokens, cache.advance(options.batch_size, 1, device), cache).argmax(-1)

    return decode


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_language_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens in the cache")
    parser.add_argument("--new", type=int, default=128, help="tokens to decode")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the weights")
    parser.add_argument("--compile", action="store_true", help="compile the decode step")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", help="file for the raw result")
    options = parser.parse_args()
    configs = language_configs(options.model, options.overrides)
    memory = {name: peak_mib(make_decode, config, options) for name, config in configs.items()}
    device = torch.device(options.device)
    times = interleaved({name: make_decode(c, options) for name, c in configs.items()}, options.repeats, device)
    ratios = {}
    for name in configs:
        rate = options.new * options.batch_size / statistics.median(times[name])
        ratios[name] = 1 / median_ratio(times, "composed", name)
        print(f"{name:18} {rate:9.1f} tokens/s {memory[name]:8.0f} MiB   composed runs at {100 * ratios[name]:5.1f} %")
    result = {"environment": environment(device), "options": vars(options), "ratios": ratios}
    save(options.json, result | {"seconds": times, "peak_mib": memory})


if __name__ == "__main__":
    main()
