"""One training step of a composed decoder against plain attention with the same windows and without, interleaved.

python benchmarks/train_step_lm.py --tokens 512 --batch-size 1 --overrides '{"num_layers": 2, "vocab_size": 4096}'
python benchmarks/train_step_lm.py --batch-size 8 --device cuda --dtype bfloat16 --compile
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from measure import environment, interleaved, median_ratio, peak_mib, save
from models import add_language_arguments, language_configs

import dclm


def make_step(config: dclm.DecoderConfig, options: argparse.Namespace) -> Callable[[], None]:
    """Make a training step: forward, chunked cross-entropy, backward, AdamW."""
    torch.manual_seed(0)
    decoder = dclm.Decoder(config, recompute=options.recompute, device=options.device)
    if options.compile:
        decoder.compile()
    shape = (options.batch_size, options.tokens + 1)
    tokens = torch.randint(config.vocab_size, shape, device=options.device)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-4)
    dtype = getattr(torch, options.dtype)

    def step() -> None:
        with torch.autocast(options.device, dtype, enabled=dtype != torch.float32):
            loss = decoder(tokens[:, :-1], targets=tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_language_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of autocast")
    parser.add_argument("--compile", action="store_true", help="compile the decoders")
    parser.add_argument("--recompute", action="store_true", help="recompute the blocks in the backward pass")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", help="file for the raw result")
    options = parser.parse_args()
    configs = language_configs(options.model, options.overrides)
    memory = {name: peak_mib(make_step, config, options) for name, config in configs.items()}
    device = torch.device(options.device)
    times = interleaved({name: make_step(c, options) for name, c in configs.items()}, options.repeats, device)
    ratios = {}
    for name in configs:
        rate = options.tokens * options.batch_size / statistics.median(times[name])
        ratios[name] = 1 / median_ratio(times, "composed", name)
        print(f"{name:18} {rate:9.1f} tokens/s {memory[name]:8.0f} MiB   composed runs at {100 * ratios[name]:5.1f} %")
    result = {"environment": environment(device), "options": vars(options), "ratios": ratios}
    save(options.json, result | {"seconds": times, "peak_mib": memory})


if __name__ == "__main__":
    main()
