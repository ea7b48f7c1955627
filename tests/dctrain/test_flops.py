"""FLOPs of a model: the count does not depend on the implementation of its layers."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dclm
from dcmha import DCAttention, DCCrossAttention, attention_flops, visible_pairs
from dctrain.plan.flops import forward_flops


def test_image_model_flops_equal_dense_reference():
    model = nn.Sequential(nn.Linear(8, 32), DCAttention(32, 4, num_groups=2), nn.Linear(32, 3))
    example = torch.empty(2, 9, 8, device="meta")
    reference = nn.Sequential(nn.Linear(8, 32), DCAttention(32, 4, num_groups=2, impl="reference"), nn.Linear(32, 3))
    with FlopCounterMode(display=False) as counter:
        reference.to("meta")(example)
    assert forward_flops(model, example) == counter.get_total_flops()
    assert model[1](torch.randn(2, 9, 32)).any()  # the attention layers of the model still work


def test_flops_exclude_pairs_masked_by_causality_and_windows():
    overrides = {"num_layers": 2, "windows": (4, None), "vocab_size": 32}
    config = dclm.decoder_config("dcformer_pp_debug", **overrides)
    example = torch.zeros(1, 16, dtype=torch.long, device="meta")
    counted = forward_flops(dclm.Decoder(config, device="meta"), example)
    dense = dclm.decoder_config("dcformer_pp_debug", **overrides | {"impl": "reference"})
    with FlopCounterMode(display=False) as counter:
        dclm.Decoder(dense, device="meta")(example)
    pairs = [visible_pairs(16, 16, is_causal=True, window_size=window_size) for window_size in (4, None)]
    assert pairs == [58, 136]
    hidden = attention_flops(config.dim // config.num_heads, config.num_heads, 2 * 16 * 16 - sum(pairs))
    assert counted == counter.get_total_flops() - hidden


class FromContext(nn.Module):
    """Cross-attention to a context that is a parameter."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.attend, self.context = DCCrossAttention(16, 4, **options), nn.Parameter(torch.randn(1, 7, 16))

    def forward(self, x):
        return self.attend(x, self.context)


def test_cross_attention_flops_equal_dense_reference():
    example = torch.empty(1, 5, 16, device="meta")
    with FlopCounterMode(display=False) as counter:
        FromContext(impl="reference").to("meta")(example)
    assert forward_flops(FromContext(), example) == counter.get_total_flops()
