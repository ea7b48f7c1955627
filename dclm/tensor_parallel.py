"""Tensor parallelism of a decoder: attention split by head groups, MLP by hidden channels, embeddings by vocabulary."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dcmha.parallel import ShardedDim, split_heads
from dctrain.distributed.layout import RankShare
from dctrain.distributed.tensor_parallel import TensorParallelPlan

from .blocks import MLP
from .decoder import Decoder


def split_decoder(decoder: Decoder, rank: int, ranks: int) -> TensorParallelPlan:
    """Change a decoder in place to compute the share of a rank.

    Args:
        decoder: The decoder.
        rank: Index of the rank.
        ranks: Number of ranks.

    Returns:
        How its parameters are split.

    Raises:
        ValueError: If head groups, hidden channels, their groups or the vocabulary are not divisible, or the decoder
            has cross-attention.
    """
    vocab_size = decoder.config.vocab_size
    first, end = RankShare(ranks - 1, ranks).of(vocab_size)
    if decoder.config.cross_layers:
        raise ValueError("cross_layers cannot be split; expected a decoder without cross-attention.")
    if first == end:
        raise ValueError(f"vocab_size={vocab_size} leaves no rows for the last of {ranks} ranks.")
    splits = {"embed.weight": ShardedDim(0), "output.weight": ShardedDim(0)}
    styles = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    entered = []
    for i, block in enumerate(decoder.blocks):
        parts = {"attn": split_heads(block.attn, ranks), "mlp": _split_mlp(block.mlp, rank, ranks)}
        for part, found in parts.items():
            splits |= {f"blocks.{i}.{part}.{name}": split for name, split in found.items()}
            entered.append(f"blocks.{i}.{part}")
        styles |= {f"blocks.{i}.{name}": RowwiseParallel(input_layouts=Shard(-1)) for name in ("attn.proj", "mlp.down")}
    return TensorParallelPlan(splits, entered, styles)


def _split_mlp(mlp: MLP, rank: int, ranks: int) -> dict[str, ShardedDim]:
    width = mlp.up.out_features
    if width % ranks:
        raise ValueError(f"mlp_dim={width} cannot be split over {ranks} ranks: it must be a multiple of them.")
    splits = {f"{name}.{key}": ShardedDim(0) for name in ("gate", "up") for key in ("weight", "bias")}
    splits |= {"down.weight": ShardedDim(1), "group_gate.weight": ShardedDim(is_summed=True)}
    if mlp.group_gate is not None:
        mlp.groups = _own_groups(mlp.group_gate.out_features, rank, ranks)
    present = dict(mlp.named_parameters())
    return {name: split for name, split in splits.items() if name in present}


def _own_groups(groups: int, rank: int, ranks: int) -> slice:
    if groups % ranks:
        raise ValueError(f"mlp_groups={groups} cannot be split over {ranks} ranks: it must be a multiple of them.")
    return slice(rank * groups // ranks, (rank + 1) * groups // ranks)
