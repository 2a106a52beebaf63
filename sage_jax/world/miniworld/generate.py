"""Draws a `Plan` from a seed. Pure Python: the same seed and size give the same plan on every machine."""

from __future__ import annotations

import datetime
import random

from sage_jax.world.miniworld import content as c
from sage_jax.world.miniworld import words

ACCOUNT_APPS = ("amazon", "phone", "file_system", "spotify", "venmo", "gmail", "splitwise", "simple_note", "todoist")
MIN_PEOPLE = 28  # 15 payments and requests each: more than 400
FULL_PEOPLE = 40
CITIES = ("Oakville", "Milford", "Ashton", "Fairview", "Kingsport", "Lakewood")


def make_plan(seed: int, size: int = FULL_PEOPLE) -> c.Plan:
    """A world with `size` people (at least 28): about 5/8 of them for train, 1/8 for dev, 1/4 for the tests.

    Collections of one person stay within 20 entries, one page of the apps' largest page size.
    """
    most = min(len(words.FIRST), len(words.LAST))  # all first names differ, and all last names
    if not MIN_PEOPLE <= size <= most:
        raise ValueError(f"a mini world has {MIN_PEOPLE} to {most} people, not {size}")
    rng = random.Random(f"sage_jax mini world {seed} {size}")
    titles = words.Titles(rng)
    people = _people(rng, size)
    music = _music(rng, titles, people)
    return c.Plan(
        seed=seed, people=people, **music, **_venmo(rng, people), **_phone(rng, people), **_notes(rng, titles, people),
        **_todos(rng, titles, people), **_mails(rng, titles, people), **_files(rng, people), **_groups(rng, titles, people),
    )


def _moment(rng: random.Random, days: int = 120) -> datetime.datetime:
    """A past moment on a whole minute, at least one hour before now."""
    return c.NOW - datetime.timedelta(minutes=rng.randrange(60, days * 24 * 60))


def _people(rng: random.Random, size: int) -> tuple[c.Person, ...]:
    firsts, lasts = rng.sample(words.FIRST, size), rng.sample(words.LAST, size)
    test, dev = max(4, size // 4), max(3, size // 8)
    pools = ["test"] * test + ["dev"] * dev + ["train"] * (size - test - dev)
    rng.shuffle(pools)
    out = []
    for i, (first, last, pool) in enumerate(zip(firsts, lasts, pools, strict=True), start=1):
        born = datetime.date(1953, 1, 1) + datetime.timedelta(days=rng.randrange(18_000))
        passwords = {app: "".join(rng.choices("abcdefghijkmnpqrstuvwxyz23456789", k=8)) for app in ACCOUNT_APPS}
        out.append(c.Person(
            id=i, first=first, last=last, email=f"{first.lower()}.{last.lower()}@gmail.com",
            phone=f"{rng.randrange(200, 900)}{i:03d}{rng.randrange(10_000):04d}", birthday=born.isoformat(),
            sex=rng.choice(("male", "female")), pool=pool, passwords=passwords, balance=rng.randrange(3_000, 9_000),
            street=f"{rng.randrange(1, 999)} {rng.choice(words.NOUNS)} Street", city=rng.choice(CITIES),
            card_number=4_000_000_000_000_000 + i * 100_003 + rng.randrange(100_000)))
    return tuple(out)


def _music(rng: random.Random, titles: words.Titles, people: tuple[c.Person, ...]) -> dict:
    n_artists, n_albums = 30, 2 * len(people) + 40
    names = set()
    while len(names) < n_artists:
        names.add(f"{rng.choice(words.FIRST)} {rng.choice(words.NOUNS)}")
    artists = tuple(c.Artist(i, name, rng.choice(words.GENRES)) for i, name in enumerate(sorted(names), start=1))
    albums, songs = [], []
    n_songs = n_albums * 5
    durations = rng.sample(range(90, 90 + 2 * n_songs), n_songs)
    plays = rng.sample(range(100, 100 + 4 * n_songs), n_songs)
    for album_id in range(1, n_albums + 1):
        artist = artists[(album_id - 1) % n_artists] if album_id <= n_artists else rng.choice(artists)
        year = rng.randrange(1990, 2023)
        albums.append(c.Album(album_id, titles.draw(), artist.id, year))
        for _ in range(5):
            j = len(songs)
            songs.append(c.Song(j + 1, titles.draw(), artist.id, album_id, durations[j], plays[j],
                                artist.genre if rng.random() < 0.6 else rng.choice(words.GENRES), year, rng.randrange(1, 360)))
    playlists, library_songs, library_albums, liked, followed = [], {}, {}, {}, {}
    all_songs = range(1, len(songs) + 1)
    for person in people:
        own_titles = [titles.draw() for _ in range(rng.randrange(7, 11))]
        for title in own_titles:
            chosen = tuple(rng.sample(all_songs, rng.randrange(5, 10)))
            playlists.append(c.Playlist(len(playlists) + 1, person.id, title, chosen, rng.random() < 0.3))
        # Songs of few artists, so that counting by artist or genre gives more than one.
        favourites = rng.sample(artists, 4)
        pool = [s.id for s in songs if s.artist_id in {a.id for a in favourites}]
        library = set(rng.sample(pool, min(12, len(pool))))
        library.update(rng.sample(all_songs, 4))
        library_songs[person.id] = tuple(rng.sample(sorted(library), len(library)))
        library_albums[person.id] = tuple(rng.sample(range(1, n_albums + 1), rng.randrange(6, 13)))
        likes = {*rng.sample(pool, min(6, len(pool))), *rng.sample(all_songs, rng.randrange(3, 7))}
        liked[person.id] = tuple(rng.sample(sorted(likes), len(likes)))
        followed[person.id] = tuple(rng.sample(range(1, n_artists + 1), rng.randrange(6, 13)))
    return {"artists": artists, "albums": tuple(albums), "songs": tuple(songs), "playlists": tuple(playlists),
            "library_songs": library_songs, "library_albums": library_albums, "liked_songs": liked, "followed_artists": followed}


def _others(rng: random.Random, people: tuple[c.Person, ...], person: c.Person, n: int) -> list[c.Person]:
    return rng.sample([p for p in people if p.id != person.id], n)


def _venmo(rng: random.Random, people: tuple[c.Person, ...]) -> dict:
    friends: dict[int, set[int]] = {p.id: set() for p in people}
    for person in people:
        for other in _others(rng, people, person, 4):
            friends[person.id].add(other.id)
            friends[other.id].add(person.id)
    transactions, requests = [], []
    for person in people:
        # At most 20 in all that concern one person: each sends 9 and receives about as many from a few partners.
        partners = _others(rng, people, person, 4)
        amounts = rng.sample(range(5, 99), 15)
        for k in range(9):
            receiver = partners[k % 4] if k < 4 else rng.choice(partners)
            likes = tuple(sorted(rng.sample(range(1, len(people) + 1), rng.randrange(3))))
            transactions.append((person.id, receiver.id, amounts[k], _purpose(rng), rng.random() < 0.2, _moment(rng), likes))
        for k in range(6):
            status = "pending" if k < 4 else rng.choice(("approved", "denied"))
            requests.append((person.id, partners[k % 4].id, amounts[9 + k], _purpose(rng), status, rng.random() < 0.2, _moment(rng)))
    # Ids follow time, as they would if the payments had really been made one after the other.
    transactions.sort(key=lambda t: (t[5], t[:3]))
    requests.sort(key=lambda r: (r[6], r[:3]))
    return {"friends": {k: tuple(sorted(v)) for k, v in friends.items()},
            "transactions": tuple(c.Transaction(i, *t) for i, t in enumerate(transactions, start=1)),
            "requests": tuple(c.PaymentRequest(i, *r) for i, r in enumerate(requests, start=1))}


def _purpose(rng: random.Random) -> str:
    return f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.PURPOSES)}"


def _phone(rng: random.Random, people: tuple[c.Person, ...]) -> dict:
    contacts, messages, alarms = [], [], []
    for person in people:
        known = _others(rng, people, person, rng.randrange(9, 13))
        for other in known:
            contacts.append(c.Contact(len(contacts) + 1, person.id, other.id, rng.choice(words.RELATIONSHIPS)))
        for other in known[:4]:
            for _ in range(2):
                messages.append((person.id, other.id, words.sentence(rng), _moment(rng)))
        for minute in rng.sample(range(5 * 12, 23 * 12), 5):
            label = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"
            while any(a.user_id == person.id and a.label == label for a in alarms):
                label = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"
            days = tuple(d for d in words.DAY_NAMES if rng.random() < 0.4) or ("monday",)
            alarms.append(c.Alarm(len(alarms) + 1, person.id, f"{minute // 12:02d}:{minute % 12 * 5:02d}", label,
                                  rng.random() < 0.5, days, rng.choice((5, 10, 15))))
    messages.sort(key=lambda m: (m[3], m[:3]))
    return {"contacts": tuple(contacts), "alarms": tuple(alarms),
            "messages": tuple(c.TextMessage(i, *m) for i, m in enumerate(messages, start=1))}


def _notes(rng: random.Random, titles: words.Titles, people: tuple[c.Person, ...]) -> dict:
    notes = []
    for person in people:
        for _ in range(rng.randrange(8, 13)):
            tags = tuple(rng.sample(words.TAGS, rng.randrange(1, 3)))
            lines = "\n".join(words.sentence(rng) for _ in range(rng.randrange(1, 5)))
            notes.append(c.Note(len(notes) + 1, person.id, titles.draw(), lines, tags, rng.random() < 0.3, _moment(rng)))
    return {"notes": tuple(notes)}


def _todos(rng: random.Random, titles: words.Titles, people: tuple[c.Person, ...]) -> dict:
    projects, todos = [], []
    for person in people:
        for k in range(6):
            name = "Inbox" if k == 0 else titles.draw()
            projects.append(c.TodoProject(len(projects) + 1, person.id, name, k == 0))
            for order in range(rng.randrange(5, 9)):
                due = c.NOW.replace(hour=9) + datetime.timedelta(days=rng.randrange(-20, 40)) if rng.random() < 0.7 else None
                todos.append(c.TodoTask(len(todos) + 1, len(projects), person.id, titles.draw(),
                                        rng.choice(("high", "medium", "low")), rng.random() < 0.4, due, order))
    return {"projects": tuple(projects), "todos": tuple(todos)}


def _mails(rng: random.Random, titles: words.Titles, people: tuple[c.Person, ...]) -> dict:
    mails = []
    for person in people:
        partners = _others(rng, people, person, 4)
        for k in (0, 0, 0, 0, 1, 1, 1, 2, 2, 3):  # different numbers, so that counting them asks for more than "1"
            others = [partners[k]] if rng.random() < 0.8 else rng.sample(partners, 2)
            mails.append((person.id, tuple(p.id for p in others), titles.draw(), words.sentence(rng).capitalize() + ".",
                          rng.random() < 0.5, rng.random() < 0.3, _moment(rng)))
    mails.sort(key=lambda m: (m[6], m[:3]))
    return {"mails": tuple(c.Mail(i, *m) for i, m in enumerate(mails, start=1))}


def _files(rng: random.Random, people: tuple[c.Person, ...]) -> dict:
    directories, files = [], []
    for person in people:
        directories.append(c.Directory(len(directories) + 1, person.id, "/"))
        directories.append(c.Directory(len(directories) + 1, person.id, "/home/"))
        directories.append(c.Directory(len(directories) + 1, person.id, person.home))
        for folder in rng.sample(words.FOLDERS, 4):
            path = f"{person.home}{folder}/"
            directories.append(c.Directory(len(directories) + 1, person.id, path))
            names = set()
            while len(names) < rng.randrange(4, 8):
                stem = f"{rng.choice(words.ADJECTIVES)}_{rng.choice(words.NOUNS)}".lower()
                names.add(f"{stem}.{rng.choice(words.EXTENSIONS)}")
            for name in sorted(names):
                text = "\n".join(words.sentence(rng) for _ in range(rng.randrange(1, 5)))
                files.append(c.File(len(files) + 1, person.id, path + name, text, _moment(rng)))
    return {"directories": tuple(directories), "files": tuple(files)}


def _groups(rng: random.Random, titles: words.Titles, people: tuple[c.Person, ...]) -> dict:
    groups, expenses = [], []
    for person in people:
        for _ in range(2):
            members = (person.id, *(p.id for p in _others(rng, people, person, 3)))
            groups.append(c.ExpenseGroup(len(groups) + 1, person.id, titles.draw(), members))
            for _ in range(rng.randrange(5, 8)):
                payer = rng.choice(members)
                debtors = tuple(m for m in members if m != payer)
                share = rng.randrange(3, 60)
                expenses.append((payer, len(groups), payer, debtors, share * len(members), share, _purpose(rng), _moment(rng)))
    expenses.sort(key=lambda e: (e[7], e[:3]))
    return {"groups": tuple(groups), "expenses": tuple(c.Expense(i, *e) for i, e in enumerate(expenses, start=1))}
