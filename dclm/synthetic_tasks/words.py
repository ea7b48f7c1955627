"""Words of the synthetic tasks and their transformations; each result is a single word."""

_NAMES = (
    "Alice Anna Aaron Adam Bella Ben Clara Carl Diana Dan Emma Eric Fiona Frank Grace Greg Hannah Harry "
    "Irene Ian Julia Jack Kate Kurt Laura Leo Maria Max Nora Nick Olivia Oscar Paula Peter Rosa Ralph "
    "Sarah Sam Tina Tom Vera Victor Wendy Walter Zoe Zack"
)
NAMES = _NAMES.split()

CLASSES = {  # superclass: its members
    "clothing": "shirt sweater jacket coat scarf skirt blouse hat sock glove",
    "fruit": "banana pear mango peach lemon cherry plum apricot melon papaya",
    "animal": "dog cat horse rabbit tiger wolf donkey fox camel goat",
    "weapon": "rifle pistol cannon grenade sword dagger spear bow shotgun revolver",
    "vehicle": "car bus truck taxi tram bicycle tractor van scooter jeep",
    "furniture": "table chair sofa desk bed shelf stool cupboard bench wardrobe",
    "insect": "bee beetle mosquito ant wasp moth cricket butterfly fly termite",
    "instrument": "violin piano guitar flute trumpet drum harp cello clarinet organ",
}
SUPERCLASS = {word: name for name, members in CLASSES.items() for word in members.split()}

CAPABILITY = {  # purpose of a thing
    **dict.fromkeys(["pen", "pencil", "chalk", "crayon", "marker"], "write"),
    **dict.fromkeys(["knife", "scissors", "razor", "axe", "saw"], "cut"),
    **dict.fromkeys(["kite", "plane", "helicopter", "balloon", "glider"], "fly"),
    **dict.fromkeys(["lamp", "candle", "torch", "lantern", "bulb"], "shine"),
    **dict.fromkeys(["oven", "stove", "kettle", "toaster", "grill"], "heat"),
    **dict.fromkeys(["boat", "raft", "canoe", "ferry", "yacht"], "float"),
    **dict.fromkeys(["clock", "watch", "stopwatch", "sundial", "hourglass"], "time"),
    **dict.fromkeys(["ruler", "scale", "thermometer", "compass", "barometer"], "measure"),
}

COUNTRY = {
    "Paris": "France", "Lyon": "France", "Marseille": "France", "Nice": "France",
    "Rome": "Italy", "Milan": "Italy", "Naples": "Italy", "Turin": "Italy",
    "Berlin": "Germany", "Munich": "Germany", "Hamburg": "Germany", "Cologne": "Germany",
    "Madrid": "Spain", "Barcelona": "Spain", "Seville": "Spain", "Valencia": "Spain",
    "Tokyo": "Japan", "Osaka": "Japan", "Kyoto": "Japan", "Nagoya": "Japan",
    "Beijing": "China", "Shanghai": "China", "Wuhan": "China", "Chengdu": "China",
    "Delhi": "India", "Mumbai": "India", "Chennai": "India", "Kolkata": "India",
    "Toronto": "Canada", "Montreal": "Canada", "Vancouver": "Canada", "Ottawa": "Canada",
    "Cairo": "Egypt", "Luxor": "Egypt", "Giza": "Egypt", "Alexandria": "Egypt",
    "Nairobi": "Kenya", "Mombasa": "Kenya", "Nakuru": "Kenya", "Kisumu": "Kenya",
}  # fmt: skip
CONTINENT_OF_COUNTRY = {
    **dict.fromkeys(("France", "Italy", "Germany", "Spain"), "Europe"),
    **dict.fromkeys(("Japan", "China", "India"), "Asia"),
    **dict.fromkeys(("Egypt", "Kenya"), "Africa"),
    "Canada": "America",
}
CONTINENT = {city: CONTINENT_OF_COUNTRY[country] for city, country in COUNTRY.items()}

_OPPOSITES = (
    "big small, heavy light, hot cold, fast slow, old young, rich poor, strong weak, tall short, wide narrow, "
    "clean dirty, dry wet, empty full, hard soft, loud quiet, sharp blunt, smooth rough, thick thin, "
    "bright dark, brave timid, healthy ill, honest false, cheap costly, deep shallow, early late"
)
PAIRS = [tuple(pair.split()) for pair in _OPPOSITES.split(", ")]
OPPOSITE = {word: other for a, b in PAIRS for word, other in ((a, b), (b, a))}

_YEARS = [str(year) for year in range(1990, 2030)]
_MONTH_NAMES = "January February March April May June July August September October November December"
_MONTHS = _MONTH_NAMES.split()


def _following(words: list[str]) -> dict[str, str]:
    return dict(zip(words, words[1:], strict=False))


NEXT_YEAR = _following(_YEARS)
PREVIOUS_YEAR = _following(_YEARS[::-1])
NEXT_MONTH = _following([*_MONTHS, _MONTHS[0]])
PREVIOUS_MONTH = _following([*_MONTHS[::-1], _MONTHS[-1]])

_MADE = (SUPERCLASS, CAPABILITY, COUNTRY, CONTINENT, OPPOSITE)
ALL_WORDS = {*NAMES, *_YEARS, *_MONTHS, *(word for made in _MADE for pair in made.items() for word in pair)}
