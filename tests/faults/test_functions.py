"""Arguments of public functions that could silently give a wrong result."""

import copy

import numpy as np
import pytest
import timm
import torch
from torch import nn

import dclm
import dcvision
from dclm.blocks import CrossContext
from dclm.data.tokenizers import ByteTokenizer
from dclm.huggingface import DCFormerConfig, DCFormerForCausalLM, DCLMConfig, DCLMForCausalLM, DCPythiaForCausalLM
from dcmha import ComposeWeights, DCCrossAttention, SideWeights, composed_attention, rotary_embedding
from dctrain.errors import UserError
from dcvision import ImageClassifier
from dcvision.data import ImageBatch
from dcvl.contrastive import ContrastiveBatch, contrastive_loss
from dcvl.network import ImageText, as_tokens
from dcvl.retrieval import RetrievalAt1

GATE = ComposeWeights(SideWeights(gate=torch.randn(2, 6, 4)))


@pytest.fixture
def q() -> torch.Tensor:
    return torch.randn(2, 4, 6, 8)


@pytest.fixture(scope="module")
def decoder() -> dclm.Decoder:
    return dclm.Decoder(dclm.decoder_config("dcformer_pp_debug", num_layers=1, vocab_size=31)).eval()


IDS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("weights", [GATE, None], ids=["composed", "plain"])
def test_document_ids_modified_through_numpy_are_read_again(q, weights):
    numbers = np.zeros((2, 6), np.int64)
    document_ids = torch.from_numpy(numbers)
    composed_attention(q, q, q, weights, document_ids=document_ids)
    numbers[:, 3:] = 1  # torch does not detect this change
    got = composed_attention(q, q, q, weights, document_ids=document_ids)
    torch.testing.assert_close(got, composed_attention(q, q, q, weights, document_ids=document_ids.clone()))


def test_document_ids_under_vmap_match_batched_call(q):
    document_ids = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])

    def one(q, document_ids):
        return composed_attention(q[None], q[None], q[None], None, document_ids=document_ids[None], impl="reference")[0]

    expected = composed_attention(q, q, q, document_ids=document_ids, impl="reference")
    torch.testing.assert_close(torch.vmap(one)(q, document_ids), expected)


@pytest.mark.parametrize("impl", ["cpu", "compiled", "reference"])
def test_expanded_mask_matches_copied_mask_and_has_gradients_of_all_heads(q, impl):
    mask = torch.randn(2, 1, 1, 6).masked_fill(torch.rand(2, 1, 1, 6) < 0.3, -torch.inf)
    expected = composed_attention(q, q, q, GATE, attn_mask=mask.expand(2, 4, 6, 6).clone(), impl=impl)
    torch.testing.assert_close(
        composed_attention(q, q, q, GATE, attn_mask=mask.expand(2, 4, 6, 6), impl=impl), expected
    )
    pairs = mask.nan_to_num(neginf=0.0).requires_grad_().expand(2, 4, 6, 6)
    out = composed_attention(q, q, q, GATE, attn_mask=pairs, impl=impl)
    (gradient,) = torch.autograd.grad(out.square().sum(), pairs)
    assert (gradient != 0).all(dim=1).any()  # gradient of every head, although the memory is shared


def test_negative_view_and_efficient_zero_tensor_match_plain_tensors(q):
    negative = torch._neg_view(q)
    assert torch.equal(
        composed_attention(negative, q, q, GATE, impl="cpu"), composed_attention(-q, q, q, GATE, impl="cpu")
    )
    zero = torch._efficientzerotensor(q.shape)
    expected = composed_attention(torch.zeros_like(q), q, q, GATE, impl="cpu")
    assert torch.equal(composed_attention(zero, q, q, GATE, impl="cpu"), expected)


@pytest.mark.parametrize("length_penalty", [0, 1, 19.0])
@pytest.mark.parametrize("steps", [1, 3, 40])
def test_beam_search_returns_requested_length_for_any_length_penalty(decoder, length_penalty, steps):
    found = dclm.beam_search(decoder, IDS, steps, 2, length_penalty=length_penalty)
    assert [len(tokens) for tokens in found] == [6 + steps] * 2
    with pytest.raises(ValueError, match="length_penalty"):
        dclm.beam_search(decoder, IDS, 2, 2, length_penalty=81.0)


def test_iterators_and_malformed_pairs_are_rejected(decoder):
    pairs = [("a", "b")]
    assert len(dclm.encode_pairs(ByteTokenizer(), pairs)) == 1
    for wrong in (iter(pairs), zip(["a"], ["b"], strict=True), None, [("a", "b", "c")]):
        with pytest.raises(ValueError, match="pairs"):
            dclm.encode_pairs(ByteTokenizer(), wrong)
    for wrong in (iter([((1,), (2,))]), None, 3, [((1,), (2,), (3,))], [(1, 2)]):
        with pytest.raises(ValueError, match="pair"):
            dclm.log_likelihoods(decoder, wrong)


def test_invalid_generation_arguments_raise_error(decoder):
    for wrong in (None, 5, "text", {1: 2}):
        with pytest.raises(ValueError, match="input_ids"):
            dclm.generate(decoder, wrong, 1)
    for options, name in (({"seed": True}, "seed"), ({"temperature": 10**400}, "temperature")):
        with pytest.raises(ValueError, match=name):
            dclm.generate(decoder, IDS, 1, **options)
    torch.testing.assert_close(
        dclm.generate(decoder, IDS, 3, 1.0, seed=np.int64(3)), dclm.generate(decoder, IDS, 3, 1.0, seed=3)
    )
    with pytest.raises(ValueError, match="context=Tensor"):
        dclm.generate(decoder, IDS, 1, context=torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="float32"):
        dclm.Decoder(decoder.config, dtype="float32")


def test_log_likelihoods_with_nan_weights_raise_error(decoder):
    damaged = copy.deepcopy(decoder)
    with torch.no_grad():
        damaged.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        dclm.log_likelihoods(damaged, [((1,), (0,))])


def test_swap_attention_preserves_frozen_parameters_and_grad_checkpointing():
    plain = dclm.Decoder(dclm.decoder_config("transformer_pp_debug")).requires_grad_(False)
    plain.set_grad_checkpointing()
    swapped = dclm.swap_attention(plain)
    trained = {name for name, parameter in swapped.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in swapped.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert swapped.grad_checkpointing


def make_pairs(**changes) -> ContrastiveBatch:
    unit = nn.functional.normalize(torch.randn(4, 8), dim=1)
    return ContrastiveBatch(unit, unit, torch.arange(8).view(4, 2), torch.ones(4, dtype=torch.bool))._replace(**changes)


def test_contrastive_loss_rejects_invalid_arguments_and_accepts_empty_batch():
    scale = torch.tensor(10.0)
    for kind in ("sigmiod", "Sigmoid", None):
        with pytest.raises(ValueError, match="kind"):
            contrastive_loss(kind, make_pairs(), scale, None)
    with pytest.raises(ValueError, match="counts"):
        contrastive_loss("sigmoid", make_pairs(counts=torch.ones(4, 1, dtype=torch.bool)), scale, None)
    with pytest.raises(ValueError, match="scale"):
        contrastive_loss("sigmoid", make_pairs(), torch.ones(4), None)
    nothing = ContrastiveBatch(
        torch.zeros(0, 8), torch.zeros(0, 8), torch.zeros(0, 2, dtype=torch.long), torch.ones(0).bool()
    )
    assert contrastive_loss("sigmoid", nothing, scale, None) == 0


def test_retrieval_is_nan_without_data_and_with_nan_embeddings():
    metric = RetrievalAt1()
    assert all(value.isnan() for value in metric.compute().values())
    metric.update(torch.full((4, 8), torch.nan), torch.randn(4, 8), torch.arange(8).view(4, 2), torch.arange(4))
    assert all(value.isnan() for value in metric.compute().values())


def test_nan_logits_count_as_errors_and_predict_step_raises_error():
    class Damaged(nn.Module):
        def forward(self, x):
            return x.new_full((len(x), 3), torch.nan)

    model = ImageClassifier(Damaged(), num_classes=3, image_size=8)
    batch = ImageBatch(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.long), ["a", "b"], 0)
    model.log = lambda *args, **kwargs: None
    model.validation_step(batch, 0)
    assert model.val_top1.compute() == 0 and model.val_loss.compute().isnan()
    with pytest.raises(UserError, match="NaN"):
        model.predict_step(batch, 0)


def test_one_channel_images_are_rejected():
    with pytest.raises(ValueError, match=r"expected \[B, 3"):
        ImageClassifier().eval()(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))


def test_bidirectional_text_tower_and_invalid_image_features_are_rejected():
    image = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    text = dclm.Decoder(dclm.decoder_config("dcformer_pp_debug", is_causal=False))
    with pytest.raises(ValueError, match="is_causal"):
        ImageText(image, text, 8)
    for shape in ((2, 4, 4, 5), (2, 4, 5, 7, 7)):
        with pytest.raises(UserError, match="features"):
            as_tokens(torch.zeros(shape), 7)


def test_swap_attention_rejects_shared_layers_and_unknown_options():
    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    model.blocks[0].attn = model.blocks[1].attn
    with pytest.raises(ValueError, match=r"blocks\.0\.attn and blocks\.1\.attn"):
        dcvision.swap_attention(model)
    with pytest.raises(ValueError, match="foo"):
        dcvision.swap_attention(timm.create_model("vit_tiny_patch16_224"), foo=None)


def test_invalid_positions_contexts_and_masks_raise_error(q):
    with pytest.raises(ValueError, match="positions"):
        rotary_embedding(torch.arange(18).view(3, 6), 8)(q, q)
    for positions in (torch.zeros(1, 2, 3, dtype=torch.long), torch.arange(3.0), [1, 2]):
        with pytest.raises(ValueError, match="positions"):
            rotary_embedding(positions, 8)
    layer, other = DCCrossAttention(16, 4), DCCrossAttention(16, 4, num_groups=2)
    with pytest.raises(ValueError, match="groups"):
        layer(torch.zeros(1, 3, 16), other.precompute_kv(torch.zeros(1, 5, 16)))
    x, context, real = torch.zeros(1, 3, 16), torch.zeros(1, 5, 16), torch.ones(1, 5, dtype=torch.bool)
    with pytest.raises(TypeError, match="attn_mask"):
        layer(x, context, real, torch.ones(3, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="context_mask"):
        layer(x, context, [True] * 5)
    assert CrossContext(x, None).mask is None


@pytest.fixture(scope="module")
def hub_model() -> DCLMForCausalLM:
    config = dclm.decoder_config("dcformer_pp_debug", num_layers=1, vocab_size=31)
    return DCLMForCausalLM(DCLMConfig.from_decoder_config(config)).eval()


def test_logits_to_keep_returns_last_logits_and_rejects_invalid_values(hub_model):
    whole = hub_model(IDS).logits
    for count in (1, np.int64(2), 6, 0):
        torch.testing.assert_close(hub_model(IDS, logits_to_keep=count).logits, whole[:, -int(count) :])
    for wrong in (-1, None, True, torch.tensor(1), 1.0):
        with pytest.raises(ValueError, match="logits_to_keep"):
            hub_model(IDS, logits_to_keep=wrong)


@pytest.mark.parametrize("wrong", [0, torch.tensor(0), torch.tensor(-3), 0.0])
def test_num_items_in_batch_below_one_raises_error(hub_model, wrong):
    with pytest.raises(ValueError, match="num_items_in_batch"):
        hub_model(IDS, labels=IDS, num_items_in_batch=wrong)


def test_invalid_token_ids_and_labels_raise_error(hub_model):
    for wrong in (None, [[1, 2]], IDS[0], IDS.float()):
        with pytest.raises(ValueError, match="input_ids"):
            hub_model(wrong)
    with pytest.raises(ValueError, match="labels"):
        hub_model(IDS, labels=IDS.float())
    torch.testing.assert_close(hub_model(IDS, labels=IDS.int()).loss, hub_model(IDS, labels=IDS).loss)


def test_config_or_checkpoint_of_another_family_raises_error(hub_model, tmp_path):
    with pytest.raises(ValueError, match="DCLMConfig"):
        DCFormerForCausalLM(hub_model.config)
    model = DCFormerForCausalLM(DCFormerConfig.from_decoder_config(dclm.decoder_config("dcformer_pp_debug")))
    model.save_pretrained(tmp_path / "dcformer")
    hub_model.save_pretrained(tmp_path / "dclm")
    for kind, folder in (
        (DCPythiaForCausalLM, "dcformer"),
        (DCLMForCausalLM, "dcformer"),
        (DCFormerForCausalLM, "dclm"),
    ):
        with pytest.raises(ValueError, match="has a model of type"):
            kind.from_pretrained(tmp_path / folder)


def test_model_built_on_meta_device_restores_positions():
    trained = timm.create_model("dcvit_digits_patch2_8").eval()
    with torch.device("meta"):
        model = timm.create_model("dcvit_digits_patch2_8").eval()
    model.to_empty(device="cpu")
    model.positions.fill_(torch.nan)  # uninitialized memory can contain NaN
    model.load_state_dict(trained.state_dict())
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(model(x), trained(x))


def test_malformed_batches_and_targets_raise_error(decoder):
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    for batch in ({"images": images}, (images, [0, 1]), (images, torch.zeros(2).long(), 3)):
        with pytest.raises(UserError, match="the batch is .*: expected"):
            ImageClassifier().training_step(batch, 0)
    for batch in ({"input_ids": IDS}, (IDS, IDS, IDS)):
        with pytest.raises(UserError, match="the batch is .*: expected"):
            dclm.LanguageModel("dcformer_pp_debug", vocab_size=31).training_step(batch, 0)
    with pytest.raises(ValueError, match="targets"):
        decoder(IDS, targets=IDS.tolist())
