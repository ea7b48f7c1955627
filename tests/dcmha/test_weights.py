"""ComposeProjection: equations 5 and 6 of the paper, initialization, options and parameter counts."""

import math

import pytest
import torch
import torch.nn.functional as F

from dcmha import ComposeProjection, compose_cost


def test_projection_equals_equations_5_and_6_for_each_token():
    C, H, R, G = 10, 6, 2, 2
    torch.manual_seed(0)
    projection = ComposeProjection(C, H, rank=R, num_groups=G).double()
    x = torch.randn(1, 3, C, dtype=torch.float64)
    pre, post = projection(x)
    width, heads = 2 * R * H // G, H // G
    hidden = projection.hidden.view(2, 2, G, width, C)  # axes: side, composition, group
    project = projection.project.view(2, 2, G, width, 2, R, heads)
    gate = projection.gate.view(2, 2, H, C)
    for side, name in enumerate(("query", "key")):
        for composition, weights in enumerate((pre, post)):
            for t in range(3):
                for g in range(G):
                    z = torch.einsum(
                        "k,krud->rud",
                        F.gelu(hidden[side, composition, g] @ x[0, t]),
                        project[side, composition, g],
                    )
                    down = z[0] / (z[0].square().mean(-1, keepdim=True) + 1e-6).sqrt()
                    heads_of_group = slice(g * heads, (g + 1) * heads)
                    torch.testing.assert_close(getattr(weights, name).down[0, t, :, heads_of_group], down)
                    torch.testing.assert_close(getattr(weights, name).up[0, t, :, heads_of_group], z[1])
                expected = torch.tanh(gate[side, composition] @ x[0, t])
                torch.testing.assert_close(getattr(weights, name).gate[0, t], expected)


@pytest.mark.parametrize("groups", [1, 4])
def test_initialization_has_expected_mean_and_standard_deviation(groups):
    C, H, R = 512, 16, 2
    torch.manual_seed(0)
    projection = ComposeProjection(C, H, rank=R, static_base=True, num_groups=groups)
    heads, width = H // groups, 2 * R * H // groups
    expected = {
        "hidden": math.sqrt(2 / (C + width)),
        "project": 0.02 / (math.sqrt(2 * heads * R) * (heads + R)),
        "gate": 0.05 * math.sqrt(2 / (C + heads)),
        "base": 0.1 * math.sqrt(1 / heads),
    }
    for name, parameter in projection.named_parameters():
        assert parameter.mean().abs() < 0.2 * expected[name], name
        assert abs(parameter.std() / expected[name] - 1) < 0.15, name


SWITCHES = [
    {},
    {"rank": 0},
    {"rank": 1, "num_groups": 2},
    {"rank": 4, "static_base": True},
    {"query_wise": False},
    {"key_wise": False, "static_base": True},
    {"query_wise": False, "key_wise": False, "static_base": True},
    {"pre_compose": False},
    {"post_compose": False, "dynamic_gate": False},
]


@pytest.mark.parametrize("options", SWITCHES, ids=str)
def test_options_determine_branches_and_parameter_count(options):
    projection = ComposeProjection(24, 6, **options)
    weights = projection(torch.randn(2, 5, 24))
    assert [w is not None for w in weights] == [options.get("pre_compose", True), options.get("post_compose", True)]
    for w in filter(None, weights):
        for side in ("query", "key"):
            on = options.get(f"{side}_wise", True)
            assert (getattr(w, side).down is not None) == (on and options.get("rank", 2) > 0)
            assert (getattr(w, side).gate is not None) == (on and options.get("dynamic_gate", True))
        assert (w.base is not None) == options.get("static_base", False)
    assert sum(p.numel() for p in projection.parameters()) == compose_cost(24, 6, 1, 1, **options).params


MISTAKES = [
    ({"num_groups": 4}, r"num_groups=4 must be a positive divisor of num_heads=6"),
    ({"rank": -1}, r"rank=-1 must be an integer, 0"),
    ({"pre_compose": False, "post_compose": False}, r"nothing is left to compose"),
    ({"rank": 0, "dynamic_gate": False}, r"nothing is left to compose.*rank=0, .*dynamic_gate=False"),
    ({"query_wise": False, "key_wise": False}, r"nothing is left to compose"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_invalid_options_raise_error(options, message):
    with pytest.raises(ValueError, match=message):
        ComposeProjection(24, 6, **options)
