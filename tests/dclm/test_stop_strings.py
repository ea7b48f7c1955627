"""Stop tokens, and stop strings that may begin and end anywhere within the tokens."""

import pytest
import torch

import dclm
from dclm.data.tokenizers import ByteTokenizer
from dclm.stop_strings import StopStringBuffer

from .test_decoder import ids, small


def fed(text: str, **stops) -> tuple[list[str], bool, str]:
    """Return the text that each byte releases, whether the text has ended, and the remaining text."""
    growing = StopStringBuffer(ByteTokenizer(), **stops)
    released = [growing.add(byte) for byte in text.encode()]
    return released, growing.is_ended, growing.rest()


@pytest.mark.parametrize(
    ("text", "strings", "expected"),
    [
        ("hello", [], (list("hello"), False, "")),
        ("ab\ncd", ["\n"], (["a", "b", "", "", ""], True, "")),
        ("xaab.", ["ab"], (["x", "", "a", "", ""], True, "")),  # the second "a" restarts the match
        ("xabab", ["abac"], (["x", "", "", "", "ab"], False, "ab")),
        ("one two", ["two", "ne"], (["o", "", "", "", "", "", ""], True, "")),
        ("grü", ["ü"], (["g", "r", "", ""], True, "")),
    ],
)
def test_text_is_released_when_it_cannot_start_a_stop_string(text, strings, expected):
    assert fed(text, stop_strings=strings) == expected


def test_stop_token_releases_withheld_text():
    growing = StopStringBuffer(ByteTokenizer(), [256], ["xyz"])
    assert [growing.add(token) for token in (97, 120, 121, 256, 97)] == ["a", "", "", "xy", ""]
    assert growing.is_ended and growing.rest() == ""


def test_row_ends_with_token_that_completes_stop_string():
    decoder, prompts = small("dcformer_pp_debug", vocab_size=257), [ids(4, seed=1), ids(7, seed=2)]
    free = dclm.generate(decoder, prompts, 30)
    written = [ByteTokenizer().decode(row[len(prompt) :].tolist()) for row, prompt in zip(free, prompts, strict=True)]
    bytes_of_row = free[0][4:].tolist()
    at = next(i for i in range(2, 29) if max(bytes_of_row[i : i + 2]) < 128)
    stop = bytes(bytes_of_row[at : at + 2]).decode()
    first = next(i for i in range(29) if bytes(bytes_of_row[i : i + 2]) == stop.encode())
    rows = dclm.generate(decoder, prompts, 30, stop_strings=[stop], tokenizer=ByteTokenizer())
    assert torch.equal(rows[0], free[0][: 4 + first + 2])
    if stop not in written[1]:
        assert torch.equal(rows[1], free[1])
    padded = dclm.generate(decoder, prompts[0][None], 30, stop_strings=[stop], tokenizer=ByteTokenizer())
    assert torch.equal(padded[0], rows[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_strings": ["x"]}, "tokenizer=None: stop_strings require the model's"),
        ({"stop_strings": "x", "tokenizer": ByteTokenizer()}, "stop_strings='x'; expected a sequence of strings"),
        ({"stop_strings": [""], "tokenizer": ByteTokenizer()}, "expected a sequence of strings that are not empty"),
    ],
)
def test_invalid_stop_strings_raise_value_error(options, message):
    with pytest.raises(ValueError, match=message):
        dclm.generate(small("dcformer_pp_debug", vocab_size=257), ids(1, 4), 3, **options)
