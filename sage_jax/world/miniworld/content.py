"""The content of a mini world as plain data: who exists and what everyone owns, in every app.

Nothing here touches the engine. Expected answers of the tasks are computed from a `Plan` alone, so that a reference
solution (which asks the running apps) and the expected answer are two independent paths.

Ids are those of the database: each list is ordered by id, which starts at 1 (`database.py` checks this when it writes).
A person has the same id in all apps.
"""

from __future__ import annotations

import dataclasses
import datetime

NOW = datetime.datetime(2023, 5, 18, 12, 0, 0)  # the frozen clock of every task


@dataclasses.dataclass(frozen=True)
class Person:
    """One user with an account in every app; `pool` says which splits may ask for them."""

    id: int
    first: str
    last: str
    email: str
    phone: str
    birthday: str  # YYYY-MM-DD
    sex: str
    pool: str  # "train" | "dev" | "test"
    passwords: dict[str, str]  # app -> password
    balance: int  # dollars in Venmo
    street: str
    city: str
    card_number: int

    @property
    def name(self) -> str:
        return f"{self.first} {self.last}"

    @property
    def home(self) -> str:
        """Home folder in the file system app, with a slash at its end."""
        return f"/home/{self.first.lower()}/"


@dataclasses.dataclass(frozen=True)
class Artist:
    id: int
    name: str
    genre: str


@dataclasses.dataclass(frozen=True)
class Album:
    id: int
    title: str
    artist_id: int
    year: int


@dataclasses.dataclass(frozen=True)
class Song:
    id: int
    title: str
    artist_id: int
    album_id: int
    duration: int  # seconds, unique among the songs
    play_count: int  # unique among the songs
    genre: str
    year: int
    day: int  # day of the year of its release


@dataclasses.dataclass(frozen=True)
class Playlist:
    id: int
    user_id: int
    title: str
    song_ids: tuple[int, ...]
    public: bool


@dataclasses.dataclass(frozen=True)
class Transaction:
    """A Venmo payment; amounts are whole dollars, different for all payments of the same sender."""

    id: int
    sender_id: int
    receiver_id: int
    amount: int
    description: str
    private: bool
    created: datetime.datetime
    like_ids: tuple[int, ...]  # people who liked it


@dataclasses.dataclass(frozen=True)
class PaymentRequest:
    """`sender` asks `receiver` for money."""

    id: int
    sender_id: int
    receiver_id: int
    amount: int
    description: str
    status: str  # "pending" | "approved" | "denied"
    private: bool
    created: datetime.datetime


@dataclasses.dataclass(frozen=True)
class Note:
    id: int
    user_id: int
    title: str
    content: str
    tags: tuple[str, ...]
    pinned: bool
    created: datetime.datetime


@dataclasses.dataclass(frozen=True)
class Contact:
    id: int
    user_id: int  # owner of the phone
    person_id: int  # whom the entry describes
    relationship: str


@dataclasses.dataclass(frozen=True)
class TextMessage:
    id: int
    sender_id: int
    receiver_id: int
    text: str
    created: datetime.datetime


@dataclasses.dataclass(frozen=True)
class Alarm:
    id: int
    user_id: int
    time: str  # HH:MM, different for all alarms of a user
    label: str
    enabled: bool
    days: tuple[str, ...]
    snooze: int  # minutes


@dataclasses.dataclass(frozen=True)
class TodoProject:
    id: int
    user_id: int
    name: str
    inbox: bool


@dataclasses.dataclass(frozen=True)
class TodoTask:
    id: int
    project_id: int
    user_id: int
    title: str
    priority: str  # "high" | "medium" | "low"
    completed: bool
    due: datetime.datetime | None
    order: int  # place inside the project, from 0


@dataclasses.dataclass(frozen=True)
class Mail:
    """One mail = one thread of length 1, with a copy in the mailbox of the sender and of each recipient."""

    id: int  # of the email and of its global thread
    sender_id: int
    recipient_ids: tuple[int, ...]
    subject: str
    body: str
    read: bool  # by the recipients
    starred: bool  # by the recipients
    created: datetime.datetime


@dataclasses.dataclass(frozen=True)
class File:
    id: int
    user_id: int
    path: str  # absolute
    content: str
    created: datetime.datetime

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[1]

    @property
    def folder(self) -> str:
        """Absolute path of the folder, with a slash at its end."""
        return self.path.rsplit("/", 1)[0] + "/"


@dataclasses.dataclass(frozen=True)
class Directory:
    id: int
    user_id: int
    path: str  # absolute, with a slash at its end


@dataclasses.dataclass(frozen=True)
class ExpenseGroup:
    id: int
    user_id: int  # who made it; the first of the members
    name: str
    member_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Expense:
    """A Splitwise expense: every debtor owes the payer `share` dollars; amount = share * (debtors + 1)."""

    id: int
    user_id: int  # who entered it (the payer)
    group_id: int
    payer_id: int
    debtor_ids: tuple[int, ...]
    amount: int
    share: int
    description: str
    created: datetime.datetime


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is in the base databases. Tuples are ordered by id."""

    seed: int
    people: tuple[Person, ...]
    artists: tuple[Artist, ...]
    albums: tuple[Album, ...]
    songs: tuple[Song, ...]
    playlists: tuple[Playlist, ...]
    library_songs: dict[int, tuple[int, ...]]  # person id -> song ids
    library_albums: dict[int, tuple[int, ...]]  # person id -> album ids
    liked_songs: dict[int, tuple[int, ...]]  # person id -> song ids
    followed_artists: dict[int, tuple[int, ...]]  # person id -> artist ids
    friends: dict[int, tuple[int, ...]]  # person id -> ids of Venmo friends (both ways)
    transactions: tuple[Transaction, ...]
    requests: tuple[PaymentRequest, ...]
    notes: tuple[Note, ...]
    contacts: tuple[Contact, ...]
    messages: tuple[TextMessage, ...]
    alarms: tuple[Alarm, ...]
    projects: tuple[TodoProject, ...]
    todos: tuple[TodoTask, ...]
    mails: tuple[Mail, ...]
    directories: tuple[Directory, ...]
    files: tuple[File, ...]
    groups: tuple[ExpenseGroup, ...]
    expenses: tuple[Expense, ...]

    def person(self, id: int) -> Person:
        return self.people[id - 1]

    def song(self, id: int) -> Song:
        return self.songs[id - 1]

    def album(self, id: int) -> Album:
        return self.albums[id - 1]

    def artist(self, id: int) -> Artist:
        return self.artists[id - 1]

    def pool(self, name: str) -> tuple[Person, ...]:
        """The people whom tasks of a split may belong to: "train", "dev" or "test"."""
        return tuple(p for p in self.people if p.pool == name)

    def playlists_of(self, person: Person) -> tuple[Playlist, ...]:
        return tuple(x for x in self.playlists if x.user_id == person.id)

    def songs_of_album(self, album_id: int) -> tuple[Song, ...]:
        return tuple(s for s in self.songs if s.album_id == album_id)

    def sent(self, person: Person) -> tuple[Transaction, ...]:
        return tuple(t for t in self.transactions if t.sender_id == person.id)

    def received(self, person: Person) -> tuple[Transaction, ...]:
        return tuple(t for t in self.transactions if t.receiver_id == person.id)

    def contacts_of(self, person: Person) -> tuple[Contact, ...]:
        return tuple(c for c in self.contacts if c.user_id == person.id)

    def notes_of(self, person: Person) -> tuple[Note, ...]:
        return tuple(n for n in self.notes if n.user_id == person.id)

    def alarms_of(self, person: Person) -> tuple[Alarm, ...]:
        return tuple(a for a in self.alarms if a.user_id == person.id)

    def projects_of(self, person: Person) -> tuple[TodoProject, ...]:
        return tuple(p for p in self.projects if p.user_id == person.id)

    def todos_of(self, project_id: int) -> tuple[TodoTask, ...]:
        return tuple(t for t in self.todos if t.project_id == project_id)

    def inbox_of(self, person: Person) -> tuple[Mail, ...]:
        return tuple(m for m in self.mails if person.id in m.recipient_ids)

    def outbox_of(self, person: Person) -> tuple[Mail, ...]:
        return tuple(m for m in self.mails if m.sender_id == person.id)

    def files_of(self, person: Person) -> tuple[File, ...]:
        return tuple(f for f in self.files if f.user_id == person.id)

    def groups_of(self, person: Person) -> tuple[ExpenseGroup, ...]:
        return tuple(g for g in self.groups if person.id in g.member_ids)

    def expenses_of(self, group_id: int) -> tuple[Expense, ...]:
        return tuple(e for e in self.expenses if e.group_id == group_id)
