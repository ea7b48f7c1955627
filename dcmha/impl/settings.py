"""What a call of an implementation is, apart from its tensors."""

from typing import NamedTuple


class Settings(NamedTuple):
    """Arguments of `composed_attention`, already checked, with the scale filled in."""

    is_causal: bool
    window: int | None
    scale: float
    dropout_p: float
    num_groups: int
