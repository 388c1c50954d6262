"""Stories, names and things of the word problems: a table without logic.

A sentence changes the running amount by one operation with one number, so every sentence contains `{n}` exactly once.
Names and things never appear literally in a sentence, so that sentences without them identify the computation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

PEOPLE = {
    "She": ("Ada", "Emma", "Ivy", "Lena", "Mia", "Nora", "Rosa", "Zoe"),
    "He": ("Adam", "Ben", "Eli", "Hugo", "Leo", "Max", "Omar", "Tom"),
}


@dataclass(frozen=True)
class Story:
    """One kind of word problem.

    Besides `{n}`, sentences may use `{name}` (the main person), `{He}` (that person's pronoun), `{friend}` (another
    person) and `{thing}`.

    Attributes:
      things: Words that may replace `{thing}`.
      amount: Opening that states the first amount.
      product: Opening with two numbers; the first amount is `{n}` times `{m}`.
      changes: Sentences by operator: `+`, `-`, `*` or `/`.
      question: Question about the final amount.
    """

    things: tuple[str, ...]
    amount: str
    product: str
    changes: Mapping[str, tuple[str, ...]]
    question: str


STORIES = (
    Story(  # a collection
        things=("marbles", "stickers", "shells", "stamps"),
        amount="{name} has {n} {thing}.",
        product="{name} has {n} boxes of {m} {thing}.",
        changes={
            "+": ("{He} finds {n} more.", "{friend} brings {n} more."),
            "-": ("{He} loses {n}.", "{friend} takes {n}."),
            "*": ("{He} trades each one for {n} new ones.",),
            "/": ("{He} makes {n} equal piles and keeps one.",),
        },
        question="How many {thing} does {name} have now?",
    ),
    Story(  # baking
        things=("cookies", "muffins", "pies", "rolls"),
        amount="{name} bakes {n} {thing}.",
        product="{name} bakes {n} trays of {m} {thing}.",
        changes={
            "+": ("{He} bakes {n} more.", "{friend} brings {n} more."),
            "-": ("{He} eats {n}.", "{He} burns {n}."),
            "*": ("{He} cuts each one into {n} pieces.",),
            "/": ("{He} packs {n} equal bags and keeps one.",),
        },
        question="How many does {name} have now?",
    ),
    Story(  # savings
        things=("dollars", "coins"),
        amount="{name} saves {n} {thing}.",
        product="{name} saves {n} {thing} on each of {m} days.",
        changes={
            "+": ("{He} earns {n} more.", "{friend} pays back {n}."),
            "-": ("{He} spends {n}.", "{He} loses {n}."),
            "*": ("A bonus makes it {n} times as much.",),
            "/": ("{He} makes {n} equal shares and keeps one.",),
        },
        question="How many {thing} does {name} have now?",
    ),
    Story(  # shopping
        things=("apples", "pears", "eggs", "lemons"),
        amount="{name} buys {n} {thing}.",
        product="{name} buys {n} bags of {m} {thing}.",
        changes={
            "+": ("{He} buys {n} more.", "The shop adds {n} for free."),
            "-": ("{He} sells {n}.", "{He} drops {n}."),
            "*": ("A bonus makes it {n} times as many.",),
            "/": ("{He} packs {n} equal boxes and keeps one.",),
        },
        question="How many {thing} are left?",
    ),
    Story(  # a vehicle
        things=("train", "bus", "ferry", "tram"),
        amount="A {thing} leaves with {n} people.",
        product="A {thing} has {n} rows of {m} people.",
        changes={
            "+": ("Then {n} get on.", "At the next stop {n} come in."),
            "-": ("Then {n} get off.", "At the next stop {n} go out."),
            "*": ("In town it fills to {n} times as many.",),
            "/": ("They form {n} equal groups and one stays.",),
        },
        question="How many people are on the {thing}?",
    ),
    Story(  # a garden
        things=("roses", "tulips", "beans", "onions"),
        amount="{name} plants {n} {thing}.",
        product="{name} plants {n} rows of {m} {thing}.",
        changes={
            "+": ("{He} plants {n} more.", "In spring {n} more grow."),
            "-": ("{He} picks {n}.", "A snail eats {n}."),
            "*": ("Then each one grows into {n} new ones.",),
            "/": ("{He} makes {n} equal beds and keeps one.",),
        },
        question="How many {thing} are in the garden?",
    ),
    Story(  # a library
        things=("books", "maps", "films"),
        amount="A library has {n} {thing}.",
        product="A library has {n} shelves of {m} {thing}.",
        changes={
            "+": ("{name} brings back {n}.", "The library buys {n} more."),
            "-": ("{name} takes {n}.", "The library sells {n}."),
            "*": ("{name} copies each one {n} times and keeps only copies.",),
            "/": ("They form {n} equal groups and one stays.",),
        },
        question="How many {thing} are in the library?",
    ),
    Story(  # a farm
        things=("goats", "ducks", "sheep", "hens"),
        amount="{name} has a farm with {n} {thing}.",
        product="{name} has {n} barns with {m} {thing} each.",
        changes={
            "+": ("In spring {n} more are born.", "{He} buys {n} more."),
            "-": ("{He} sells {n}.", "At night {n} run off."),
            "*": ("Then the farm grows to {n} times as many.",),
            "/": ("They form {n} equal groups and one stays.",),
        },
        question="How many {thing} are on the farm?",
    ),
    Story(  # a game
        things=("points", "stars", "gems"),
        amount="{name} starts a game with {n} {thing}.",
        product="{name} wins {n} games with {m} {thing} each.",
        changes={
            "+": ("{He} wins {n} more.", "A chest adds {n}."),
            "-": ("{He} loses {n}.", "A trap takes {n}."),
            "*": ("A potion makes it {n} times as many.",),
            "/": ("A spell makes {n} equal parts and keeps one.",),
        },
        question="How many {thing} does {name} have now?",
    ),
    Story(  # a tank
        things=("water", "milk", "juice"),
        amount="A tank holds {n} liters of {thing}.",
        product="{name} fills a tank with {n} cans of {m} liters of {thing}.",
        changes={
            "+": ("{name} adds {n} liters.", "A pipe brings {n} more."),
            "-": ("{name} takes {n} liters.", "Then {n} liters run out."),
            "*": ("A pump fills it to {n} times as much.",),
            "/": ("{name} makes {n} equal parts and keeps one.",),
        },
        question="How many liters of {thing} are in the tank?",
    ),
)
