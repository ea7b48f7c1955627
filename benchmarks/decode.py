"""Decoding throughput with a KV cache: composed decoder and MHA baselines, windowed and global, interleaved.

python benchmarks/decode.py --prompt 256 --new 32 --overrides '{"num_layers": 4, "vocab_size": 4096}'
python benchmarks/decode.py --model dcformer_pp_2b8 --prompt 1024 --new 128 --device cuda --dtype bfloat16 --compile
"""

import argparse
from collections.abc import Callable

import torch
from models import compare, language_parser

import dclm


def make_decode(config: dclm.DecoderConfig, options: argparse.Namespace) -> Callable[[], None]:
    """Create a call that greedily decodes the new tokens after a cached prompt."""
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
    """Run the benchmark and print the results."""
    parser = language_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=1024, help="number of cached tokens")
    parser.add_argument("--new", type=int, default=128, help="number of tokens to decode")
    options = parser.parse_args()
    compare(make_decode, options, options.new * options.batch_size)


if __name__ == "__main__":
    main()
