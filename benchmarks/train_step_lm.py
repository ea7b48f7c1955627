"""One training step of a composed decoder against plain attention with the same windows and without, interleaved.

python benchmarks/train_step_lm.py --tokens 512 --batch-size 1 --overrides '{"num_layers": 2, "vocab_size": 4096}'
python benchmarks/train_step_lm.py --batch-size 8 --device cuda --dtype bfloat16 --compile
"""

import argparse
from collections.abc import Callable
from typing import get_args

import torch
from models import compare, language_parser

import dclm
from dctrain.recompute import Recompute, set_recompute


def make_step(config: dclm.DecoderConfig, options: argparse.Namespace) -> Callable[[], None]:
    """Make a training step: forward, chunked cross-entropy, backward, AdamW."""
    torch.manual_seed(0)
    decoder = dclm.Decoder(config, device=options.device)
    set_recompute(decoder, options.recompute)
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
    parser = language_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--recompute", choices=get_args(Recompute), default="none", help="in the backward pass")
    options = parser.parse_args()
    compare(make_step, options, options.tokens * options.batch_size)


if __name__ == "__main__":
    main()
