"""ComposeOptions: the parts of a composition. The only place where they are declared, documented and checked."""

# H heads, R compose rank, G head groups

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ComposeOptions:
    """Options of a composition (paper, section 3; each row of table 9 is one setting).

    Layers, models and configurations accept these fields as keyword arguments. With `pre_compose=False` and
    `post_compose=False` attention is ordinary multi-head attention and the other fields have no effect.

    Attributes:
        rank: Rank R of the dynamic projections, 2 in the paper; 0 disables them.
        pre_compose: Compose the scores, before the softmax.
        post_compose: Compose the attention weights, after the softmax.
        query_wise: Compose by matrices computed from the query's token.
        key_wise: Compose by matrices computed from the key's token.
        dynamic_gate: Gate each head depending on the token (the diagonal part).
        static_base: Add a learned static base (talking heads).
        num_groups: Compose within G groups of heads (section 3.2).

    Raises:
        ValueError: If a value has the wrong type or is out of range.
    """

    rank: int = 2
    pre_compose: bool = True
    post_compose: bool = True
    query_wise: bool = True
    key_wise: bool = True
    dynamic_gate: bool = True
    static_base: bool = False
    num_groups: int = 1

    def __post_init__(self) -> None:
        """Check types and ranges."""
        for name in BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be of type bool.")
        if type(self.rank) is not int or self.rank < 0:
            raise ValueError(f"rank={self.rank!r} must be an integer, 0 (no dynamic projection) or more.")
        if type(self.num_groups) is not int or self.num_groups < 1:
            raise ValueError(f"num_groups={self.num_groups!r} must be a positive integer.")

    @property
    def is_composed(self) -> bool:
        """Whether scores or attention weights are composed."""
        return self.pre_compose or self.post_compose

    @property
    def compositions(self) -> tuple[str, ...]:
        """The enabled compositions, a subset of "pre" and "post"."""
        return ("pre",) * self.pre_compose + ("post",) * self.post_compose

    @property
    def sides(self) -> tuple[str, ...]:
        """The enabled sides, a subset of "query" and "key"."""
        is_dynamic = self.rank > 0 or self.dynamic_gate
        return ("query",) * (self.query_wise and is_dynamic) + ("key",) * (self.key_wise and is_dynamic)

    def check_composes(self) -> None:
        """Raise ValueError if these options leave nothing to compose."""
        if not self.is_composed or not (self.sides or self.static_base):
            got = ", ".join(f"{name}={getattr(self, name)}" for name in COMPOSE_OPTIONS)
            raise ValueError(
                "nothing is left to compose: enable pre_compose or post_compose, and static_base or a dynamic branch "
                f"(got {got}); for plain attention disable the composition."
            )

    def group_heads(self, num_heads: int) -> int:
        """Return the number of heads per group, H/G.

        Raises:
            ValueError: If `num_heads` is not divisible by the number of groups.
        """
        if num_heads % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must be a positive divisor of num_heads={num_heads}.")
        return num_heads // self.num_groups


COMPOSE_OPTIONS = tuple(field.name for field in fields(ComposeOptions))
BOOLEANS = tuple(field.name for field in fields(ComposeOptions) if field.type is bool)


def compose_options_of(config: object) -> dict[str, Any]:
    """Read the fields of `ComposeOptions` from the attributes of an object."""
    return {name: getattr(config, name) for name in COMPOSE_OPTIONS}


def check_names(options: Mapping[str, object], accepted: tuple[str, ...]) -> None:
    """Raise ValueError if an option is not among the accepted ones."""
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ValueError(f"unknown options {unknown}; expected {', '.join(accepted)}.")
