"""Families about groups, expenses and balances on Splitwise."""

from __future__ import annotations

import random
from collections import Counter

from sage_jax.world.miniworld.content import Expense, Person, Plan
from sage_jax.world.miniworld.families.parts import OPERATIONS, find_email, other_person
from sage_jax.world.miniworld.family import Change, Draw, Family, skill_source

_FIND_EXPENSES = (
    'groups = apis.splitwise.show_groups(access_token=token, page_limit=20)\n'
    'group_id = [g["group_id"] for g in groups if g["name"] == group][0]\n'
    'items = apis.splitwise.show_group_expenses(access_token=token, group_id=group_id, page_limit=20)\n'
)
GROUP_AMOUNTS = _FIND_EXPENSES + 'amounts = [e["paid_amount"] for e in items]\n'
PAYER_AMOUNTS = _FIND_EXPENSES + 'amounts = [e["paid_amount"] for e in items if e["payer"]["name"] == name]\n'


def _of_group(operation: str):
    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw:
        group = rng.choice(plan.groups_of(person))
        return Draw({"group": group.name}, OPERATIONS[operation][1]([e.amount for e in plan.expenses_of(group.id)]))

    return draw


def _of_payer(operation: str):
    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        group = rng.choice(plan.groups_of(person))
        paid: dict[int, list[int]] = {}
        for e in plan.expenses_of(group.id):
            paid.setdefault(e.payer_id, []).append(e.amount)
        payers = [p for p in sorted(paid) if p != person.id and len(paid[p]) > 1]
        if not payers or len(paid) < 2:
            return None
        payer = rng.choice(payers)
        return Draw({"group": group.name, "name": plan.person(payer).name}, OPERATIONS[operation][1](paid[payer]))

    return draw


def balances(plan: Plan, person: Person) -> dict[int, int]:
    """Other's id -> dollars that the other owes `person` (negative: the other way round), over all groups."""
    out: Counter = Counter()
    e: Expense
    for e in plan.expenses:
        if e.payer_id == person.id:
            for debtor in e.debtor_ids:
                out[debtor] += e.share
        elif person.id in e.debtor_ids:
            out[e.payer_id] -= e.share
    return dict(out)


def _owed(sign: int):
    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        owing = {o: v for o, v in balances(plan, person).items() if v * sign > 0}
        if not owing:
            return None
        other = rng.choice(sorted(owing))
        return Draw({"name": plan.person(other).name}, abs(owing[other]))

    return draw


def _record(payer: str):
    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw:
        other, amount = other_person(rng, plan, person), rng.randrange(5, 99)
        ids = (other.id, person.id) if payer == "other" else (person.id, other.id)
        return Draw({"name": other.name, "amount": amount}, changes=(
            Change("splitwise.Payment", added=({"payer_id": ids[0], "receiver_id": ids[1], "amount": amount, "group_id": None},)),
            Change("splitwise.Notification", added=({"user_id": other.id},)),
        ))

    return draw


FAMILIES = (
    Family(
        function=skill_source(
            "group_total(group: str) -> float", "Total of the expenses of a group.", "splitwise",
            GROUP_AMOUNTS + 'return sum(amounts)'),
        phrasings=(
            "What is the total of all expenses in my Splitwise group '{group}'?",
            "How much money has my group '{group}' on Splitwise spent in total?",
            "Add up the expenses of the Splitwise group '{group}'. How much is it?"),
        draw=_of_group("total"), apps=("splitwise",), difficulty=2, api="splitwise.show_groups"),
    Family(
        function=skill_source(
            "largest_paid_by(group: str, name: str) -> float", "Largest expense of a group that a person paid.", "splitwise",
            PAYER_AMOUNTS + 'return max(amounts)'),
        phrasings=(
            "How much was the largest expense that '{name}' paid in my Splitwise group '{group}'?",
            "In the Splitwise group '{group}', what is the largest amount that '{name}' paid?",
            "Of the expenses that '{name}' paid in my group '{group}' on Splitwise, how much was the largest?"),
        draw=_of_payer("largest"), apps=("splitwise",), difficulty=3, api="splitwise.show_groups"),
    Family(
        function=skill_source(
            "amount_owed_by(name: str) -> float", "What a person owes me on Splitwise.", "splitwise",
            'people = apis.splitwise.show_people_balance(access_token=token)["breakdown"]\n'
            'return [p["amount"] for p in people if p["name"] == name][0]'),
        phrasings=(
            "How much does '{name}' owe me on Splitwise?",
            "What is the amount that '{name}' still has to pay me back on Splitwise?",
            "Look at my Splitwise balances. How many dollars does '{name}' owe me?"),
        draw=_owed(1), apps=("splitwise",), difficulty=1, api="splitwise.show_people_balance"),
    Family(
        function=skill_source(
            "record_payment_from(name: str, amount: int) -> None", "Record that a person paid me.", "splitwise",
            find_email("splitwise") +
            'apis.splitwise.record_payment(\n'
            '    access_token=token, payer_email=email, receiver_email=me["email"], amount=amount)'),
        phrasings=(
            "Record on Splitwise that '{name}' paid me {amount} dollars, outside of any group.",
            "'{name}' gave me {amount} dollars. Record this payment on Splitwise without a group.",
            "Add a Splitwise payment without a group: '{name}' paid me {amount} dollars."),
        draw=_record("other"), apps=("splitwise",), difficulty=2, api="splitwise.record_payment"),
    Family(
        function=skill_source(
            "largest_group_expense(group: str) -> float", "Largest expense of a group.", "splitwise",
            GROUP_AMOUNTS + 'return max(amounts)'),
        phrasings=(
            "How much was the largest expense in my Splitwise group '{group}'?",
            "What is the largest amount that was paid in the Splitwise group '{group}'?",
            "Of all expenses of my group '{group}' on Splitwise, how much was the largest?"),
        draw=_of_group("largest"), apps=("splitwise",), difficulty=2, api="splitwise.show_groups", role="challenge"),
    Family(
        function=skill_source(
            "total_paid_by(group: str, name: str) -> float", "Total of the expenses of a group that a person paid.", "splitwise",
            PAYER_AMOUNTS + 'return sum(amounts)'),
        phrasings=(
            "What is the total of the expenses that '{name}' paid in my Splitwise group '{group}'?",
            "In the Splitwise group '{group}', how much has '{name}' paid in total?",
            "Add up the expenses that '{name}' paid in my group '{group}' on Splitwise. How much is it?"),
        draw=_of_payer("total"), apps=("splitwise",), difficulty=3, api="splitwise.show_groups", role="challenge"),
    Family(
        function=skill_source(
            "record_payment_to(name: str, amount: int) -> None", "Record that I paid a person.", "splitwise",
            find_email("splitwise") +
            'apis.splitwise.record_payment(\n'
            '    access_token=token, payer_email=me["email"], receiver_email=email, amount=amount)'),
        phrasings=(
            "Record on Splitwise that I paid '{name}' {amount} dollars, outside of any group.",
            "I gave '{name}' {amount} dollars. Record this payment on Splitwise without a group.",
            "Add a Splitwise payment without a group: I paid '{name}' {amount} dollars."),
        draw=_record("me"), apps=("splitwise",), difficulty=2, api="splitwise.record_payment", role="challenge"),
)
