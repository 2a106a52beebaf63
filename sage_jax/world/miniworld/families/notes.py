"""Families about notes in Simple Note."""

from __future__ import annotations

import random

from sage_jax.world.miniworld.content import Note, Person, Plan
from sage_jax.world.miniworld.families.parts import new_title, short_text
from sage_jax.world.miniworld.family import Change, Draw, Family, skill_source

FIND_TAGGED = 'notes = apis.simple_note.search_notes(access_token=token, tags=[tag], page_limit=20)\n'
FIND_TITLE = (
    'notes = apis.simple_note.search_notes(access_token=token, page_limit=20)\n'
    'note = [n for n in notes if n["title"] == title][0]\n'
)


def _tagged(plan: Plan, person: Person) -> dict[str, list[Note]]:
    """Tag -> the notes that have it, of tags that neither all notes nor only one has."""
    notes = plan.notes_of(person)
    tags = sorted({t for n in notes for t in n.tags})
    out = {t: [n for n in notes if t in n.tags] for t in tags}
    return {t: found for t, found in out.items() if 1 < len(found) < len(notes)}


def _count(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    tagged = _tagged(plan, person)
    if not tagged:
        return None
    tag = rng.choice(sorted(tagged))
    return Draw({"tag": tag}, len(tagged[tag]))


def _count_lines(rng: random.Random, plan: Plan, person: Person) -> Draw:
    note = rng.choice(plan.notes_of(person))
    return Draw({"title": note.title}, len(note.content.splitlines()))


def _delete(rng: random.Random, plan: Plan, person: Person) -> Draw:
    note = rng.choice(plan.notes_of(person))
    return Draw({"title": note.title}, changes=(Change("simple_note.Note", removed=(note.id,)),))


def _delete_tagged(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    tagged = _tagged(plan, person)
    if not tagged:
        return None
    tag = rng.choice(sorted(tagged))
    return Draw({"tag": tag}, changes=(Change("simple_note.Note", removed=tuple(n.id for n in tagged[tag])),))


def _pin_changes(notes) -> tuple[Change, ...]:
    return (Change("simple_note.Note", updated={n.id: {"pinned": True} for n in notes}, free=("updated_at",)),)


def _pin(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    notes = [n for n in plan.notes_of(person) if not n.pinned]
    if not notes:
        return None
    note = rng.choice(notes)
    return Draw({"title": note.title}, changes=_pin_changes([note]))


def _pin_tagged(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    # Only tags without a pinned note: pinning again would still set the note's time of change.
    tagged = {t: notes for t, notes in _tagged(plan, person).items() if not any(n.pinned for n in notes)}
    if not tagged:
        return None
    tag = rng.choice(sorted(tagged))
    return Draw({"tag": tag}, changes=_pin_changes(tagged[tag]))


def _add_line(rng: random.Random, plan: Plan, person: Person) -> Draw:
    note, text = rng.choice(plan.notes_of(person)), short_text(rng)
    return Draw({"title": note.title, "text": text}, changes=(
        Change("simple_note.Note", updated={note.id: {"content": f"{note.content}\n{text}"}},
               free=("updated_at",)),))


def note_changes(person: Person, title: str, content: str) -> tuple[Change, ...]:
    """What a new note adds."""
    return (Change("simple_note.Note", added=({"user_id": person.id, "title": title, "content": content},)),)


def _create(rng: random.Random, plan: Plan, person: Person) -> Draw:
    title, text = new_title(rng, (n.title for n in plan.notes_of(person))), short_text(rng)
    return Draw({"title": title, "text": text}, changes=note_changes(person, title, text))


FAMILIES = (
    Family(
        function=skill_source(
            "count_tagged_notes(tag: str) -> int", "Number of notes with a tag.", "simple_note",
            FIND_TAGGED + 'return len(notes)'),
        phrasings=(
            "How many of my notes in Simple Note have the tag '{tag}'?",
            "Count my Simple Note notes that are tagged '{tag}'.",
            "In Simple Note, how many notes do I have with the tag '{tag}'?"),
        draw=_count, apps=("simple_note",), difficulty=1, api="simple_note.search_notes"),
    Family(
        function=skill_source(
            "count_note_lines(title: str) -> int", "Number of lines of a note.", "simple_note",
            FIND_TITLE +
            'content = apis.simple_note.show_note(access_token=token, note_id=note["note_id"])["content"]\n'
            'return len(content.splitlines())'),
        phrasings=(
            "How many lines does my note '{title}' in Simple Note have?",
            "Count the lines of the Simple Note note '{title}'.",
            "My Simple Note note '{title}' has how many lines?"),
        draw=_count_lines, apps=("simple_note",), difficulty=2, api="simple_note.show_note"),
    Family(
        function=skill_source(
            "delete_note_titled(title: str) -> None", "Delete the note with a title.", "simple_note",
            FIND_TITLE + 'apis.simple_note.delete_note(access_token=token, note_id=note["note_id"])'),
        phrasings=(
            "Delete my note '{title}' in Simple Note.",
            "Please remove the note '{title}' from Simple Note.",
            "I no longer need the Simple Note note '{title}'. Delete it."),
        draw=_delete, apps=("simple_note",), difficulty=1, api="simple_note.delete_note"),
    Family(
        function=skill_source(
            "pin_note(title: str) -> None", "Pin the note with a title.", "simple_note",
            FIND_TITLE + 'apis.simple_note.update_note(access_token=token, note_id=note["note_id"], pinned=True)'),
        phrasings=(
            "Pin my note '{title}' in Simple Note.",
            "Please pin the Simple Note note '{title}'.",
            "Mark the note '{title}' as pinned in Simple Note."),
        draw=_pin, apps=("simple_note",), difficulty=1, api="simple_note.update_note"),
    Family(
        function=skill_source(
            "add_note_line(title: str, text: str) -> None", "Append a line to the note with a title.", "simple_note",
            FIND_TITLE +
            'apis.simple_note.add_content_to_note(\n'
            '    access_token=token, note_id=note["note_id"], append_or_prepend="append", added_content=text)'),
        phrasings=(
            "Append the line '{text}' to my note '{title}' in Simple Note.",
            "In Simple Note, add the line '{text}' at the end of the note '{title}'.",
            "Please write '{text}' as a new last line into my Simple Note note '{title}'."),
        draw=_add_line, apps=("simple_note",), difficulty=2, api="simple_note.add_content_to_note"),
    Family(
        function=skill_source(
            "write_note(title: str, text: str) -> None", "Create a note with a title and a text.", "simple_note",
            'apis.simple_note.create_note(access_token=token, title=title, content=text)'),
        phrasings=(
            "Create a note with the title '{title}' and the text '{text}' in Simple Note.",
            "In Simple Note, make a new note '{title}' that says '{text}'.",
            "Please write a Simple Note note titled '{title}' with the content '{text}'."),
        draw=_create, apps=("simple_note",), difficulty=1, api="simple_note.create_note"),
    Family(
        function=skill_source(
            "delete_tagged_notes(tag: str) -> None", "Delete all notes with a tag.", "simple_note",
            FIND_TAGGED +
            'for note in notes:\n'
            '    apis.simple_note.delete_note(access_token=token, note_id=note["note_id"])'),
        phrasings=(
            "Delete all my notes with the tag '{tag}' in Simple Note.",
            "Please remove every note tagged '{tag}' from Simple Note.",
            "I no longer need the Simple Note notes with the tag '{tag}'. Delete them."),
        draw=_delete_tagged, apps=("simple_note",), difficulty=2, api="simple_note.delete_note", role="challenge"),
    Family(
        function=skill_source(
            "pin_tagged_notes(tag: str) -> None", "Pin all notes with a tag.", "simple_note",
            FIND_TAGGED +
            'for note in notes:\n'
            '    apis.simple_note.update_note(access_token=token, note_id=note["note_id"], pinned=True)'),
        phrasings=(
            "Pin all my notes with the tag '{tag}' in Simple Note.",
            "Please pin every Simple Note note tagged '{tag}'.",
            "Mark the notes with the tag '{tag}' as pinned in Simple Note."),
        draw=_pin_tagged, apps=("simple_note",), difficulty=2, api="simple_note.update_note", role="challenge"),
)
