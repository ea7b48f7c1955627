"""GPT-NeoX and Llama checkpoints: logits of models that transformers saved, older formats and error messages."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import dclm
from tests.dcmha.inputs import relative_error

SIZES = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4} | {
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
VARIANTS = {
    "pythia": ("GPTNeoX", {"rotary_pct": 0.34}),
    "sequential": ("GPTNeoX", {"rotary_pct": 1.0, "use_parallel_residual": False}),
    "llama": ("Llama", {}),
    "grouped": ("Llama", {"num_key_value_heads": 2, "rope_theta": 500.0}),
    "biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "sliding_window": 7}),
}


def theirs(kind: str, **options):
    """Return a random Hugging Face model in which every parameter affects the logits."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES | options))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    return model.eval()


@pytest.mark.slow  # importing transformers takes seconds
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_logits_match_transformers(name, tmp_path):
    kind, options = VARIANTS[name]
    model = theirs(kind, **options)
    model.save_pretrained(tmp_path)
    decoder = dclm.load_pretrained(tmp_path)
    assert not decoder.config.is_composed and not decoder.training
    input_ids = torch.randint(61, (2, 37), generator=torch.Generator().manual_seed(1))
    assert relative_error(decoder(input_ids), model(input_ids).logits) < 3e-6
    assert decoder.config.layer_windows == [options.get("sliding_window")] * 3


def saved(folder, model_type="gpt_neox"):
    """Save a decoder with the config fields and tensors of older versions of transformers, and return it."""
    torch.manual_seed(0)
    if model_type == "gpt_neox":
        config = SIZES | {"rotary_pct": 0.25, "rotary_emb_base": 10000, "hidden_size": 32, "attention_dropout": 0.0}
        decoder = dclm.Decoder(dclm.decoder_config("pythia_debug", **shape(config)))
        top = ("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out")
    else:
        config = SIZES | {"hidden_size": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "pretraining_tp": 1}
        decoder = dclm.Decoder(dclm.decoder_config("transformer_pp_debug", **shape(config)))
        top = ("model.embed_tokens", "model.norm", "lm_head")
    from dclm.hub.neox_llama import weights_to_huggingface

    weights = weights_to_huggingface(decoder.state_dict(), decoder.config)
    assert {f"{name}.weight" for name in top} <= set(weights)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type, "torch_dtype": "float32"}))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return decoder


def shape(config):
    return {
        "dim": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "mlp_dim": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
    }


@pytest.mark.parametrize("model_type", ["gpt_neox", "llama"])
@torch.no_grad()
def test_older_field_and_tensor_names_are_loaded(model_type, tmp_path):
    decoder = saved(tmp_path, model_type)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    layer = "gpt_neox.layers.0.attention" if model_type == "gpt_neox" else "model.layers.0.self_attn"
    weights |= {f"{layer}.rotary_emb.inv_freq": torch.ones(4)}
    if model_type == "gpt_neox":
        weights |= {f"{layer}.bias": torch.ones(1, 1, 4, 4), f"{layer}.masked_bias": torch.tensor(-1e9)}
        weights["lm_head.weight"] = weights.pop("embed_out.weight")
    else:
        joined = f"{layer}.qkv_proj.weight"
        weights |= {
            f"{layer}.{letter}_proj.weight": part.contiguous()
            for letter, part in zip("qkv", weights.pop(joined).chunk(3), strict=True)
        }
    save_file(weights, path)
    loaded = dclm.load_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in decoder.state_dict().items())


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt_neox", {"hidden_act": "gelu_new"}, "hidden_act='gelu_new'; expected \"gelu\""),
        ("gpt_neox", {"attention_bias": False}, "attention_bias=False; expected true"),
        ("gpt_neox", {"rotary_emb_base": "big"}, "rotary_emb_base='big' must be of type int or float"),
        ("gpt_neox", {"quantization_config": {}}, r"unknown fields \['quantization_config'\]"),
        ("gpt_neox", {"hidden_size": None}, "hidden_size=None must be of type int"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has rope_type='linear'; expected"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear"}},
            "rope_scaling has rope_type='linear'",
        ),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "beta_fast": 2}}, r"unknown fields \['beta_fast'\]"),
        ("llama", {"head_dim": 16}, "head_dim=16; expected null or 8"),
        ("llama", {"attention_bias": True}, "attention_bias=True and mlp_bias=False; expected equal values"),
        ("llama", {"num_key_value_heads": 3}, "num_kv_heads=3 must be a positive divisor"),
        ("llama", {"num_key_value_heads": 2}, r"qkv_proj.weight is \[96, 32\], not \[64, 32\]"),
    ],
)
def test_unsupported_config_raises_value_error(model_type, changes, message, tmp_path):
    saved(tmp_path, model_type)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        dclm.load_pretrained(tmp_path)


@pytest.mark.parametrize(("model_type", "output"), [("gpt_neox", "embed_out"), ("llama", "lm_head")])
@pytest.mark.filterwarnings("ignore")
def test_missing_output_is_tied_only_if_config_ties_embeddings(model_type, output, tmp_path):
    saved(tmp_path, model_type)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights[f"{output}.weight"]
    save_file(weights, path)
    with pytest.raises(ValueError, match=f"missing {output}.weight"):
        dclm.load_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoder = dclm.load_pretrained(tmp_path)
    assert torch.equal(decoder.output.weight, decoder.embed.weight)


def test_mistral_window_defaults_to_4096(tmp_path):
    saved(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "mistral"}))
    assert dclm.load_pretrained(tmp_path).config.windows == (4096,)


def test_missing_config_field_raises_value_error(tmp_path):
    saved(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["num_hidden_layers"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"config.json: the fields \['num_hidden_layers'\] are missing"):
        dclm.load_pretrained(tmp_path)
