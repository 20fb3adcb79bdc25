#!/usr/bin/env python3
"""A grammar of short stories for children: what the model of examples/net/stories is trained on.

    grammar.py [--count N] [--seed S]     prints stories, an empty line after each; the same ones for the same seed

A story is ASCII, of 150 to 450 bytes. First it draws who and what it is about, the cast: a hero with a name, a kind and a home, a thing, a
helper with a name and a kind. Then it draws a plot, and a wording for each part of it. All wordings name the same cast, so what the opening
says decides words that come 300 bytes later. A model has to learn that: the casts alone are more than 10^10, more than it could keep.
"""

import argparse
import random

LEAST, MOST = 150, 450

SHE = "Mira Lily Nora Ella Ruby Tess Daisy Ivy Hazel Luna Poppy Rosa Clara Molly Wren Pearl Freya Anna Bella Greta".split()
HE = "Tom Max Oscar Finn Leo Hugo Sam Milo Otto Ben Jack Theo Felix Paul Noah Emil Barney Rudy Jonas Kip".split()
ANIMALS = "fox rabbit bear mouse hedgehog squirrel frog duck kitten puppy lamb badger beaver owl turtle pony goat piglet otter deer".split()
NATURES = "little brave shy clever kind merry curious gentle sleepy cheerful quiet hungry".split()
COLORS = "red blue green yellow golden silver white purple".split()
# A thing, and where its owner likes to take it.
THINGS = {
    "kite": "to fly it on the hill",
    "ball": "to play with it in the grass",
    "boat": "to sail it on the pond",
    "drum": "to play it in the morning",
    "hat": "to wear it on sunny days",
    "scarf": "to wear it in the snow",
    "lantern": "to carry it at night",
    "bell": "to ring it at noon",
    "basket": "to fill it with berries",
    "cup": "to drink warm milk from it",
    "button": "to look at it in the sun",
    "blanket": "to lie on it under the stars",
    "flute": "to play it by the river",
    "wagon": "to pull it down the road",
}
# Things that tear; the others break.
SOFT = ["kite", "hat", "scarf", "blanket"]
# Where someone lives, and where a thing may be lost near there.
PLACES = {
    "in a small house by the sea": ["under a shell", "on the beach", "behind a rock"],
    "in a hollow tree in the forest": ["under a leaf", "behind a mushroom", "in the tall ferns"],
    "on a farm at the edge of the village": ["in the barn", "behind the hay", "under the cart"],
    "in a warm burrow under the hill": ["in the tall grass", "under a root", "behind a stone"],
    "near a quiet lake in the valley": ["among the reeds", "on the shore", "under the bridge"],
    "in a garden full of flowers": ["under a rose", "behind the gate", "among the tulips"],
    "in a cottage at the foot of a mountain": ["in the snow", "behind a rock", "under a pine tree"],
    "beside an old mill on the river": ["under the wheel", "among the reeds", "behind the sacks"],
    "in a cave behind a waterfall": ["on a wet stone", "in the moss", "behind the water"],
    "on an island in the middle of a lake": ["in the sand", "under a palm tree", "behind a log"],
}
TIMES = ["One day", "One morning", "One sunny day", "One windy day", "One evening", "One cold morning", "On a rainy day", "Last summer"]
FOODS = "bread soup cake porridge jam pudding pie stew toast cheese".split()
FEELINGS = ["sad", "worried", "unhappy", "upset"]

OPENINGS = [
    "Once upon a time there was a {nature} {kind} named {hero}. {He} lived {place}.",
    "Once upon a time, a {nature} {kind} lived {place}. {His} name was {hero}.",
    "There once was a {kind} called {hero} who lived {place}. {He} was very {nature}.",
    "{hero} was a {nature} {kind}. {He} lived {place}.",
    "Long ago, a {nature} {kind} named {hero} lived {place}.",
    "This is the story of {hero}, a {nature} {kind} who lived {place}.",
    "{hero} the {kind} lived {place}. Everyone knew that {he} was {nature}.",
]
LIKES = [
    "{He} had a {color} {thing} and liked {use}.",
    "{He} loved {his} {color} {thing} and liked {use}.",
    "More than anything, {he} loved {his} {color} {thing}.",
    "{His} best friend was a {companion} named {other}.",
    "Every day {he} ate {food} with {his} friend {other} the {companion}.",
]
# What went wrong, what the helper says, how it ends.
PLOTS = [
    (
        [
            "{time}, {his} {color} {thing} was gone. {hero} looked everywhere, but {he} could not find it.",
            "{time}, {hero} lost {his} {color} {thing}. {He} looked and looked.",
            "{time}, {hero} could not find {his} {color} {thing}.",
        ],
        [
            '"I will help you look for it," said {helper}.',
            '"Let us look for your {thing} together," said the {friend}.',
            '"I saw a {color} {thing} today," said {helper}.',
        ],
        [
            "They found the {thing} {spot}.",
            "Soon {helper} found the {thing} {spot}.",
            "There it was, {spot}!",
            "The {color} {thing} was {spot}.",
        ],
    ),
    (
        [
            "{time}, {his} {color} {thing} {broke}. {hero} began to cry.",
            "{time}, {hero} fell and {broke} {his} {color} {thing}.",
            "{time}, {hero} saw that {his} {color} {thing} was {broken}.",
        ],
        [
            '"I can mend your {thing}," said {helper}.',
            '"Do not cry," said the {friend}. "We can fix it."',
            '"Give me the {thing}," said {helper}. "I know what to do."',
        ],
        [
            "They worked all day, and the {thing} was like new.",
            "{helper} mended the {thing} with a bit of string.",
            "Soon the {color} {thing} was as good as new.",
        ],
    ),
    (
        [
            "{time}, the wind blew {his} {color} {thing} into a tall tree.",
            "{time}, {his} {color} {thing} got stuck in a tree. {hero} could not reach it.",
            "{time}, {hero} threw {his} {color} {thing} too high, and it stayed in a tree.",
        ],
        ['"I can climb that tree," said {helper}.', '"Stand on my back," said the {friend}.', '"Let us shake the tree," said {helper}.'],
        ["Down came the {color} {thing}!", "They shook the tree until the {thing} fell down.", "In no time {hero} had {his} {thing} back."],
    ),
    (
        [
            "{time}, {hero} went for a walk and lost {his} way.",
            "{time}, {hero} walked too far, and it got dark.",
            "{time}, {hero} could not find the way home.",
        ],
        [
            '"I know the way," said {helper}. "Come with me."',
            '"Follow me," said the {friend}.',
            '"Stay close to me," said {helper}. "I will take you home."',
        ],
        [
            "They walked by the light of the moon until {hero} was home.",
            "{helper} led {hero} all the way home.",
            "Before long {hero} saw {his} home again.",
        ],
    ),
    (
        [
            "{time}, there was a big storm. {hero} was afraid of the thunder.",
            "{time}, the sky turned black and the thunder roared. {hero} hid under the bed.",
            "{time}, a storm came. {hero} did not dare to sleep.",
        ],
        [
            '"The thunder is only a noise," said {helper}.',
            '"Let us sing a song," said the {friend}.',
            '"I will stay with you," said {helper}.',
        ],
        [
            "They sang until the storm was over.",
            "{helper} told a funny story, and {hero} forgot the thunder.",
            "Soon the sun came out, and {hero} was not afraid anymore.",
        ],
    ),
    (
        [
            "{time}, {hero} was very hungry, but there was no {food} left.",
            "{time}, {hero} wanted to make {food} for a feast, but {he} did not know how.",
            "{time}, all the {food} was gone, and {hero} had nothing to eat.",
        ],
        [
            '"I have enough for two," said {helper}.',
            '"Let us make some {food} together," said the {friend}.',
            '"Come to my house," said {helper}. "I have {food}."',
        ],
        [
            "They ate {food} until they were full.",
            "They shared the {food}, and it tasted wonderful.",
            "{helper} and {hero} ate {food} until the sun went down.",
        ],
    ),
    (
        [
            "{time}, {hero} wanted to cross the river, but the water was too deep.",
            "{time}, {hero} came to a wide river and could not get across.",
            "{time}, the bridge was gone, and {hero} could not cross the river.",
        ],
        ['"We can build a raft," said {helper}.', '"I can carry you," said the {friend}.', '"Let us lay a log across," said {helper}.'],
        [
            "Soon they were both on the other side.",
            "{hero} held on tight, and they crossed the river.",
            "It took all day, but at last {hero} was across.",
        ],
    ),
]
SADNESS = ["{He} was very {feeling}.", "{hero} sat down and felt {feeling}.", "This made {hero} {feeling}."]
ARRIVALS = [
    "Then a {friend} named {helper} came by.",
    "Just then {he} met {helper}, an old {friend}.",
    "A {friend} named {helper} heard {him} and came closer.",
    "Along came {helper}, a {friend} with a big smile.",
]
THANKS = ['"Thank you, {helper}!" said {hero}.', '"You are a good friend, {helper}," said {hero}.', "{hero} thanked {helper} and smiled."]
ENDINGS = [
    "From that day on, {hero} and {helper} were best friends.",
    "{hero} was happy, and so was {helper}.",
    "That night {hero} slept well.",
    "And {hero} never forgot the kind {friend}.",
    "{hero} and {helper} laughed and danced. The end.",
    "They lived happily ever after.",
    "Now {hero} knows that it is good to have friends.",
]


def cast(rng):
    """Who and what a story is about."""
    pick = rng.choice
    female = rng.random() < 0.5
    hero, kind = pick(SHE if female else HE), pick(ANIMALS)
    # No two of a name or of a kind.
    helper = pick([name for name in (SHE if rng.random() < 0.5 else HE) if name != hero])
    friend = pick([animal for animal in ANIMALS if animal != kind])
    companion = pick([animal for animal in ANIMALS if animal not in (kind, friend)])
    other = pick([name for name in (SHE if rng.random() < 0.5 else HE) if name not in (hero, helper)])
    place, thing = pick(list(PLACES)), pick(list(THINGS))
    pronouns = (
        {"he": "she", "him": "her", "his": "her", "He": "She", "His": "Her"}
        if female
        else {"he": "he", "him": "him", "his": "his", "He": "He", "His": "His"}
    )
    return dict(
        pronouns,
        hero=hero,
        kind=kind,
        helper=helper,
        friend=friend,
        companion=companion,
        other=other,
        place=place,
        spot=pick(PLACES[place]),
        thing=thing,
        use=THINGS[thing],
        nature=pick(NATURES),
        color=pick(COLORS),
        broke="tore" if thing in SOFT else "broke",
        broken="torn" if thing in SOFT else "broken",
        time=pick(TIMES),
        food=pick(FOODS),
        feeling=pick(FEELINGS),
    )


def parts(rng):
    """The parts of a story as patterns, in paragraphs."""
    pick = rng.choice
    problems, offers, ends = pick(PLOTS)
    first = [pick(OPENINGS)]
    if rng.random() < 0.6:
        first.append(pick(LIKES))
    second = [pick(problems)]
    if rng.random() < 0.4:
        second.append(pick(SADNESS))
    second.append(pick(ARRIVALS))
    if rng.random() < 0.8:
        second.append(pick(offers))
    third = [pick(ends)]
    if rng.random() < 0.4:
        third.append(pick(THANKS))
    third.append(pick(ENDINGS))
    return [first, second, third] if rng.random() < 0.4 else [first + second + third]


def articles(text):
    """`a owl` is `an owl`."""
    for animal in ("owl", "otter"):
        text = text.replace(f" a {animal}", f" an {animal}")
    return text


def story(rng):
    """One story; `rng` is a random.Random."""
    while True:
        words = cast(rng)
        text = "\n".join(" ".join(part.format_map(words) for part in paragraph) for paragraph in parts(rng))
        text = articles(text)
        if LEAST <= len(text) <= MOST:
            return text


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=10)
    options.add_argument("--seed", type=int, default=0)
    options = options.parse_args()
    rng = random.Random(options.seed)
    for _ in range(options.count):
        print(story(rng), end="\n\n")


if __name__ == "__main__":
    main()
