"""Families about the files of the file system app."""

from __future__ import annotations

import random
from collections import defaultdict

from sage_jax.world.miniworld.content import File, Person, Plan
from sage_jax.world.miniworld.family import Change, Draw, Family, skill_source

FIND_FILES = (
    'files = apis.file_system.show_directory(\n'
    '    access_token=token, directory_path=folder, entry_type="files", recursive=False)\n'
)
FIND_TEXTS = FIND_FILES + (
    'texts = {f: apis.file_system.show_file(access_token=token, file_path=f)["content"] for f in files}\n'
)


def folders(plan: Plan, person: Person) -> dict[str, list[File]]:
    """Folder as a task names it, e.g. '~/photos' -> its files."""
    out = defaultdict(list)
    for file in plan.files_of(person):
        out["~/" + file.folder.removeprefix(person.home).rstrip("/")].append(file)
    return dict(out)


def deletion_changes(plan: Plan, person: Person, files: list[File]) -> tuple[Change, ...]:
    """What deleting files of one folder changes: the rows, and the times of all folders above."""
    above = [d.id for d in plan.directories if d.user_id == person.id and files[0].folder.startswith(d.path)]
    return (
        Change("file_system.File", removed=tuple(f.id for f in files)),
        Change("file_system.Directory", updated={i: {} for i in above}, free=("updated_at",)),
    )


def _count(rng: random.Random, plan: Plan, person: Person) -> Draw:
    found = folders(plan, person)
    folder = rng.choice(sorted(found))
    return Draw({"folder": folder}, len(found[folder]))


def _endings(rng: random.Random, plan: Plan, person: Person, least: int) -> tuple[str, str, list[File]] | None:
    """A folder, an ending and the files with it: at least so many, but not all."""
    options = []
    for folder, files in sorted(folders(plan, person).items()):
        for ending in sorted({f.name.rsplit(".", 1)[1] for f in files}):
            having = [f for f in files if f.name.endswith("." + ending)]
            if least <= len(having) < len(files):
                options.append((folder, ending, having))
    return rng.choice(options) if options else None


def _count_ending(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    option = _endings(rng, plan, person, 1)
    return option and Draw({"folder": option[0], "ending": option[1]}, len(option[2]))


def _delete_ending(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    option = _endings(rng, plan, person, 2)
    return option and Draw({"folder": option[0], "ending": option[1]}, changes=deletion_changes(plan, person, option[2]))


def _extreme(rng: random.Random, plan: Plan, person: Person, best) -> tuple[str, File] | None:
    """A folder and the one file in it whose content is longest (`best` = max) or shortest (min)."""
    options = []
    for folder, files in sorted(folders(plan, person).items()):
        file = best(files, key=lambda f: len(f.content))
        if sum(len(f.content) == len(file.content) for f in files) == 1:
            options.append((folder, file))
    return rng.choice(options) if options else None


def _path_of(best):
    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        option = _extreme(rng, plan, person, best)
        return option and Draw({"folder": option[0]}, option[1].path)

    return draw


def _delete_extreme(best):
    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        option = _extreme(rng, plan, person, best)
        return option and Draw({"folder": option[0]}, changes=deletion_changes(plan, person, [option[1]]))

    return draw


def _delete(rng: random.Random, plan: Plan, person: Person) -> Draw:
    found = folders(plan, person)
    folder = rng.choice(sorted(found))
    file = rng.choice(found[folder])
    return Draw({"folder": folder, "file": file.name}, changes=deletion_changes(plan, person, [file]))


FAMILIES = (
    Family(
        function=skill_source(
            "count_files(folder: str) -> int", "Number of files in a folder.", "file_system", FIND_FILES + 'return len(files)'),
        phrasings=(
            "How many files are in my folder '{folder}'?",
            "Count the files in the folder '{folder}' of my file system.",
            "The folder '{folder}' in my file system has how many files?"),
        draw=_count, apps=("file_system",), difficulty=1, api="file_system.show_directory"),
    Family(
        function=skill_source(
            "count_ending_files(folder: str, ending: str) -> int", "Number of files in a folder with an ending.", "file_system",
            FIND_FILES + 'return len([f for f in files if f.endswith("." + ending)])'),
        phrasings=(
            "How many '{ending}' files are in my folder '{folder}'?",
            "Count the files in the folder '{folder}' of my file system that end with '{ending}'.",
            "My folder '{folder}' has how many files of the type '{ending}'?"),
        draw=_count_ending, apps=("file_system",), difficulty=2, api="file_system.show_directory"),
    Family(
        function=skill_source(
            "longest_file(folder: str) -> str", "Path of the file with the longest content in a folder.", "file_system",
            FIND_TEXTS + 'return max(texts, key=lambda f: len(texts[f]))'),
        phrasings=(
            "Which file in my folder '{folder}' has the longest content? Answer with its full path.",
            "Give me the full path of the longest file in the folder '{folder}' of my file system.",
            "What is the full path of the file with the most characters in my folder '{folder}'?"),
        draw=_path_of(max), apps=("file_system",), difficulty=2, api="file_system.show_file"),
    Family(
        function=skill_source(
            "delete_file_in(folder: str, file: str) -> None", "Delete a file of a folder.", "file_system",
            'apis.file_system.delete_file(access_token=token, file_path=folder + "/" + file)'),
        phrasings=(
            "Delete the file '{file}' in my folder '{folder}'.",
            "Please remove '{file}' from the folder '{folder}' of my file system.",
            "I no longer need the file '{file}' in '{folder}'. Delete it."),
        draw=_delete, apps=("file_system",), difficulty=1, api="file_system.delete_file"),
    Family(
        function=skill_source(
            "shortest_file(folder: str) -> str", "Path of the file with the shortest content in a folder.", "file_system",
            FIND_TEXTS + 'return min(texts, key=lambda f: len(texts[f]))'),
        phrasings=(
            "Which file in my folder '{folder}' has the shortest content? Answer with its full path.",
            "Give me the full path of the shortest file in the folder '{folder}' of my file system.",
            "What is the full path of the file with the fewest characters in my folder '{folder}'?"),
        draw=_path_of(min), apps=("file_system",), difficulty=2, api="file_system.show_file", role="challenge"),
    Family(
        function=skill_source(
            "delete_ending_files(folder: str, ending: str) -> None", "Delete the files in a folder with an ending.",
            "file_system", FIND_FILES +
            'for f in files:\n'
            '    if f.endswith("." + ending):\n'
            '        apis.file_system.delete_file(access_token=token, file_path=f)'),
        phrasings=(
            "Delete all '{ending}' files in my folder '{folder}'.",
            "Please remove the files that end with '{ending}' from the folder '{folder}' of my file system.",
            "I no longer need the '{ending}' files in '{folder}'. Delete them."),
        draw=_delete_ending, apps=("file_system",), difficulty=3, api="file_system.delete_file", role="challenge"),
    Family(
        function=skill_source(
            "delete_longest_file(folder: str) -> None", "Delete the file with the longest content in a folder.", "file_system",
            FIND_TEXTS +
            'path = max(texts, key=lambda f: len(texts[f]))\n'
            'apis.file_system.delete_file(access_token=token, file_path=path)'),
        phrasings=(
            "Delete the file with the longest content in my folder '{folder}'.",
            "Please remove the longest file from the folder '{folder}' of my file system.",
            "Find the file with the most characters in my folder '{folder}' and delete it."),
        draw=_delete_extreme(max), apps=("file_system",), difficulty=3, api="file_system.delete_file", role="challenge"),
)
