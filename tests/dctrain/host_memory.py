"""Script for torchrun: build a sharded decoder with N layers; print the shard size and peak memory of rank 0."""

import json
import resource
import sys

import torch
import torch.distributed as dist

import dclm
from dctrain.distributed.layout import Layout
from dctrain.distributed.meta_init import init_shards, on_meta_device, weights_device
from dctrain.distributed.strategy import make_mesh, mesh_axes, shard_blocks

dist.init_process_group("gloo")
config = dclm.decoder_config("dcformer_pp_405m", num_layers=int(sys.argv[1]), vocab_size=257)
with on_meta_device():
    decoder = dclm.Decoder(config, device=weights_device())
mesh = make_mesh("cpu", mesh_axes(dist.get_world_size()))
shard_blocks(decoder, decoder.blocks, mesh)
init_shards(decoder, Layout(mesh, {}), torch.device("cpu"))
shard = sum(p.to_local().nbytes for p in decoder.parameters())
if dist.get_rank() == 0:
    print(json.dumps({"shard": shard, "most": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
dist.destroy_process_group()
