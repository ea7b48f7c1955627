"""Fields of WebDataset samples: the image and an associated field, such as the class number."""

from dataclasses import dataclass
from dataclasses import fields as fields_of
from tarfile import TarFile, TarInfo
from typing import BinaryIO, ClassVar, NamedTuple

from dctrain.errors import UserError


class PickedFields(NamedTuple):
    """Selected fields of a sample.

    Attributes:
        image: The image.
        field: Name of the other field.
        other: Content of the other field.
    """

    image: object
    field: str
    other: object


@dataclass(frozen=True)
class SampleFields:
    """Names of the image field and of another field, each with alternatives separated by ";".

    Subclasses add the name of the other field, and define what an index stores of it and how it is read.

    Attributes:
        image: Field of the encoded image.

    Raises:
        UserError: If a field has no name.
    """

    image: str = "jpg;jpeg;png;webp;bmp;ppm;tif;tiff"
    other: ClassVar[str]  # attribute with the name of the other field

    def __post_init__(self) -> None:
        """Check the names."""
        for field in fields_of(self):
            wanted = getattr(self, field.name)
            if not all(wanted.split(";")):
                raise UserError(f"fields.{field.name}={wanted!r} must name a field, such as jpg or input.jpg.")

    def pick(self, sample: dict[str, object], name: str) -> PickedFields:
        """Select the fields of a sample.

        Args:
            sample: Fields of the sample.
            name: Name of the sample in messages.

        Raises:
            UserError: If a field is missing or ambiguous.
        """
        image, other = (_pick(sample, getattr(self, wanted), name) for wanted in ("image", self.other))
        return PickedFields(sample[image], other, sample[other])

    def index(self, tar: TarFile, member: TarInfo, name: str) -> tuple[int, ...]:
        """Return what an index stores of the other field of a sample in a shard.

        Args:
            tar: The shard.
            member: The field.
            name: What it is called in messages.

        Raises:
            UserError: If its content is invalid.
        """
        raise NotImplementedError

    def read(self, file: BinaryIO, kept: list[int], name: str) -> object:
        """Read the other field of a sample from the shard, given its entry in the index."""
        raise NotImplementedError

    def parse(self, content: bytes, field: str, name: str) -> object:
        """Convert the content of the other field to the result of `read`; errors as in `index`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fields(SampleFields):
    """Names of the image field and of the class number's field.

    Attributes:
        image: Field of the encoded image.
        label: Field of the class number, as text.
    """

    label: str = "cls"
    other: ClassVar[str] = "label"

    def index(self, tar: TarFile, member: TarInfo, name: str) -> tuple[int]:
        """Return the class number."""
        return (self.parse(tar.extractfile(member).read(), "", name),)

    def read(self, file: BinaryIO, kept: list[int], name: str) -> int:
        """Return the class number."""
        return kept[0]

    def parse(self, content: bytes, field: str, name: str) -> int:
        """Parse a class number."""
        if not content.strip().isdigit() or len(content) > 12:
            raise UserError(f"{name} has {content[:20]!r}; expected a class number as text.")
        return int(content)


DEFAULT_FIELDS = Fields()


def _pick(sample: dict[str, object], wanted: str, name: str) -> str:
    found = [field for field in wanted.split(";") if field in sample]
    if len(found) != 1:
        raise UserError(
            f"sample {name} has {len(found)} of the fields {wanted}; expected one. It has {', '.join(sample)} "
            "(a key ends at the first dot; data.fields sets other names)."
        )
    return found[0]
