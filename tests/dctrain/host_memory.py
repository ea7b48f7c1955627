"""Run by torchrun: build a decoder of some layers sharded over the ranks; print the most memory a rank has needed."""

import json
import resource
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dclm
from dctrain.deferred import deferred_weights, draw_shards, weights_device

dist.init_process_group("gloo")
config = dclm.decoder_config("dcformer_pp_405m", num_layers=int(sys.argv[1]), vocab_size=257)
with deferred_weights():
    decoder = dclm.Decoder(config, device=weights_device())
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for module in (*decoder.blocks, decoder):
    fully_shard(module, mesh=mesh)
draw_shards(decoder, torch.device("cpu"))
shard = sum(p.to_local().nbytes for p in decoder.parameters())
if dist.get_rank() == 0:
    print(json.dumps({"shard": shard, "most": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
dist.destroy_process_group()
