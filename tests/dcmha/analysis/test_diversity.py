"""Head diversity from factors against the full matrices."""

import pytest
import timm
import torch
from torch import nn

from dcmha import DCAttention, DCCrossAttention
from dcmha.analysis import head_diversity, head_weights, model_diversity


def formed(matrices: torch.Tensor) -> torch.Tensor:
    """Return the captured variance of the concatenated matrices [H, C, C'], computed from their singular values."""
    variances = torch.linalg.svdvals(torch.cat(matrices.unbind(0), 1)).square()
    return variances.cumsum(0) / variances.sum()


LAYERS = {
    "square": lambda: DCAttention(24, 4),
    "few channels": lambda: DCAttention(24, 2, attn_head_dim=5),
    "many channels": lambda: DCAttention(24, 4, attn_head_dim=10),
    "shared keys": lambda: DCAttention(24, 4, num_kv_heads=2),
    "cross": lambda: DCCrossAttention(24, 4, context_dim=16),
    "timm's": lambda: timm.layers.Attention(24, 4),
    "EVA's": lambda: timm.models.eva.EvaAttention(24, 4, qkv_fused=False, norm_layer=nn.LayerNorm),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_diversity_from_factors_equals_diversity_of_full_matrices(kind):
    torch.manual_seed(0)
    layer = LAYERS[kind]().double()
    query, key, value, output = head_weights(layer)
    for found, matrices in zip(head_diversity(layer), (query.mT @ key, output @ value), strict=True):
        torch.testing.assert_close(found, formed(matrices)[: len(found)])
        assert len(found) == min(24, query.shape[0] * query.shape[1]) and found[-1] == pytest.approx(1.0)


def test_head_weights_reproduce_the_scores_and_the_output_of_a_layer():
    torch.manual_seed(0)
    layer = DCAttention(24, 4, num_kv_heads=2, pre_compose=False, post_compose=False, proj_bias=False)
    x = torch.randn(1, 5, 24)
    query, key, value, output = head_weights(layer)
    scores = torch.einsum("tc,hdc,hde,se->hts", x[0], query, key, x[0]) * layer.scale
    out = torch.einsum("hts,sc,hdc,hed->te", scores.softmax(-1), x[0], value, output)
    torch.testing.assert_close(out[None], layer(x))


def test_equal_heads_are_less_diverse():
    torch.manual_seed(0)
    layer = DCAttention(24, 4)
    before = head_diversity(layer)
    with torch.no_grad():
        parts = layer.qkv.weight.view(3, 4, 6, 24)
        parts[:, 1:] = parts[:, :1]
    after = head_diversity(layer)
    assert (after.qk[:6] > before.qk[:6]).all() and float(after.qk[5]) == pytest.approx(1.0)
    torch.nn.init.zeros_(layer.qkv.weight)
    assert (head_diversity(layer).qk == 1).all()


def test_model_diversity_measures_each_layer_and_rejects_unsupported_models():
    model = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=24, num_heads=3)
    assert list(model_diversity(model)) == ["blocks.0.attn", "blocks.1.attn"]
    for other in (nn.Linear(2, 2), timm.create_model("tiny_vit_5m_224")):  # TinyViT heads interleave q, k and v
        with pytest.raises(ValueError, match=f"{type(other).__name__} has no supported attention layers"):
            model_diversity(other)
