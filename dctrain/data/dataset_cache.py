"""Folders that a preparation fills: a plan says what from, a manifest what came out; both are written whole.

The same preparation again goes on where it stopped, or changes nothing; another one into the same folder is refused.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from ..checkpointing.checkpoint import make_folder
from ..errors import UserError, as_user_error
from ..utils.files import held, write_json


class Preparation:
    """What a folder, or the files of one prefix in it, are made from.

    Args:
        out: The folder.
        plan: What decides the content.
        plan_name: File of the plan.
        manifest_name: File of the manifest.
        products: What it makes, as patterns of file names: while there is none, another plan may take the place.
    """

    def __init__(self, out: Path, plan: dict, plan_name: str, manifest_name: str, products: tuple[str, ...]) -> None:
        self.out, self.plan, self.products = out, plan, products
        self.plan_path, self.manifest_path = out / plan_name, out / manifest_name

    @property
    def has_begun(self) -> bool:
        """Whether this very preparation was begun before."""
        return self.plan_path.is_file()

    def check(self) -> None:
        """Refuse a folder that was made from something else; forget a plan that nothing came of, and what a kill left
        half-written.
        """
        for pattern in self.products:
            for path in self.out.glob(f"{pattern}.*partial"):
                path.unlink()
        if not any(any(self.out.glob(pattern)) for pattern in (*self.products, self.manifest_path.name)):
            self.plan_path.unlink(missing_ok=True)
        if self.has_begun:
            before = self._read(self.plan_path)
            changed = [name for name in self.plan if self.plan[name] != before.get(name)]
            if changed:
                said = "nothing was overwritten. Remove it to make it again, or name another folder."
                raise UserError(f"{self.out} was made with other {', '.join(changed)}; {said}")
        elif self.manifest_path.exists():
            raise UserError(
                f"{self.out} holds {self.manifest_path.name}, but not what it was made from ({self.plan_path.name}); "
                "nothing was overwritten."
            )

    def forget(self) -> None:
        """Remove what was made, of which nothing can come, so that another plan may take the place."""
        for pattern in (*self.products, self.plan_path.name):
            for path in self.out.glob(pattern):
                path.unlink()

    def begin(self) -> None:
        """Record the plan."""
        write_json(self.plan_path, self.plan)

    def manifest(self) -> dict | None:
        """Return what came out; None if it is not finished."""
        return self._read(self.manifest_path) if self.manifest_path.is_file() else None

    def _read(self, path: Path) -> dict:
        with as_user_error(f"{path} is damaged; remove what was made of {self.plan_path.name} and make it again"):
            content = json.loads(path.read_text())
            if not isinstance(content, dict):
                raise UserError(f"{path} is damaged: it holds no JSON object.")
            return content

    def finish(self, manifest: dict) -> dict:
        """Record what came out, and return it."""
        write_json(self.manifest_path, manifest)
        return manifest


@contextmanager
def preparing(
    out: Path,
    plan: dict,
    products: tuple[str, ...],
    *,
    plan_name: str = "plan.json",
    manifest_name: str = "manifest.json",
) -> Iterator[Preparation]:
    """Hold a folder, made if missing, for a preparation; arguments are those of `Preparation`.

    Raises:
        UserError: If the folder was made from something else, or another process is at it.
    """
    make_folder(str(out))
    try:
        preparation = Preparation(out, plan, plan_name, manifest_name, products)
        with held(preparation.plan_path.with_suffix(".lock"), f"{out} is being prepared by another process."):
            preparation.check()
            yield preparation
    except KeyboardInterrupt:
        print("\nthe same command goes on from here", file=sys.stderr)
        raise


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_files(folder: Path, entries: list[dict]) -> None:
    """Compare files with what a manifest says of them; reads all of them, at the speed of the disk or of SHA-256.

    Args:
        folder: Where they lie.
        entries: Entries of a manifest, with `file` and `sha256`.

    Raises:
        UserError: If files are missing or were changed; all of them are named.
    """
    if not entries or not all(isinstance(entry, dict) and {"file", "sha256"} <= entry.keys() for entry in entries):
        raise UserError(f"{folder}: its manifest lists no files with their sha256; nothing was verified.")
    sizes = {
        entry["file"]: (folder / entry["file"]).stat().st_size
        for entry in entries
        if (folder / entry["file"]).is_file()
    }
    problems = [f"{entry['file']} is missing" for entry in entries if entry["file"] not in sizes]
    with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc="verifying") as bar:
        for entry in entries:
            if entry["file"] in sizes:
                if file_digest(folder / entry["file"]) != entry["sha256"]:
                    problems.append(f"{entry['file']} has changed")
                bar.update(sizes[entry["file"]])
    if problems:
        raise UserError(
            f"{folder}: {len(problems)} of {len(entries)} files are not as they were made: {', '.join(problems)}."
        )
    print(f"{folder}: all {len(entries)} files are as they were made")


def digest_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines of text, names of files with undecodable bytes among them."""
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
