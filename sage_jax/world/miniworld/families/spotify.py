"""Families about songs, albums, playlists and likes on Spotify.

Questions are made of a collection and an operation on its songs; train shows some of the pairs, test_challenge others.
"""

from __future__ import annotations

import random
from collections import Counter

from sage_jax.world.miniworld.content import Person, Plan, Song
from sage_jax.world.miniworld.families.parts import new_title
from sage_jax.world.miniworld.family import Change, Draw, Family, skill_source

# Collection -> lines that leave in `ids` the ids of the songs of the collection whose title is the parameter.
COLLECTIONS = {
    "playlist": (
        'library = apis.spotify.show_playlist_library(access_token=token, page_limit=20)\n'
        'ids = [p["song_ids"] for p in library if p["title"] == playlist][0]\n'),
    "album": (
        'library = apis.spotify.show_album_library(access_token=token, page_limit=20)\n'
        'ids = [a["song_ids"] for a in library if a["title"] == album][0]\n'),
}
# Operation -> (in words, expression over `songs`, the same over songs of the plan).
OPERATIONS = {
    "most_played": ("most played", 'max(songs, key=lambda s: s["play_count"])["title"]', lambda s: max(s, key=_plays).title),
    "least_played": ("least played", 'min(songs, key=lambda s: s["play_count"])["title"]', lambda s: min(s, key=_plays).title),
    "longest": ("longest", 'max(songs, key=lambda s: s["duration"])["title"]', lambda s: max(s, key=_length).title),
}


def _plays(song: Song) -> int:
    return song.play_count


def _length(song: Song) -> int:
    return song.duration


def _collections(plan: Plan, person: Person, collection: str) -> list[tuple[str, tuple[int, ...]]]:
    """(title, song ids) of the person's playlists, or of the albums in the person's library."""
    if collection == "playlist":
        return [(p.title, p.song_ids) for p in plan.playlists_of(person)]
    return [(plan.album(a).title, tuple(s.id for s in plan.songs_of_album(a))) for a in plan.library_albums[person.id]]


def _best_song(operation: str, collection: str, role: str) -> Family:
    """Asks for the title of the song that is extreme in some respect."""
    what, expression, compute = OPERATIONS[operation]

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw:
        title, ids = rng.choice(_collections(plan, person, collection))
        return Draw({collection: title}, compute([plan.song(i) for i in ids]))

    return Family(
        function=skill_source(
            f"{operation}_in_{collection}({collection}: str) -> str", f"Title of the {what} song of a {collection}.", "spotify",
            f'{COLLECTIONS[collection]}songs = [apis.spotify.show_song(song_id=i) for i in ids]\nreturn {expression}'),
        phrasings=(
            f"What is the {what} song in my Spotify {collection} '{{{collection}}}'?",
            f"Give me the title of the {what} song in my {collection} '{{{collection}}}' on Spotify.",
            f"Which song of my Spotify {collection} '{{{collection}}}' is the {what} one?"),
        draw=draw, apps=("spotify",), difficulty=2, api=f"spotify.show_{collection}_library", role=role)


def like_changes(plan: Plan, person: Person, song_ids) -> tuple[Change, ...]:
    """The rows that liking these songs (not liked before) adds, and the like counts that it raises."""
    counts = {i: sum(i in songs for songs in plan.liked_songs.values()) + 1 for i in song_ids}
    return (
        Change("spotify.SongLike", added=tuple({"user_id": person.id, "song_id": i} for i in song_ids)),
        Change("spotify.Song", updated={i: {"like_count": n} for i, n in counts.items()}),
    )


def _like_all(collection: str, role: str) -> Family:
    """Asks to like every song of a collection in which none is liked yet."""

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        liked = set(plan.liked_songs[person.id])
        options = [(title, ids) for title, ids in _collections(plan, person, collection) if not liked & set(ids)]
        if not options:
            return None
        title, ids = rng.choice(options)
        return Draw({collection: title}, changes=like_changes(plan, person, ids))

    return Family(
        function=skill_source(
            f"like_{collection}_songs({collection}: str) -> None", f"Like every song of a {collection}.", "spotify",
            f'{COLLECTIONS[collection]}for i in ids:\n    apis.spotify.like_song(song_id=i, access_token=token)'),
        phrasings=(
            f"Like all songs of my Spotify {collection} '{{{collection}}}'.",
            f"Please like every song in my {collection} '{{{collection}}}' on Spotify.",
            f"Go through my Spotify {collection} '{{{collection}}}' and like each song."),
        draw=draw, apps=("spotify",), difficulty=2, api="spotify.like_song", role=role)


def _copy(collection: str, role: str) -> Family:
    """Asks for a new playlist that holds the songs of a collection."""

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw:
        title, ids = rng.choice(_collections(plan, person, collection))
        new = new_title(rng, (p.title for p in plan.playlists))
        row = len(plan.playlists) + 1
        return Draw({collection: title, "name": new}, changes=(
            Change("spotify.Playlist", added=({"id": row, "user_id": person.id, "title": new},)),
            Change("spotify.PlaylistSong", added=tuple({"playlist_id": row, "song_id": i} for i in ids)),
        ))

    return Family(
        function=skill_source(
            f"copy_{collection}({collection}: str, name: str) -> None", f"Make a new playlist with the songs of a {collection}.",
            "spotify",
            f'{COLLECTIONS[collection]}'
            'new = apis.spotify.create_playlist(access_token=token, title=name)\n'
            'for i in ids:\n'
            '    apis.spotify.add_song_to_playlist(playlist_id=new["playlist_id"], song_id=i, access_token=token)'),
        phrasings=(
            f"Make a new Spotify playlist '{{name}}' with all songs of my {collection} '{{{collection}}}'.",
            f"Copy my Spotify {collection} '{{{collection}}}' into a new playlist called '{{name}}'.",
            f"Create the Spotify playlist '{{name}}' and add every song of my {collection} '{{{collection}}}'."),
        draw=draw, apps=("spotify",), difficulty=3, api="spotify.create_playlist", role=role)


def _count_artist(which: str, role: str) -> Family:
    """Asks how many songs of an artist are in the song library or among the liked songs."""
    api, where = {"library": ("show_song_library", "in my Spotify song library"),
                  "liked": ("show_liked_songs", "among my liked songs on Spotify")}[which]

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw:
        ids = plan.library_songs[person.id] if which == "library" else plan.liked_songs[person.id]
        counts = Counter(plan.song(i).artist_id for i in ids)
        often = sorted(a for a, n in counts.items() if n > 1)
        artist = rng.choice(often or sorted(counts))
        return Draw({"artist": plan.artist(artist).name}, counts[artist])

    return Family(
        function=skill_source(
            f"count_{which}_songs(artist: str) -> int", f"How many songs of an artist are {where.replace('my', 'the')}.", "spotify",
            f'songs = apis.spotify.{api}(access_token=token, page_limit=20)\n'
            'return sum(a["name"] == artist for s in songs for a in s["artists"])'),
        phrasings=(
            f"How many songs by '{{artist}}' are {where}?",
            f"Count the songs of the artist '{{artist}}' {where}.",
            f"Tell me how many songs by '{{artist}}' I have {where}."),
        draw=draw, apps=("spotify",), difficulty=1, api=f"spotify.{api}", role=role)


def _add_song(rng: random.Random, plan: Plan, person: Person) -> Draw:
    playlist = rng.choice(plan.playlists_of(person))
    song = rng.choice([s for s in plan.songs if s.id not in playlist.song_ids])
    return Draw({"song": song.title, "playlist": playlist.title},
                changes=(Change("spotify.PlaylistSong", added=({"playlist_id": playlist.id, "song_id": song.id},)),))


FAMILIES = (
    _best_song("most_played", "playlist", "normal"),
    _best_song("longest", "album", "normal"),
    _best_song("least_played", "playlist", "normal"),
    _like_all("playlist", "normal"),
    _copy("album", "normal"),
    _count_artist("library", "normal"),
    Family(
        function=skill_source(
            "add_song(song: str, playlist: str) -> None", "Add a song to a playlist.", "spotify",
            'found = apis.spotify.search_songs(query=song, page_limit=20)\n'
            'ids = [s["song_id"] for s in found if s["title"] == song]\n'
            'library = apis.spotify.show_playlist_library(access_token=token, page_limit=20)\n'
            'lists = [p["playlist_id"] for p in library if p["title"] == playlist]\n'
            'apis.spotify.add_song_to_playlist(playlist_id=lists[0], song_id=ids[0], access_token=token)'),
        phrasings=(
            "Add the song '{song}' to my Spotify playlist '{playlist}'.",
            "Put '{song}' into my playlist '{playlist}' on Spotify.",
            "My Spotify playlist '{playlist}' lacks the song '{song}'. Please add it."),
        draw=_add_song, apps=("spotify",), difficulty=3, api="spotify.add_song_to_playlist"),
    _best_song("most_played", "album", "challenge"),
    _best_song("longest", "playlist", "challenge"),
    _like_all("album", "challenge"),
    _copy("playlist", "challenge"),
    _count_artist("liked", "challenge"),
)
