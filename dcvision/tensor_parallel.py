"""Tensor parallelism of vision transformers: attention is split by head groups, the MLP by hidden channels."""

from timm.layers import Mlp
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from dcmha import DCAttention
from dcmha.parallel import ShardedDim, split_heads
from dctrain.distributed.tensor_parallel import TensorParallelPlan


def split_vit(model: nn.Module, ranks: int) -> TensorParallelPlan:
    """Change a vision transformer with `DCAttention` in place to compute the share of a rank.

    Args:
        model: A timm model whose blocks have `attn`, a `DCAttention`, and `mlp`, timm's `Mlp`.
        ranks: Number of ranks.

    Returns:
        How its parameters are split.

    Raises:
        ValueError: If it has different blocks, or head groups or hidden channels are not divisible.
    """
    splits, styles, entered = {}, {}, []
    blocks = list(getattr(model, "blocks", ()))
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no blocks to split.")
    for i, block in enumerate(blocks):
        _check_block(i, block)
        for part, found in (("attn", split_heads(block.attn, ranks)), ("mlp", _split_mlp(block.mlp, ranks))):
            splits |= {f"blocks.{i}.{part}.{name}": split for name, split in found.items()}
            entered.append(f"blocks.{i}.{part}")
        styles |= {f"blocks.{i}.{name}": RowwiseParallel(input_layouts=Shard(-1)) for name in ("attn.proj", "mlp.fc2")}
    return TensorParallelPlan(splits, entered, styles)


def _check_block(number: int, block: nn.Module) -> None:
    attn, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    if not isinstance(attn, DCAttention) or type(mlp) is not Mlp or not isinstance(mlp.fc1, nn.Linear):
        got = f"{type(attn).__name__} and {type(mlp).__name__}"
        raise ValueError(f"block {number} has {got}, which cannot be split; expected DCAttention and timm's Mlp.")
    if any(True for _ in mlp.norm.parameters()):
        raise ValueError(f"block {number}: a norm within the MLP cannot be split.")


def _split_mlp(mlp: Mlp, ranks: int) -> dict[str, ShardedDim]:
    width = mlp.fc1.out_features
    if width % ranks:
        raise ValueError(f"{width} hidden channels cannot be split over {ranks} ranks.")
    splits = {"fc1.weight": ShardedDim(0), "fc1.bias": ShardedDim(0), "fc2.weight": ShardedDim(1)}
    present = dict(mlp.named_parameters())
    return {name: split for name, split in splits.items() if name in present}
