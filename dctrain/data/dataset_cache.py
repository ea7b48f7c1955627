"""Prepared data sets in folders: a plan file records the inputs, a manifest the result; both are written atomically.

Repeating the same preparation continues where it stopped, or changes nothing; a different one in the same folder raises
an error.
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
from ..utils.files import file_lock, write_json


class Preparation:
    """State of a preparation: a folder, or the files with one prefix in it.

    Args:
        out: The folder.
        plan: Settings and inputs that determine the content.
        plan_name: File name of the plan.
        manifest_name: File name of the manifest.
        products: File name patterns of the results. While there are none, a different plan may replace this one.
    """

    def __init__(self, out: Path, plan: dict, plan_name: str, manifest_name: str, products: tuple[str, ...]) -> None:
        self.out, self.plan, self.products = out, plan, products
        self.plan_path, self.manifest_path = out / plan_name, out / manifest_name

    @property
    def has_begun(self) -> bool:
        """Whether the same preparation was started before."""
        return self.plan_path.is_file()

    def check(self) -> None:
        """Raise UserError if the folder was prepared from different inputs; remove a plan without results, and
        partially written files.
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
                message = "nothing was overwritten. Remove it to prepare it again, or use another folder."
                raise UserError(f"{self.out} was prepared with different {', '.join(changed)}; {message}")
        elif self.manifest_path.exists():
            raise UserError(
                f"{self.out} has {self.manifest_path.name}, but no {self.plan_path.name}, the record of its inputs; "
                "nothing was overwritten."
            )

    def forget(self) -> None:
        """Remove all results, so that a different plan can be used."""
        for pattern in (*self.products, self.plan_path.name):
            for path in self.out.glob(pattern):
                path.unlink()

    def begin(self) -> None:
        """Record the plan."""
        write_json(self.plan_path, self.plan)

    def manifest(self) -> dict | None:
        """Return the manifest; None if the preparation is not finished."""
        return self._read(self.manifest_path) if self.manifest_path.is_file() else None

    def _read(self, path: Path) -> dict:
        with as_user_error(f"{path} is damaged; remove the files of {self.plan_path.name} and prepare them again"):
            content = json.loads(path.read_text())
            if not isinstance(content, dict):
                raise UserError(f"{path} is damaged: expected a JSON object.")
            return content

    def finish(self, manifest: dict) -> dict:
        """Write the manifest, and return it."""
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
    """Create and lock a folder for a preparation; arguments as in `Preparation`.

    Raises:
        UserError: If the folder was prepared from different inputs, or another process is preparing it.
    """
    make_folder(str(out))
    try:
        preparation = Preparation(out, plan, plan_name, manifest_name, products)
        with file_lock(preparation.plan_path.with_suffix(".lock"), f"{out} is being prepared by another process."):
            preparation.check()
            yield preparation
    except KeyboardInterrupt:
        print("\nrun the same command again to continue", file=sys.stderr)
        raise


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_files(folder: Path, entries: list[dict]) -> None:
    """Compare files with the checksums of a manifest; reads all files.

    Args:
        folder: Folder of the files.
        entries: Entries of a manifest, with `file` and `sha256`.

    Raises:
        UserError: If files are missing or changed; the message names all of them.
    """
    if not entries or not all(isinstance(entry, dict) and {"file", "sha256"} <= entry.keys() for entry in entries):
        raise UserError(f"{folder}: the manifest has no files with sha256; nothing was verified.")
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
            f"{folder}: {len(problems)} of {len(entries)} files are missing or changed: {', '.join(problems)}."
        )
    print(f"{folder}: all {len(entries)} files match their checksums")


def digest_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines of text, which may be file names with undecodable bytes."""
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
