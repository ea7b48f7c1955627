"""Decoder whose last layers have cross-attention to a context sequence."""

import pytest
import torch

import dclm
from dclm.blocks import CrossContext
from dclm.tensor_parallel import split_decoder

OVERRIDES = {"dim": 32, "num_layers": 3, "num_heads": 4, "mlp_dim": 48, "vocab_size": 23, "context_length": 16}
LOOKS = {"context_dim": 12, "cross_layers": 2}


def made(name: str = "dcformer_pp_debug", **overrides) -> dclm.Decoder:
    torch.manual_seed(0)
    config = dclm.decoder_config(name, **OVERRIDES | {"windows": (5, None), "init_std": 0.2} | overrides)
    decoder = dclm.Decoder(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter_name, parameter in decoder.named_parameters():
            if parameter_name.endswith("project"):
                parameter.mul_(30)
    return decoder


def inputs(rows: int = 2, tokens: int = 9) -> tuple[torch.Tensor, CrossContext]:
    torch.manual_seed(1)
    mask = torch.ones(rows, 7, dtype=torch.bool)
    mask[-1, 3:] = False
    return torch.randint(23, (rows, tokens)), CrossContext(torch.randn(rows, 7, 12, dtype=torch.float64), mask)


@pytest.mark.parametrize("cross_compose", [False, True])
@pytest.mark.parametrize("name", ["dcformer_pp_debug", "transformer_debug", "dcpythia_debug"])
def test_cached_decoding_matches_full_forward(name, cross_compose):
    """The tokens are decoded in parts, the context is processed once, and rows are reordered between the parts."""
    decoder = made(name, **LOOKS, cross_compose=cross_compose)
    ids, context = inputs()
    expected = decoder(ids, context=context)
    with torch.no_grad():
        cache = decoder.make_cache(9, context=context)
        first = decoder.decode(ids[:, :4], cache)
        cache.reorder(torch.tensor([1, 0]))
        rest = [decoder.decode(part.flip(0), cache) for part in ids[:, 4:].split([1, 4], 1)]
    found = torch.cat([first, *(part.flip(0) for part in rest)], 1)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(decoder(ids, context=CrossContext(context.tokens + 1, context.mask)), expected)
    hidden = CrossContext(context.tokens.masked_fill(~context.mask[..., None], 100.0), context.mask)
    torch.testing.assert_close(decoder(ids, context=hidden), expected)


def test_zero_cross_attention_output_equals_plain_decoder():
    decoder, plain = made(**LOOKS, cross_compose=True), made()
    with torch.no_grad():
        for block in decoder.blocks[1:]:
            block.cross.proj.weight.zero_()
    assert decoder.blocks[0].cross is None and decoder.blocks[1].cross.compose is not None
    own = {name: weight for name, weight in decoder.state_dict().items() if "cross" not in name}
    plain.load_state_dict(own)
    ids, context = inputs()
    torch.testing.assert_close(decoder(ids, context=context), plain(ids))


def test_states_before_context_are_independent_of_context():
    decoder = made(**LOOKS)
    ids, context = inputs()
    before, after = decoder.hidden_and_final(ids, context=context)
    torch.testing.assert_close(decoder.output(after), decoder(ids, context=context))
    other = CrossContext(context.tokens + 1, context.mask)
    assert torch.equal(decoder.hidden_and_final(ids, context=other)[0], before)
    assert torch.equal(decoder.states_before_context(ids), before)
    plain = made()
    before, after = plain.hidden_and_final(ids)
    torch.testing.assert_close(plain.norm(before), after)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_context_gradients_match_finite_differences(is_checkpointed):
    decoder = made(**LOOKS, cross_compose=True)
    decoder.set_grad_checkpointing(is_checkpointed)
    ids, context = inputs()
    tokens = context.tokens.requires_grad_()
    decoder(ids, targets=ids, context=context).backward()
    assert all(parameter.grad.any() for name, parameter in decoder.named_parameters() if "cross" in name)
    step = torch.zeros_like(tokens)
    step[0, 2, 5] = 1e-5
    with torch.no_grad():
        up, down = (decoder(ids, targets=ids, context=CrossContext(tokens + x, context.mask)) for x in (step, -step))
    assert float((up - down) / 2e-5) == pytest.approx(float(tokens.grad[0, 2, 5]), rel=1e-4)
    assert not tokens.grad[1, 3:].any() and tokens.grad[1, :3].any()


def test_generation_with_context_matches_single_rows():
    decoder = made(**LOOKS, cross_compose=True)
    ids, context = inputs(rows=2, tokens=3)
    found = dclm.generate(decoder, ids, 5, context=context)
    for row in range(2):
        alone = CrossContext(context.tokens[row : row + 1], context.mask[row : row + 1])
        assert torch.equal(dclm.generate(decoder, ids[row : row + 1], 5, context=alone)[0], found[row])
        text = found[row : row + 1]
        for end in range(3, 8):
            assert decoder(text[:, :end], context=alone)[0, -1].argmax() == text[0, end]
    padded = dclm.generate(decoder, [ids[0], ids[1, 1:]], 5, context=context)
    alone = CrossContext(context.tokens[1:], context.mask[1:])
    assert torch.equal(padded[1], dclm.generate(decoder, ids[1:, 1:], 5, context=alone)[0])


def test_model_with_cross_attention_is_saved_in_native_format(tmp_path):
    decoder = made(**LOOKS, cross_compose=True, rank=3)
    with pytest.raises(ValueError, match="rank=3"):
        dclm.save_pretrained(decoder, tmp_path / "published")
    with pytest.raises(ValueError, match="context_dim=12 is not supported by the published format"):
        dclm.save_pretrained(made(**LOOKS), tmp_path / "published")
    dclm.save_pretrained(decoder, tmp_path / "native", native=True)
    loaded = dclm.load_pretrained(tmp_path / "native")
    assert loaded.config == decoder.config
    ids, context = inputs()
    torch.testing.assert_close(loaded(ids, context=context), decoder(ids, context=context), rtol=0, atol=1e-12)
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in decoder.state_dict().items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"context_dim": 8}, "context_dim=8 with cross_layers=0; expected both, or neither"),
        ({"cross_layers": 1}, "context_dim=None with cross_layers=1"),
        ({"context_dim": 0, "cross_layers": 1}, "context_dim=0 must be at least 1, or null"),
        ({"context_dim": 8, "cross_layers": 4}, "cross_layers=4 must be from 0 to num_layers=3"),
        ({"cross_compose": True}, "cross_compose=True requires cross_layers"),
        ({**LOOKS, "cross_compose": True, "rank": 0, "dynamic_gate": False}, "nothing is left to compose"),
        ({**LOOKS, "context_dim": "8"}, "context_dim='8' must be of type int or None"),
    ],
)
def test_invalid_configuration_raises_value_error(overrides, message):
    with pytest.raises(ValueError, match=message):
        dclm.decoder_config("transformer_pp_debug", **OVERRIDES | overrides)


def test_invalid_calls_raise_value_error():
    looking, blind = made(**LOOKS), made()
    ids, context = inputs()
    with pytest.raises(ValueError, match="context=None: the last 2 layers require a context of width 12"):
        looking(ids)
    with pytest.raises(ValueError, match="context: expected None, as the model has no cross-attention"):
        blind(ids, context=context)
    with pytest.raises(ValueError, match="context has 2 rows; expected 1, as in input_ids"):
        looking(ids[:1], context=context)
    with pytest.raises(ValueError, match=r"context has shape \[2, 7, 5\]; expected \[2, tokens, 12\]"):
        looking(ids, context=CrossContext(context.tokens[..., :5]))
    with pytest.raises(ValueError, match="the cache has 2 rows; got 1"):
        looking.decode(ids[:1], looking.make_cache(9, context=context))
    with pytest.raises(ValueError, match="cross_layers cannot be split"):
        split_decoder(looking, 0, 2)
