"""Families that carry something from one app into another one."""

from __future__ import annotations

import random

from sage_jax.world.miniworld.content import Person, Plan
from sage_jax.world.miniworld.families.mail import FIND_THREADS, mail_changes, mails_by_sender
from sage_jax.world.miniworld.families.notes import note_changes
from sage_jax.world.miniworld.families.parts import (
    contact_person,
    find_contact,
    find_email,
    find_relation,
    new_title,
    only_relation,
    other_person,
)
from sage_jax.world.miniworld.families.phone import FIELDS, conversations, find_messages, text_changes
from sage_jax.world.miniworld.families.todos import task_changes
from sage_jax.world.miniworld.families.venmo import payment_changes
from sage_jax.world.miniworld.family import Draw, Family, skill_source


def _contact_field(field: str):
    """A source: (app, lines, expression, draw of (person of the source, value))."""

    def draw(rng: random.Random, plan: Plan, person: Person) -> tuple[Person, str]:
        other = contact_person(rng, plan, person)
        return other, FIELDS[field][1](other)

    return "phone", find_contact(), f'contact["{field}"]', draw


def _draw_message(rng: random.Random, plan: Plan, person: Person) -> tuple[Person, str] | None:
    talks = conversations(plan, person, "sender")
    if not talks:
        return None
    other = rng.choice(sorted(talks))
    return plan.person(other), talks[other][-1].text


def _draw_subject(rng: random.Random, plan: Plan, person: Person) -> tuple[Person, str] | None:
    senders = mails_by_sender(plan, person)
    if not senders:
        return None
    sender = rng.choice(sorted(senders))
    return plan.person(sender), senders[sender][-1].subject


SOURCES = {
    "number": _contact_field("phone_number"),
    "birthday": _contact_field("birthday"),
    "message": ("phone", find_messages("sender"), 'max(texts, key=lambda m: m["sent_at"])["message"]', _draw_message),
    "subject": ("gmail", FIND_THREADS, 'max(threads, key=lambda t: t["created_at"])["subject"]', _draw_subject),
}


def _note(source: str, role: str, phrasings: tuple[str, ...]) -> Family:
    """Writes the value into a new note."""
    app, find, value, draw_source = SOURCES[source]

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        found = draw_source(rng, plan, person)
        if found is None:
            return None
        title = new_title(rng, (n.title for n in plan.notes_of(person)))
        return Draw({"name": found[0].name, "title": title}, changes=note_changes(person, title, found[1]))

    return Family(
        function=skill_source(
            f"note_{source}(name: str, title: str) -> None", f"Write the {source} of a person into a new note.",
            (app, "simple_note"),
            f'{find}text = {value}\n'
            'apis.simple_note.create_note(access_token=simple_note_token, title=title, content=text)'),
        phrasings=phrasings, draw=draw, apps=(app, "simple_note"), difficulty=3, api="simple_note.create_note", role=role)


def _mail(source: str, role: str, phrasings: tuple[str, ...]) -> Family:
    """Mails the value to a friend, as subject and as body."""
    app, find, value, draw_source = SOURCES[source]

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        found = draw_source(rng, plan, person)
        if found is None:
            return None
        friend = other_person(rng, plan, person, found[0])
        return Draw({"name": found[0].name, "friend": friend.name}, changes=mail_changes(person, friend, found[1]))

    return Family(
        function=skill_source(
            f"mail_{source}(name: str, friend: str) -> None", f"Mail the {source} of a person to a friend.", (app, "gmail"),
            f'{find}text = {value}\n' + find_email("gmail", "friend", "gmail_token") +
            'apis.gmail.send_email(access_token=gmail_token, email_addresses=[email], subject=text, body=text)'),
        phrasings=phrasings, draw=draw, apps=(app, "gmail"), difficulty=3, api="gmail.send_email", role=role)


def _task(source: str, role: str, phrasings: tuple[str, ...]) -> Family:
    """Adds a task with the value as title to the inbox of Todoist."""
    app, find, value, draw_source = SOURCES[source]

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        found = draw_source(rng, plan, person)
        if found is None:
            return None
        (inbox,) = (p for p in plan.projects_of(person) if p.inbox)
        return Draw({"name": found[0].name}, changes=task_changes(person, inbox, found[1]))

    return Family(
        function=skill_source(
            f"task_from_{source}(name: str) -> None", f"Add a task with the latest {source} from a person.", (app, "todoist"),
            f'{find}text = {value}\napis.todoist.create_task(access_token=todoist_token, project_id=0, title=text)'),
        phrasings=phrasings, draw=draw, apps=(app, "todoist"), difficulty=3, api="todoist.create_task", role=role)


def _text_field(field: str, source: str, role: str) -> Family:
    """Texts a field of one contact to another contact."""
    what, value = FIELDS[field]

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw:
        one, two = rng.sample([plan.person(c.person_id) for c in plan.contacts_of(person)], 2)
        return Draw({"name": one.name, "friend": two.name}, changes=text_changes(person, two, value(one)))

    return Family(
        function=skill_source(
            f"text_{source}(name: str, friend: str) -> None", f"Text the {what} of a contact to another contact.", "phone",
            find_contact() + f'text = contact["{field}"]\n' + find_contact("friend") +
            'apis.phone.send_text_message(access_token=token, phone_number=contact["phone_number"], message=text)'),
        phrasings=(
            f"Text '{{friend}}' the {what} of my contact '{{name}}', nothing else.",
            f"Send '{{friend}}' a text message that is just the {what} of '{{name}}' in my contacts.",
            f"My contact '{{friend}}' needs the {what} of '{{name}}'. Text only that."),
        draw=draw, apps=("phone",), difficulty=3, api="phone.send_text_message", role=role)


def _pay_relation(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    contact, amount = only_relation(rng, plan, person), rng.randrange(5, 99)
    return contact and Draw({"relation": contact.relationship, "amount": amount},
                            changes=payment_changes(person, plan.person(contact.person_id), amount))


FAMILIES = (
    _note("number", "normal", (
        "Create a Simple Note note '{title}' whose content is the phone number of my contact '{name}'.",
        "Save the phone number that my phone has for '{name}' in a new Simple Note note '{title}'.",
        "Make a note '{title}' in Simple Note with just the phone number of my contact '{name}'.")),
    _note("subject", "normal", (
        "Create a Simple Note note '{title}' whose content is the subject of the latest Gmail email from '{name}'.",
        "Save the subject of the newest email from '{name}' in Gmail as a new Simple Note note '{title}'.",
        "Make a note '{title}' in Simple Note with just the subject of the most recent Gmail email from '{name}'.")),
    _mail("birthday", "normal", (
        "Email '{friend}' the birthday of my phone contact '{name}', as subject and as body.",
        "Send '{friend}' a Gmail email: subject and body are the birthday that my phone has for '{name}'.",
        "'{friend}' wants the birthday of my contact '{name}'. Send it by Gmail as subject and body.")),
    _task("message", "normal", (
        "Add the latest text message from '{name}' as a task to my Todoist inbox.",
        "Make a task in my Todoist inbox whose title is the newest text message that '{name}' sent me.",
        "Put the most recent text from '{name}' on my phone into the inbox of Todoist as a task.")),
    _text_field("email", "address", "normal"),
    _note("message", "challenge", (
        "Create a Simple Note note '{title}' whose content is the latest text message from '{name}'.",
        "Save the newest text message that '{name}' sent me in a new Simple Note note '{title}'.",
        "Make a note '{title}' in Simple Note with just the most recent text from '{name}'.")),
    _mail("number", "challenge", (
        "Email '{friend}' the phone number of my phone contact '{name}', as subject and as body.",
        "Send '{friend}' a Gmail email: subject and body are the phone number that my phone has for '{name}'.",
        "'{friend}' wants the phone number of my contact '{name}'. Send it by Gmail as subject and body.")),
    _task("subject", "challenge", (
        "Add the subject of the latest Gmail email from '{name}' as a task to my Todoist inbox.",
        "Make a task in my Todoist inbox whose title is the subject of the newest Gmail email from '{name}'.",
        "Put the subject of the most recent email from '{name}' in Gmail into the inbox of Todoist as a task.")),
    _text_field("phone_number", "number", "challenge"),
    Family(
        function=skill_source(
            "pay_relation(relation: str, amount: int) -> None", "Send money on Venmo to the contact with a relationship.",
            ("phone", "venmo"), find_relation() +
            'apis.venmo.create_transaction(access_token=venmo_token, receiver_email=contact["email"], amount=amount)'),
        phrasings=(
            "Send {amount} dollars on Venmo to my '{relation}' in my phone contacts.",
            "Please pay my '{relation}' {amount} dollars on Venmo. The contact is in my phone.",
            "Look up my '{relation}' in my phone and send {amount} dollars on Venmo."),
        draw=_pay_relation, apps=("phone", "venmo"), difficulty=3, api="venmo.create_transaction", role="challenge"),
)
