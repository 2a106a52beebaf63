"""What a world costs, beside the stock way: python -m sage_jax.bench.worlds

In one run, on the mini world: worlds per second (open, three executes, evaluate, close), executes per second, median and 99th percentile of
an execute, proportional memory of a world (PSS of its two processes, after a login and three calls) at 1, 8, 32 and 128 open worlds; the
same for the stock way, a fresh process a world (its slow exit is cut short and not counted); and the time of a copy
(`PoolWorld.fork`). The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags
from rich.table import Table

from sage_jax.report.progress import terminal
from sage_jax.world.pool import Limits, WorldPool
from sage_jax.world.roots import SMOKE_SCENARIOS, resolve_root
from sage_jax.world.watch import descendants

OPEN = flags.DEFINE_list("open", ["1", "8", "32", "128"], "Numbers of open worlds to measure at.")
SECONDS = flags.DEFINE_float("seconds", 10.0, "Seconds of measuring at each number, and for the stock way.")

LOGIN = (
    "me = apis.supervisor.show_profile()\n"
    "passwords = {p['account_name']: p['password'] for p in apis.supervisor.show_account_passwords()}\n"
    "token = apis.spotify.login(username=me['email'], password=passwords['spotify'])['access_token']"
)
CALLS = (
    "print(apis.spotify.show_playlist_library(access_token=token, page_limit=5))",
    "print(apis.spotify.search_songs(access_token=token, query='a', page_limit=5))",
    "print(len(apis.api_docs.show_api_descriptions(app_name='venmo')))",
)
STEPS = (LOGIN + "\n" + CALLS[0], CALLS[1], CALLS[2])

# The stock way, as a user of the engine would: one process a task. Prints when it is done, and its memory while it is open.
STOCK = """
import os, sys, time
from appworld import AppWorld
world = AppWorld(sys.argv[1], experiment_name=sys.argv[2])
for code in sys.argv[3:]:
    text = world.execute(code)
    assert not text.startswith("Execution failed"), text
pss = [line for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:")][0].split()[1]
world.evaluate()
world.close()
print(pss, flush=True)
os._exit(0)
"""


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    root = resolve_root("miniworld", scenarios=SMOKE_SCENARIOS)
    tasks = root.task_ids("train")
    cores = os.cpu_count() or 1
    print(f"{cores} cores; {root.path}")
    stock = measure_stock(root.path, tasks, cores, SECONDS.value)
    ours = asyncio.run(measure_pool(root.path, tasks, [int(n) for n in OPEN.value], SECONDS.value))
    table = Table("open worlds", "worlds/s", "executes/s", "execute median ms", "p99 ms", "PSS MiB a world", "PSS GiB in all")
    table.add_row("stock, a process a world", f"{stock['worlds_per_s']:.2f}", "", "", "", f"{stock['pss_mib']:.0f}", "")
    for row in ours["rows"]:
        table.add_row(
            str(row["open"]), f"{row['worlds_per_s']:.1f}", f"{row['executes_per_s']:.0f}", f"{row['median_ms']:.1f}", f"{row['p99_ms']:.1f}",
            f"{row['pss_mib']:.1f}", f"{row['gib']:.2f}",
        )  # fmt: skip
    terminal().print(table)
    print(f"copy of a live world: median {ours['fork_ms']:.1f} ms; layers of isolation on: {', '.join(ours['layers'])}")
    by_open = {row["open"]: row for row in ours["rows"]}
    at_32, at_most = by_open.get(32, ours["rows"][-1]), by_open.get(128, ours["rows"][-1])
    result = {
        "worlds_per_s_x_stock": round(max(r["worlds_per_s"] for r in ours["rows"]) / stock["worlds_per_s"], 2),
        "memory_share_of_stock": round(at_32["pss_mib"] / stock["pss_mib"], 3),
        "gib_for_128_worlds": round(at_most["gib"] * 128 / at_most["open"], 2),
        "execute_p99_ms": round(at_32["p99_ms"], 1),
        "fork_ms": round(ours["fork_ms"], 1),
    }
    print(json.dumps(result))


def measure_stock(root: Path, tasks: list[str], cores: int, seconds: float) -> dict[str, float]:
    """As many processes side by side as there are cores, for at least `seconds`; memory is the mean of their own figures."""
    done, pss, running = 0, [], {}
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(root / "data", Path(folder) / "data")
        environment = {**os.environ, "APPWORLD_ROOT": folder}
        started = time.monotonic()
        number = 0
        while running or time.monotonic() - started < seconds:
            while len(running) < cores and time.monotonic() - started < seconds:
                command = [sys.executable, "-c", STOCK, tasks[number % len(tasks)], f"stock{number}", *STEPS]
                running[number] = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
                number += 1
            for key, process in list(running.items()):
                if process.poll() is not None:
                    text = process.communicate()[0]
                    if process.returncode:
                        raise RuntimeError(f"the stock way failed with code {process.returncode}")
                    pss.append(int(text.split()[-1]) / 1024)
                    done += 1
                    del running[key]
            time.sleep(0.005)
        took = time.monotonic() - started
    return {"worlds_per_s": done / took, "pss_mib": statistics.mean(pss)}


async def measure_pool(root: Path, tasks: list[str], numbers: list[int], seconds: float) -> dict:
    """Rows by the number of open worlds, the time of a copy, the layers that were on."""
    rows = []
    async with WorldPool(root, limits=Limits(), outputs=None, max_open=max(numbers), allow_unisolated=True) as pool:
        for number in numbers:
            rows.append(await _row(pool, tasks, number, seconds))
        world = await pool.open(tasks[0], experiment="bench", keep=False)
        await world.execute(STEPS[0])
        forks = []
        for _ in range(20):
            began = time.perf_counter()
            copy = await world.fork()
            forks.append(1000 * (time.perf_counter() - began))
            await copy.close()
        await world.close()
        layers = [name for name, layer in pool.layers.items() if layer.on]
    return {"rows": rows, "fork_ms": statistics.median(forks), "layers": layers}


async def _row(pool: WorldPool, tasks: list[str], number: int, seconds: float) -> dict:
    latencies: list[float] = []
    finished = 0
    deadline = time.monotonic() + seconds

    async def live(index: int) -> None:
        nonlocal finished
        while True:
            world = await pool.open(tasks[index % len(tasks)], experiment="bench", keep=False)
            for code in STEPS:
                began = time.perf_counter()
                step = await world.execute(code)
                latencies.append(1000 * (time.perf_counter() - began))
                if step.failed:
                    raise RuntimeError(f"a step of the benchmark failed: {step.text}")
            await world.evaluate()
            await world.close()
            finished += 1
            if time.monotonic() > deadline:
                return

    started = time.monotonic()
    await asyncio.gather(*(live(i) for i in range(number)))
    took = time.monotonic() - started

    async def opened(index: int):
        world = await pool.open(tasks[index % len(tasks)], experiment="bench", keep=False)
        for code in STEPS:
            await world.execute(code)
        return world

    worlds = await asyncio.gather(*(opened(i) for i in range(number)))
    whole = _pss(descendants(pool.server_pid))
    server = _pss([pool.server_pid])
    await asyncio.gather(*(w.close() for w in worlds))
    latencies.sort()
    return {
        "open": number, "worlds_per_s": finished / took, "executes_per_s": len(latencies) / took, "median_ms": statistics.median(latencies),
        "p99_ms": latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))], "pss_mib": (whole - server) / 2**20 / number, "gib": whole / 2**30,
    }  # fmt: skip


def _pss(pids: list[int]) -> int:
    """Proportional set size in bytes, summed."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


if __name__ == "__main__":
    app.run(main)
