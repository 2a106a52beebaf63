"""Writes a `Plan` into the engine's base databases, one app at a time, with the engine's own models.

Every row gets the id that the plan says (checked), so that expected changes can name rows. Clock and random numbers
are fixed while writing: the files depend on the plan and the engine's version only.
"""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Sequence
from pathlib import Path

from sage_jax.world.miniworld import content as c
from sage_jax.world.miniworld.generate import ACCOUNT_APPS

APPS = ("admin", "api_docs", "supervisor", *ACCOUNT_APPS)
_JOINED = datetime.datetime(2022, 6, 1, 9, 0, 0)  # when everybody opened their accounts
_MEMORY = ":memory:base"


def write_app(app: str, plan: c.Plan, folder: Path, api_docs: dict | None = None) -> int:
    """Writes `folder/<app>.db` and returns its number of rows. `api_docs` (app -> api -> doc) is needed for "api_docs".

    Raises RuntimeError if a row got another id than the plan's.
    """
    import sqlite3

    from appworld.apps.api_lib import set_local_date_and_time, unset_local_date_and_time
    from appworld.apps.model_lib import CachedDBHandler
    from appworld.collections.models import ModelCollection

    freezer = set_local_date_and_time(c.NOW)
    state = random.getstate()
    random.seed(plan.seed)
    try:
        collection = ModelCollection.load(to_db_home_path=_MEMORY, from_db_home_path=_MEMORY, load_apps=[app],
                                          skip_mandatory_apps=True, create_db=True)
        rows = _Rows(collection[app])
        if app == "api_docs":
            _write_api_docs(rows, api_docs)
        elif app == "admin":
            _write_admin(rows, plan)
        elif app != "supervisor":  # the supervisor's rows belong to a task
            _users(rows, plan, app)
            {"spotify": _spotify, "venmo": _venmo, "phone": _phone, "simple_note": _notes, "todoist": _todoist,
             "gmail": _gmail, "file_system": _file_system, "splitwise": _splitwise, "amazon": _amazon}[app](rows, plan)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{app}.db"
        target.unlink(missing_ok=True)
        collection.reset_db_home_path()
        collection[app].SQLModel.db.save("full", str(target))
        collection.close()
        CachedDBHandler.reset(_MEMORY)
        # The copy may hold free pages and a change counter of its history: rebuild it from its content.
        connection = sqlite3.connect(target)
        connection.execute("VACUUM")
        connection.close()
        return rows.count
    finally:
        random.setstate(state)
        unset_local_date_and_time(freezer)


class _Rows:
    """Saves rows of one app in batches.

    The engine's own saving runs several queries a row (dependents, computed fields, search text): minutes for a whole
    world. Here the models validate each row, rows go in one transaction a table, and what the engine would compute from
    linked rows is computed from the plan; the first and the last row of each table are compared with the engine's result.
    """

    def __init__(self, models):
        self._models = models
        self.count = 0

    def add(self, model: str, rows: Sequence[dict], search: Sequence[str] | None = None, computed: bool = False,
            check: bool = True) -> None:
        """Saves `rows` (keyword arguments of `model`), which get the ids 1, 2, ... in this order.

        search: the rows' search texts, for models whose search text depends on linked rows.
        computed: the rows hold the computed fields already, so that the model's own computation is left out.
        check: compare now; False where linked rows are saved later (call `check` then).
        """
        from sqlmodel import Session

        klass = self._models[model]
        records = [klass.create(**row) for row in rows]
        for record in records:
            if not computed:
                record._pre_change("create", None)
            record.set_record_hash()
        with Session(klass.db.engine, expire_on_commit=False) as session:
            session.add_all(records)
            session.flush()
            ids = [r.id for r in records]
            session.commit()
        if ids != list(range(1, len(rows) + 1)):
            raise RuntimeError(f"{klass.__module__}.{model}: rows got the ids {ids[:5]}..., expected 1, 2, ...")
        if records and klass.searchable():
            texts = [r.computed_search_text for r in records] if search is None else search
            self._save_search(klass, texts)
        klass.increment_model_hash()
        self.count += len(records)
        if check:
            self.check(model)

    @staticmethod
    def _save_search(klass, texts: Sequence[str]) -> None:
        from sqlalchemy import text as sql

        rows = [{"id": i, "text": " ".join(t.strip().lower().split())} for i, t in enumerate(texts, start=1)]
        with klass.db.engine.connect() as connection:
            connection.execute(sql(f"INSERT INTO {klass.table_name}_fts (id, saved_search_text) VALUES (:id, :text)"), rows)
            connection.commit()

    def check(self, model: str) -> None:
        """Raises RuntimeError if the engine would have computed other fields or search texts."""
        klass = self._models[model]
        size = klass.size()
        for id in {1, size} if size else ():
            record = klass.by_id(id)
            before, saved = record.record_hash, record.saved_search_text if klass.searchable() else ""
            record._pre_change("create", None)
            record.set_record_hash()
            text = " ".join(record.computed_search_text.strip().lower().split()) if klass.searchable() else ""
            if record.record_hash != before or text != saved:
                raise RuntimeError(f"{klass.__module__}.{model} row {id}: the engine computes {text!r} and "
                                   f"{record.dict()}, which differ from the saved row (search text {saved!r})")


def _users(rows: _Rows, plan: c.Plan, app: str) -> None:
    out = []
    for p in plan.people:
        row = {"first_name": p.first, "last_name": p.last, "password": p.passwords[app], "created_at": _JOINED,
               "last_logged_in": _JOINED}
        row |= {"phone_number": p.phone} if app == "phone" else {"email": p.email}
        if app not in ("phone", "gmail"):
            row["verified"] = True
        if app == "venmo":
            row["venmo_balance"] = float(p.balance)
        out.append(row)
    rows.add("User", out)


def _card(p: c.Person) -> dict:
    return {"owner_name": p.name, "card_name": "Visa", "card_number": p.card_number, "expiry_year": 2027,
            "expiry_month": 1 + p.id % 12, "cvv_number": 100 + p.id}


def _write_admin(rows: _Rows, plan: c.Plan) -> None:
    rows.add("MainUser", [{"first_name": p.first, "last_name": p.last, "email": p.email, "phone_number": p.phone,
                           "birthday": p.birthday, "sex": p.sex} for p in plan.people])
    rows.add("PaymentCard", [{**_card(p), "main_user_id": p.id, "balance": 5000.0} for p in plan.people])


def supervisor_rows(person: c.Person, instruction: str) -> dict[str, list[dict]]:
    """Rows of the supervisor app of one task, by model, in the order in which they must be saved."""
    return {
        "Supervisor": [{"first_name": person.first, "last_name": person.last, "email": person.email,
                        "phone_number": person.phone, "birthday": person.birthday, "sex": person.sex}],
        "AccountPassword": [{"supervisor_id": 1, "account_name": app, "password": person.passwords[app]}
                            for app in ACCOUNT_APPS],
        "Address": [{"supervisor_id": 1, "name": "Home", "street_address": person.street, "city": person.city,
                     "state": "Ohio", "country": "United States", "zip_code": 43000 + person.id}],
        "PaymentCard": [{**_card(person), "supervisor_id": 1}],
        "Task": [{"supervisor_id": 1, "instruction": instruction}],
    }


def _write_api_docs(rows: _Rows, docs: dict | None) -> None:
    if docs is None:
        raise ValueError("the app api_docs needs the API documents")
    rows.add("ApiDoc", [
        {"app_name_": app, "api_name": name, "path": d["path"], "method": d["method"], "description": d["description"],
         "parameters": d["parameters"], "response_schemas": d["response_schemas"]}
        for app, apis in docs.items() for name, d in apis.items()])


def _amazon(rows: _Rows, plan: c.Plan) -> None:
    rows.add("PaymentCard", [{**_card(p), "user_id": p.id} for p in plan.people])


def _spotify(rows: _Rows, plan: c.Plan) -> None:
    rows.add("Artist", [{"name": a.name, "genre": a.genre, "created_at": _JOINED} for a in plan.artists])
    rows.add("Album", [{"title": a.title, "artist_ids": [a.artist_id], "genre": plan.artist(a.artist_id).genre,
                        "release_date": _release(a.year, 1), "rating": 0.0} for a in plan.albums],
             search=[_words(a.title, plan.artist(a.artist_id).genre, plan.artist(a.artist_id).name) for a in plan.albums])
    likes = [(p.id, song) for p in plan.people for song in plan.liked_songs[p.id]]
    like_count = {s.id: 0 for s in plan.songs}
    for _, song in likes:
        like_count[song] += 1
    rows.add("Song", [{"title": s.title, "artist_ids": [s.artist_id], "album_id": s.album_id, "duration": s.duration,
                       "release_date": _release(s.year, s.day), "genre": s.genre, "play_count": s.play_count,
                       "like_count": like_count[s.id], "rating": 0.0} for s in plan.songs],
             search=[_words(s.title, s.genre, plan.artist(s.artist_id).name) for s in plan.songs])
    rows.add("Playlist", [{"title": x.title, "user_id": x.user_id, "is_public": x.public, "created_at": _JOINED,
                           "rating": 0.0}
                          for x in plan.playlists])
    rows.add("PlaylistSong", [{"playlist_id": x.id, "song_id": s, "added_at": _after(k)}
                              for x in plan.playlists for k, s in enumerate(x.song_ids)])
    rows.add("UserLibrarySong", [{"user_id": p.id, "song_id": s, "created_at": _after(k)}
                                 for p in plan.people for k, s in enumerate(plan.library_songs[p.id])])
    rows.add("UserLibraryAlbum", [{"user_id": p.id, "album_id": a, "created_at": _after(k)}
                                  for p in plan.people for k, a in enumerate(plan.library_albums[p.id])])
    rows.add("SongLike", [{"user_id": u, "song_id": s, "liked_at": _after(s)} for u, s in likes])
    rows.add("UserArtistFollowing", [{"user_id": p.id, "artist_id": a, "created_at": _after(k)}
                                     for p in plan.people for k, a in enumerate(plan.followed_artists[p.id])])
    rows.add("MusicPlayer", [{"user_id": p.id, "queue_song_ids": list(plan.library_songs[p.id][:5]), "cursor_position": 0,
                              "volume": 5} for p in plan.people])
    rows.add("PaymentCard", [{**_card(p), "user_id": p.id} for p in plan.people])


def _words(*parts: str) -> str:
    return " ".join(parts)


def _release(year: int, day: int) -> datetime.datetime:
    return datetime.datetime(year, 1, 1) + datetime.timedelta(days=day - 1)


def _after(hours: int) -> datetime.datetime:
    """A moment after everybody joined: keeps the order of a collection visible in its dates."""
    return _JOINED + datetime.timedelta(hours=1 + hours)


def _venmo(rows: _Rows, plan: c.Plan) -> None:
    rows.add("Friendship", [{"user_id": p.id, "friend_id": f, "created_at": _JOINED}
                            for p in plan.people for f in plan.friends[p.id]])
    rows.add("Transaction", [
        {"sender_id": t.sender_id, "receiver_id": t.receiver_id, "amount": float(t.amount), "description": t.description,
         "created_at": t.created, "updated_at": t.created, "private": t.private, "like_count": len(t.like_ids)}
        for t in plan.transactions],
        search=[_parties(plan, t) for t in plan.transactions])
    rows.add("TransactionLike", [{"transaction_id": t.id, "user_id": u, "created_at": t.created}
                                 for t in plan.transactions for u in t.like_ids])
    rows.add("PaymentRequest", [
        {"sender_id": r.sender_id, "receiver_id": r.receiver_id, "amount": float(r.amount), "description": r.description,
         "created_at": r.created, "updated_at": r.created, "private": r.private,
         "approved_at": r.created if r.status == "approved" else None,
         "denied_at": r.created if r.status == "denied" else None} for r in plan.requests],
        search=[_parties(plan, r) for r in plan.requests])
    rows.add("PaymentCard", [{**_card(p), "user_id": p.id} for p in plan.people])


def _parties(plan: c.Plan, payment: c.Transaction | c.PaymentRequest) -> str:
    sender, receiver = plan.person(payment.sender_id), plan.person(payment.receiver_id)
    return _words(payment.description, sender.name, receiver.name, sender.email, receiver.email)


def _phone(rows: _Rows, plan: c.Plan) -> None:
    contacts = []
    for contact in plan.contacts:
        p = plan.person(contact.person_id)
        contacts.append({"user_id": contact.user_id, "first_name": p.first, "last_name": p.last, "email": p.email,
                         "phone_number": p.phone, "relationships": [contact.relationship], "birthday": p.birthday,
                         "home_address": f"{p.street}, {p.city}", "created_at": _JOINED})
    rows.add("Contact", contacts)
    rows.add("GlobalTextMessage", [{"sender_id": m.sender_id, "receiver_id": m.receiver_id, "message": m.text,
                                    "created_at": m.created} for m in plan.messages])
    rows.add("UserTextMessage", [{"global_text_message_id": m.id, "user_id": u, "created_at": m.created}
                                 for m in plan.messages for u in (m.sender_id, m.receiver_id)],
             search=[_words(m.text, plan.person(m.sender_id).name, plan.person(m.receiver_id).name)
                     for m in plan.messages for _ in range(2)])
    rows.add("Alarm", [{"user_id": a.user_id, "time": a.time, "label": a.label, "enabled": a.enabled,
                        "repeat_days": list(a.days), "snooze_minutes": a.snooze, "created_at": _JOINED} for a in plan.alarms])


def _notes(rows: _Rows, plan: c.Plan) -> None:
    rows.add("Note", [{"user_id": n.user_id, "title": n.title, "content": n.content, "tags": list(n.tags),
                       "pinned": n.pinned, "created_at": n.created, "updated_at": n.created} for n in plan.notes])


def _todoist(rows: _Rows, plan: c.Plan) -> None:
    rows.add("Project", [{"user_id": p.user_id, "name": p.name, "is_inbox": p.inbox, "created_at": _JOINED}
                         for p in plan.projects],
             search=[_words(p.name, plan.person(p.user_id).name, plan.person(p.user_id).email) for p in plan.projects],
             check=False)
    rows.add("ProjectCollaboratorLink", [{"project_id": p.id, "user_id": p.user_id, "created_at": _JOINED}
                                         for p in plan.projects])
    rows.check("Project")
    rows.add("Task", [{"project_id": t.project_id, "user_id": t.user_id, "title": t.title, "priority": t.priority,
                       "is_completed": t.completed, "due_date": t.due, "order_index": t.order, "created_at": _after(t.order)}
                      for t in plan.todos])


def _gmail(rows: _Rows, plan: c.Plan) -> None:
    rows.add("Email", [{"sender_id": m.sender_id, "recipient_ids": list(m.recipient_ids), "subject": m.subject, "body": m.body,
                        "created_at": m.created} for m in plan.mails])
    rows.add("GlobalEmailThread", [{"email_ids": [m.id], "created_at": m.created, "updated_at": m.created} for m in plan.mails])
    threads, texts = [], []
    for m in plan.mails:
        sender, recipients = plan.person(m.sender_id), [plan.person(i) for i in m.recipient_ids]
        names, emails = [p.name for p in recipients], [p.email for p in recipients]
        for user in (m.sender_id, *m.recipient_ids):
            mine = user == m.sender_id
            threads.append({"global_email_thread_id": m.id, "user_id": user, "email_ids": [m.id], "incoming": not mine,
                            "outgoing": mine, "read": mine or m.read, "starred": not mine and m.starred,
                            "sender_email_addresses": [sender.email], "sender_names": [sender.name],
                            "recipient_email_addresses": emails, "recipient_names": names, "has_attachments": False,
                            "created_at": m.created, "updated_at": m.created})
            texts.append(_words(sender.name, sender.email, *names, *emails, m.subject, m.body))
    rows.add("UserEmailThread", threads, search=texts, computed=True)


def _file_system(rows: _Rows, plan: c.Plan) -> None:
    def tilde(entry: c.Directory | c.File) -> str:
        return entry.path.replace(plan.person(entry.user_id).home, "~/")

    rows.add("Directory", [{"user_id": d.user_id, "path": d.path, "tilde_path": tilde(d), "created_at": _JOINED,
                            "updated_at": _JOINED} for d in plan.directories], computed=True)
    rows.add("File", [{"user_id": f.user_id, "path": f.path, "tilde_path": tilde(f), "content": f.content,
                       "created_at": f.created, "updated_at": f.created} for f in plan.files], computed=True)


def _splitwise(rows: _Rows, plan: c.Plan) -> None:
    rows.add("Group", [{"user_id": g.user_id, "name": g.name, "created_at": _JOINED, "invitation_code": f"inv{g.id:05d}"}
                       for g in plan.groups])
    rows.add("GroupMember", [{"group_id": g.id, "user_id": m, "joined_at": _JOINED} for g in plan.groups for m in g.member_ids])
    rows.add("Expense", [{"user_id": e.user_id, "payer_id": e.payer_id, "group_id": e.group_id, "amount": float(e.amount),
                          "description": e.description, "debtor_ids": list(e.debtor_ids), "created_at": e.created}
                         for e in plan.expenses],
             search=[_words(e.description, *(_words(p.name, p.email) for p in map(plan.person, (e.payer_id, *e.debtor_ids))))
                     for e in plan.expenses], check=False)
    rows.add("ExpenseShare", [{"expense_id": e.id, "debtor_id": d, "share_amount": float(e.share), "created_at": e.created}
                              for e in plan.expenses for d in e.debtor_ids])
    rows.check("Expense")


def api_documents() -> dict:
    """The installed engine's API documents, app -> api -> doc. The clock must not be frozen."""
    from appworld.apps import get_all_apps
    from appworld.collections.api_docs import ApiDocCollection

    docs = ApiDocCollection.build(load_apps=tuple(get_all_apps(skip_admin=True)))
    return json.loads(json.dumps({app: dict(apis.items()) for app, apis in docs.items() if not app.startswith("_")}))


def write_api_documents(docs: dict, root: Path) -> None:
    """`data/api_docs/standard/<app>.json` in the form that the engine loads."""
    folder = root / "data" / "api_docs" / "standard"
    folder.mkdir(parents=True, exist_ok=True)
    for app, apis in docs.items():
        marked = {name: {**doc, "canary_string": ""} for name, doc in apis.items()}
        (folder / f"{app}.json").write_text(json.dumps(marked, indent=1) + "\n")
