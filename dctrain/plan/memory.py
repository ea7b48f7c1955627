"""Estimated memory of a rank: weights, gradients, optimizer and activations, computed without a device."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcmha import ComposedAttentionBase, ComposeWeights

from ..activation_checkpointing import Recompute, set_recompute
from ..distributed.layout import WHOLE, RankShare, split_blocks
from ..distributed.strategy import make_mesh, mesh_axes, shard_blocks
from ..errors import UserError
from ..training_module import TrainingModule
from .flops import in_dtype

GIB = 2**30
GATHERED_BLOCKS = 2  # the current block and the prefetched one


class Memory(NamedTuple):
    """Estimated bytes of a rank.

    Attributes:
        weights: Parameters in 32 bits, and their gathered or cast copies.
        gradients: Gradients in 32 bits.
        optimizer: Adam's two moments.
        activations: Tensors saved for the backward pass of a batch.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(self)


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Act as rank 0 of a simulated process group within the body."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_share(module: TrainingModule, ranks: int) -> TrainingModule:
    """Copy a module whose network is one rank's share under tensor parallelism, on the meta device.

    Args:
        module: The module, whose network is on the meta device.
        ranks: Ranks that split each layer.

    Raises:
        UserError: If the network cannot be split.
    """
    module = copy.deepcopy(module)
    splits = module.split_model(0, ranks).splits
    for name, whole in list(module.model.named_parameters()):
        blocks = split_blocks(whole.shape, splits.get(name, WHOLE), RankShare(0, ranks))
        part = torch.cat([block.of_whole(whole.detach()) for block in blocks], splits.get(name, WHOLE).dim or 0)
        owner, _, key = name.rpartition(".")
        module.model.get_submodule(owner)._parameters[key] = nn.Parameter(part, requires_grad=whole.requires_grad)
    return module


def sharded_numel(model: nn.Module, shards: int) -> int:
    """Count the parameters of the rank with the largest shards under `FSDP2Strategy`.

    Args:
        model: The network, on the meta device.
        shards: Number of shards.
    """
    with fake_world(shards):
        model = copy.deepcopy(model)
        shard_blocks(model, getattr(model, "blocks", ()), make_mesh("cpu", mesh_axes(shards)))
        return sum(parameter.to_local().numel() for parameter in model.parameters())


def activation_bytes(
    model: nn.Module, args: tuple, kwargs: dict, dtype: torch.dtype, recompute: Recompute = "none"
) -> int:
    """Count the bytes that a forward pass saves for the backward pass with the fused kernels.

    Args:
        model: The network.
        args: Its positional inputs, on the meta device.
        kwargs: Its keyword inputs.
        dtype: Compute dtype.
        recompute: Activation checkpointing; the activations of one recomputed block are added.
    """
    model = copy.deepcopy(model).to(device="meta", dtype=dtype).train()
    set_recompute(model, recompute)
    kept = _kept_bytes(model, args, kwargs, dtype)
    if recompute != "none":
        set_recompute(model, "none")
        kept += (_kept_bytes(model, args, kwargs, dtype) - kept) // len(model.blocks)
    return kept


def _kept_bytes(model: nn.Module, args: tuple, kwargs: dict, dtype: torch.dtype) -> int:
    for module in model.modules():
        if isinstance(module, ComposedAttentionBase):
            module.attend = partial(_attend, module)
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept.setdefault(x.untyped_storage()._cdata, x)
        return x

    args = in_dtype(args, dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(*args, **kwargs)
    return sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in parameters)


class _Attention(torch.autograd.Function):
    """Saves the same tensors as the fused kernels: the operands, the output, and one number per row."""

    @staticmethod
    def forward(ctx, q: Tensor, *rest: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, *rest, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out


def _attend(layer: ComposedAttentionBase, q: Tensor, k: Tensor, v: Tensor, pre, post, *_, **__) -> Tensor:
    def parts(weights: ComposeWeights | None) -> list[Tensor]:
        return [] if weights is None else [x for x in (*weights.query, *weights.key, weights.base) if x is not None]

    return _Attention.apply(q, k, v, *parts(pre), *parts(post))


def ddp_memory(model: nn.Module, activations: int, *, is_mixed: bool, world: int) -> Memory:
    """Estimate the memory of a rank under DDP; several ranks add the reduction buckets."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    return Memory((4 + 2 * is_mixed) * numel, (4 + 4 * (world > 1)) * numel, 8 * numel, activations)


def fsdp2_memory(model: nn.Module, activations: int, *, is_mixed: bool, shards: int, accumulate: int) -> Memory:
    """Estimate the memory of a rank under FSDP2; accumulated gradients are full-size until they are reduced."""
    blocks = list(getattr(model, "blocks", ()))
    whole = sum(parameter.numel() for parameter in model.parameters())
    block = max((sum(parameter.numel() for parameter in b.parameters()) for b in blocks), default=0)
    rest = whole - sum(parameter.numel() for b in blocks for parameter in b.parameters())
    shard = sharded_numel(model, shards)
    gathered = GATHERED_BLOCKS * block + rest
    reduced = whole if accumulate > 1 else block + rest
    return Memory(4 * shard + (2 if is_mixed else 4) * gathered, 4 * (shard + reduced), 8 * shard, activations)


def check_fits(memory: Memory, gpu_memory: float) -> None:
    """Check that a run fits into the memory of a GPU.

    Args:
        memory: Estimated memory of the run.
        gpu_memory: Memory of a GPU, in GiB.

    Raises:
        UserError: If it does not fit; the message suggests a change.
    """
    if memory.total <= gpu_memory * GIB:
        return
    largest = max(memory._fields, key=lambda name: getattr(memory, name))
    advice = "a smaller data.batch_size, or model.recompute" if largest == "activations" else "fsdp2 on more ranks"
    raise UserError(
        f"a rank needs about {memory.total / GIB:.1f} GiB of {gpu_memory:g}, most of it for {largest} "
        f"({getattr(memory, largest) / GIB:.1f}); use {advice}."
    )
