"""Folders that a preparation fills: a plan says what from, a manifest what came out; both are written whole.

The same preparation again goes on where it stopped, or changes nothing; another one into the same folder is refused.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from .checkpoint import make_folder
from .errors import UserError
from .files import write_json


class Preparation:
    """What a folder, or the files of one prefix in it, are made from.

    Args:
        out: The folder.
        plan: What decides the content.
        plan_name: File of the plan.
        manifest_name: File of the manifest.
    """

    def __init__(self, out: Path, plan: dict, plan_name: str, manifest_name: str) -> None:
        self.out, self.plan = out, plan
        self.plan_path, self.manifest_path = out / plan_name, out / manifest_name

    @property
    def has_begun(self) -> bool:
        """Whether this very preparation was begun before."""
        return self.plan_path.is_file()

    def check(self) -> None:
        """Refuse a folder that was made from something else."""
        if self.has_begun:
            before = json.loads(self.plan_path.read_text())
            changed = [name for name in self.plan if self.plan[name] != before.get(name)]
            if changed:
                raise UserError(f"{self.out} was made with other {', '.join(changed)}; nothing was overwritten.")
        elif self.manifest_path.exists():
            raise UserError(
                f"{self.out} holds {self.manifest_path.name}, but not what it was made from ({self.plan_path.name}); "
                "nothing was overwritten."
            )

    def begin(self) -> None:
        """Record the plan."""
        write_json(self.plan_path, self.plan)

    def manifest(self) -> dict | None:
        """Return what came out; None if it is not finished."""
        return json.loads(self.manifest_path.read_text()) if self.manifest_path.is_file() else None

    def finish(self, manifest: dict) -> dict:
        """Record what came out, and return it."""
        write_json(self.manifest_path, manifest)
        return manifest


@contextmanager
def preparing(
    out: Path, plan: dict, *, plan_name: str = "plan.json", manifest_name: str = "manifest.json"
) -> Iterator[Preparation]:
    """Hold a folder, made if missing, for a preparation; arguments are those of `Preparation`.

    Raises:
        UserError: If the folder was made from something else, or another process is at it.
    """
    make_folder(str(out))
    try:
        preparation = Preparation(out, plan, plan_name, manifest_name)
        with FileLock(preparation.plan_path.with_suffix(".lock"), timeout=0):
            preparation.check()
            yield preparation
    except Timeout as error:
        raise UserError(f"{out} is being prepared by another process.") from error
    except KeyboardInterrupt:
        print("\nthe same command goes on from here", file=sys.stderr)
        raise


def digest_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines of text, names of files with undecodable bytes among them."""
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
