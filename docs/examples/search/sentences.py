"""Sentences that people write on a neighbourhood's notice board, made from a grammar: what is wanted, and of which thing.

A meaning is a number, `WISHES` times `THINGS`. Every wish can be said in several ways that have no word of weight in common, and
so can most things, so that sentences of one meaning often share no word.
"""

from __future__ import annotations

import random

WISHES = (
    ("how do i fix {}", "{} is broken what can i do", "mending {} at home", "my {} does not work any more"),
    ("where can i buy {}", "shops that sell {}", "looking for a cheap {}", "what does a new {} cost"),
    ("how to clean {}", "my {} is dirty", "getting stains off {}", "washing {} properly"),
    ("who wants my old {}", "getting rid of {}", "{} to give away for free", "moving out so my {} has to go"),
    ("can somebody lend me {}", "{} for rent", "i need {} for one day only", "may i borrow your {} tomorrow"),
    ("i lost my {}", "has anybody seen my {}", "{} is missing since yesterday", "stolen {} call me if you find it"),
    ("making your own {}", "plans for a homemade {}", "how to build {} from scrap", "i want to construct {} myself"),
    ("which {} is best", "comparing brands of {}", "what {} would you take", "tests and reviews of {}"),
)
THINGS = (
    ("bicycle", "bike", "two wheeler"), ("car", "automobile", "vehicle"), ("sofa", "couch", "settee"), ("tap", "faucet"),
    ("phone", "mobile", "handset"), ("laptop", "notebook", "portable computer"), ("coat", "jacket", "parka"),
    ("shoes", "boots", "sneakers"), ("lamp", "light"), ("television", "tv", "telly"), ("fridge", "refrigerator"),
    ("carpet", "rug"), ("cupboard", "wardrobe", "closet"), ("camera",), ("glasses", "spectacles"),
    ("bag", "backpack", "rucksack"), ("guitar",), ("tent",), ("oven", "stove", "cooker"), ("watch", "clock"),
    ("lawn mower", "grass cutter"),
    ("pram", "stroller", "buggy"), ("pot", "saucepan"), ("book", "novel"), ("ladder", "steps"), ("drill", "power tool"),
    ("umbrella", "brolly"), ("bin", "trash can", "dustbin"), ("trousers", "pants", "jeans"), ("sweater", "pullover", "jumper"),
    ("bed", "mattress"), ("wallet", "purse"),
)  # fmt: skip
BEFORE = ("", "", "", "hello", "please", "quick question", "good evening")
BEHIND = ("", "", "", "thanks", "near me", "in the old town", "any ideas")
MEANINGS = len(WISHES) * len(THINGS)


def words() -> list[str]:
    """All words there are; the first two are what fills a sentence up, and what is not known."""
    texts = (" ".join(group) for family in (WISHES, THINGS, (BEFORE, BEHIND)) for group in family)
    return ["", "?", *sorted({word for text in texts for word in text.split() if word != "{}"})]


def ways(meaning: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How a meaning's wish and thing can be said."""
    return WISHES[meaning % len(WISHES)], THINGS[meaning // len(WISHES)]


def pair(meaning: int, rng: random.Random) -> tuple[str, str]:
    """Two sentences of one meaning, in other words as far as there are any."""
    wishes, things = ways(meaning)
    said = rng.sample(wishes, 2)
    called = rng.sample(things, 2) if len(things) > 1 else things * 2
    first, second = (wish.format(thing) for wish, thing in zip(said, called, strict=True))
    return tuple(" ".join(f"{rng.choice(BEFORE)} {text} {rng.choice(BEHIND)}".split()) for text in (first, second))  # type: ignore[return-value]
