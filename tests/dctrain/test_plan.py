"""Plans: meshes, memory estimates of small models, and rejected settings."""

import pytest
import torch
from torch import nn

import dclm
from dclm.cli import main
from dctrain.distributed.meta_init import on_meta_device
from dctrain.errors import UserError
from dctrain.plan.memory import Memory, activation_bytes, check_fits, fsdp2_memory, rank_share, sharded_numel

CONFIG = ["plan", "--config", "configs/lm/dcpythia_6b9.yaml"]


def test_activation_bytes_equal_saved_tensors():
    """Two linear layers and a GELU save the input of the model, and the input and output of the GELU."""
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    example = torch.empty(5, 8, device="meta")
    assert activation_bytes(model, (example,), {}, torch.float32) == 4 * 5 * (8 + 32 + 32)
    assert activation_bytes(model, (example,), {}, torch.bfloat16) == 2 * 5 * (8 + 32 + 32)


def test_activations_grow_linearly_with_tokens_and_shrink_with_recompute():
    def kept(tokens: int, layers: int, recompute: str) -> int:
        config = dclm.decoder_config("dcformer_pp_debug", num_layers=layers, windows=(None,), context_length=tokens)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        model = dclm.Decoder(config, device="meta")
        return activation_bytes(model, (ids,), {"targets": ids}, torch.bfloat16, recompute)

    assert kept(512, 2, "none") < 2.1 * kept(256, 2, "none")
    a_block, without_attention, a_block_input = (
        kept(256, 3, choice) - kept(256, 2, choice) for choice in ("none", "attention", "block")
    )
    assert a_block_input < a_block / 8
    assert 2 * a_block_input < without_attention < 0.8 * a_block
    assert kept(256, 8, "block") < kept(256, 2, "none") + 6 * a_block / 8


def test_shards_divide_parameters_and_accumulation_adds_full_gradients():
    model = dclm.Decoder(dclm.decoder_config("dcformer_pp_debug"), device="meta")
    whole = sum(p.numel() for p in model.parameters())
    assert sharded_numel(model, 1) == whole
    assert whole / 16 <= sharded_numel(model, 16) < 1.1 * whole / 16
    assert not torch.distributed.is_initialized()
    once, often = (fsdp2_memory(model, 7, is_mixed=True, shards=16, accumulate=n).gradients for n in (1, 2))
    assert often == 4 * (whole + sharded_numel(model, 16)) > once


def test_rank_share_splits_heads_without_changing_module():
    """Four ranks split all parameters except norms and vectors of the model's width; the module is unchanged."""
    with on_meta_device():
        module = dclm.LanguageModel("dcformer_pp_debug", overrides={"num_groups": 4})
    whole = sum(p.numel() for p in module.model.parameters())
    share = rank_share(module, 4).model
    assert 0.25 < sum(p.numel() for p in share.parameters()) / whole < 0.27
    assert share.blocks[0].attn.num_heads == 1 and module.model.blocks[0].attn.num_heads == 4
    ids = torch.zeros(2, 64, dtype=torch.long, device="meta")
    sizes = [activation_bytes(m, (ids,), {"targets": ids}, torch.bfloat16) for m in (module.model, share)]
    assert 0.25 < sizes[1] / sizes[0] < 0.6


def test_memory_above_limit_raises_error():
    with pytest.raises(UserError, match=r"needs about 3.0 GiB of 2, most of it for optimizer \(2.0\).*fsdp2 on more"):
        check_fits(Memory(2**29, 2**28, 2**31, 2**28), 2)
    with pytest.raises(UserError, match=r"most of it for activations.*smaller data.batch_size, or model.recompute"):
        check_fits(Memory(1, 1, 1, 2**40), 80)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--gpu_memory=1", "most of it for"),
        ("--trainer.devices=some", "trainer.devices='some'"),
        ("--trainer.num_nodes=0", "trainer.num_nodes=0 must be positive"),
        ("--data.batch_size=-3", "batch_size=-3"),
        ("--gpu_memory=-1", "gpu_memory=-1.0 must be positive"),
        ("--trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0 must be at least 1"),
        ("--trainer.strategy=nonsense", "trainer.strategy='nonsense' is unknown; expected auto, ddp, fsdp2"),
        ("--trainer.precision=bf16-true", "'bf16-true'; expected 32-true, bf16-mixed, 16-mixed"),
        ("--trainer.strategy=fsdp", "trainer.strategy fsdp is not supported"),
        ("--trainer.strategy=ddp", "of 80, most of it for gradients (51.7)"),
    ],
)
def test_invalid_plan_is_rejected(capsys, option, message):
    with pytest.raises(SystemExit) as exit_info:
        main([*CONFIG, option])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_replicas_must_divide_world_size(capsys):
    with pytest.raises(SystemExit):
        main([*CONFIG, "--trainer.strategy=FSDP2Strategy", "--trainer.strategy.replicas=3"])
    assert "trainer.strategy.replicas=3 must be a divisor of the 128 ranks" in capsys.readouterr().err
    main([*CONFIG, "--trainer.strategy=FSDP2Strategy", "--trainer.strategy.replicas=16"])
    assert "128 ranks (16 x 8), 8 shards in 16 replicas" in capsys.readouterr().out


@pytest.mark.slow
def test_tensor_parallel_mesh_splits_heads(capsys):
    heads = ["--trainer.strategy=FSDP2Strategy", "--trainer.strategy.tensor_parallel=8", "--data.batch_size=64"]
    main([*CONFIG, *heads, "--model.overrides={num_groups: 8}"])
    out = capsys.readouterr().out
    assert "128 ranks (16 x 8), 16 shards of 8 tensor-parallel ranks" in out
    assert "2,097,152 tokens (131,072 x 1 accumulated x 16 ranks)" in out
    with pytest.raises(SystemExit):
        main([*CONFIG, *heads])
    assert "tensor_parallel=8: num_groups=1 cannot be split over 8 ranks" in capsys.readouterr().err
