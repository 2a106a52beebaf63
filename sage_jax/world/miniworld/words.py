"""Word lists and samplers of the mini world: names, titles and short texts, plain ASCII.

Strings are composed at random, so a title of a test person is rarely a string that train shows: it must be copied
from the instruction, not remembered.
"""

from __future__ import annotations

import random


def _words(*lines: str) -> tuple[str, ...]:
    return tuple("".join(lines).split())


FIRST = _words(
    "Ada Alan Alma Amos Anna Aron Beth Boris Brett Carl Cara Celia Cleo Colin Cora Dale Dana Daria Dirk Dora Edgar Edith "
    "Elena Elias Elsa Emil Enzo Erica Ezra Fabio Faye Felix Fiona Flora Frank Gail Gavin Gina Glenn Greta Hanna Heidi Hugo "
    "Ida Igor Ines Iris Ivan Jade Jana Jasper Joan Jonas Judy Julia Karl Kate Kira Kurt Laila Lars Lena Leo Linus Lola Luis "
    "Mabel Marco Maya Milo Mina Nadia Nils Nina Noel Nora Olga Omar Oscar Otto Paula Pedro Petra Pia Quinn Ralf Rhea Rita "
    "Rosa Ruben Sara Silas Simon Sonia Stella Sven Tara Theo Tessa Tina Tobias Ugo Una Uma Vera Vito Wanda Willa Xenia Yara "
    "Yusuf Zara Zeno Zoe"
)
LAST = _words(
    "Abbott Archer Bailey Barlow Becker Bennet Bishop Bolton Brandt Burton Calder Carver Castro Clarke Conley Cooper Crane "
    "Dalton Dawson Decker Dexter Draper Duncan Easton Ellis Farley Fisher Foster Fuller Garner Gibson Glover Graham Greene "
    "Hadley Harper Hayden Hewitt Holden Hopper Hunter Irving Jensen Jordan Keller Kemper Kramer Lawson Lennox Lowell Madden "
    "Malone Marsh Mercer Miller Morris Nelson Norton Olsen Osborn Parker Pastor Porter Potter Quimby Ramsey Reeves Ritter "
    "Rowley Sawyer Sexton Sharpe Slater Sutton Tanner Thorne Turner Tyler Vaughn Verner Walden Walker Warner Weaver Wilder "
    "Wright Yates Zeller"
)
ADJECTIVES = _words(
    "Amber Ancient Arctic Autumn Bitter Blank Blazing Blue Bold Brass Brave Bright Broken Bronze Burning Calm Careful Cheap "
    "Clear Clever Cloudy Cold Copper Coral Cosmic Cozy Crimson Crooked Crystal Curious Daily Dancing Dark Deep Distant Double "
    "Dusty Early Easy Eastern Electric Empty Endless Faded Fading Famous Fancy Fast Final Foggy Forgotten Fragile Free Frozen "
    "Gentle Giant Glass Golden Grand Green Grey Happy Heavy Hidden Hollow Honest Humble Icy Idle Indigo Iron Ivory Jolly "
    "Kind Last Late Lazy Little Lonely Long Loud Lucky Lunar Magic Mellow Midnight Misty Modern Narrow Neon Noble Northern "
    "Odd Old Olive Open Orange Other Pale Paper Patient Perfect Pink Plain Polar Proud Purple Quick Quiet Rapid Rare Raw Red "
    "Restless Rough Royal Rusty Sacred Salty Scarlet Secret Seven Sharp Shining Short Shy Silent Silver Simple Single Sleepy "
    "Slow Small Smooth Soft Solar Solid Sour Southern Spare Spicy Steady Stolen Stray Strong Sudden Sunny Sweet Swift Tall "
    "Tender Thin Tidal Tiny Tired Total Tropic True Twin Upper Urban Velvet Violet Vivid Wandering Warm Wasted Western White "
    "Wild Winter Wise Wooden Yellow Young"
)
NOUNS = _words(
    "Acorn Alley Anchor Angel Apple Arrow Ash Atlas Attic Avenue Badge Balloon Bamboo Banner Basket Bay Beach Beacon Bear "
    "Bell Berry Bird Bloom Boat Bottle Boulder Branch Breeze Brick Bridge Brook Bucket Butter Cabin Cactus Camera Candle "
    "Canyon Castle Cave Cedar Chain Chalk Chapel Cherry Circle Cliff Clock Cloud Clover Coast Comet Compass Corner Cotton "
    "Crane Creek Crown Curtain Daisy Dawn Desert Diary Dragon Dream Drum Dune Dust Eagle Echo Ember Engine Falcon Feather "
    "Fern Field Fire Flag Flame Flower Forest Fountain Fox Garden Gate Ghost Glacier Glove Grape Guitar Hammer Harbor Hat "
    "Hawk Heart Hill Honey Horizon Horse Hotel House Island Ivy Jacket Jewel Jungle Kettle Key Kite Ladder Lagoon Lake "
    "Lamp Lantern Leaf Lemon Letter Lion Lotus Magnet Mango Maple Marble Market Meadow Mill Mirror Monk Moon Moss Mountain "
    "Mule Needle Nest Night Oak Oasis Ocean Onion Orchard Otter Owl Palace Panther Parade Peach Pearl Pebble Pepper Piano "
    "Pier Pilot Pine Planet Pocket Pond Poppy Prairie Puzzle Quarry Rabbit Radio Rain Raven Reef Ribbon Ridge River Road "
    "Robin Rocket Roof Rope Rose Sail Salt Sand Shadow Shell Ship Signal Smoke Snow Song Spark Spider Spring Star Station "
    "Statue Stone Storm Street Summer Swan Table Temple Thunder Ticket Tiger Tower Train Tree Tulip Tunnel Turtle Valley "
    "Vase Village Violin Wagon Wall Wave Whale Wheel Willow Wind Window Wing Wolf Zebra"
)
GENRES = ("rock", "jazz", "pop", "folk", "soul", "metal", "blues", "disco")
TAGS = ("work", "home", "travel", "health", "ideas", "money", "school", "garden")
RELATIONSHIPS = ("friend", "sibling", "parent", "coworker", "roommate", "neighbor")
PURPOSES = _words(
    "lunch dinner rent taxi coffee tickets groceries pizza books gift petrol concert cinema snacks parking laundry museum "
    "flowers breakfast hotel"
)
FOLDERS = ("documents", "downloads", "photos", "projects", "recipes", "travel")
EXTENSIONS = ("txt", "md", "csv", "pdf", "log")
DAY_NAMES = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
MAX_TITLE = 18  # characters


class Titles:
    """Hands out titles of 1 to 3 words, each at most once over the life of the object (also across letter case)."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._seen: set[str] = set()

    def draw(self) -> str:
        """One unused title of at most `MAX_TITLE` characters. Raises RuntimeError when the words are used up."""
        for _ in range(10_000):
            kind = self._rng.random()
            words = [self._rng.choice(NOUNS)]
            if kind > 0.04:
                words.insert(0, self._rng.choice(ADJECTIVES))
            if kind > 0.85:
                words.insert(1, self._rng.choice(NOUNS))
            title = " ".join(words)
            if len(title) <= MAX_TITLE and title.lower() not in self._seen and len(set(words)) == len(words):
                self._seen.add(title.lower())
                return title
        raise RuntimeError(f"no unused title left after {len(self._seen)} titles: add words")


def sentence(rng: random.Random) -> str:
    """A short lower-case text, e.g. 'the rusty bridge near the lake'."""
    first, second = rng.sample(NOUNS, 2)
    place = rng.choice(("near", "behind", "under", "beside"))
    return f"the {rng.choice(ADJECTIVES).lower()} {first.lower()} {place} the {second.lower()}"
