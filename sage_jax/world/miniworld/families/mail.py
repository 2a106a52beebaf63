"""Families about mails in Gmail."""

from __future__ import annotations

import random
from collections import defaultdict

from sage_jax.world.miniworld.content import Mail, Person, Plan
from sage_jax.world.miniworld.families.parts import find_email, other_person, short_text
from sage_jax.world.miniworld.family import Change, Draw, Family, skill_source

FIND_THREADS = (
    find_email("gmail") +
    'threads = apis.gmail.show_inbox_threads(access_token=token, from_email=email, page_limit=20)\n'
)


def mails_by_sender(plan: Plan, person: Person) -> dict[int, list[Mail]]:
    """Sender's id -> mails to `person`, oldest first, of senders with at least two mails at different times."""
    out = defaultdict(list)
    for mail in plan.inbox_of(person):
        out[mail.sender_id].append(mail)
    return {s: sorted(ms, key=lambda m: m.created) for s, ms in out.items()
            if len(ms) > 1 and len({m.created for m in ms}) == len(ms)}


def thread_ids(plan: Plan, person: Person) -> dict[int, int]:
    """Mail id -> id of the thread in the mailbox of `person`: the threads are written mail by mail, the sender's first."""
    out, row = {}, 0
    for mail in plan.mails:
        for user in (mail.sender_id, *mail.recipient_ids):
            row += 1
            if user == person.id:
                out[mail.id] = row
    return out


def _question(value):
    """Draws a question for `value(mails)` over all mails of one sender; None means unsuitable."""

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        senders = {s: value(mails) for s, mails in mails_by_sender(plan, person).items()}
        senders = {s: v for s, v in senders.items() if v is not None}
        if not senders:
            return None
        sender = rng.choice(sorted(senders))
        return Draw({"name": plan.person(sender).name}, senders[sender])

    return draw


def _mark(wanted, **fields):
    """Draws a change that sets fields on the threads of one sender for which `wanted(mail)` holds, at least one."""

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        senders = {s: [m for m in mails if wanted(m)] for s, mails in mails_by_sender(plan, person).items()}
        senders = {s: mails for s, mails in senders.items() if mails}
        if not senders:
            return None
        sender, rows = rng.choice(sorted(senders)), thread_ids(plan, person)
        return Draw({"name": plan.person(sender).name},
                    changes=(Change("gmail.UserEmailThread", updated={rows[m.id]: fields for m in senders[sender]}),))

    return draw


def mail_changes(person: Person, other: Person, text: str) -> tuple[Change, ...]:
    """What a mail with `text` as subject and body adds."""
    return (
        Change("gmail.Email", added=({"sender_id": person.id, "recipient_ids": [other.id], "subject": text, "body": text},)),
        Change("gmail.GlobalEmailThread", added=({},)),
        Change("gmail.UserEmailThread", added=({"user_id": person.id, "outgoing": True}, {"user_id": other.id, "incoming": True})),
    )


def _send(rng: random.Random, plan: Plan, person: Person) -> Draw:
    other, text = other_person(rng, plan, person), short_text(rng)
    return Draw({"name": other.name, "text": text}, changes=mail_changes(person, other, text))


def _some(count: int) -> int | None:
    return count or None


FAMILIES = (
    Family(
        function=skill_source(
            "count_unread_from(name: str) -> int", "Number of unread mails from a person.", "gmail",
            FIND_THREADS + 'return len([t for t in threads if not t["read"]])'),
        phrasings=(
            "How many unread emails from '{name}' are in my Gmail inbox?",
            "Count the Gmail emails from '{name}' that I have not read.",
            "In Gmail, how many emails that '{name}' sent me are still unread?"),
        draw=_question(lambda mails: _some(sum(not m.read for m in mails))), apps=("gmail",), difficulty=2,
        api="gmail.search_users"),
    Family(
        function=skill_source(
            "latest_subject_from(name: str) -> str", "Subject of the latest mail from a person.", "gmail",
            FIND_THREADS + 'return max(threads, key=lambda t: t["created_at"])["subject"]'),
        phrasings=(
            "What is the subject of the latest email that '{name}' sent me on Gmail?",
            "Give me the subject of the newest email from '{name}' in my Gmail inbox.",
            "What is the most recent Gmail email from '{name}' about? Answer with its subject."),
        draw=_question(lambda mails: mails[-1].subject), apps=("gmail",), difficulty=2, api="gmail.search_users"),
    Family(
        function=skill_source(
            "star_mails_from(name: str) -> None", "Star all mails from a person.", "gmail",
            FIND_THREADS +
            'for t in threads:\n'
            '    if not t["starred"]:\n'
            '        apis.gmail.mark_thread_starred(access_token=token, email_thread_id=t["email_thread_id"])'),
        phrasings=(
            "Star all emails from '{name}' in my Gmail inbox.",
            "Please mark every Gmail email that '{name}' sent me as starred.",
            "In Gmail, put a star on each email from '{name}'."),
        draw=_mark(lambda m: not m.starred, starred=True), apps=("gmail",), difficulty=2, api="gmail.mark_thread_starred"),
    Family(
        function=skill_source(
            "read_mails_from(name: str) -> None", "Mark all mails from a person as read.", "gmail",
            FIND_THREADS +
            'for t in threads:\n'
            '    if not t["read"]:\n'
            '        apis.gmail.mark_thread_read(access_token=token, email_thread_id=t["email_thread_id"])'),
        phrasings=(
            "Mark all emails from '{name}' in my Gmail inbox as read.",
            "Please mark every Gmail email that '{name}' sent me as read.",
            "In Gmail, set each email from '{name}' to read."),
        draw=_mark(lambda m: not m.read, read=True), apps=("gmail",), difficulty=2, api="gmail.mark_thread_read"),
    Family(
        function=skill_source(
            "mail_person(name: str, text: str) -> None", "Send a mail with the same subject and body.", "gmail",
            find_email("gmail") +
            'apis.gmail.send_email(access_token=token, email_addresses=[email], subject=text, body=text)'),
        phrasings=(
            "Send '{name}' an email on Gmail with '{text}' as subject and as body.",
            "Email '{name}' on Gmail. Subject and body are both '{text}'.",
            "Please write a Gmail email to '{name}' whose subject and body are '{text}'."),
        draw=_send, apps=("gmail",), difficulty=2, api="gmail.send_email"),
    Family(
        function=skill_source(
            "count_starred_from(name: str) -> int", "Number of starred mails from a person.", "gmail",
            FIND_THREADS + 'return len([t for t in threads if t["starred"]])'),
        phrasings=(
            "How many starred emails from '{name}' are in my Gmail inbox?",
            "Count the Gmail emails from '{name}' that I have starred.",
            "In Gmail, how many emails that '{name}' sent me have a star?"),
        draw=_question(lambda mails: _some(sum(m.starred for m in mails))), apps=("gmail",), difficulty=2,
        api="gmail.search_users", role="challenge"),
    Family(
        function=skill_source(
            "first_subject_from(name: str) -> str", "Subject of the first mail from a person.", "gmail",
            FIND_THREADS + 'return min(threads, key=lambda t: t["created_at"])["subject"]'),
        phrasings=(
            "What is the subject of the first email that '{name}' sent me on Gmail?",
            "Give me the subject of the oldest email from '{name}' in my Gmail inbox.",
            "What was the very first Gmail email from '{name}' about? Answer with its subject."),
        draw=_question(lambda mails: mails[0].subject), apps=("gmail",), difficulty=2, api="gmail.search_users",
        role="challenge"),
    Family(
        function=skill_source(
            "star_unread_from(name: str) -> None", "Star the unread mails from a person.", "gmail",
            FIND_THREADS +
            'for t in threads:\n'
            '    if not t["read"] and not t["starred"]:\n'
            '        apis.gmail.mark_thread_starred(access_token=token, email_thread_id=t["email_thread_id"])'),
        phrasings=(
            "Star all unread emails from '{name}' in my Gmail inbox.",
            "Please mark every unread Gmail email that '{name}' sent me as starred.",
            "In Gmail, put a star on each email from '{name}' that I have not read."),
        draw=_mark(lambda m: not m.read and not m.starred, starred=True), apps=("gmail",), difficulty=3,
        api="gmail.mark_thread_starred", role="challenge"),
)
