"""Families about songs, albums, playlists and likes."""

from __future__ import annotations

import random

from sage_jax.world.miniworld.content import Person, Plan
from sage_jax.world.miniworld.family import Change, Draw, Family, skill_source


def _playlist_song(key: str, best):
    """Draws a question for the title of the best song of a playlist by one attribute."""

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw:
        playlist = rng.choice(plan.playlists_of(person))
        song = best((plan.song(i) for i in playlist.song_ids), key=lambda s: getattr(s, key))
        return Draw({"playlist": playlist.title}, song.title)

    return draw


def _find_playlist(then: str) -> str:
    return (
        'library = apis.spotify.show_playlist_library(access_token=token, page_limit=20)\n'
        'ids = [p["song_ids"] for p in library if p["title"] == playlist][0]\n'
        f'{then}'
    )


def _like_playlist(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    liked = set(plan.liked_songs[person.id])
    lists = [p for p in plan.playlists_of(person) if not liked & set(p.song_ids)]
    if not lists:
        return None
    playlist = rng.choice(lists)
    return Draw({"playlist": playlist.title}, changes=like_changes(plan, person, playlist.song_ids))


def like_changes(plan: Plan, person: Person, song_ids) -> tuple[Change, ...]:
    """The rows that liking these songs (not liked before) adds, and the like counts that it raises."""
    counts = {i: sum(i in songs for songs in plan.liked_songs.values()) + 1 for i in song_ids}
    return (
        Change("spotify.SongLike", added=tuple({"user_id": person.id, "song_id": i} for i in song_ids)),
        Change("spotify.Song", updated={i: {"like_count": n} for i, n in counts.items()}),
    )


FAMILIES = (
    Family(
        function=skill_source(
            "most_played_in_playlist(playlist: str) -> str", "Title of the most played song in a playlist.", "spotify",
            _find_playlist(
                'songs = [apis.spotify.show_song(song_id=i) for i in ids]\n'
                'return max(songs, key=lambda s: s["play_count"])["title"]')),
        phrasings=(
            "What is the most played song in my Spotify playlist '{playlist}'?",
            "Give me the title of the most played song in my playlist '{playlist}' on Spotify.",
            "Which song of my Spotify playlist '{playlist}' has been played most often?",
        ),
        draw=_playlist_song("play_count", max), apps=("spotify",), difficulty=2, api="spotify.show_playlist_library"),
    Family(
        function=skill_source(
            "like_playlist_songs(playlist: str) -> None", "Like every song of a playlist.", "spotify",
            _find_playlist(
                'for i in ids:\n'
                '    apis.spotify.like_song(song_id=i, access_token=token)')),
        phrasings=(
            "Like all songs of my Spotify playlist '{playlist}'.",
            "Please like every song in my playlist '{playlist}' on Spotify.",
            "Go through my Spotify playlist '{playlist}' and like each song.",
        ),
        draw=_like_playlist, apps=("spotify",), difficulty=2, api="spotify.like_song"),
)
