"""Families about projects and tasks in Todoist."""

from __future__ import annotations

import random

from sage_jax.world.miniworld.content import Person, Plan, TodoProject
from sage_jax.world.miniworld.families.parts import new_title
from sage_jax.world.miniworld.family import Change, Draw, Family, skill_source

FIND_PROJECT = (
    'projects = apis.todoist.show_projects(access_token=token, page_limit=20)\n'
    'project_id = [p["project_id"] for p in projects if p["name"] == project][0]\n'
)
FIND_TASKS = FIND_PROJECT + (
    'tasks = apis.todoist.show_tasks(access_token=token, project_id=project_id)["no_section_tasks"]\n'
)
FIND_TASK = FIND_TASKS + 'task_id = [t["task_id"] for t in tasks if t["title"] == title][0]\n'


def _project(rng: random.Random, plan: Plan, person: Person) -> TodoProject:
    return rng.choice([p for p in plan.projects_of(person) if not p.inbox])


def _count(**fields):
    """Draws a question for the number of a project's tasks whose fields have these values; not all and not none have."""

    def draw(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
        project = _project(rng, plan, person)
        tasks = plan.todos_of(project.id)
        count = sum(all(getattr(t, k) == v for k, v in fields.items()) for t in tasks)
        return Draw({"project": project.name}, count) if 0 < count < len(tasks) and 2 * count != len(tasks) else None

    return draw


def _count_priority(rng: random.Random, plan: Plan, person: Person) -> Draw:
    project, priority = _project(rng, plan, person), rng.choice(("high", "medium", "low"))
    count = sum(t.priority == priority for t in plan.todos_of(project.id))
    return Draw({"project": project.name, "priority": priority}, count)


def _finish(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    project = _project(rng, plan, person)
    tasks = [t for t in plan.todos_of(project.id) if not t.completed]
    if not tasks:
        return None
    task = rng.choice(tasks)
    return Draw({"project": project.name, "title": task.title},
                changes=(Change("todoist.Task", updated={task.id: {"is_completed": True}}),))


def _finish_all(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    project = _project(rng, plan, person)
    rows = [t.id for t in plan.todos_of(project.id) if not t.completed]
    if len(rows) < 2:
        return None
    return Draw({"project": project.name}, changes=(Change("todoist.Task", updated={i: {"is_completed": True} for i in rows}),))


def _delete(rng: random.Random, plan: Plan, person: Person) -> Draw:
    project = _project(rng, plan, person)
    task = rng.choice(plan.todos_of(project.id))
    return Draw({"project": project.name, "title": task.title}, changes=(Change("todoist.Task", removed=(task.id,)),))


def _delete_finished(rng: random.Random, plan: Plan, person: Person) -> Draw | None:
    project = _project(rng, plan, person)
    tasks = plan.todos_of(project.id)
    rows = tuple(t.id for t in tasks if t.completed)
    return Draw({"project": project.name}, changes=(Change("todoist.Task", removed=rows),)) if 0 < len(rows) < len(tasks) else None


def task_changes(person: Person, project: TodoProject, title: str) -> tuple[Change, ...]:
    """What a new task adds."""
    return (Change("todoist.Task", added=({"user_id": person.id, "project_id": project.id, "title": title,
                                           "is_completed": False},)),)


def _add(rng: random.Random, plan: Plan, person: Person) -> Draw:
    project = _project(rng, plan, person)
    title = new_title(rng, (t.title for t in plan.todos_of(project.id)))
    return Draw({"project": project.name, "title": title}, changes=task_changes(person, project, title))


FAMILIES = (
    Family(
        function=skill_source(
            "count_open_tasks(project: str) -> int", "Number of tasks of a project that are not completed.", "todoist",
            FIND_TASKS + 'return len([t for t in tasks if not t["is_completed"]])'),
        phrasings=(
            "How many open tasks does my Todoist project '{project}' have?",
            "Count the tasks of my project '{project}' in Todoist that are not completed.",
            "In Todoist, how many tasks are still to be done in the project '{project}'?"),
        draw=_count(completed=False), apps=("todoist",), difficulty=2, api="todoist.show_projects"),
    Family(
        function=skill_source(
            "count_priority_tasks(project: str, priority: str) -> int", "Number of tasks of a project with a priority.", "todoist",
            FIND_TASKS + 'return len([t for t in tasks if t["priority"] == priority])'),
        phrasings=(
            "How many tasks of my Todoist project '{project}' have the priority '{priority}'?",
            "Count the tasks with priority '{priority}' in my project '{project}' in Todoist.",
            "In Todoist, how many '{priority}' priority tasks are in the project '{project}'?"),
        draw=_count_priority, apps=("todoist",), difficulty=2, api="todoist.show_projects"),
    Family(
        function=skill_source(
            "finish_task(project: str, title: str) -> None", "Mark a task of a project as completed.", "todoist",
            FIND_TASK + 'apis.todoist.update_task(access_token=token, task_id=task_id, is_completed=True)'),
        phrasings=(
            "Mark the task '{title}' in my Todoist project '{project}' as completed.",
            "In Todoist, complete the task '{title}' of the project '{project}'.",
            "I have done '{title}' from my Todoist project '{project}'. Mark it as completed."),
        draw=_finish, apps=("todoist",), difficulty=2, api="todoist.update_task"),
    Family(
        function=skill_source(
            "remove_task(project: str, title: str) -> None", "Delete a task of a project.", "todoist",
            FIND_TASK + 'apis.todoist.delete_task(access_token=token, task_id=task_id)'),
        phrasings=(
            "Delete the task '{title}' from my Todoist project '{project}'.",
            "In Todoist, remove the task '{title}' of the project '{project}'.",
            "I no longer need the task '{title}' in my Todoist project '{project}'. Delete it."),
        draw=_delete, apps=("todoist",), difficulty=2, api="todoist.delete_task"),
    Family(
        function=skill_source(
            "add_task(project: str, title: str) -> None", "Add a task to a project.", "todoist",
            FIND_PROJECT + 'apis.todoist.create_task(access_token=token, project_id=project_id, title=title)'),
        phrasings=(
            "Add the task '{title}' to my Todoist project '{project}'.",
            "In Todoist, create a task '{title}' in the project '{project}'.",
            "Put a new task called '{title}' into my Todoist project '{project}'."),
        draw=_add, apps=("todoist",), difficulty=2, api="todoist.create_task"),
    Family(
        function=skill_source(
            "count_finished_tasks(project: str) -> int", "Number of tasks of a project that are completed.", "todoist",
            FIND_TASKS + 'return len([t for t in tasks if t["is_completed"]])'),
        phrasings=(
            "How many completed tasks does my Todoist project '{project}' have?",
            "Count the tasks of my project '{project}' in Todoist that are completed.",
            "In Todoist, how many tasks are already done in the project '{project}'?"),
        draw=_count(completed=True), apps=("todoist",), difficulty=2, api="todoist.show_projects", role="challenge"),
    Family(
        function=skill_source(
            "finish_all_tasks(project: str) -> None", "Mark all open tasks of a project as completed.", "todoist",
            FIND_TASKS +
            'for t in tasks:\n'
            '    if not t["is_completed"]:\n'
            '        apis.todoist.update_task(access_token=token, task_id=t["task_id"], is_completed=True)'),
        phrasings=(
            "Mark all open tasks in my Todoist project '{project}' as completed.",
            "In Todoist, complete every task of the project '{project}'.",
            "I have done everything in my Todoist project '{project}'. Mark its tasks as completed."),
        draw=_finish_all, apps=("todoist",), difficulty=3, api="todoist.update_task", role="challenge"),
    Family(
        function=skill_source(
            "remove_finished_tasks(project: str) -> None", "Delete all completed tasks of a project.", "todoist",
            FIND_TASKS +
            'for t in tasks:\n'
            '    if t["is_completed"]:\n'
            '        apis.todoist.delete_task(access_token=token, task_id=t["task_id"])'),
        phrasings=(
            "Delete all completed tasks from my Todoist project '{project}'.",
            "In Todoist, remove every completed task of the project '{project}'.",
            "Clean up my Todoist project '{project}': delete its completed tasks."),
        draw=_delete_finished, apps=("todoist",), difficulty=3, api="todoist.delete_task", role="challenge"),
)
