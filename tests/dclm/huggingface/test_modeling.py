"""DCFormer and DCPythia in Hugging Face transformers: logits, generation, training, LoRA and saving."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dclm

pytestmark = pytest.mark.slow  # importing transformers takes seconds
SHAPE = {"vocab_size": 97, "dim": 32, "num_layers": 3, "num_heads": 4, "mlp_dim": 48, "context_length": 64}
GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ["dcformer_pp_debug", "dcpythia_debug"]


def decoder(name="dcformer_pp_debug", **options) -> dclm.Decoder:
    torch.manual_seed(0)
    made = dclm.Decoder(dclm.decoder_config(name, **SHAPE | {"windows": (6, None)} | options))
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(20 if "compose" in key else 8)
    return made.eval()


@pytest.fixture
def transformers():
    import transformers

    import dclm.huggingface  # noqa: F401  registers the models

    return transformers


@pytest.fixture(params=NAMES)
def both(request, tmp_path, transformers):
    """Return a decoder, and the transformers model loaded from its published folder."""
    made = decoder(request.param)
    dclm.save_pretrained(made, tmp_path / "published")
    return made, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published")


def ids(*shape, seed=0):
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))


def left_padded():
    """Return two prompts of 13 and 20 tokens, padded on the left, and their attention mask."""
    input_ids, mask = ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    input_ids[0, :7], mask[0, :7] = 0, 0
    return input_ids, mask


@torch.no_grad()
def test_logits_equal_decoder_logits(both):
    ours, theirs = both
    input_ids = ids(2, 30)
    assert torch.equal(theirs(input_ids).logits, ours(input_ids))
    torch.testing.assert_close(theirs(input_ids, logits_to_keep=3).logits, ours(input_ids)[:, -3:])
    assert (theirs.config.hidden_size, theirs.config.max_position_embeddings) == (32, 64)


@pytest.mark.parametrize("name", ["dcformer_lg", "dcformer_mha", "dcpythia_parallel"])
@torch.no_grad()
def test_published_folders_of_the_authors_load(name, transformers):
    """The published code wrote these folders, which include its config fields and derived tensors."""
    folder = GOLDEN / name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model(ids(1, 12) % 20).logits, dclm.load_pretrained(folder, torch.float32)(ids(1, 12) % 20))


@torch.no_grad()
def test_padding_on_either_side_does_not_change_logits(both):
    ours, theirs = both
    input_ids, mask = ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = mask[0, 15:] = 0
    logits = theirs(input_ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[0, 7:15], ours(input_ids[:1, 7:15])[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1], ours(input_ids[1:])[0], rtol=1e-4, atol=1e-4)
    mask[1, 5] = 0
    with pytest.raises(ValueError, match="padding between tokens"):
        theirs(input_ids, attention_mask=mask)


def test_generate_matches_decoder_generation(both):
    ours, theirs = both
    input_ids, mask = left_padded()
    expected = dclm.generate(ours, [input_ids[0, 7:], input_ids[1]], 12)
    calls = []
    theirs.decoder.embed.register_forward_hook(lambda module, args, out: calls.append(args[0].shape[1]))
    got = theirs.generate(input_ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(got[0, 7:], expected[0]) and torch.equal(got[1], expected[1])
    assert calls == [20] + [1] * 11  # one call for the prompts, then one call per token with the cache


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_beam_search_with_cache_equals_beam_search_without_cache(both, options):
    _, theirs = both
    input_ids, mask = left_padded()
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0} | options
    cached = theirs.generate(input_ids, **options)
    assert torch.equal(cached, theirs.generate(input_ids, use_cache=False, **options))
    greedy = theirs.generate(input_ids, **options | {"num_beams": 1, "num_return_sequences": 1})
    assert not torch.equal(cached[: len(greedy)], greedy)


def test_sampling_varies_and_manual_cache_loop_matches_decoder(both):
    ours, theirs = both
    torch.manual_seed(0)
    sampled = theirs.generate(ids(1, 5), max_new_tokens=6, do_sample=True, num_return_sequences=4, pad_token_id=0)
    assert sampled.shape == (4, 11) and len({tuple(row) for row in sampled.tolist()}) > 1
    row, cache = ids(1, 9), None
    with torch.no_grad():
        for part in row.split([4, 1, 4], 1):
            out = theirs(part, cache=cache, use_cache=True)
            cache = out.cache
        torch.testing.assert_close(out.logits, ours(row)[:, -4:], rtol=1e-4, atol=1e-4)


def test_loss_matches_cross_entropy_of_shifted_labels(both):
    """Labels are shifted and -100 is ignored. The loss is the mean over the tokens or over an accumulated batch."""
    _, theirs = both
    input_ids = ids(2, 15)
    labels = input_ids.clone()
    labels[0, :5] = -100
    with torch.no_grad():
        out = theirs(input_ids, labels=labels)
        logits, targets = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(logits, targets))
        shared = theirs(input_ids, labels=labels, num_items_in_batch=50).loss
        torch.testing.assert_close(shared, out.loss * (targets != -100).sum() / 50)


def test_saved_folders_have_published_format(both, tmp_path, transformers):
    ours, theirs = both
    theirs.save_pretrained(tmp_path / "saved")
    again = dclm.load_pretrained(tmp_path / "saved")
    assert again.config == dclm.load_pretrained(tmp_path / "published").config
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in ours.state_dict().items())
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 == half.decoder.embed.weight.dtype
    content = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert content["model_type"] in ("dcformer", "dcpythia") and content["dim"] == 32


def test_new_models_are_initialized_like_decoders(transformers):
    from dclm.huggingface import DCFormerConfig

    config = DCFormerConfig.from_decoder_config(decoder().config)
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(config)
    assert made.decoder.config == replace(decoder().config, init_std=0.006)  # the format does not store init_std
    assert 0.004 < made.decoder.embed.weight.std() < 0.008
    assert 0 < made.decoder.blocks[0].attn.compose.project.std() < 0.01
    assert DCFormerConfig().rope_base == 10000 and DCFormerConfig(prefill_pad=True).rope_base == 500000


def test_gradient_checkpointing_does_not_change_gradients(both):
    _, theirs = both
    theirs.train()
    input_ids = ids(2, 12)

    def gradients():
        theirs.zero_grad()
        theirs(input_ids, labels=input_ids).loss.backward()
        return [parameter.grad.clone() for parameter in theirs.parameters()]

    plain = gradients()
    calls = []
    theirs.decoder.blocks[0].register_forward_pre_hook(lambda *args: calls.append(1))
    theirs.gradient_checkpointing_enable()
    for one, other in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(one, other)
    assert len(calls) == 2


def test_trainer_reduces_loss_and_its_checkpoint_loads(both, tmp_path, transformers):
    _, theirs = both
    data = [{"input_ids": row, "labels": row} for row in ids(16, 12)]
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        report_to=[],
        logging_steps=1,
        use_cpu=True,
        save_steps=6,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=theirs, args=options, train_dataset=data, eval_dataset=data[:4])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.5
    kept = dclm.load_pretrained(tmp_path / "run" / "checkpoint-6")
    with torch.no_grad():
        torch.testing.assert_close(kept(ids(1, 9)), theirs.eval()(ids(1, 9)).logits, rtol=1e-4, atol=1e-4)


def test_lora_trains_adapters_only_and_merges(both, tmp_path, transformers):
    import peft

    ours, theirs = both
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["qkv", "proj", "up", "down"])
    adapted = peft.get_peft_model(theirs, config)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    adapted.train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        out = adapted(input_ids=ids(4, 12), labels=ids(4, 12), attention_mask=torch.ones(4, 12, dtype=torch.long))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    assert losses[-1] < losses[0] - 0.2
    adapted.eval().save_pretrained(tmp_path / "adapter")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published")
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = adapted(input_ids=ids(1, 9)).logits
        torch.testing.assert_close(loaded(input_ids=ids(1, 9)).logits, expected)
        assert not torch.allclose(expected, ours(ids(1, 9)))
        merged = adapted.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        torch.testing.assert_close(dclm.load_pretrained(tmp_path / "merged")(ids(1, 9)), expected, rtol=1e-4, atol=1e-4)


def test_resize_token_embeddings_extends_vocabulary(both):
    _, theirs = both
    theirs.resize_token_embeddings(103)
    assert theirs.config.vocab_size == theirs.decoder.config.vocab_size == 103
    assert theirs(torch.tensor([[102, 5]])).logits.shape == (1, 2, 103)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(ids(1, 3), inputs_embeds=torch.ones(1, 3, 32)), "inputs_embeds: not supported"),
        (lambda m: m(ids(1, 3), output_attentions=True), "output_attentions: not supported"),
        (lambda m: m.generate(ids(1, 3), cache_implementation="static", max_new_tokens=2), "'static'; expected None"),
        (
            lambda m: m.generate(ids(1, 3), attention_mask=torch.tensor([[1, 1, 0]]), max_new_tokens=2),
            "padding after tokens",
        ),
    ],
)
def test_unsupported_arguments_are_rejected(both, call, message):
    with pytest.raises(ValueError, match=message):
        call(both[1])


def test_config_values_outside_the_format_are_rejected(transformers):
    from dclm.huggingface import DCFormerConfig, DCPythiaConfig

    with pytest.raises(ValueError, match="window_type='X' is unknown"):
        DCFormerConfig(window_type="X")
    with pytest.raises(ValueError, match="tie_word_embeddings=True; expected false"):
        DCFormerConfig(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="is of model_type='dcformer', not 'dcpythia'"):
        DCPythiaConfig.from_decoder_config(decoder().config)


def test_trainer_resumes_and_loads_best_checkpoint(both, tmp_path, transformers):
    """Checkpoints have the published format, which the trainer also loads into an existing model."""
    _, theirs = both
    data = [{"input_ids": row, "labels": row} for row in ids(16, 12)]
    common = {"per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 1}
    common |= {
        "learning_rate": 1e-2,
        "save_steps": 3,
        "lr_scheduler_type": "constant",
        "output_dir": str(tmp_path / "r"),
    }

    def train(model, resume=None, **options):
        args = transformers.TrainingArguments(**common | options)
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:4])
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    def fresh():
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published")

    whole = train(fresh(), max_steps=6)
    resumed = train(fresh(), resume=str(tmp_path / "r" / "checkpoint-3"), max_steps=6)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}
    kept = train(fresh(), max_steps=9, learning_rate=3.0, output_dir=str(tmp_path / "best"), **best)
    assert kept.evaluate()["eval_loss"] == pytest.approx(kept.state.best_metric, rel=1e-4)


def test_adapter_on_output_layer_is_trained(both):
    import peft

    _, theirs = both
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["output"]))
    with torch.no_grad():
        adapted.base_model.model.decoder.output.lora_B["default"].weight.normal_()
    adapted.eval()
    out = adapted(input_ids=ids(2, 12), labels=ids(2, 12))
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids(2, 12)[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    assert adapted.base_model.model.decoder.output.lora_A["default"].weight.grad.abs().sum() > 0


@torch.no_grad()
def test_inconsistent_arguments_with_cache_are_rejected(both):
    _, theirs = both
    row, mask = ids(1, 6), torch.ones(1, 6, dtype=torch.long)
    cache = theirs(row[:, :4], use_cache=True).cache
    for wrong, message in (
        (mask.index_fill(1, torch.tensor([0]), 0), "does not match the padding of the tokens in the cache"),
        (mask[:, :5], r"attention_mask is \[1, 5\]; expected a tensor \[1, 6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            theirs(row[:, 4:], cache=cache, attention_mask=wrong)
    with pytest.raises(ValueError, match="labels and cache cannot be combined"):
        theirs(row[:, 4:], cache=cache, labels=row[:, 4:])
    with pytest.raises(ValueError, match="cache is a DynamicCache"):
        from transformers import DynamicCache

        theirs(row, cache=DynamicCache())


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 4), torch.ones(2, 7), torch.ones(2, 5, 5), torch.full((2, 5), 0.5), "x"]
)
@pytest.mark.parametrize("use_cache", [False, True])
def test_invalid_attention_masks_are_rejected(both, mask, use_cache):
    _, model = both
    with pytest.raises(ValueError, match="attention_mask"):
        model(torch.ones(2, 5, dtype=torch.long), attention_mask=mask, use_cache=use_cache)


def test_invalid_labels_and_item_counts_are_rejected(both):
    _, model = both
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="num_items_in_batch=0"):
        model(ids, labels=ids, num_items_in_batch=0)
    with pytest.raises(ValueError, match=r"labels are \[2, 4\]; expected \[2, 5\]"):
        model(ids, labels=ids[:, :4])


@torch.no_grad()
def test_return_dict_logits_to_keep_config_overrides_and_repeated_saves_work(both, tmp_path, transformers):
    ours, theirs = both
    (logits,) = theirs(ids(1, 5), return_dict=False)
    assert torch.equal(logits, ours(ids(1, 5)))
    kept = theirs(ids(1, 5), logits_to_keep=torch.tensor([1, 3])).logits
    torch.testing.assert_close(kept, ours(ids(1, 5))[:, [1, 3]])  # products of fewer rows may be rounded differently
    wide = type(theirs).from_pretrained(tmp_path / "published", window_size=None)
    assert wide.decoder.config.windows == (None,)
    theirs.save_pretrained(tmp_path / "s", max_shard_size="20KB")
    theirs.save_pretrained(tmp_path / "s")
    dclm.load_pretrained(tmp_path / "s")


def test_exported_folder_includes_tokenizer_and_end_token(tmp_path, transformers):
    """The tokenizer of the run is exported, and the end token of documents ends the generation."""
    from dclm.commands import _write_tokenizer
    from dclm.data.tokenizers import train_bpe

    dclm.save_pretrained(decoder(vocab_size=300), tmp_path / "out")
    words = train_bpe(["a cat sat on a mat"] * 50, 300)
    _write_tokenizer(tmp_path / "out", words)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == words.eos_id
    prompts = tokenizer(["a cat", "a cat sat on"], return_tensors="pt", padding=True, padding_side="left")
    prompts.pop("token_type_ids", None)
    out = model.generate(**prompts, max_new_tokens=8, do_sample=False, stop_strings=["zz"], tokenizer=tokenizer)
    assert out.shape[0] == 2 and dclm.load_model(tmp_path / "out").tokenizer.eos_id == words.eos_id
