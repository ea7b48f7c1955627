"""Bidirectional decoders: receptive field, documents, scores, and rejection of causal functions."""

import pytest
import torch
import torch.nn.functional as F

import dclm
from dclm import swap_attention
from dclm.callbacks import BigramBaseline, TextSample
from dclm.data import TokenDataModule
from dclm.data.masking import Masked
from dclm.data.tokenizers import ByteTokenizer
from dclm.language_model import LanguageModel
from dclm.likelihood import score_masked
from dclm.loss import IGNORED
from dctrain.errors import UserError

from .test_decoder import ids, small

NAMES = ["transformer_debug", "dcformer_debug", "dcformer_pp_debug", "dcpythia_debug"]


def reach(decoder: dclm.Decoder, T: int = 12) -> torch.Tensor:
    """Return a mask [T, T] of the inputs on which the logits of each position depend."""
    embedded = decoder.embed(ids(1, T)).detach().requires_grad_()
    decoder.embed.register_forward_hook(lambda *_: embedded)
    logits = decoder(ids(1, T))
    rows = [torch.autograd.grad(logits[0, t].square().sum(), embedded, retain_graph=True)[0] for t in range(T)]
    return torch.stack(rows)[:, 0].abs().sum(-1) > 0


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_attend_in_both_directions_within_window(name, impl):
    places = torch.arange(12)
    within = (places[:, None] - places).abs() < 4
    assert torch.equal(reach(small(name, is_causal=False, num_layers=1, windows=[4], impl=impl).float()), within)
    assert reach(small(name, is_causal=False, num_layers=2, windows=[4, None], impl=impl).float()).all()
    assert torch.equal(reach(small(name, num_layers=1, windows=[4], impl=impl).float()), within.tril())


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_match_separate_documents(name):
    decoder = small(name, is_causal=False)
    first, second = ids(1, 9), ids(1, 14, seed=2)
    document_ids = torch.tensor([[0] * 9 + [1] * 14])
    together = decoder(torch.cat([first, second], 1), document_ids=document_ids)
    torch.testing.assert_close(together, torch.cat([decoder(first), decoder(second)], 1), rtol=1e-12, atol=1e-12)


def test_plain_block_matches_torch_encoder_layer():
    """`nn.TransformerEncoderLayer` with pre-LayerNorm, GELU and biases is the independent reference."""
    decoder = small("transformer_debug", is_causal=False, num_layers=1)
    block, config = decoder.blocks[0], decoder.config
    theirs = torch.nn.TransformerEncoderLayer(
        config.dim, config.num_heads, config.mlp_dim, 0.0, "gelu", config.norm_eps, batch_first=True, norm_first=True
    ).double()
    pairs = {
        "self_attn.in_proj_weight": block.attn.qkv.weight, "self_attn.in_proj_bias": block.attn.qkv.bias,
        "self_attn.out_proj.weight": block.attn.proj.weight, "self_attn.out_proj.bias": block.attn.proj.bias,
        "linear1.weight": block.mlp.up.weight, "linear1.bias": block.mlp.up.bias,
        "linear2.weight": block.mlp.down.weight, "linear2.bias": block.mlp.down.bias,
        "norm1.weight": block.attn_norm.weight, "norm1.bias": block.attn_norm.bias,
        "norm2.weight": block.mlp_norm.weight, "norm2.bias": block.mlp_norm.bias,
    }  # fmt: skip
    theirs.load_state_dict(pairs)
    x = torch.randn(2, 7, config.dim, dtype=torch.float64)
    torch.testing.assert_close(block(x, None, None, None), theirs(x))


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_scores_cover_masked_tokens_only(name):
    decoder = small(name, is_causal=False)
    inputs, targets = ids(3, 11), torch.full((3, 11), IGNORED)
    targets[0, 2], targets[0, 7], targets[2, 10] = 5, 6, 7
    logits = decoder(inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = decoder(inputs, targets=targets)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(of, list(decoder.parameters()), retain_graph=True) for of in (loss, expected)]
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-12)
    scores = decoder(inputs, targets=targets, per_token=True)
    asked = targets != IGNORED
    torch.testing.assert_close(scores.log_likelihoods, logits.log_softmax(-1)[asked, targets[asked]].detach())
    assert torch.equal(scores.is_greedy, logits.argmax(-1)[asked] == targets[asked])
    assert decoder(inputs, targets=torch.full_like(targets, IGNORED)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_padded_texts_match_individual_scores(name):
    decoder = small(name, is_causal=False)
    texts = []
    for length in (5, 1, 9):
        targets = torch.full((length,), IGNORED)
        targets[::2] = 3
        texts.append(Masked(ids(length, seed=length).numpy(), targets.numpy()))
    texts.append(Masked(ids(4).numpy(), torch.full((4,), IGNORED).numpy()))
    for alone, together in zip(texts, score_masked(decoder, texts), strict=True):
        (expected,) = score_masked(decoder, [alone])
        torch.testing.assert_close(together.log_likelihoods, expected.log_likelihoods, rtol=1e-12, atol=1e-12)
        assert torch.equal(together.is_greedy, expected.is_greedy)
        assert len(together.is_greedy) == (alone.targets != IGNORED).sum()


@pytest.mark.parametrize(
    "use",
    [
        lambda decoder: dclm.generate(decoder, ids(1, 3), 2),
        lambda decoder: decoder.make_cache(8),
        lambda decoder: dclm.log_likelihoods(decoder, [([1], [2])]),
    ],
)
def test_causal_functions_reject_bidirectional_model(use):
    with pytest.raises(ValueError, match="the model is bidirectional"):
        use(small("dcformer_pp_debug", is_causal=False))


def test_scores_require_targets_and_save_no_graph():
    decoder = small("dcformer_pp_debug", is_causal=False)
    with pytest.raises(ValueError, match="per_token=True requires targets"):
        decoder(ids(1, 4), per_token=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        decoder(ids(1, 4), targets=ids(1, 4), per_token=True)
    assert not kept


@pytest.mark.parametrize("callback", [BigramBaseline(), TextSample("a text")])
def test_causal_callbacks_reject_bidirectional_model(callback):
    with pytest.raises(UserError, match=f"{type(callback).__name__}: the model is bidirectional"):
        callback.setup(None, LanguageModel("transformer_debug", 258, 16, {"is_causal": False}), "fit")


def test_non_finite_token_makes_validation_loss_nan():
    model = LanguageModel("transformer_debug", 61, 16)
    with torch.no_grad():
        model.model.embed.weight[3] = float("nan")
    batch = torch.randint(4, 61, (2, 16))
    batch[0, 9] = 3
    model.validation_step((batch, batch), 0)
    assert model.val_loss.compute().isnan()


def test_swap_attention_preserves_bidirectional_attention():
    swapped = swap_attention(small("transformer_pp_debug", is_causal=False))
    assert swapped.config.is_composed and not swapped.config.is_causal and not swapped.blocks[0].is_causal


def test_mask_token_has_embedding_row():
    data = TokenDataModule("stdlib", mask_fraction=0.15)
    assert data.vocab_size == ByteTokenizer.vocab_size + 1
    model = LanguageModel("transformer_debug", data.vocab_size, 16, {"is_causal": False})
    assert model(torch.full((1, 16), ByteTokenizer.vocab_size)).isfinite().all()
