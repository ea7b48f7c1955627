"""Statistics of compositions against matrices computed for one pair at a time."""

import pytest
import torch

from dcmha import ComposeWeights, DCAttention, DCCrossAttention, SideWeights
from dcmha.analysis import MixingMeter, measure_mixing
from dcmha.analysis.mixing import branch_matrices, effective_rank
from dcmha.impl.reference import compose
from tests.dcmha.inputs import Case, make_weights


def of_pair(weights: ComposeWeights, sequence: int, query: int, key: int) -> torch.Tensor:
    """Return the composition matrix of one query-key pair."""
    heads = torch.eye(6, dtype=torch.float64)[:, :, None, None]
    sides = (
        side.map(lambda w, at=at: w[sequence, at].expand(6, 1, *w.shape[2:]))
        for side, at in ((weights.query, query), (weights.key, key))
    )
    return compose(heads, ComposeWeights(*sides, weights.base), 2)[:, :, 0, 0]


@pytest.fixture
def weights() -> ComposeWeights:
    torch.manual_seed(0)
    return make_weights(Case(B=2, T=4, S=5, H=6, G=2))


def test_branch_matrices_sum_to_the_composition_of_the_operator(weights):
    made = branch_matrices(weights, 6, 2)
    total = torch.eye(6, dtype=torch.float64) + made["base"][0, 0]
    total = total + sum(made[f"query {part}"][1, 2] + made[f"key {part}"][1, 3] for part in ("projection", "gate"))
    torch.testing.assert_close(total, of_pair(weights, 1, 2, 3))


def test_sizes_and_shares_equal_statistics_over_all_pairs(weights):
    """The shares divide the mean squared distance to the identity. Adding the same sequence again changes nothing."""
    weights = ComposeWeights(*(side.map(lambda w: w[:1]) for side in (weights.query, weights.key)), weights.base)
    meter = MixingMeter(6, 2)
    meter.add(weights)
    once = meter.mixing()
    meter.add(weights)
    twice = meter.mixing()
    pairs = torch.stack([torch.stack([of_pair(weights, 0, i, j) for j in range(5)]) for i in range(4)])
    changes = pairs - torch.eye(6, dtype=torch.float64)
    total = changes.square().sum((-2, -1)).mean()
    static = changes.mean((0, 1)).square().sum()
    query = (changes.mean(1) - changes.mean((0, 1))).square().sum((-2, -1)).mean()
    expected = {"static": float(static / total), "query": float(query / total)}
    expected["key"] = 1 - sum(expected.values())
    norms = branch_matrices(weights, 6, 2)["key projection"].norm(dim=(-2, -1)) / 6**0.5
    for mixing in (once, twice):
        assert mixing.shares == pytest.approx(expected, rel=1e-5)
        assert mixing.sizes["key projection"] == pytest.approx(
            (float(norms.mean()), float(norms.std(correction=0))), rel=1e-5
        )
        assert list(mixing.sizes) == ["base", "query projection", "query gate", "key projection", "key gate"]


def test_effective_rank_equals_rank_of_known_matrices():
    values = torch.tensor([1.0, 1.0, 1.0, 0.0])
    basis = torch.linalg.qr(torch.randn(4, 4))[0]
    torch.testing.assert_close(
        effective_rank(basis @ values.diag() @ basis.T), torch.tensor(3.0).double(), rtol=1e-4, atol=0
    )
    assert float(effective_rank(torch.zeros(4, 4))) == 1.0
    meter = MixingMeter(4, 1)
    meter.add(ComposeWeights(SideWeights(gate=torch.tensor([[[0.0, 0.0, -1.0, -1.0]]]))))
    assert meter.mixing().effective_rank == pytest.approx((2.0, 0.0))
    meter.add(ComposeWeights(SideWeights(gate=torch.zeros(1, 1, 4))))
    assert meter.mixing().effective_rank == pytest.approx((3.0, 1.0))


def test_zero_composition_has_zero_shares_and_empty_meter_raises_error():
    meter = MixingMeter(4, 1)
    with pytest.raises(ValueError, match="no composition has been added"):
        meter.mixing()
    meter.add(ComposeWeights(base=torch.zeros(1, 4, 4)))
    mixing = meter.mixing()
    assert mixing.shares == {"static": 0.0, "query": 0.0, "key": 0.0} and mixing.effective_rank.mean == pytest.approx(4)


def test_layers_are_measured_only_inside_the_context():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        DCAttention(32, 4),
        DCAttention(32, 4, pre_compose=False),
        DCAttention(32, 4, pre_compose=False, post_compose=False),
    )
    model.compile(backend="eager")
    batches = [torch.randn(2, 7, 32) for _ in range(2)]
    with measure_mixing(model) as meters:
        outputs = [model(x) for x in batches]
    torch.testing.assert_close(model(batches[0]), outputs[0])
    assert {name: list(found) for name, found in meters.items()} == {"0": ["pre", "post"], "1": ["post"]}
    expected = MixingMeter(4, 1)
    for x in batches:
        expected.add(model[0].compose(x)[1])
    assert meters["0"]["post"].mixing() == expected.mixing()


def test_cross_attention_is_measured_and_plain_attention_raises_error():
    layer = DCCrossAttention(32, 4, context_dim=16)
    with measure_mixing(layer) as meters:
        layer(torch.randn(2, 3, 32), torch.randn(2, 5, 16))
    assert sorted(meters[""]) == ["post", "pre"] and meters[""]["pre"].branches["key gate"].count == 10
    plain = DCAttention(32, 4, pre_compose=False, post_compose=False)
    with pytest.raises(ValueError, match="DCAttention has no layer that composes heads"), measure_mixing(plain):
        pass
