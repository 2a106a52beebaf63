"""Families about payments and payment requests on Venmo."""

from __future__ import annotations

import random
from collections import defaultdict

from sage_jax.world.miniworld.content import Person, Plan
from sage_jax.world.miniworld.families.parts import OPERATIONS, find_email, other_person
from sage_jax.world.miniworld.family import Change, Draw, Family, skill_source


def payment_amounts(direction: str) -> str:
    """Lines that leave in `amounts` what was paid to ("sent") or by ("received") the parameter `name`."""
    partner = "receiver" if direction == "sent" else "sender"
    return (
        f'items = apis.venmo.show_transactions(access_token=token, query=name, direction="{direction}", page_limit=20)\n'
        f'amounts = [t["amount"] for t in items if t["{partner}"]["name"] == name]\n'
    )


def amounts_by_partner(plan: Plan, person: Person, direction: str) -> dict[int, list[int]]:
    """Partner's id -> amounts in dollars, of partners with at least two payments in that direction."""
    out = defaultdict(list)
    for t in plan.sent(person) if direction == "sent" else plan.received(person):
        out[t.receiver_id if direction == "sent" else t.sender_id].append(t.amount)
    return {partner: amounts for partner, amounts in out.items() if len(amounts) > 1}


def _amounts(direction: str, operation: str, role: str, phrasings: tuple[str, ...]) -> Family:
    expression, compute = OPERATIONS[operation]
    name = f"{operation}_{direction}_{'to' if direction == 'sent' else 'from'}"

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        partners = amounts_by_partner(plan, person, direction)
        if not partners:
            return None
        partner = rng.choice(sorted(partners))
        return Draw({"name": plan.person(partner).name}, compute(partners[partner]))

    return Family(
        function=skill_source(
            f"{name}(name: str) -> float", f"The {operation} of the Venmo payments {direction} {name.split('_')[-1]} a person.",
            "venmo", payment_amounts(direction) + f"return {expression}"),
        phrasings=phrasings, draw=draw, apps=("venmo",), difficulty=2, api="venmo.login", role=role)


def _send(rng: random.Random, plan: Plan, person: Person) -> Draw:
    other, amount = other_person(rng, plan, person), rng.randrange(5, 99)
    return Draw({"name": other.name, "amount": amount}, changes=payment_changes(person, other, amount))


def payment_changes(person: Person, other: Person, amount: int) -> tuple[Change, ...]:
    """What paying `other` from the balance of `person` changes."""
    return (
        Change("venmo.Transaction", added=({"sender_id": person.id, "receiver_id": other.id, "amount": amount},)),
        Change("venmo.User", updated={person.id: {"venmo_balance": person.balance - amount},
                                      other.id: {"venmo_balance": other.balance + amount}}),
        Change("venmo.Notification", added=({"user_id": other.id},)),
    )


def _request(rng: random.Random, plan: Plan, person: Person) -> Draw:
    other, amount = other_person(rng, plan, person), rng.randrange(5, 99)
    return Draw({"name": other.name, "amount": amount}, changes=(
        Change("venmo.PaymentRequest", added=({"sender_id": person.id, "receiver_id": other.id, "amount": amount,
                                               "approved_at": None, "denied_at": None},)),
        Change("venmo.Notification", added=({"user_id": other.id},)),
    ))


def _deny(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    pending = [r for r in plan.requests if r.receiver_id == person.id and r.status == "pending"]
    if len({r.sender_id for r in pending}) < 2:
        return None  # denying all of them would do
    sender = rng.choice(sorted({r.sender_id for r in pending}))
    rows = [r.id for r in pending if r.sender_id == sender]
    return Draw({"name": plan.person(sender).name}, changes=(
        Change("venmo.PaymentRequest", updated={i: {} for i in rows}, free=("denied_at", "updated_at")),
        Change("venmo.Notification", added=tuple({"user_id": sender} for _ in rows)),
    ))


FAMILIES = (
    _amounts("sent", "total", "normal", (
        "How much money have I sent to '{name}' on Venmo in total?",
        "What is the total of all my Venmo payments to '{name}'?",
        "Add up everything that I paid '{name}' on Venmo. How much is it?")),
    _amounts("sent", "largest", "normal", (
        "What is the largest amount that I ever sent to '{name}' on Venmo?",
        "How big was my largest Venmo payment to '{name}'?",
        "Of all payments that I sent to '{name}' on Venmo, how much was the largest one?")),
    _amounts("received", "count", "normal", (
        "How many Venmo payments have I received from '{name}'?",
        "Count the payments that '{name}' sent me on Venmo.",
        "How often did I receive money from '{name}' on Venmo?")),
    _amounts("received", "smallest", "normal", (
        "What is the smallest amount that I ever received from '{name}' on Venmo?",
        "How big was the smallest Venmo payment from '{name}' to me?",
        "Of all payments that '{name}' sent me on Venmo, how much was the smallest one?")),
    _amounts("sent", "count", "challenge", (
        "How many Venmo payments have I sent to '{name}'?",
        "Count the payments that I sent to '{name}' on Venmo.",
        "How often did I send money to '{name}' on Venmo?")),
    _amounts("received", "total", "challenge", (
        "How much money have I received from '{name}' on Venmo in total?",
        "What is the total of all Venmo payments from '{name}' to me?",
        "Add up everything that '{name}' paid me on Venmo. How much is it?")),
    _amounts("received", "largest", "challenge", (
        "What is the largest amount that I ever received from '{name}' on Venmo?",
        "How big was the largest Venmo payment from '{name}' to me?",
        "Of all payments that '{name}' sent me on Venmo, how much was the largest one?")),
    Family(
        function=skill_source(
            "send_money(name: str, amount: int) -> None", "Send money to a person on Venmo.", "venmo",
            find_email("venmo") + "apis.venmo.create_transaction(access_token=token, receiver_email=email, amount=amount)"),
        phrasings=(
            "Send {amount} dollars to '{name}' on Venmo.",
            "Please pay '{name}' {amount} dollars on Venmo.",
            "Use my Venmo balance to send '{name}' {amount} dollars."),
        draw=_send, apps=("venmo",), difficulty=2, api="venmo.create_transaction"),
    Family(
        function=skill_source(
            "request_money(name: str, amount: int) -> None", "Request money from a person on Venmo.", "venmo",
            find_email("venmo") + "apis.venmo.create_payment_request(access_token=token, user_email=email, amount=amount)"),
        phrasings=(
            "Request {amount} dollars from '{name}' on Venmo.",
            "Please ask '{name}' for {amount} dollars with a Venmo payment request.",
            "Make a Venmo payment request of {amount} dollars to '{name}'."),
        draw=_request, apps=("venmo",), difficulty=2, api="venmo.create_payment_request"),
    Family(
        function=skill_source(
            "deny_requests_from(name: str) -> None", "Deny the pending payment requests of a person.", "venmo",
            'items = apis.venmo.show_received_payment_requests(access_token=token, status="pending", page_limit=20)\n'
            'for r in items:\n'
            '    if r["sender"]["name"] == name:\n'
            '        apis.venmo.deny_payment_request(access_token=token, payment_request_id=r["payment_request_id"])'),
        phrasings=(
            "Deny all pending payment requests from '{name}' on Venmo.",
            "Please turn down every pending Venmo payment request that '{name}' sent me.",
            "'{name}' asked me for money on Venmo. Deny what is still pending."),
        draw=_deny, apps=("venmo",), difficulty=2, api="venmo.show_received_payment_requests"),
)
