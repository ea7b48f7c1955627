"""Synthetic tasks that combine attention to a word with a transformation of it (paper, section 4.3).

A task has an attention *pattern*, which determines the source word of the answer, a *transformation* of this word, a
*domain* of words, and a *wording* of the sentences.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from . import words

COPY = "copy"


class Domain(NamedTuple):
    """A domain of words, and templates of sentences.

    Attributes:
        transformations: Mapping of words, by the transformation's name.
        endings: Text before the answer, by the transformation's name.
        holds: Templates of statements with {person} and {word}.
        asks: Template of a question about a person.
        denies: Template of a question about an object that the person does not have.
        classes: Classes of the words; empty if no pattern needs them.
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


class TaskExample(NamedTuple):
    """The text before an answer, and the answer."""

    question: str
    answer: str


class Cast(NamedTuple):
    """People in examples.

    Attributes:
        names: Names of people.
        count: Number of people per example, each with a thing.
    """

    names: Sequence[str] = words.NAMES
    count: int = 3


SUITE = Cast()


def _draw(random: Random, domain: Domain, transformation: str, count: int) -> list[str]:
    """Sample words with distinct transformations, so that only the right source gives the answer."""
    made = domain.transformations[transformation]
    while True:
        drawn = random.sample(list(made), count)
        if len({made[word] for word in drawn}) == count:
            return drawn


def _people(random: Random, domain: Domain, wording: int, people: list[str], things: list[str]) -> str:
    """State who has what, in random order."""
    pairs = list(zip(people, things, strict=True))
    random.shuffle(pairs)
    return "< " + " ".join(domain.holds[wording].format(person=who, word=what) for who, what in pairs) + " >."


def same_person(random: Random, domain: Domain, transformation: str, wording: int, cast: Cast) -> TaskExample:
    """Several people have one thing each; the question is about one person's thing."""
    people, things = random.sample(cast.names, cast.count), _draw(random, domain, transformation, cast.count)
    prompt = f"{_people(random, domain, wording, people, things)} {domain.asks.format(person=people[0])}"
    return TaskExample(f"{prompt} {domain.endings[transformation]}", domain.transformations[transformation][things[0]])


def other_person(random: Random, domain: Domain, transformation: str, wording: int, cast: Cast) -> TaskExample:
    """One of two people has all things but one; the question is about the thing this person does not have."""
    (asked, other), things = random.sample(cast.names, 2), _draw(random, domain, transformation, cast.count)
    prompt = _people(random, domain, wording, [other, *[asked] * (cast.count - 1)], things)
    prompt = f"{prompt} {domain.denies.format(person=asked)} {domain.endings[transformation]}"
    return TaskExample(prompt, domain.transformations[transformation][things[0]])


def different(random: Random, domain: Domain, transformation: str, wording: int, cast: Cast) -> TaskExample:
    """Two words are equal; the question is about the third."""
    source, twice = _draw(random, domain, transformation, 2)
    prompt = (
        f"{_listed(random, [source, twice, twice])} Which is different? {domain.endings[transformation].capitalize()}"
    )
    return TaskExample(prompt, domain.transformations[transformation][source])


def other_class(random: Random, domain: Domain, transformation: str, wording: int, cast: Cast) -> TaskExample:
    """Two words belong to the same class; the question is about the third."""
    made = domain.transformations[transformation]
    source = random.choice(list(made))
    name = random.choice([other for other in sorted(set(domain.classes.values())) if other != domain.classes[source]])
    pair = random.sample([word for word in made if domain.classes[word] == name], 2)
    prompt = f"{_listed(random, [source, *pair])} Which has nothing to do with {name}?"
    return TaskExample(f"{prompt} {domain.endings[transformation].capitalize()}", made[source])


def owner(random: Random, domain: Domain, transformation: str, wording: int, cast: Cast) -> TaskExample:
    """Several people have one thing each; the question is about the owner of a thing."""
    people, things = random.sample(cast.names, cast.count), _draw(random, domain, transformation, cast.count)
    prompt = _people(random, domain, wording, people, things)
    return TaskExample(f"{prompt} Who owns the {things[0]}?", people[0])


def _listed(random: Random, those: list[str]) -> str:
    random.shuffle(those)
    return f"There are {', '.join(those)}."


class SyntheticTask(NamedTuple):
    """A task: pattern, transformation, domain and wording."""

    pattern: str
    transformation: str
    domain: str
    wording: int

    @property
    def id(self) -> str:
        """Name of the task, with all parts."""
        return f"{self.pattern}/{self.transformation}/{self.domain}/{self.wording}"

    def example(self, random: Random, cast: Cast = SUITE) -> TaskExample:
        """Sample an example."""
        return PATTERNS[self.pattern](random, DOMAINS[self.domain], self.transformation, self.wording, cast)


PATTERNS: dict[str, Callable[[Random, Domain, str, int], TaskExample]] = {
    "same-person": same_person,
    "the-other-person": other_person,
    "different-in-set": different,
    "the-other-class": other_class,
    "same-thing": owner,
}


def _all_tasks() -> tuple[SyntheticTask, ...]:
    """Return the 74 tasks."""
    made = [(name, transformation) for name, domain in DOMAINS.items() for transformation in domain.transformations]
    tasks = [
        SyntheticTask(pattern, transformation, name, wording)
        for pattern, wordings in (("same-person", 2), ("the-other-person", 2), ("different-in-set", 1))
        for name, transformation in made
        for wording in range(wordings)
    ]
    tasks += [SyntheticTask("the-other-class", COPY, name, 0) for name, domain in DOMAINS.items() if domain.classes]
    tasks += [SyntheticTask("same-thing", COPY, "thing", wording) for wording in range(2)]
    return tuple(tasks)


TASKS = _all_tasks()
