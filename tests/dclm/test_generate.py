"""Generation: the cache, batches of prompts of unequal lengths, sampling, stop tokens and compilation."""

import pytest
import torch

import dclm
from dclm.generate import check_prompts, stream
from dclm.sampling import Sampling
from dcmha import composed_attention, layer

from .test_decoder import NAMES, ids, small


def recomputed_greedy(decoder: dclm.Decoder, prompt: torch.Tensor, count: int) -> torch.Tensor:
    row = prompt[None]
    for _ in range(count):
        row = torch.cat([row, decoder(row)[:, -1:].argmax(-1)], 1)
    return row[0]


@pytest.mark.parametrize("window", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 8, 11])
@torch.no_grad()
def test_cached_logits_match_full_forward(prompt, window):
    """Covers prompt lengths and windows, with calls of one, few and many tokens."""
    decoder = small("dcformer_pp_debug", windows=(window, None))
    text = ids(2, 33)
    full = decoder(text)
    for parts in ([prompt] + [1] * (33 - prompt), [prompt, 2, 8, 1, 33 - prompt - 11], [prompt, 9, 8, 3]):
        parts += [33 - sum(parts)] * (sum(parts) < 33)
        cache = decoder.make_cache(33)
        got = torch.cat([decoder.decode(part, cache) for part in text.split(parts, 1)], 1)
        torch.testing.assert_close(got, full, rtol=1e-10, atol=1e-10)


def test_numpy_token_ids_are_accepted_as_prompts():
    """Tokenizers return NumPy arrays of the smallest integer dtype."""
    decoder, prompt = small("dcformer_pp_debug"), ids(1, 5)
    expected = dclm.generate(decoder, prompt, 3)
    given = [prompt[0].numpy().astype(dtype) for dtype in ("uint8", "uint16")]
    for got in dclm.generate(decoder, given, 3):
        assert torch.equal(got, expected[0])


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((name, {}) for name in NAMES),
        ("dcformer_pp_debug", {"num_groups": 2}),
        ("dcformer_pp_debug", {"key_wise": False}),
        ("dcformer_pp_debug", {"num_kv_heads": 1}),
        ("dcformer_pp_debug", {"query_wise": False, "post_compose": False}),
        ("dcformer_pp_debug", {"rank": 0, "static_base": True}),
        ("dcformer_pp_debug", {"dynamic_gate": False, "impl": "reference"}),
        ("dcformer_pp_debug", {"windows": (3, 3, 5)}),
    ],
    ids=str,
)
@torch.no_grad()
def test_batch_of_unequal_prompts_matches_single_prompts(name, overrides):
    decoder = small(name, **overrides)
    prompts = [ids(length, seed=length) for length in (1, 6, 3, 11)]
    rows = dclm.generate(decoder, prompts, 9)
    for prompt, row in zip(prompts, rows, strict=True):
        assert torch.equal(row, recomputed_greedy(decoder, prompt, 9))
    padding = torch.tensor([11 - len(prompt) for prompt in prompts])
    cache = decoder.make_cache(20, padding)
    logits = decoder.decode(torch.stack([torch.nn.functional.pad(p, (11 - len(p), 0)) for p in prompts]), cache)
    next_ids = torch.stack([row[len(p)] for p, row in zip(prompts, rows, strict=True)])[:, None]
    next_logits = decoder.decode(next_ids, cache)
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        alone = decoder(row[None, : len(prompt) + 1])[0]
        got = torch.cat([logits[number, 11 - len(prompt) :], next_logits[number]])
        torch.testing.assert_close(got, alone, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_cache_stores_low_rank_factors_and_only_the_window():
    decoder = small("dcformer_pp_debug")
    cache = decoder.make_cache(20)
    decoder.decode(ids(2, 5), cache)
    H, D, R = 4, 8, 2
    for part, size in zip(cache.layers, (4 + 7, 20, 4 + 7), strict=True):  # windows have space for 8 tokens per call
        kept = sum(tensor[0].numel() for tensor in part.kept)
        assert kept == size * (2 * H * D + 2 * (2 * R + 1) * H)
    query_wise = small("dcformer_pp_debug", key_wise=False)
    cache = query_wise.make_cache(20)
    query_wise.decode(ids(2, 5), cache)
    assert sum(tensor[0].numel() for tensor in cache.layers[0].kept) == (4 + 7) * 2 * H * D


@pytest.mark.slow
@torch.no_grad()
def test_few_tokens_use_cache_buffers_without_copy(monkeypatch):
    """Tensors of the length of the cache are not copied between calls, in particular for the fused kernels."""
    seen = []

    def attend(q, k, v, pre, post, **options):
        seen.append((k, v, *(part for weights in (pre, post) for part in weights.key)))
        return composed_attention(q, k, v, pre, post, **options)

    monkeypatch.setattr(layer, "composed_attention", attend)
    decoder = small("dcformer_pp_debug", windows=(3, None), impl="triton").float()
    text = ids(2, 16)
    full = decoder(text)
    cache = decoder.make_cache(16)
    parts = [5, 1, 2, 8]
    got = torch.cat([decoder.decode(part, cache) for part in text.split(parts, 1)], 1)
    torch.testing.assert_close(got, full, rtol=1e-4, atol=1e-4)
    for kept, given in zip([part.kept for part in cache.layers] * 3, seen[2 * len(cache.layers) :], strict=True):
        assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in given]


@torch.no_grad()
def test_recorded_step_matches_full_forward_at_later_tokens():
    """A step that is recorded once after a warm-up call, as in a CUDA graph, is correct at all later tokens."""
    from torch.fx.experimental.proxy_tensor import make_fx

    decoder = small("dcformer_pp_debug", impl="compiled")
    text, device = ids(2, 16), torch.device("cpu")
    full, cache = decoder(text), decoder.make_cache(16)
    decoder.decode(text[:, :6], cache)
    positions = cache.advance(2, 1, device)
    decoder.step(text[:, 6:7], positions, cache)
    recorded = make_fx(lambda tokens, positions: decoder.step(tokens, positions, cache))(text[:, 6:7], positions)
    for number in range(7, 16):
        got = recorded(text[:, number : number + 1], cache.advance(2, 1, device))
        torch.testing.assert_close(got, full[:, number : number + 1], rtol=1e-10, atol=1e-10)


def test_cache_rejects_gradients_and_inference_tensors():
    decoder = small("dcformer_pp_debug")
    with pytest.raises(ValueError, match=r"require a gradient, which a cache does not support; .* torch.no_grad"):
        decoder.decode(ids(1, 3), decoder.make_cache(9))
    cache = decoder.make_cache(9)
    with torch.inference_mode():
        decoder.decode(ids(1, 3), cache)
    with torch.no_grad(), pytest.raises(ValueError, match="was created within torch.inference_mode"):
        decoder.decode(ids(1, 3), cache)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_step_matches_eager_step_and_compiles_once():
    from torch._dynamo.testing import CompileCounter

    decoder = small("dcformer_pp_debug", num_layers=2).float()
    prompts = [ids(3), ids(6)]
    expected = dclm.generate(decoder, prompts, 12)
    torch._dynamo.reset()
    compiled = dclm.generate(decoder, prompts, 12, compile=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled, expected, strict=True))
    counter = CompileCounter()
    step = torch.compile(decoder.step, backend=counter, fullgraph=True)
    cache = decoder.make_cache(20)
    decoder.decode(ids(2, 4), cache)
    for number in range(10):
        step(ids(2, 1, seed=number), cache.advance(2, 1, torch.device("cpu")), cache)
    assert counter.frame_count == 1


@pytest.mark.long
@torch.no_grad()
def test_compiled_generation_of_many_sizes_matches_eager_generation():
    """The number of prompt sizes in one process exceeds the recompilation limit of torch."""
    torch._dynamo.reset()
    decoder = small("dcformer_pp_debug", num_layers=2).float()
    for number, lengths in enumerate([[3], [5], [1, 4], [7], [9, 9, 2], [11], [12, 3], [13], [14], [2, 2], [6], [8]]):
        prompts = [ids(length, seed=number) for length in lengths]
        compiled = dclm.generate(decoder, prompts, 3 + number % 4, compile=True)
        eager = dclm.generate(decoder, prompts, 3 + number % 4)
        assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True)), lengths


@torch.no_grad()
def test_failed_call_preserves_or_invalidates_cache():
    decoder = small("dcformer_pp_debug")
    text = ids(2, 12)
    cache = decoder.make_cache(12)
    decoder.decode(text[:, :6], cache)
    for wrong, message in (
        (text[:, :1] + 100, "input_ids has token 159"),
        (text[:1, :1], "the cache has 2 rows; got 1"),
        (text[:, :1].float(), "dtype torch.float32; expected"),
        (text[:, :7], "6 are used and 7 more do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.decode(wrong, cache)
    rest = torch.cat([decoder.decode(part, cache) for part in text[:, 6:11].split(1, 1)], 1)
    torch.testing.assert_close(rest, decoder(text)[:, 6:11], rtol=1e-10, atol=1e-10)
    decoder.norm = None
    with pytest.raises(TypeError):
        decoder.decode(text[:, 11:], cache)
    with pytest.raises(ValueError, match="an earlier call failed and left the cache incomplete"):
        decoder.decode(text[:, 11:], cache)


@torch.no_grad()
def test_cache_of_different_dtype_is_rejected():
    decoder = small("dcformer_pp_debug")
    cache = decoder.make_cache(9)
    decoder.decode(ids(2, 3), cache)
    with pytest.raises(ValueError, match="the cache holds torch.float64; got torch.float32"):
        decoder.float().decode(ids(2, 1), cache)


def test_cache_of_different_model_is_rejected():
    cache = small("dcformer_pp_debug").make_cache(9)
    with pytest.raises(ValueError, match="the cache does not match the model's layers or windows"):
        small("dcformer_pp_debug", windows=(None,)).decode(ids(1, 3), cache)
    with pytest.raises(ValueError, match="capacity=0"):
        small("dcformer_pp_debug").make_cache(0)


def test_stop_token_ends_each_row_at_its_first_occurrence():
    decoder = small("dcformer_pp_debug")
    prompts = ids(2, 4)
    free = dclm.generate(decoder, prompts, 12)
    assert free.shape == (2, 16)
    stop = int(free[0, 7])
    first = [4 + int((free[row, 4:] == stop).nonzero()[0]) if (free[row, 4:] == stop).any() else 15 for row in (0, 1)]
    assert first[0] < 15
    rows = dclm.generate(decoder, list(prompts), 12, stop_tokens=[stop])
    for row in (0, 1):
        assert torch.equal(rows[row], free[row, : first[row] + 1])
    padded = dclm.generate(decoder, prompts, 12, stop_tokens=[stop])
    assert padded.shape[1] == max(first) + 1
    assert (padded[0, first[0] :] == stop).all()


def test_stream_yields_one_token_per_forward_call():
    decoder = small("dcformer_pp_debug")
    calls = []
    decoder.embed.register_forward_hook(lambda *args: calls.append(1))
    steps = stream(decoder, check_prompts(decoder, ids(1, 4), 5), 5, Sampling())
    for expected in range(1, 6):
        next(steps)
        assert len(calls) == expected
    with pytest.raises(StopIteration):
        next(steps)
    assert torch.equal(dclm.generate(decoder, ids(1, 4), 0), ids(1, 4))


def test_sampling_matches_temperature_top_k_and_top_p_distributions():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0]])
    p = Sampling(temperature=2.0).probabilities(logits)
    torch.testing.assert_close(p, (logits / 2).softmax(-1))
    top2 = Sampling(temperature=1.0, top_k=2).probabilities(logits)
    torch.testing.assert_close(top2[0, [0, 4]], logits[0, [0, 4]].softmax(-1))
    assert top2[0, 1:4].sum() == 0
    wide = 4 * torch.randn(1, 50257, generator=torch.Generator().manual_seed(0))
    assert (Sampling(temperature=1.0, top_p=1.0).probabilities(wide) > 0).all()
    for tiny in (Sampling(temperature=1e-42), Sampling(temperature=1e-300), Sampling(temperature=1.0, top_p=1e-300)):
        assert tiny.probabilities(logits)[0].tolist() == [0, 0, 0, 0, 1]
    full = logits.softmax(-1)[0]  # 0.636 (4), 0.234 (0), 0.086 (1), ...
    nucleus = Sampling(temperature=1.0, top_p=0.7).probabilities(logits)[0]
    assert nucleus.nonzero().flatten().tolist() == [0, 4]
    torch.testing.assert_close(nucleus[4], full[4] / (full[4] + full[0]))
    assert Sampling(temperature=1.0, top_p=0.1).probabilities(logits)[0].nonzero().flatten().tolist() == [4]
    assert Sampling().choose(logits).tolist() == [4]
    generator = torch.Generator().manual_seed(0)
    draws = Sampling(temperature=1.0).choose(logits.expand(20000, -1), generator)
    frequency = draws.bincount(minlength=5) / 20000
    assert (frequency - full).abs().max() < 0.015


def test_equal_seeds_generate_equal_tokens():
    decoder = small("dcformer_pp_debug")
    a, b, c = (dclm.generate(decoder, ids(2, 4), 12, temperature=2.0, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1, 2], []], {}, r"prompt 1 has shape \[0\]; expected at least one token id"),
        ([], {}, "input_ids has no prompts"),
        (torch.zeros(2, 0, dtype=torch.long), {}, r"prompt 0 has shape \[0\]"),
        (torch.zeros(3, dtype=torch.long), {}, r"input_ids has shape \[3\]; expected \[B, T\]"),
        ([[1, 61]], {}, "prompt 0 has token 61; expected 0 to 60"),
        ([[-1]], {}, "prompt 0 has token -1"),
        ([[1] * 20], {}, "prompt 0 of 20 tokens and max_new_tokens=5 exceed the position table of 24"),
        ([[1.7, 2.2]], {}, "prompt 0 has dtype torch.float32; expected integer token ids"),
        (["abc"], {}, "prompt 0 is not a sequence of token ids"),
        ([[2**70]], {}, "prompt 0 is not a sequence of token ids"),
        ([[1]], {"stop_tokens": [61]}, "stop_tokens has 61; expected integers from 0 to 60"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"top_k": 0}, "top_k=0"),
        ([[1]], {"top_p": 1.5}, r"top_p=1.5 must be in \(0, 1\]"),
    ],
)
def test_invalid_arguments_raise_value_error(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        dclm.generate(small("transformer_debug"), prompts, 5, **options)


@torch.no_grad()
def test_reordered_cache_matches_cache_of_reordered_rows():
    decoder = small("dcformer_pp_debug", windows=(5, None))
    text, padding, rows = ids(3, 14), torch.tensor([2, 0, 5]), torch.tensor([2, 0, 0])
    cache, other = decoder.make_cache(20, padding.clone()), decoder.make_cache(20, padding[rows])
    decoder.decode(text, cache)
    decoder.decode(text[rows], other)
    cache.reorder(rows)
    for part in ids(3, 6, seed=5).split([1, 3, 1, 1], 1):
        torch.testing.assert_close(decoder.decode(part, cache), decoder.decode(part, other), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"rows has shape \[2\]; expected \[3\]"):
        cache.reorder(rows[:2])
    with pytest.raises(ValueError, match="expected .rows of a call"):
        decoder.make_cache(4).reorder(rows)
