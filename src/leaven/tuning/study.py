"""A study: a search over short runs of a recipe, each in a process of its own, from which the best recipe is written.

What is known is in the store (``objective.py``). The folder has what is read off it: study.json, best.toml and
centre.toml, written whole by whoever ends a trial, and checkpoints of the trials that are running.
"""

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import optuna

from leaven.data.tokens import TokenSet
from leaven.recipe.errors import InputError
from leaven.recipe.files import make_folder, read_recipe, write_recipe, write_text
from leaven.recipe.recipe import Recipe, differences
from leaven.training.engine import check_trainable
from leaven.training.outcome import Outcome
from leaven.training.run_folder import listed
from leaven.training.study_file import Best, StudyState, Trial
from leaven.training.trial import branches_of, train_trial
from leaven.training.worker import Pool
from leaven.tuning import found, ledger
from leaven.tuning.answer import answer, front
from leaven.tuning.ledger import Run
from leaven.tuning.methods import check_method
from leaven.tuning.objective import Lost, Released, agree, search
from leaven.tuning.plan import NothingFound
from leaven.tuning.proposal import Proposal
from leaven.tuning.space import Space, moved
from leaven.tuning.stores import StoreGone, open_store
from leaven.tuning.trust_region import Axes, region_of

CHECKPOINTS = "checkpoints"
OURS = ("journal.log*", ".*.tmp", CHECKPOINTS)  # what a study that was killed as it began leaves
SAID_AFTER = 5.0  # seconds for which a store is away


class Screen(Protocol):
    """What a person watches."""

    def asked(self, number: int, worker: str, /) -> None: ...
    def ended(self, trial: Trial, state: StudyState, /) -> None: ...
    def note(self, text: str, /) -> None: ...


class Study:
    """A study in a folder, or in a store elsewhere with a folder for what comes of it. Use it in a ``with``.

    Args:
        out: the folder.
        store: the URL of a database; a journal in the folder without.
        durations: in tokens, to be compared in each trial; its loss is that of the longest.

    Raises:
        InputError: if the recipe cannot be trained on the tokens, or the folder is of something else or cannot be
            made; on entering, if the store is of something else or is not there. Nothing has been written then.
    """

    def __init__(  # noqa: PLR0917 - what it is of
        self,
        out: Path,
        recipe: Recipe,
        space: Space,
        method: str,
        tokens: TokenSet,
        store: str | None = None,
        *,
        durations: Sequence[int] = (),
    ) -> None:
        check_method(method)
        check_trainable(recipe, tokens)
        branches_of(recipe, durations, tokens)
        self.out, self.recipe, self.space, self.method = out, recipe, space, method
        self._text, self._durations = tokens.fingerprint, tuple(durations)
        self._where: str | Path = store or out / "journal.log"
        self._name = f"--study {store or out}"
        self._screen: Screen | None = None
        self._stop: Callable[[], bool] = lambda: False
        self._check()

    def _check(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"{self.out}: a file; give a folder")
        centre = self.out / "centre.toml"
        if centre.exists():
            self._same(read_recipe(centre), str(self.out))
        elif self.out.exists() and not all(any(fnmatch(e.name, own) for own in OURS) for e in self.out.iterdir()):
            raise InputError(f"{self.out} is not empty and holds no study; use another folder")

    def _same(self, there: Recipe, what: str) -> None:
        if changes := differences(there, self.recipe):
            raise InputError(f"{what} is of another recipe: {listed(changes)}; use another --study")

    def __enter__(self) -> "Study":
        if isinstance(self._where, Path):
            make_folder(self.out)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._store = open_store(self._where, self._waited)
        self._study = optuna.create_study(
            study_name=self.recipe.name,
            storage=self._store,
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(),
        )
        # Other machines have no folder: what the study is of is in the store too.
        kept = self._study.user_attrs.get("recipe")
        if kept is not None:
            self._same(Recipe.model_validate(kept), self._name)
        space = {path: [low, high, 0.0] for path, (low, high) in self.space.limits.items()}
        here = {"method": self.method, "space": space, "text": self._text, "durations": list(self._durations)}
        agree(self._study, here, self._name, "give it the same, or use another --study")
        if kept is None:
            self._study.set_user_attr("recipe", self.recipe.model_dump(mode="json"))
        make_folder(self.out)
        if not (self.out / "centre.toml").exists():
            write_recipe(self.recipe, self.out / "centre.toml")
        return self

    def __exit__(self, *exception: object) -> None:
        self._store.remove_session()

    def _waited(self, seconds: float) -> None:
        """The store is away."""
        if self._stop():
            raise StoreGone("stopped while the store was away")
        if self._screen is not None and seconds > SAID_AFTER:
            self._screen.note(f"the store has been away for {seconds:.0f} s; waiting")

    def run(
        self,
        trials: int | None,
        workers: int,
        *,
        flops: float | None = None,
        hours: float | None = None,
        screen: Screen | None = None,
        stop: Callable[[], bool] = lambda: False,
        lease_seconds: float = 60.0,
    ) -> StudyState:
        """Run until the budget is used and the best few are judged, here and elsewhere, or until ``stop`` says so."""
        self._screen, self._stop = screen, stop
        with ExitStack() as stack:
            # A pool breaks as a whole when a process dies, so each worker has one.
            processes = _Processes([stack.enter_context(Pool(1)) for _ in range(workers)], stop)
            stack.callback(processes.leave)
            try:
                result = search(
                    partial(self._train, processes),
                    self.space.limits,
                    None,
                    trials,
                    self.method,
                    self.recipe.data.seed,
                    workers,
                    flops=flops,
                    hours=hours,
                    storage=self._store,
                    name=self.recipe.name,
                    stop=stop,
                    watch=self,
                    lease_seconds=lease_seconds,
                )
            except NothingFound:
                return self.save()
        return self.save(None if stop() else result)

    def _train(self, processes: "_Processes", proposal: Proposal) -> Outcome:
        try:
            recipe = moved(self.recipe, proposal, self.recipe.data.seed + proposal.seed)
        except ValueError:  # lr x weight_decay above 1, say: no recipe, and no cost
            return Outcome(math.inf)
        return processes.run(
            proposal.worker,
            partial(
                train_trial,
                recipe,
                rival=proposal.rival,
                checkpoint=self.out / CHECKPOINTS / f"{proposal.origin:06d}",
                durations=self._durations,
            ),
        )

    def asked(self, proposal: Proposal) -> None:
        if self._screen is not None:
            self._screen.asked(proposal.number, f"w{proposal.worker + 1}")

    def ended(self, trial: found.Trial) -> None:
        state = self.save()
        if self._screen is not None:
            self._screen.ended(next(other for other in state.trials if other.number == trial.number), state)

    def state(self, result: found.Found | None = None) -> StudyState:
        """The study as it stands; ``best`` is that of its result."""
        runs = ledger.runs(self._study.get_trials(deepcopy=False), len(self.space.dimensions))
        trials = tuple(map(self._record, runs))
        noise, degrees = found.floor(runs)
        more = answer(trials, self.space.dimensions, noise)
        axes = Axes.of(self.space.limits)
        trust = self.method == "trust-region" and any(run.finished for run in runs)
        return StudyState(
            name=self.recipe.name,
            method=self.method,
            space=self.space.paths,
            noise_floor=noise,
            best=result and Best(_first(runs, result.params), result.loss, result.interval),
            trials=trials,
            dimensions=self.space.dimensions,
            noise_runs=degrees,
            radius=region_of(self._study, axes).radius if trust else None,
            stalled=result is not None and result.stalled,
            fewest=more.fewest,
            fewest_octaves=more.fewest_octaves,
            coordinates=more.coordinates,
            front=front(trials),
        )

    def _record(self, run: Run) -> Trial:
        last, ran = run.last, run.last.user_attrs
        state = "failed" if run.failed else "running"
        if run.finished:
            state = "diverged" if ran.get("diverged") else "stopped" if ran.get("stopped") else "complete"
        return Trial(
            number=last.number,
            state=state,
            loss=last.value if state in {"complete", "stopped"} else None,
            values=self.space.values(last.params) if len(last.params) == len(self.space.dimensions) else {},
            seconds=ran.get("seconds"),
            tokens_per_second=ran["tokens"] / ran["seconds"] if ran.get("seconds") else None,
            octaves=dict(last.params),
            purpose=ledger.purpose(last),
            seed=ledger.seed(last),
            tokens=ran.get("tokens", 0),
            flops=ran.get("flops", 0.0),
            curve=tuple((tokens, loss) for tokens, loss in ran.get("curve", ())),
            branches=tuple((tokens, loss) for tokens, loss in ran.get("branches", ())),
            worker=ran.get("worker"),
            ended=ran.get(ledger.ENDED),
        )

    def save(self, result: found.Found | None = None) -> StudyState:
        """Write study.json, and best.toml once there is a best."""
        state = self.state(result)
        write_text(self.out / "study.json", json.dumps(asdict(state), indent=2) + "\n")
        if result is not None:
            write_recipe(self.best_recipe(state), self.out / "best.toml")
        return state

    def document(self, state: StudyState) -> dict[str, Any]:
        """The document of ``leaven tune --json``."""
        best = state.best
        return {
            "best": best
            and {"loss": best.loss, "interval": list(best.interval), "recipe": str(self.out / "best.toml")},
            "trials": state.ended,
            "failed": sum(trial.state in {"diverged", "failed"} for trial in state.trials),
            "noise_floor": state.noise_floor,
        }

    def best_recipe(self, state: StudyState) -> Recipe:
        """The winner as a recipe, with its base pinned at this scale and a reason for every searched value."""
        assert state.best is not None
        trial = next(trial for trial in state.trials if trial.number == state.best.number)
        judges = sum(t.purpose == "rerun" and t.octaves == trial.octaves for t in state.trials)
        low, high = state.best.interval
        reason = (
            f"study {state.name}, trial {state.best.number} of {len(state.trials)} ({state.method}); "
            f"validation loss {state.best.loss:.4f}, 95% interval {low:.4f} to {high:.4f} over "
            + (f"{judges} fresh seeds" if judges else "one run")
        )
        octaves = trial.octaves or {}
        why = {path: f"{reason}; {2**moved_by:.2f} x the start" for path, moved_by in octaves.items()}
        base = self.recipe.base.model_dump()
        return moved(self.recipe, octaves).replace({"scaling.base": base, "why": self.recipe.why | why})


class _Processes:
    """Worker processes, one for each thread of the search."""

    def __init__(self, pools: list[Pool], stop: Callable[[], bool]) -> None:
        self._pools, self._stop, self._left = pools, stop, threading.Event()

    def leave(self) -> None:
        self._left.set()

    def run(self, worker: int, function: Callable[[], Outcome]) -> Outcome:
        """Call the function in a process.

        Raises:
            Lost: if the process died.
            Released: if it is time to stop.
        """
        future = self._pools[worker].submit(function)
        while not wait([future], timeout=0.25).done:
            if self._stop() or self._left.is_set():
                raise Released
        try:
            return future.result()
        except BrokenProcessPool:
            raise Lost from None


def _first(runs: Sequence[Run], params: dict[str, float]) -> int:
    """The number under which a point was first run."""
    return min(run.last.number for run in runs if run.last.params == params)
