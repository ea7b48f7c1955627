"""Decoder: parameter totals of the paper, initialization, causality, documents, loss, recomputation and options."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import dclm
from dclm.loss import token_loss
from dcmha import resolve_impl
from dctrain.activation_checkpointing import set_recompute
from tests.dcmha.inputs import relative_error

SMALL = {"vocab_size": 61, "dim": 32, "num_heads": 4, "num_layers": 3, "mlp_dim": 48, "context_length": 24}
NAMES = [name for name in dclm.CONFIGS if name.endswith("debug")]


def small(name: str, seed: int = 0, **overrides) -> dclm.Decoder:
    """Return a tiny float64 decoder whose compose weights are large enough to affect the logits."""
    torch.manual_seed(seed)
    overrides = SMALL | ({"windows": (4, None)} if name.startswith("dc") else {}) | overrides
    decoder = dclm.Decoder(dclm.decoder_config(name, **overrides)).double()
    with torch.no_grad():
        for key, parameter in decoder.named_parameters():
            if key.endswith("compose.project"):
                parameter.mul_(100)
            elif key.endswith("compose.gate"):
                parameter.mul_(10)
            elif parameter.dim() > 1 and "compose" not in key:
                parameter.mul_(5)
    return decoder


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(SMALL["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


# The ++ totals and the dynamic parameters are counted by hand from the architecture of the paper. The 2.8B model is the
# published DCFormer-2.8B (2,849,567,232 parameters with composition), and DCPythia-6.9B has the published total of
# 6,941,859,840. The totals of GPT-3 style and Pythia models are 2VC + L(12C^2 + 13C) + 2C, plus 2048C for learned
# positions.
TOTALS = {
    "transformer_405m": 407_334_912,
    "transformer_834m": 837_494_784,
    "transformer_1b4": 1_418_649_600,
    "transformer_pp_405m": 411_257_856,
    "transformer_pp_834m": 833_942_016,
    "transformer_pp_1b4": 1_439_078_400,
    "transformer_pp_2b8": 2_795_036_160,
    "transformer_pp_6b9": 6_887_976_960,
    "transformer_pp_13b": 13_202_816_000,
    "transformer_pp_33b": 32_771_980_800,
    "pythia_2b8": 2_774_968_320,
    "pythia_6b9": 6_855_868_416,
    "pythia_12b": 11_841_658_880,
}
DYNAMIC = {
    "405m": 8_260_608,
    "834m": 18_582_528,
    "1b4": 33_033_216,
    "2b8": 54_531_072,
    "6b9": 85_991_424,
    "12b": 151_151_616,
    "13b": 167_946_240,
    "33b": 425_733_120,
}


def count(config: dclm.DecoderConfig) -> int:
    return sum(p.numel() for p in dclm.Decoder(config, device="meta").parameters())


@pytest.mark.parametrize("name", TOTALS)
def test_parameter_totals_match_paper(name):
    assert count(dclm.CONFIGS[name]) == TOTALS[name]
    composed = name.replace("transformer", "dcformer").replace("pythia", "dcpythia")
    assert count(dclm.CONFIGS[composed]) == TOTALS[name] + DYNAMIC[name.rsplit("_", 1)[1]]
    twin = replace(dclm.CONFIGS[composed], pre_compose=False, post_compose=False, qk_norm=False, windows=(None,))
    assert twin == dclm.CONFIGS[name]


def test_parameter_totals_match_architecture_formula():
    for name, total in TOTALS.items():
        config = dclm.CONFIGS[name]
        V, C, L = config.vocab_size, config.dim, config.num_layers
        if config.mlp == "gelu":
            expected = 2 * V * C + L * (12 * C**2 + 13 * C) + 2 * C + (2048 * C if config.position == "learned" else 0)
        else:
            expected = 2 * V * C + L * (4 * C**2 + 3 * C * config.mlp_dim + 2 * C) + C
        assert expected == total, name


def test_debug_models_return_finite_logits_and_all_gradients():
    for name in NAMES:
        decoder = small(name)
        assert decoder.config.is_composed == name.startswith("dc")
        logits = decoder(ids(2, 9))
        assert logits.shape == (2, 9, 61) and logits.isfinite().all()
        loss = decoder(ids(2, 9), targets=ids(2, 9, seed=2))
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in decoder.parameters()), name


@pytest.mark.parametrize("name", [name for name, config in dclm.CONFIGS.items() if config.is_composed])
def test_every_composed_model_resolves_to_triton_kernels(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = dclm.CONFIGS[name]
    with FakeTensorMode():
        q = torch.empty(1, config.num_heads, 2048, 64, device="cuda", dtype=torch.bfloat16)
    assert resolve_impl("auto", q, is_composed=True, num_groups=config.num_groups).impl == "triton"


def test_initialization_has_expected_standard_deviations():
    torch.manual_seed(0)
    decoder = dclm.Decoder(dclm.decoder_config("dcformer_pp_405m", num_layers=1, vocab_size=2000))
    C, H = 1024, 16
    expected = {
        "embed.weight": 0.006,
        "output.weight": 0.006,
        "blocks.0.attn.qkv.weight": 0.006,
        "blocks.0.attn.proj.weight": 0.006,
        "blocks.0.mlp.down.weight": 0.006,
        "blocks.0.attn.compose.hidden": math.sqrt(2 / (C + 4 * H)),
        "blocks.0.attn.compose.project": 0.02 / (math.sqrt(4 * H) * (H + 2)),
        "blocks.0.attn.compose.gate": 0.05 * math.sqrt(2 / (C + H)),
    }
    parameters = dict(decoder.named_parameters())
    for name, std in expected.items():
        assert abs(parameters[name].std() / std - 1) < 0.03, name
    pythia = dict(dclm.Decoder(dclm.decoder_config("dcpythia_debug")).named_parameters())
    for name, std in {
        "embed.weight": math.sqrt(2 / (5 * 128)),
        "blocks.1.mlp.up.weight": math.sqrt(2 / (5 * 128)),
        "blocks.1.mlp.down.weight": 2 / (4 * math.sqrt(128)),
        "blocks.1.attn.proj.weight": 2 / (4 * math.sqrt(128)),
    }.items():
        assert abs(pythia[name].std() / std - 1) < 0.03, name
    assert pythia["blocks.1.mlp.up.bias"].abs().sum() == 0


@pytest.mark.parametrize("impl", ["reference", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_later_tokens_do_not_change_earlier_logits(name, impl):
    decoder = small(name, impl=impl)
    a, b = ids(2, 17), ids(2, 17)
    b[:, 9:] = (b[:, 9:] + 1) % 61
    first, second = decoder(a), decoder(b)
    assert torch.equal(first[:, :9], second[:, :9])
    assert (first[:, 9:] != second[:, 9:]).any(-1).all()


@pytest.mark.parametrize("impl", ["reference", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_independent(name, impl):
    """The logits of a document equal those of the document alone, and other documents receive no gradient."""
    decoder = small(name, impl=impl)
    lengths = [[7, 1, 9], [4, 12, 1]]
    document_ids = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in lengths])
    packed_ids = ids(2, 17)
    packed = decoder(packed_ids, document_ids=document_ids)
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            part = slice(start, start + length)
            alone = decoder(packed_ids[row : row + 1, part])[0]
            torch.testing.assert_close(packed[row, part], alone, rtol=1e-11, atol=1e-11)
            start += length
    embedded = []
    decoder.embed.register_forward_hook(lambda module, args, out: embedded.append(out.retain_grad() or out))
    decoder(packed_ids, document_ids=document_ids)[0, 8:].sum().backward()
    reached = embedded[0].grad.abs().sum(-1)[0] > 0
    assert reached.tolist() == [False] * 8 + [True] * 9


@pytest.mark.parametrize("choice", ["attention", "block"])
@pytest.mark.parametrize("name", ["dcformer_pp_debug", "dcpythia_debug", "pythia_debug"])
def test_recomputation_does_not_change_gradients(name, choice):
    decoder = small(name)
    decoder(ids(2, 9), targets=ids(2, 9, seed=2)).backward()
    expected = {key: p.grad for key, p in decoder.named_parameters()}
    decoder.zero_grad()
    set_recompute(decoder, choice)
    decoder(ids(2, 9), targets=ids(2, 9, seed=2)).backward()
    for key, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-12, atol=1e-14, msg=key)


@pytest.mark.parametrize("chunk_logits", [50 * 7, 50 * 1000])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_chunked_loss_equals_cross_entropy(chunk_logits, is_compiled):
    loss = partial(token_loss, chunk_logits=chunk_logits)
    if is_compiled:
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    hidden = torch.randn(3, 8, 16, dtype=torch.float64, requires_grad=True)
    output = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(50, (3, 8))
    targets[0, :5] = targets[2, 7] = -100
    expected = F.cross_entropy((hidden @ output.T).flatten(0, 1), targets.flatten())
    expected_grads = torch.autograd.grad(expected, (hidden, output))
    got = loss(hidden, output, targets)
    torch.testing.assert_close(got, expected)
    for a, b in zip(torch.autograd.grad(got, (hidden, output)), expected_grads, strict=True):
        torch.testing.assert_close(a, b)
    assert loss(hidden, output, torch.full_like(targets, -100)) == 0


def test_loss_computes_logits_in_chunks(monkeypatch):
    sizes = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: sizes.append(len(x)) or linear(x, w))
    token_loss(torch.randn(3, 8, 16), torch.randn(50, 16), torch.randint(50, (3, 8)), chunk_logits=50 * 7)
    assert max(sizes) == 7 and sum(sizes) == 24


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("chunk_logits", [300 * 50, 300 * 1000])
def test_loss_does_not_round_logits_to_bfloat16(chunk_logits, is_autocast):
    torch.manual_seed(0)
    hidden, output = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((2, 64, 32), (300, 32)))
    targets = torch.randint(300, (2, 64))
    exact = [x.double().requires_grad_() for x in (hidden, output)]
    expected = F.cross_entropy((exact[0] @ exact[1].T).flatten(0, 1), targets.flatten())
    expected.backward()
    operands = [(x.float() if is_autocast else x).requires_grad_() for x in (hidden, output)]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        loss = token_loss(*operands, targets, chunk_logits=chunk_logits)
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss - expected) < 1e-5
    for x, y in zip(operands, exact, strict=True):
        assert relative_error(x.grad.double(), y.grad) < 4e-3


def test_windows_repeat_over_the_layers():
    config = dclm.decoder_config("dcformer_pp_debug", num_layers=9, windows=[256, 256, 256, None])
    assert config.layer_windows == [256, 256, 256, None, 256, 256, 256, None, 256]
    assert [b.attn.window for b in dclm.Decoder(config, device="meta").blocks] == config.layer_windows
    assert dclm.CONFIGS["dcformer_405m"].layer_windows == [256, None] * 12


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_groups": 2},
        {"key_wise": False},
        {"query_wise": False},
        {"post_compose": False},
        {"rank": 0, "dynamic_gate": False, "static_base": True},
        {"mlp_groups": 4},
        {"rotary_fraction": 0.5},
    ],
    ids=str,
)
def test_options_change_logits_and_all_parameters_have_gradients(overrides):
    """Each option changes the logits, and every parameter receives a gradient."""
    plain, changed = small("dcformer_pp_debug"), small("dcformer_pp_debug", **overrides)
    assert not torch.allclose(plain(ids(1, 9)), changed(ids(1, 9)))
    changed(ids(2, 9), targets=ids(2, 9, seed=2)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in changed.parameters())


@pytest.mark.parametrize(
    ("tokens", "recompute", "backend"),
    [
        pytest.param(9, True, "aot_eager", marks=pytest.mark.slow, id="short"),
        pytest.param(9, False, "inductor", marks=pytest.mark.long, id="short-inductor"),
        pytest.param(300, True, "inductor", marks=pytest.mark.long, id="long-inductor"),
    ],
)
def test_fullgraph_compilation_matches_eager_loss_and_gradients(tokens, recompute, backend):
    """Attention is computed in chunks for long sequences."""
    decoder = small("dcformer_pp_debug", num_layers=2, windows=(40, None)).float()
    text, targets = ids(2, tokens), ids(2, tokens, seed=2)
    expected = decoder(text, targets=targets)
    expected.backward()
    grads = {key: p.grad for key, p in decoder.named_parameters()}
    decoder.zero_grad()
    keys = list(decoder.state_dict())
    decoder.set_grad_checkpointing(recompute)
    decoder.compile(fullgraph=True, backend=backend)
    loss = decoder(text, targets=targets)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for key, parameter in decoder.named_parameters():
        assert relative_error(parameter.grad, grads[key]) < 1e-4, key
    assert list(decoder.state_dict()) == keys


@pytest.mark.slow
def test_compiled_scores_match_eager_scores():
    """The scores match for any number of valid targets, and new numbers cause no further recompilation."""
    decoder = small("dcformer_pp_debug", num_layers=2).eval()
    text = ids(2, 30)
    rows = [ids(2, 30, seed=2).masked_fill(text % 5 < part, -100) for part in (1, 2, 3, 4, 0)]
    expected = [decoder(text, targets=targets, per_token=True) for targets in rows]
    counter = CompileCounter()
    decoder.compile(backend=counter)
    frames = []
    for targets, (log_likelihoods, is_greedy) in zip(rows, expected, strict=True):
        scores = decoder(text, targets=targets, per_token=True)
        assert torch.equal(scores.is_greedy, is_greedy)
        torch.testing.assert_close(scores.log_likelihoods, log_likelihoods)
        frames.append(counter.frame_count)
    assert frames[-1] == frames[1]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("dcformer_pp_405", {}, "model 'dcformer_pp_405' is unknown; expected transformer_debug"),
        ("dcformer_pp_405m", {"widnows": [1]}, r"unknown fields \['widnows'\]"),
        ("dcformer_pp_405m", {"num_heads": 5}, "dim=1024 must be divisible by num_heads=5"),
        ("dcformer_pp_405m", {"windows": []}, r"windows=\[\] must have at least one entry"),
        ("dcformer_pp_405m", {"windows": [0]}, r"windows=\[0\] must have"),
        ("dcformer_pp_405m", {"mlp_groups": 5}, "mlp_groups=5 must be 0 or divide mlp_dim=2816"),
        ("dcpythia_2b8", {"rotary_fraction": 0.01}, "rotary_fraction=0.01 of head dim 80 is 0 channels"),
        ("dcpythia_2b8", {"num_groups": 3}, "num_groups=3 must be a positive divisor of num_heads=32"),
        ("dcpythia_2b8", {"num_kv_heads": 5}, "num_kv_heads=5 must be a positive divisor of num_heads=32"),
        ("dcpythia_2b8", {"impl": "merged"}, "impl='merged' is unknown; expected 'auto'"),
        ("dcpythia_2b8", {"norm": "batch"}, "norm='batch'; expected 'layer', 'rms'"),
        ("dcpythia_2b8", {"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ("dcpythia_2b8", {"norm_eps": -1}, "norm_eps=-1"),
        ("dcpythia_2b8", {"rotary_base": 0}, "rotary_base=0"),
        ("dcpythia_2b8", {"init_std": -1.0}, "init_std=-1.0"),
        ("dcpythia_2b8", {"init_std": "x"}, "init_std='x' must be of type float or None"),
        ("dcpythia_2b8", {"num_layers": "12"}, "num_layers='12' must be of type int"),
        ("dcpythia_2b8", {"num_layers": True}, "num_layers=True must be of type int"),
        ("dcpythia_2b8", {"key_wise": 0}, "key_wise=0 must be of type bool"),
        ("dcpythia_2b8", {"norm_eps": "small"}, "norm_eps='small' must be of type float"),
        ("dcpythia_2b8", {"windows": 256}, "windows=256 must be a list of numbers and nulls"),
        ("dcpythia_2b8", {"windows": ["256"]}, r"windows=\['256'\] must be a list of numbers"),
    ],
)
def test_invalid_configuration_raises_value_error(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        dclm.decoder_config(name, **overrides)


@torch.no_grad()
def test_invalid_input_raises_value_error():
    decoder = small("transformer_debug")
    with pytest.raises(ValueError, match="25 tokens exceed the position table of 24"):
        decoder(ids(1, 25))
    for wrong, message in (
        (ids(9), r"input_ids has shape \[9\] and dtype torch.int64; expected \[B, T\]"),
        (ids(1, 9).float(), "dtype torch.float32; expected"),
        (ids(1, 9) + 61, "input_ids has token .*; expected 0 to 60"),
        (ids(1, 9) - 61, "input_ids has token -"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder(wrong)
    for name in ("targets", "document_ids"):
        for wrong in (ids(9, 2), ids(2, 9).int(), ids(9)):
            with pytest.raises(ValueError, match=f"{name} has shape .*; expected that of input_ids, "):
                decoder(ids(2, 9), **{name: wrong})
    assert torch.equal(decoder(ids(2, 9).int()), decoder(ids(2, 9)))
    cache = decoder.make_cache(6)
    decoder.decode(ids(1, 5), cache)
    with pytest.raises(ValueError, match="the cache holds 6 tokens; 5 are used and 2 more do not fit"):
        decoder.decode(ids(1, 2), cache)
