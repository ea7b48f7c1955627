"""Which fields of a WebDataset sample are taken: its image, and what belongs to it, such as a class number."""

from dataclasses import dataclass
from dataclasses import fields as fields_of
from tarfile import TarFile, TarInfo
from typing import BinaryIO, ClassVar, NamedTuple

from dctrain.errors import UserError


class PickedFields(NamedTuple):
    """What is taken of a sample.

    Attributes:
        image: Its image.
        field: The name of the other field.
        other: What that holds.
    """

    image: object
    field: str
    other: object


@dataclass(frozen=True)
class SampleFields:
    """The fields of an image and of something else; of alternatives, parted by ";", one must be there.

    A subclass adds the name of the other field, says what an index keeps of it and how it is read.

    Attributes:
        image: The encoded image.

    Raises:
        UserError: If a field has no name.
    """

    image: str = "jpg;jpeg;png;webp;bmp;ppm;tif;tiff"
    other: ClassVar[str]  # the attribute that names the other field

    def __post_init__(self) -> None:
        """Check the names."""
        for field in fields_of(self):
            wanted = getattr(self, field.name)
            if not all(wanted.split(";")):
                raise UserError(f"fields.{field.name}={wanted!r} must name a field, such as jpg or input.jpg.")

    def pick(self, sample: dict[str, object], name: str) -> PickedFields:
        """Take the fields of a sample.

        Args:
            sample: Its fields.
            name: What it is called in messages.

        Raises:
            UserError: If there is not one of each.
        """
        image, other = (_pick(sample, getattr(self, wanted), name) for wanted in ("image", self.other))
        return PickedFields(sample[image], other, sample[other])

    def index(self, tar: TarFile, member: TarInfo, name: str) -> tuple[int, ...]:
        """Tell what an index keeps of the other field of a sample in a shard.

        Args:
            tar: The shard.
            member: The field.
            name: What it is called in messages.

        Raises:
            UserError: If it does not hold what it should.
        """
        raise NotImplementedError

    def read(self, file: BinaryIO, kept: list[int], name: str) -> object:
        """Read the other field of a sample, by what the index has kept, from the shard."""
        raise NotImplementedError

    def parse(self, content: bytes, field: str, name: str) -> object:
        """Make of the content of the other field what `read` returns; errors as of `index`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fields(SampleFields):
    """The fields of an image and its class number.

    Attributes:
        image: The encoded image.
        label: The class number in text.
    """

    label: str = "cls"
    other: ClassVar[str] = "label"

    def index(self, tar: TarFile, member: TarInfo, name: str) -> tuple[int]:
        """Keep the class number."""
        return (self.parse(tar.extractfile(member).read(), "", name),)

    def read(self, file: BinaryIO, kept: list[int], name: str) -> int:
        """Return the class number."""
        return kept[0]

    def parse(self, content: bytes, field: str, name: str) -> int:
        """Read a class number."""
        if not content.strip().isdigit() or len(content) > 12:
            raise UserError(f"{name} holds {content[:20]!r}; expected a class number in text.")
        return int(content)


DEFAULT_FIELDS = Fields()


def _pick(sample: dict[str, object], wanted: str, name: str) -> str:
    found = [field for field in wanted.split(";") if field in sample]
    if len(found) != 1:
        raise UserError(
            f"sample {name} has {len(found)} of the fields {wanted}; expected one. It has {', '.join(sample)} "
            "(a key ends at the first dot; data.fields names others)."
        )
    return found[0]
