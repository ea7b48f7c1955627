"""Detection of stop strings in streamed text."""

from collections.abc import Sequence

from .data.tokenizers import Tokenizer


class StopStringBuffer:
    """Converts a stream of tokens to text; withholds text that may be the start of a stop string.

    Args:
        tokenizer: Tokenizer of the model.
        stop_tokens: Tokens that end the text.
        stop_strings: Strings that end the text, independent of token boundaries.

    Attributes:
        is_ended: Whether the text has ended.

    Raises:
        ValueError: If a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Sequence[int] = (), stop_strings: Sequence[str] = ()) -> None:
        if isinstance(stop_strings, str) or not all(isinstance(text, str) and text for text in stop_strings):
            raise ValueError(f"stop_strings={stop_strings!r}; expected a sequence of strings that are not empty.")
        self._write, self._held = tokenizer.stream(), ""
        self._stop_tokens, self._stop_strings = set(stop_tokens), tuple(stop_strings)
        self.is_ended = False

    def add(self, token: int) -> str:
        """Add a token, and return new text that is final."""
        if self.is_ended:
            return ""
        if token in self._stop_tokens:
            self.is_ended = True
            return self.rest()
        text = self._held + self._write(token)
        found = [at for at in map(text.find, self._stop_strings) if at >= 0]
        self.is_ended = bool(found)
        certain = min(found) if found else len(text) - self._length_withheld(text)
        self._held = "" if found else text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """Return the withheld text, at the end of the stream."""
        text, self._held = self._held, ""
        return text

    def _length_withheld(self, text: str) -> int:
        """Length of the longest suffix that is the start of a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0
