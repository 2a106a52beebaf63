"""Families about contacts and text messages."""

from __future__ import annotations

import random
from collections import defaultdict

from sage_jax.world.miniworld.content import Person, Plan, TextMessage
from sage_jax.world.miniworld.families.parts import (
    contact_person,
    find_contact,
    find_relation,
    only_relation,
    short_text,
)
from sage_jax.world.miniworld.family import Change, Draw, Family, skill_source

# Field of a contact as the API names it -> (in words, the same of a Person).
FIELDS = {
    "phone_number": ("phone number", lambda p: p.phone),
    "email": ("email address", lambda p: p.email),
    "birthday": ("birthday", lambda p: p.birthday),
    "home_address": ("home address", lambda p: f"{p.street}, {p.city}"),
}


def _field_by_name(field: str, role: str) -> Family:
    what, value = FIELDS[field]

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw:
        other = contact_person(rng, plan, person)
        return Draw({"name": other.name}, value(other))

    return Family(
        function=skill_source(
            f"contact_{field}(name: str) -> str", f"The {what} of a contact.", "phone",
            find_contact() + f'return contact["{field}"]'),
        phrasings=(
            f"What is the {what} of '{{name}}' in my phone contacts?",
            f"Look up the {what} of my contact '{{name}}'.",
            f"Tell me the {what} that my phone has for '{{name}}'."),
        draw=draw, apps=("phone",), difficulty=1, api="phone.search_contacts", role=role)


def _field_by_relation(field: str, role: str) -> Family:
    what, value = FIELDS[field]

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        contact = only_relation(rng, plan, person)
        return contact and Draw({"relation": contact.relationship}, value(plan.person(contact.person_id)))

    return Family(
        function=skill_source(
            f"relation_{field}(relation: str) -> str", f"The {what} of the contact with a relationship.", "phone",
            find_relation() + f'return contact["{field}"]'),
        phrasings=(
            f"What is the {what} of my '{{relation}}' in my phone contacts?",
            f"Look up the {what} of my '{{relation}}' in my contact book.",
            f"Tell me the {what} that my phone has for my '{{relation}}'."),
        draw=draw, apps=("phone",), difficulty=1, api="phone.search_contacts", role=role)


def text_changes(person: Person, other: Person, message: str) -> tuple[Change, ...]:
    """What a text message from `person` to `other` adds."""
    return (
        Change("phone.GlobalTextMessage", added=({"sender_id": person.id, "receiver_id": other.id, "message": message},)),
        Change("phone.UserTextMessage", added=({"user_id": person.id}, {"user_id": other.id})),
    )


def _text_name(rng: random.Random, plan: Plan, person: Person) -> Draw:
    other, message = contact_person(rng, plan, person), short_text(rng)
    return Draw({"name": other.name, "message": message}, changes=text_changes(person, other, message))


def _text_relation(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    contact, message = only_relation(rng, plan, person), short_text(rng)
    return contact and Draw({"relation": contact.relationship, "message": message},
                            changes=text_changes(person, plan.person(contact.person_id), message))


def _count_relation(rng: random.Random, plan: Plan, person: Person) -> Draw:
    relations = sorted({c.relationship for c in plan.contacts_of(person)})
    relation = rng.choice(relations)
    return Draw({"relation": relation}, sum(c.relationship == relation for c in plan.contacts_of(person)))


def find_messages(side: str) -> str:
    """Lines that leave in `texts` the messages whose "sender" or "receiver" is the parameter `name`."""
    return (
        'items = apis.phone.search_text_messages(access_token=token, query=name, page_limit=20)\n'
        f'texts = [m for m in items if m["{side}"]["name"] == name]\n'
    )


def conversations(plan: Plan, person: Person, side: str) -> dict[int, list[TextMessage]]:
    """Other's id -> at least two messages, oldest first, that the other sent to ("sender") or got from ("receiver") `person`."""
    out = defaultdict(list)
    for m in plan.messages:
        mine, other = (m.receiver_id, m.sender_id) if side == "sender" else (m.sender_id, m.receiver_id)
        if mine == person.id:
            out[other].append(m)
    return {o: sorted(ms, key=lambda m: m.created) for o, ms in out.items()
            if len(ms) > 1 and len({m.created for m in ms}) == len(ms)}


def _message(which: str, side: str, role: str, phrasings: tuple[str, ...]) -> Family:
    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        talks = conversations(plan, person, side)
        if not talks:
            return None
        other = rng.choice(sorted(talks))
        return Draw({"name": plan.person(other).name}, talks[other][-1 if which == "latest" else 0].text)

    word = "from" if side == "sender" else "to"
    pick = "max" if which == "latest" else "min"
    return Family(
        function=skill_source(
            f"{which}_message_{word}(name: str) -> str", f"The {which} text message {word} a person.", "phone",
            find_messages(side) + f'return {pick}(texts, key=lambda m: m["sent_at"])["message"]'),
        phrasings=phrasings, draw=draw, apps=("phone",), difficulty=2, api="phone.search_text_messages", role=role)


FAMILIES = (
    _field_by_name("phone_number", "normal"),
    _field_by_name("birthday", "normal"),
    _field_by_relation("email", "normal"),
    _field_by_relation("home_address", "normal"),
    _field_by_name("email", "challenge"),
    _field_by_relation("phone_number", "challenge"),
    Family(
        function=skill_source(
            "count_contacts(relation: str) -> int", "Number of contacts with a relationship.", "phone",
            'contacts = apis.phone.search_contacts(access_token=token, relationship=relation, page_limit=20)\n'
            'return len(contacts)'),
        phrasings=(
            "How many of my phone contacts have the relationship '{relation}'?",
            "Count the people in my contact book who are saved as '{relation}'.",
            "In my phone, how many contacts are marked as '{relation}'?"),
        draw=_count_relation, apps=("phone",), difficulty=1, api="phone.search_contacts"),
    Family(
        function=skill_source(
            "text_contact(name: str, message: str) -> None", "Send a text message to a contact.", "phone",
            find_contact() +
            'apis.phone.send_text_message(access_token=token, phone_number=contact["phone_number"], message=message)'),
        phrasings=(
            "Send the text message '{message}' to my contact '{name}'.",
            "Text '{name}' the message '{message}' from my phone.",
            "Please write '{message}' to '{name}' in a text message."),
        draw=_text_name, apps=("phone",), difficulty=2, api="phone.send_text_message"),
    Family(
        function=skill_source(
            "text_relation(relation: str, message: str) -> None", "Send a text message to the contact with a relationship.",
            "phone", find_relation() +
            'apis.phone.send_text_message(access_token=token, phone_number=contact["phone_number"], message=message)'),
        phrasings=(
            "Send the text message '{message}' to my '{relation}'.",
            "Text my '{relation}' the message '{message}' from my phone.",
            "Please write '{message}' to my '{relation}' in a text message."),
        draw=_text_relation, apps=("phone",), difficulty=2, api="phone.send_text_message", role="challenge"),
    _message("latest", "sender", "normal", (
        "What is the latest text message that '{name}' sent me?",
        "What does the most recent text message from '{name}' say?",
        "Read me the newest text that I got from '{name}'.")),
    _message("first", "receiver", "normal", (
        "What is the first text message that I sent to '{name}'?",
        "What does my oldest text message to '{name}' say?",
        "Read me the first text that I wrote to '{name}'.")),
    _message("first", "sender", "challenge", (
        "What is the first text message that '{name}' sent me?",
        "What does the oldest text message from '{name}' say?",
        "Read me the first text that I got from '{name}'.")),
    _message("latest", "receiver", "challenge", (
        "What is the latest text message that I sent to '{name}'?",
        "What does my most recent text message to '{name}' say?",
        "Read me the newest text that I wrote to '{name}'.")),
)
