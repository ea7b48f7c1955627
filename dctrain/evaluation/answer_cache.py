"""What an evaluation has computed so far, in files that survive its death; what is in them is not computed again.

One file a rank, FOLDER/NAME.partial-RANK.jsonl: a line that tells what all belongs to, then a line for each answer.
"""

import glob
import json
from hashlib import blake2b
from pathlib import Path

from ..utils.files import atomic_write
from .ranks import Ranks


def digest(*parts: object) -> str:
    """Make the key of a question."""
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class AnswerCache:
    """Answers by the digest of their question.

    Args:
        folder: Where the files lie.
        name: What they are called.
        belongs_to: What the answers depend on beside the question; files of something else are begun anew.
        ranks: Each writes a file, and knows all.

    Attributes:
        known: The answers.
    """

    def __init__(self, folder: Path, name: str, belongs_to: dict, ranks: Ranks) -> None:
        self._folder, self._pattern, self._ranks = folder, f"{glob.escape(name)}.partial-*.jsonl", ranks
        self.known: dict[str, list | str] = {}
        for found in ranks.gather(self._read(belongs_to)):
            self.known |= found
        path = folder / f"{name}.partial-{ranks.rank}.jsonl"
        whole = "".join(f"{json.dumps(line)}\n" for line in (belongs_to, *_read_lines(path, belongs_to)))
        with atomic_write(path) as file:  # without a last line that was cut off
            file.write(whole.encode())
        self._file = open(path, "a")  # noqa: SIM115  closed by close()

    def _read(self, belongs_to: dict) -> dict[str, list | str]:
        return dict(line for path in self._folder.glob(self._pattern) for line in _read_lines(path, belongs_to))

    def add(self, answers: dict[str, list | str]) -> None:
        """Keep answers of this rank on the disk."""
        self._file.writelines(f"{json.dumps(line)}\n" for line in answers.items())
        self._file.flush()

    def share(self, answers: dict[str, list | str]) -> None:
        """Learn the answers of all ranks; each calls it with its own."""
        for others in self._ranks.gather(answers):
            self.known |= others

    def close(self, is_done: bool) -> None:
        """Close this rank's file; when all is done they go."""
        self._file.close()
        if is_done:
            self._ranks.gather(None)
            if self._ranks.is_first:
                for path in self._folder.glob(self._pattern):
                    path.unlink()


def _read_lines(path: Path, belongs_to: dict) -> list[list]:
    """Read a file's answers; [] if it belongs to something else. A line that was cut off or damaged ends them."""
    lines = []
    for text in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
        if len(lines) > 1 and not _is_answer(lines[-1]):
            del lines[-1]
            break
    return lines[1:] if lines and lines[0] == belongs_to else []


def _is_answer(line: object) -> bool:
    """Tell whether a line is a question's digest and its answer."""
    return isinstance(line, list) and len(line) == 2 and isinstance(line[0], str) and isinstance(line[1], list | str)
