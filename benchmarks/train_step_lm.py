"""Throughput of a training step: composed decoder and MHA baselines, windowed and global, interleaved.

python benchmarks/train_step_lm.py --tokens 512 --batch-size 1 --overrides '{"num_layers": 2, "vocab_size": 4096}'
python benchmarks/train_step_lm.py --batch-size 8 --device cuda --dtype bfloat16 --compile
torchrun --nproc_per_node 8 benchmarks/train_step_lm.py --model dcformer_pp_6b9 --batch-size 4 --recompute block \
    --device cuda --dtype bfloat16 --compile        # sharded over the ranks; a row of table 6, like 2b8, 13b and 33b
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
import torch.distributed as dist
from models import compare, language_parser
from torch.distributed.tensor.parallel import loss_parallel

import dclm
from dclm.tensor_parallel import split_decoder
from dctrain.activation_checkpointing import Recompute, set_recompute
from dctrain.distributed.strategy import make_mesh, mesh_axes, shard_model


def make_decoder(config: dclm.DecoderConfig, options: argparse.Namespace) -> dclm.Decoder:
    """Create a decoder; in distributed runs, shard it over the ranks and split it over the tensor-parallel ranks."""
    torch.manual_seed(0)
    if not dist.is_initialized():
        return dclm.Decoder(config, device=options.device)
    decoder = dclm.Decoder(config, device="meta")
    mesh = make_mesh(options.device, mesh_axes(dist.get_world_size(), tensor_parallel=options.tensor_parallel))
    precision = "32-true" if options.dtype == "float32" else "bf16-mixed"
    device = torch.device(options.device, torch.cuda.current_device() if options.device == "cuda" else None)
    shard_model(decoder, decoder.blocks, mesh, precision, partial(split_decoder, decoder), device)
    return decoder


def make_step(config: dclm.DecoderConfig, options: argparse.Namespace) -> Callable[[], None]:
    """Create a training step: forward, chunked cross-entropy, backward, AdamW."""
    decoder = make_decoder(config, options)
    set_recompute(decoder, options.recompute)
    if options.compile:
        for module in decoder.blocks if dist.is_initialized() else [decoder]:
            module.compile()
    shape = (options.batch_size, options.tokens + 1)
    tokens = torch.randint(config.vocab_size, shape, device=options.device)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-4, fused=options.device == "cuda" or None)
    dtype = getattr(torch, options.dtype)

    def step() -> None:
        with torch.autocast(options.device, dtype, enabled=dtype != torch.float32), loss_parallel():
            loss = decoder(tokens[:, :-1], targets=tokens[:, 1:])
        with loss_parallel():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Run the benchmark and print the results."""
    parser = language_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--recompute", choices=get_args(Recompute), default="none", help="recomputation in backward")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="number of ranks that split a layer")
    options = parser.parse_args()
    data_ranks = 1
    if "WORLD_SIZE" in os.environ:
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        data_ranks = dist.get_world_size() // options.tensor_parallel
    compare(make_step, options, options.tokens * options.batch_size * data_ranks)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
