"""Tasks that take two things at once: attend to the right word, and make the right thing of it (paper, section 4.3).

A task is an attention *pattern*, which says what word of an example is the source of the answer, and a *transformation*
of it, in a *domain* of words and a *wording* of the sentences.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from . import words

COPY = "copy"


class Domain(NamedTuple):
    """Words of a kind, and how sentences speak of them.

    Attributes:
        transformations: What is made of each word, by the transformation's name.
        endings: What stands before the answer, by the transformation's name.
        holds: Wordings of who has what: sentences of {person} and {word}.
        asks: How a question takes a person up.
        denies: How it asks for what the person has not.
        classes: What divides the words; empty where no pattern needs it.
    """

    transformations: Mapping[str, Mapping[str, str]]
    endings: Mapping[str, str]
    holds: tuple[str, str]
    asks: str
    denies: str
    classes: Mapping[str, str] = {}


def _copies(mapping: Mapping[str, str]) -> dict[str, str]:
    return {word: word for word in mapping}


DOMAINS = {
    "thing": Domain(
        {COPY: _copies(words.SUPERCLASS), "superclass": words.SUPERCLASS},
        {COPY: "the", "superclass": "a kind of"},
        ("{person} has the {word}.", "The {word} belongs to {person}."),
        "{person} owns",
        "{person} does not own",
        words.SUPERCLASS,
    ),
    "tool": Domain(
        {"capability": words.CAPABILITY},
        {"capability": "the thing to"},
        ("{person} has the {word}.", "The {word} belongs to {person}."),
        "{person} owns",
        "{person} does not own",
    ),
    "city": Domain(
        {COPY: _copies(words.COUNTRY), "country": words.COUNTRY, "continent": words.CONTINENT},
        {COPY: "the city called", "country": "the city in", "continent": "the city on the continent of"},
        ("{person} longs for {word}.", "{word} attracts {person}."),
        "{person} loves",
        "{person} does not love",
        words.COUNTRY,
    ),
    "quality": Domain(
        {COPY: _copies(words.OPPOSITE), "opposite": words.OPPOSITE},
        {COPY: "just", "opposite": "the opposite of"},
        ("{person} looks {word}.", "It is {word} that {person} looks."),
        "{person} is",
        "{person} is not",
    ),
    "year": Domain(
        {COPY: _copies(words.NEXT_YEAR), "next": words.NEXT_YEAR, "previous": words.PREVIOUS_YEAR},
        {COPY: "in", "next": "in the year before", "previous": "in the year after"},
        ("{person} came in {word}.", "In {word} came {person}."),
        "{person} arrived",
        "{person} did not arrive",
    ),
    "month": Domain(
        {COPY: _copies(words.NEXT_MONTH), "next": words.NEXT_MONTH, "previous": words.PREVIOUS_MONTH},
        {COPY: "in", "next": "in the month before", "previous": "in the month after"},
        ("{person} left in {word}.", "In {word} left {person}."),
        "{person} departed",
        "{person} did not depart",
    ),
}


class Example(NamedTuple):
    """What stands before an answer, and the answer."""

    question: str
    answer: str


class Cast(NamedTuple):
    """Who acts in examples.

    Attributes:
        names: Of people.
        count: People, each with a thing, of examples that speak of people.
    """

    names: Sequence[str] = words.NAMES
    count: int = 3


SUITE = Cast()


def _draw(random: Random, domain: Domain, transformation: str, count: int) -> list[str]:
    """Draw words of which a transformation makes different things: the right source alone gives the answer."""
    made = domain.transformations[transformation]
    while True:
        drawn = random.sample(list(made), count)
        if len({made[word] for word in drawn}) == count:
            return drawn


def _people(random: Random, domain: Domain, wording: int, people: list[str], things: list[str]) -> str:
    """Say who has what, in any order."""
    pairs = list(zip(people, things, strict=True))
    random.shuffle(pairs)
    return "< " + " ".join(domain.holds[wording].format(person=who, word=what) for who, what in pairs) + " >."


def same_person(random: Random, domain: Domain, transformation: str, wording: int, cast: Cast) -> Example:
    """Some people have something each, and one of them is asked for."""
    people, things = random.sample(cast.names, cast.count), _draw(random, domain, transformation, cast.count)
    said = f"{_people(random, domain, wording, people, things)} {domain.asks.format(person=people[0])}"
    return Example(f"{said} {domain.endings[transformation]}", domain.transformations[transformation][things[0]])


def other_person(random: Random, domain: Domain, transformation: str, wording: int, cast: Cast) -> Example:
    """One of two people has all things but one, and what that one has not is asked for."""
    (asked, other), things = random.sample(cast.names, 2), _draw(random, domain, transformation, cast.count)
    said = _people(random, domain, wording, [other, *[asked] * (cast.count - 1)], things)
    said = f"{said} {domain.denies.format(person=asked)} {domain.endings[transformation]}"
    return Example(said, domain.transformations[transformation][things[0]])


def different(random: Random, domain: Domain, transformation: str, wording: int, cast: Cast) -> Example:
    """Two words are the same, and the third is asked for."""
    source, twice = _draw(random, domain, transformation, 2)
    said = (
        f"{_listed(random, [source, twice, twice])} Which is different? {domain.endings[transformation].capitalize()}"
    )
    return Example(said, domain.transformations[transformation][source])


def other_class(random: Random, domain: Domain, transformation: str, wording: int, cast: Cast) -> Example:
    """Two words are of a class, and the third is asked for."""
    made = domain.transformations[transformation]
    source = random.choice(list(made))
    name = random.choice([other for other in sorted(set(domain.classes.values())) if other != domain.classes[source]])
    pair = random.sample([word for word in made if domain.classes[word] == name], 2)
    said = f"{_listed(random, [source, *pair])} Which has nothing to do with {name}?"
    return Example(f"{said} {domain.endings[transformation].capitalize()}", made[source])


def owner(random: Random, domain: Domain, transformation: str, wording: int, cast: Cast) -> Example:
    """Some people have something each, and who has one of the things is asked for."""
    people, things = random.sample(cast.names, cast.count), _draw(random, domain, transformation, cast.count)
    said = _people(random, domain, wording, people, things)
    return Example(f"{said} Who owns the {things[0]}?", people[0])


def _listed(random: Random, those: list[str]) -> str:
    random.shuffle(those)
    return f"There are {', '.join(those)}."


class Task(NamedTuple):
    """A pattern, a transformation, a domain, and a wording of its sentences."""

    pattern: str
    transformation: str
    domain: str
    wording: int

    @property
    def id(self) -> str:
        """Name it, as `parts_of` reads it."""
        return f"{self.pattern}/{self.transformation}/{self.domain}/{self.wording}"

    def example(self, random: Random, cast: Cast = SUITE) -> Example:
        """Draw an example."""
        return PATTERNS[self.pattern](random, DOMAINS[self.domain], self.transformation, self.wording, cast)


PATTERNS: dict[str, Callable[[Random, Domain, str, int], Example]] = {
    "same-person": same_person,
    "the-other-person": other_person,
    "different-in-set": different,
    "the-other-class": other_class,
    "same-thing": owner,
}


def _all_tasks() -> tuple[Task, ...]:
    """List the 74 tasks."""
    made = [(name, transformation) for name, domain in DOMAINS.items() for transformation in domain.transformations]
    tasks = [
        Task(pattern, transformation, name, wording)
        for pattern, wordings in (("same-person", 2), ("the-other-person", 2), ("different-in-set", 1))
        for name, transformation in made
        for wording in range(wordings)
    ]
    tasks += [Task("the-other-class", COPY, name, 0) for name, domain in DOMAINS.items() if domain.classes]
    tasks += [Task("same-thing", COPY, "thing", wording) for wording in range(2)]
    return tuple(tasks)


TASKS = _all_tasks()
