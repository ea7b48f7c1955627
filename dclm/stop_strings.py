"""The text of a row that is being generated, as its tokens come, up to what ends it."""

from collections.abc import Sequence

from .data.tokenizers import Tokenizer


class StopStringBuffer:
    """Turns tokens, one after the other, into text; holds back what may be the beginning of a stop string.

    Args:
        tokenizer: The model's.
        stop_tokens: Tokens that end the text.
        stop_strings: Texts that end it, wherever among the tokens they begin and end.

    Attributes:
        is_ended: Whether one of them has come; nothing is added after it.

    Raises:
        ValueError: If a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Sequence[int] = (), stop_strings: Sequence[str] = ()) -> None:
        if isinstance(stop_strings, str) or not all(isinstance(text, str) and text for text in stop_strings):
            raise ValueError(f"stop_strings={stop_strings!r}; expected a sequence of texts that are not empty.")
        self._write, self._held = tokenizer.stream(), ""
        self._stop_tokens, self._stop_strings = set(stop_tokens), tuple(stop_strings)
        self.is_ended = False

    def add(self, token: int) -> str:
        """Return the text that is certain since this token."""
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
        """Return what was held back; no token comes after it."""
        text, self._held = self._held, ""
        return text

    def _length_withheld(self, text: str) -> int:
        """Count the characters at the end that a stop string may begin with."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0
