"""Public functions with a model argument raise an error that names the expected type."""

import pytest
import timm
import torch
from torch import nn

import dclm
import dcvision
from dcmha import record_attention
from dcmha.analysis import composition_branches, measure_mixing, model_diversity

OF_MODULES = {
    "record_attention": lambda model: record_attention(model).__enter__(),
    "measure_mixing": lambda model: measure_mixing(model).__enter__(),
    "composition_branches": composition_branches,
    "model_diversity": model_diversity,
    "dcvision.swap_attention": dcvision.swap_attention,
}
OF_DECODERS = {
    "generate": lambda model: dclm.generate(model, torch.ones(1, 2, dtype=torch.long), 1),
    "beam_search": lambda model: dclm.beam_search(model, torch.ones(1, 2, dtype=torch.long), 1, 1),
    "log_likelihoods": lambda model: dclm.log_likelihoods(model, [((1,), (2,))]),
    "save_pretrained": lambda model: dclm.save_pretrained(model, "unused"),
    "dclm.swap_attention": dclm.swap_attention,
}


@pytest.mark.parametrize("model", [None, "vit_small_patch16_224", {}, nn.Linear], ids=repr)
@pytest.mark.parametrize("call", (OF_MODULES | OF_DECODERS).values(), ids=OF_MODULES | OF_DECODERS)
def test_model_must_be_a_module(call, model):
    with pytest.raises(TypeError, match="model: expected a torch|decoder: expected a dclm"):
        call(model)


@pytest.mark.parametrize("call", OF_DECODERS.values(), ids=OF_DECODERS)
def test_decoder_must_be_a_decoder(call):
    with pytest.raises(TypeError, match="decoder: expected a dclm"):
        call(nn.Linear(2, 2))


def test_compiled_modules_are_accepted():
    model = torch.compile(timm.create_model("dcvit_tiny_patch16_224"), backend="eager")
    assert len(composition_branches(model)) > 0
    plain = dclm.Decoder(dclm.decoder_config("transformer_pp_debug"))
    ids = torch.ones(1, 2, dtype=torch.long)
    torch.testing.assert_close(
        dclm.generate(torch.compile(plain, backend="eager"), ids, 3), dclm.generate(plain, ids, 3)
    )
