"""Tokenizers: round trips of texts and of streamed ids."""

import pytest

from dclm.data.tokenizers import ByteTokenizer, tokenizer_from_spec, train_bpe

TEXT = "def grün(x):\n    return '\u65e5\u672c\u8a9e' \U0001f600  # done\n"


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else train_bpe([TEXT] * 5, 290)


def test_encode_and_decode_round_trip(tokenizer):
    (ids,) = tokenizer.encode([TEXT])
    assert tokenizer.decode(ids.tolist()) == TEXT
    assert ids.max() < tokenizer.vocab_size and tokenizer.eos_id not in ids
    assert tokenizer.decode([*ids.tolist(), tokenizer.eos_id]) == TEXT


def test_streamed_ids_decode_to_the_original_text(tokenizer):
    (ids,) = tokenizer.encode([TEXT])
    write = tokenizer.stream()
    parts = [write(int(i)) for i in ids]
    assert "".join(parts) == TEXT
    assert "\ufffd" not in "".join(parts)
    assert parts[0] and sum(bool(part) for part in parts) > len(parts) / 2


def test_tokenizer_from_spec_equals_the_original(tokenizer):
    again = tokenizer_from_spec(tokenizer.spec)
    assert again.encode([TEXT])[0].tolist() == tokenizer.encode([TEXT])[0].tolist()
    assert (again.vocab_size, again.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)


def test_trained_tokenizer_merges_and_encodes_all_bytes():
    tokenizer = train_bpe([TEXT] * 5, 290)
    assert len(tokenizer.encode([TEXT])[0]) < len(TEXT.encode())
    unseen = "\u0416\x00\x7f"
    assert tokenizer.decode(tokenizer.encode([unseen])[0].tolist()) == unseen
