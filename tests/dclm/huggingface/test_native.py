"""Native format in Hugging Face transformers: grouped keys and values, single branches, masked models."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import dclm
from dclm.decoder import Decoder

from .test_modeling import decoder, ids, left_padded, transformers  # noqa: F401  transformers is a fixture

pytestmark = pytest.mark.slow  # importing transformers takes seconds
CAUSAL = {
    "llama with grouped keys": ("transformer_pp_debug", {"num_kv_heads": 2}),
    "composed with grouped keys": ("dcformer_pp_debug", {"num_kv_heads": 2}),
    "one branch": ("dcformer_pp_debug", {"rank": 0, "dynamic_gate": False, "static_base": True}),
    "groups": ("dcformer_debug", {"num_groups": 2, "rank": 1, "key_wise": False}),
    "pythia with windows": ("pythia_debug", {"windows": (5, 9, None)}),
    "learned positions": ("transformer_debug", {}),
}


def masked() -> Decoder:
    return decoder("dcformer_pp_debug", is_causal=False)


@pytest.fixture(params=CAUSAL)
def both(request, tmp_path, transformers):  # noqa: F811
    """Return a decoder, and the transformers model loaded from its native folder."""
    name, options = CAUSAL[request.param]
    made = decoder(name, **options)
    dclm.save_pretrained(made, tmp_path / "native", native=True)
    return made, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "native")


@torch.no_grad()
def test_logits_and_generation_equal_decoder_results(both):
    ours, theirs = both
    assert torch.equal(theirs(ids(2, 30)).logits, ours(ids(2, 30)))
    input_ids, mask = left_padded()
    expected = dclm.generate(ours, [input_ids[0, 7:], input_ids[1]], 12)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    got = theirs.generate(input_ids, **options)
    assert torch.equal(got[0, 7:], expected[0]) and torch.equal(got[1], expected[1])
    cached = theirs.generate(input_ids, **options, num_beams=3)
    assert torch.equal(cached, theirs.generate(input_ids, **options, num_beams=3, use_cache=False))


def test_saved_folders_load_with_dclm_and_transformers(both, tmp_path, transformers):  # noqa: F811
    ours, theirs = both
    theirs.save_pretrained(tmp_path / "saved")
    content = json.loads((tmp_path / "saved/config.json").read_text())
    assert content["model_type"] == "dclm" and content["architectures"] == ["DCLMForCausalLM"]
    again = dclm.load_pretrained(tmp_path / "saved")
    assert again.config == ours.config
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in ours.state_dict().items())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and loaded.config.max_position_embeddings == 64


def test_trainer_reduces_loss_and_resumes(tmp_path, transformers):  # noqa: F811
    dclm.save_pretrained(decoder("dcformer_pp_debug", num_kv_heads=2), tmp_path / "native", native=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    data = [{"input_ids": row, "labels": row} for row in ids(16, 12)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        use_cpu=True, save_steps=2, disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=theirs, args=args, train_dataset=data, eval_dataset=data[:4])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    trainer = transformers.Trainer(model=fresh, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    for one, other in zip(theirs.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_hidden_states_equal_block_inputs_and_outputs(both):
    ours, theirs = both
    out = theirs(ids(1, 9), output_hidden_states=True)
    assert len(out.hidden_states) == ours.config.num_layers + 1
    torch.testing.assert_close(ours.output(out.hidden_states[-1]), out.logits)
    made = []
    for block in ours.blocks:
        block.register_forward_hook(lambda module, args, output: made.append((args[0], output)))
    ours(ids(1, 9))
    for number, (given, output) in enumerate(made):
        assert torch.equal(given, out.hidden_states[number])
        following = output if number + 1 < len(made) else ours.norm(output)
        assert torch.equal(following, out.hidden_states[number + 1])
    assert theirs(ids(1, 9)).hidden_states is None
    with pytest.raises(ValueError, match="output_hidden_states=True is not supported with a cache"):
        theirs(ids(1, 9), output_hidden_states=True, use_cache=True)


def test_masked_model_logits_and_loss_match_decoder(tmp_path, transformers):  # noqa: F811
    ours = masked()
    dclm.save_pretrained(ours, tmp_path / "native", native=True)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "native")
    input_ids, labels = ids(2, 14), ids(2, 14, seed=1)
    labels[:, ::2] = -100
    with torch.no_grad():
        out = theirs(input_ids, labels=labels)
        assert torch.equal(out.logits, ours(input_ids))
        expected = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        torch.testing.assert_close(out.loss, expected)
        mask = torch.ones(2, 14, dtype=torch.long)
        mask[0, 10:] = 0
        logits = theirs(input_ids, attention_mask=mask).logits
        torch.testing.assert_close(logits[0, :10], ours(input_ids[:1, :10])[0], rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(tmp_path / "saved")
    assert dclm.load_pretrained(tmp_path / "saved").config == ours.config
    with pytest.raises(ValueError, match="is_causal=False: DCLMForCausalLM is for causal models"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "native")


def test_models_with_cross_attention_are_rejected(transformers):  # noqa: F811
    from dclm.huggingface import DCLMConfig

    with pytest.raises(ValueError, match="cross_layers=1"):
        DCLMConfig.from_decoder_config(decoder(context_dim=16, cross_layers=1).config)


def test_new_models_are_initialized_like_decoders(transformers):  # noqa: F811
    from dclm.huggingface import DCLMConfig

    config = DCLMConfig.from_decoder_config(decoder(num_kv_heads=2).config)
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(config)
    assert made.decoder.config == decoder(num_kv_heads=2).config
    assert 0.015 < made.decoder.embed.weight.std() < 0.025  # init_std of the debug model
    assert DCLMConfig(num_attention_heads=8, hidden_size=64).decoder_config().num_heads == 8


def test_tied_embeddings_are_rejected(transformers):  # noqa: F811
    from dclm.huggingface import DCLMConfig

    DCLMConfig(tie_word_embeddings=False)
    with pytest.raises(ValueError, match="tie_word_embeddings=True"):
        DCLMConfig(tie_word_embeddings=True)


@pytest.mark.parametrize(("change", "named"), [("missing", "output.weight"), ("unknown", "extra")])
def test_folder_with_missing_or_unknown_weights_is_rejected(tmp_path, change, named, transformers):  # noqa: F811
    """Missing weights raise an error; transformers alone would initialize them randomly with a warning."""
    from dclm.huggingface import DCLMConfig, DCLMForCausalLM

    model = DCLMForCausalLM(DCLMConfig())
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del weights[named]
    else:
        weights[named] = torch.zeros(1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{change} {named}"):
        DCLMForCausalLM.from_pretrained(tmp_path)
