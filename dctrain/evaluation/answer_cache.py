"""Cache of an evaluation's answers on disk, so that an interrupted evaluation can continue.

There is one file per rank, FOLDER/NAME.partial-RANK.jsonl: a line that identifies the evaluation, then one line per
answer.
"""

import glob
import json
from hashlib import blake2b
from pathlib import Path

from ..utils.files import atomic_write
from .ranks import EvaluationRanks


def digest(*parts: object) -> str:
    """Compute the key of a question."""
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class AnswerCache:
    """Answers by the digest of their questions.

    Args:
        folder: Folder of the files.
        name: Base name of the files.
        belongs_to: Everything that answers depend on other than the question; files of a different evaluation are
            replaced.
        ranks: Ranks of the evaluation; each writes a file and reads all.

    Attributes:
        known: The answers.
    """

    def __init__(self, folder: Path, name: str, belongs_to: dict, ranks: EvaluationRanks) -> None:
        self._folder, self._pattern, self._ranks = folder, f"{glob.escape(name)}.partial-*.jsonl", ranks
        self.known: dict[str, list | str] = {}
        for found in ranks.gather(self._read(belongs_to)):
            self.known |= found
        path = folder / f"{name}.partial-{ranks.rank}.jsonl"
        whole = "".join(f"{json.dumps(line)}\n" for line in (belongs_to, *_read_lines(path, belongs_to)))
        with atomic_write(path) as file:  # without an incomplete last line
            file.write(whole.encode())
        self._file = open(path, "a")  # noqa: SIM115  closed by close()

    def _read(self, belongs_to: dict) -> dict[str, list | str]:
        return dict(line for path in self._folder.glob(self._pattern) for line in _read_lines(path, belongs_to))

    def add(self, answers: dict[str, list | str]) -> None:
        """Store answers of this rank."""
        self._file.writelines(f"{json.dumps(line)}\n" for line in answers.items())
        self._file.flush()

    def share(self, answers: dict[str, list | str]) -> None:
        """Exchange answers between ranks; each rank passes its own."""
        for others in self._ranks.gather(answers):
            self.known |= others

    def close(self, is_done: bool) -> None:
        """Close this rank's file; remove all files if the evaluation is done."""
        self._file.close()
        if is_done:
            self._ranks.gather(None)
            if self._ranks.is_first:
                for path in self._folder.glob(self._pattern):
                    path.unlink()


def _read_lines(path: Path, belongs_to: dict) -> list[list]:
    """Read a file's answers up to the first incomplete line; [] if it belongs to a different evaluation."""
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
    """Whether a line is a digest with its answer."""
    return isinstance(line, list) and len(line) == 2 and isinstance(line[0], str) and isinstance(line[1], list | str)
