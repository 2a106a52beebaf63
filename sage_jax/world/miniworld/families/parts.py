"""Lines of code and draws that several families share, so that the same step is always written in the same words."""

from __future__ import annotations

import random
from collections.abc import Iterable

from sage_jax.world.miniworld import words
from sage_jax.world.miniworld.content import Contact, Person, Plan

# What a function returns about `amounts`: operation -> (expression, the same in Python over a list).
OPERATIONS = {
    "total": ("sum(amounts)", sum),
    "count": ("len(amounts)", len),
    "largest": ("max(amounts)", max),
    "smallest": ("min(amounts)", min),
}


def find_email(app: str, name: str = "name", token: str = "token") -> str:
    """A line that leaves in `email` the address of the user of `app` whose full name is the parameter `name`.

    Nobody shares a first or last name, so the best match of a search is the person.
    """
    return f'email = apis.{app}.search_users(access_token={token}, query={name})[0]["email"]\n'


def find_contact(name: str = "name", token: str = "token") -> str:
    """A line that leaves in `contact` the entry of the phone's contact book whose full name is the parameter `name`."""
    return f'contact = apis.phone.search_contacts(access_token={token}, query={name})[0]\n'


def find_relation(token: str = "token") -> str:
    """A line that leaves in `contact` the only entry of the phone's contact book with the parameter `relation`."""
    return f'contact = apis.phone.search_contacts(access_token={token}, relationship=relation)[0]\n'


def short_text(rng: random.Random) -> str:
    """Two words to be written somewhere, e.g. 'rusty bridge'."""
    return f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}".lower()


def new_title(rng: random.Random, taken: Iterable[str]) -> str:
    """A title of two words that is not in `taken`."""
    taken = set(taken)
    while (title := f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}") in taken:
        pass
    return title


def contact_person(rng: random.Random, plan: Plan, person: Person) -> Person:
    """Somebody in the contact book of `person`."""
    return plan.person(rng.choice(plan.contacts_of(person)).person_id)


def other_person(rng: random.Random, plan: Plan, person: Person, *excluded: Person) -> Person:
    """Anybody but `person` and the excluded ones."""
    ids = {person.id, *(p.id for p in excluded)}
    return rng.choice([p for p in plan.people if p.id not in ids])


def only_relation(rng: random.Random, plan: Plan, person: Person) -> Contact | None:
    """A contact whose relationship no other contact of `person` has, if there is one."""
    contacts = plan.contacts_of(person)
    kinds = [c.relationship for c in contacts]
    single = [c for c in contacts if kinds.count(c.relationship) == 1]
    return rng.choice(single) if single else None
