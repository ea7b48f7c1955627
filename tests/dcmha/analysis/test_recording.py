"""Recorded attention maps match their definition, and recording does not change the output."""

import pytest
import torch

from dcmha import DCAttention, DCCrossAttention, record_attention
from dcmha.analysis.mixing import mean_composition
from dcmha.impl.reference import BRANCHES, compose
from tests.dcmha.inputs import Case, make_weights


@pytest.mark.parametrize(
    "options", [{}, {"window_size": 3, "num_groups": 2}, {"post_compose": False, "static_base": True}]
)
def test_recorded_maps_reproduce_the_output(options):
    torch.manual_seed(0)
    layer = DCAttention(32, 4, **options)
    with torch.no_grad():
        layer.compose.project.mul_(100)
    model, x = torch.nn.Sequential(layer), torch.randn(2, 7, 32)
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[1, ..., 5:] = False
    expected = layer(x, mask)
    values = layer.qkv(x).unflatten(-1, (3, 4, 8))[:, :, 2].transpose(1, 2)
    with record_attention(model) as recorded:
        assert torch.equal(layer(x, mask), expected)
    assert "attend" not in vars(layer)
    maps, pre, post = recorded["0"].maps, recorded["0"].pre_composition, recorded["0"].post_composition
    out = layer.proj((maps.composed_weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(maps.weights.sum(-1), torch.ones(2, 4, 7))
    plain = DCAttention(32, 4, window_size=layer.window, pre_compose=False, post_compose=False)
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "compose" not in name})
    out = layer.proj((recorded["0"].uncomposed_weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, plain(x, mask), rtol=1e-4, atol=1e-5)
    assert (maps.weights[1, ..., 5:] == 0).all() and not torch.equal(maps.scores, maps.composed_scores)
    assert pre.shape == (4, 4) and not torch.equal(pre, torch.eye(4))
    assert (post is None) == ("post_compose" in options)


def test_compiled_models_are_recorded():
    model = torch.nn.Sequential(DCAttention(32, 4), DCAttention(32, 4))
    model.compile(backend="eager")
    x = torch.randn(2, 7, 32)
    expected = model(x)
    with record_attention(model) as recorded:
        torch.testing.assert_close(model(x), expected)
    assert list(recorded) == ["0", "1"]
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(model(x), expected)


def test_mean_composition_equals_mean_over_pairs():
    """Each row is the composition of a one-hot head vector, averaged over all pairs."""
    case = Case(B=2, T=5, S=6, H=4, G=2)
    torch.manual_seed(0)
    weights = make_weights(case)
    rows = []
    for head in range(4):
        one = torch.zeros(2, 4, 5, 6, dtype=torch.float64)
        one[:, head] = 1.0
        rows.append(compose(one, weights, 2).mean((0, 2, 3)))
    torch.testing.assert_close(mean_composition(weights, 4, 2).double(), torch.stack(rows), rtol=1e-5, atol=1e-6)


def test_record_attention_selects_layers_and_applies_a_function():
    model = torch.nn.Sequential(DCAttention(32, 4), DCAttention(32, 4))
    x = torch.randn(2, 7, 32)
    with record_attention(model, ["1"], lambda one: one.maps.weights[0, 3, -1]) as recorded:
        model(x)
    with record_attention(model) as whole:
        model(x)
    assert list(recorded) == ["1"] and torch.equal(recorded["1"], whole["1"].maps.weights[0, 3, -1])
    with (
        pytest.raises(ValueError, match=r"layers=\['2'\] are not in the model; expected 0, 1"),
        record_attention(model, ["2"]),
    ):
        pass


@pytest.mark.parametrize("composition", ["pre", "post"])
def test_breakdown_terms_of_a_pair_sum_to_the_composed_value(composition):
    torch.manual_seed(0)
    layer = DCAttention(32, 6, attn_head_dim=8, static_base=True, num_groups=2)
    with torch.no_grad():
        layer.compose.project.mul_(100)
    with record_attention(layer) as recorded:
        layer(torch.randn(2, 7, 32), is_causal=True)
    one = recorded[""]
    maps = one.maps
    before, after = {"pre": (maps.scores, maps.composed_scores), "post": (maps.weights, maps.composed_weights)}[
        composition
    ]
    found = one.breakdown(composition, -1, 2, batch=1)
    assert list(found.terms) == ["itself", *BRANCHES]
    assert torch.equal(found.before, before[1, :, 6, 2])
    torch.testing.assert_close(found.after, after[1, :, 6, 2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(found.terms.values()), found.after)
    for name, side in (("query", found.weights.query), ("key", found.weights.key)):
        grouped = found.before.view(2, 1, 3) * side.down[0, 0].view(2, 2, 3).transpose(0, 1)
        torch.testing.assert_close(found.inner[name], grouped.sum(-1))
        up = side.up[0, 0].view(2, 2, 3).transpose(0, 1)
        expected = (found.inner[name][..., None] * up).sum(1).flatten()
        torch.testing.assert_close(found.terms[f"{name} projection"], expected)
        torch.testing.assert_close(found.terms[f"{name} gate"], found.before * side.gate.flatten())
    torch.testing.assert_close(found.terms["base"], found.before @ torch.block_diag(*found.weights.base))


def test_breakdown_supports_cross_attention():
    layer = DCCrossAttention(32, 4, context_dim=16, key_wise=False)
    with record_attention(layer) as recorded:
        layer(torch.randn(2, 3, 32), torch.randn(2, 5, 16))
    found = recorded[""].breakdown("post", 2, 4)
    assert list(found.terms) == ["itself", "query projection", "query gate"] and list(found.inner) == ["query"]
    torch.testing.assert_close(found.after, recorded[""].maps.composed_weights[0, :, 2, 4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pre", 7, 0), "query=7; expected -7 to 6"),
        (("pre", 0, -8), "key=-8; expected -7 to 6"),
        (("pre", 0, 0, 2), "batch=2; expected -2 to 1"),
        (("post", 0, 0), "composition='post' is disabled in this layer"),
        (("both", 0, 0), "composition='both'; expected 'pre', 'post'"),
    ],
)
def test_breakdown_with_invalid_arguments_raises_error(arguments, message):
    layer = DCAttention(32, 4, post_compose=False)
    with record_attention(layer) as recorded:
        layer(torch.randn(2, 7, 32))
    with pytest.raises(ValueError, match=message):
        recorded[""].breakdown(*arguments)


def test_recording_stops_when_the_context_ends():
    layer = DCAttention(32, 4)
    with pytest.raises(RuntimeError, match="stop"), record_attention(layer) as recorded:
        layer(torch.randn(1, 3, 32))
        raise RuntimeError("stop")
    first = recorded[""]
    with record_attention(layer), pytest.raises(ValueError, match="already being recorded"), record_attention(layer):
        pass
    assert "attend" not in vars(layer)
    layer(torch.randn(1, 3, 32))
    assert recorded[""] is first
    with (
        pytest.raises(ValueError, match="Linear has no DCAttention or DCCrossAttention to record"),
        record_attention(torch.nn.Linear(2, 2)),
    ):
        pass
