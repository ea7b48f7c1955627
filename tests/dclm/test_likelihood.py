"""Log-likelihoods of continuations, compared with the logits of one whole text at a time."""

import pytest
import torch

import dclm
from dclm import loss
from dclm.data.tokenizers import ByteTokenizer, train_bpe

from .test_decoder import small


def random_pairs(*lengths, vocab_size=61):
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randint(vocab_size, (length,), generator=generator).tolist() for length in pair) for pair in lengths
    ]


def one_by_one(decoder, pairs):
    """Return the log-likelihoods and greedy flags of each pair alone, from the logits of the whole text."""
    found = []
    for context, continuation in pairs:
        logits = decoder(torch.tensor([[*context, *continuation]]))[0, len(context) - 1 : -1]
        targets = torch.tensor(continuation)
        found.append((logits.log_softmax(-1).gather(1, targets[:, None])[:, 0], logits.argmax(-1) == targets))
    return found


@pytest.mark.parametrize("name", ["dcformer_pp_debug", "transformer_debug"])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
@torch.no_grad()
def test_log_likelihoods_match_full_logits(name, batch_size, monkeypatch):
    decoder = small(name)
    pairs = random_pairs((3, 4), (10, 1), (1, 1), (7, 13), (1, 20), (5, 2))
    pairs += [(pairs[1][0], [7]), (pairs[1][0], [8]), (pairs[0][0], pairs[0][1])]  # pairs with shared contexts
    greedy = decoder(torch.tensor([pairs[1][0]]))[0, -1].argmax().item()
    pairs.append((pairs[1][0], [greedy]))
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 5 * decoder.config.vocab_size)
    found = dclm.log_likelihoods(decoder, pairs, batch_size=batch_size)
    assert [len(each.log_likelihoods) for each in found] == [len(continuation) for _, continuation in pairs]
    for got, (expected, is_greedy) in zip(found, one_by_one(decoder, pairs), strict=True):
        torch.testing.assert_close(got.log_likelihoods, expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(got.is_greedy, is_greedy)
    assert bool(found[-1].is_greedy.all())


def test_shared_context_runs_once_and_logits_cover_targets_only(monkeypatch):
    decoder = small("dcformer_pp_debug")
    (context, _), *_ = pairs = random_pairs((9, 1))
    pairs = [(context, [token]) for token in range(6)]
    rows, made = [], []
    decoder.embed.register_forward_hook(lambda module, args, out: rows.append(tuple(args[0].shape)))
    whole = loss.wide_logits
    monkeypatch.setattr(loss, "wide_logits", lambda h, w: made.append(len(h)) or whole(h, w))
    dclm.log_likelihoods(decoder, pairs)
    assert rows == [(1, 9)] and made == [6]


def test_bfloat16_model_returns_unrounded_float32_log_likelihoods():
    decoder = small("dcformer_pp_debug").bfloat16()
    (found,) = dclm.log_likelihoods(decoder, random_pairs((4, 9)))
    assert found.log_likelihoods.dtype == torch.float32
    rounded = found.log_likelihoods.bfloat16().float()
    assert not torch.equal(found.log_likelihoods, rounded)


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ([([], [1])], {}, "the context of pair 0 is empty"),
        ([([1], [1]), ([1], [])], {}, "the continuation of pair 1 is empty"),
        ([([1], [61])], {}, "pair 0 has token 61; expected 0 to 60"),
        ([([-1], [1])], {}, "pair 0 has token -1"),
        ([([1], [1])], {"batch_size": 0}, "batch_size=0"),
    ],
)
def test_invalid_arguments_raise_value_error(pairs, options, message):
    with pytest.raises(ValueError, match=message):
        dclm.log_likelihoods(small("dcformer_pp_debug"), pairs, **options)


def test_encode_pairs_moves_space_to_continuation_and_adds_eos_to_empty_context():
    tokenizer = train_bpe(["a cat sat on a mat"] * 50, 300)
    encode = lambda text: tokenizer.encode([text])[0].tolist()  # noqa: E731
    (first, spaced, empty), (bare,) = (
        dclm.encode_pairs(tokenizer, [("a cat", " sat"), ("a cat ", "sat"), ("", "a cat")]),
        dclm.encode_pairs(ByteTokenizer(), [("", "ab")]),
    )
    assert first == spaced == (encode("a cat"), encode(" sat"))
    assert empty == ([tokenizer.eos_id], encode("a cat"))
    assert bare == ([256], [97, 98])


def test_encode_pairs_uses_begin_token_of_tokenizer():
    import json

    spec = json.loads(train_bpe(["a cat sat on a mat"] * 50, 300).spec)
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    from dclm.data.tokenizers import SubwordTokenizer

    tokenizer = SubwordTokenizer(json.dumps(spec))
    assert tokenizer.begin_ids == [0]
    (given, empty) = dclm.encode_pairs(tokenizer, [("a cat", " sat"), ("", "a cat")])
    assert given[0] == [0, *tokenizer.encode(["a cat"])[0]] and empty[0] == [0]


def test_cut_left_truncates_context():
    assert dclm.cut_left(([1, 2, 3, 4], [5, 6]), 5) == ([1, 2, 3, 4], [5, 6])
    assert dclm.cut_left(([1, 2, 3, 4], [5, 6]), 4) == ([2, 3, 4], [5, 6])
    assert dclm.cut_left(([1, 2], [5, 6]), 2) == ([2], [5, 6])
    with pytest.raises(ValueError, match="a continuation of 3 tokens exceeds the context of 2"):
        dclm.cut_left(([1], [2, 3, 4]), 2)
