"""Many whole training runs, each kept as it ends: what was run once is not run again.

A run is known by what it computes, so one folder serves any checks and arms, and a check that was stopped or killed
goes on with the runs that are missing.
"""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.training.run_folder import held
from leaven.training.worker import Outcome, Pool, run_trial

LINES = "runs.jsonl"


class Stopped(Exception):
    """The runs were asked to stop before all had ended; those that had are kept."""


def key(recipe: Recipe) -> str:
    """The same for two recipes that compute the same losses: names, reasons and layout are left out."""
    document = recipe.model_dump(mode="json", exclude={"name", "why", "layout"})
    return blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=12).hexdigest()


def run_all(
    recipes: Iterable[Recipe],
    folder: Path,
    workers: int,
    *,
    on_run: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Callable[[Recipe], Outcome]:
    """Train each recipe once, the longest first so that none runs alone at the end; outcomes are looked up after.

    Raises:
        InputError: if the folder is in use or cannot be made, or the process of a run dies twice.
        Stopped: if ``stop`` said so.
    """
    wanted = {key(recipe): recipe for recipe in recipes}
    with held(folder, "--run"):
        ended = _read(folder / LINES)
        missing = sorted(wanted.keys() - ended.keys(), key=lambda name: (-_cost(wanted[name]), name))
        on_run(len(wanted) - len(missing), len(wanted))
        with Pool(workers) as pool:
            queue, died = list(reversed(missing)), set[str]()
            pending: dict[Future[Outcome], str] = {}
            while (queue or pending) and not stop():
                while queue and len(pending) < workers:
                    name = queue.pop()
                    pending[pool.submit(run_trial, wanted[name])] = name
                for future in wait(pending, timeout=0.5, return_when=FIRST_COMPLETED).done:
                    name = pending.pop(future)
                    try:
                        ended[name] = future.result()
                    except BrokenProcessPool:
                        if name in died:
                            raise InputError("the process of a run died twice; is there memory enough?") from None
                        died.add(name)
                        queue.append(name)
                        continue
                    _append(folder / LINES, name, ended[name])
                    on_run(len(wanted.keys() & ended.keys()), len(wanted))
    if wanted.keys() - ended.keys():
        raise Stopped(f"{len(wanted.keys() & ended.keys())} of {len(wanted)} runs have ended")
    return lambda recipe: ended[key(recipe)]


def _cost(recipe: Recipe) -> float:
    return recipe.model.params * recipe.data.tokens


def _read(path: Path) -> dict[str, Outcome]:
    """The lines of a file; one torn by a crash is passed over."""
    found: dict[str, Outcome] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
                name = entry.pop("key")
                found[name] = Outcome(**entry)
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
    return found


def _append(path: Path, name: str, outcome: Outcome) -> None:
    with path.open("a", encoding="utf-8") as file:
        # A line of its own even after one that was torn.
        file.write(f"\n{json.dumps({'key': name} | asdict(outcome))}\n")
