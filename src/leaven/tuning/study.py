"""A study: many trials of one recipe, kept in an Optuna journal, from which the best recipe is written.

This process alone asks and tells; workers only train. So a killed worker or a killed study loses no finished trial:
on the next start, trials that were running are run again with the same values.
"""

import json
import math
import os
import statistics
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from leaven.data.tokens import TokenSet
from leaven.recipe.errors import InputError
from leaven.recipe.files import read_recipe, write_recipe, write_text
from leaven.recipe.recipe import Recipe, differences
from leaven.training.course import lost_above
from leaven.training.engine import check_trainable
from leaven.training.outcome import Outcome
from leaven.training.run_folder import LOCK, held
from leaven.training.study_file import Best, StudyState, Trial
from leaven.training.trial import train_trial
from leaven.training.worker import Pool
from leaven.tuning import methods
from leaven.tuning.methods import check_method, sampler
from leaven.tuning.noise import interval, pooled
from leaven.tuning.space import Space, moved
from leaven.tuning.trust_region import Axes

METHODS = tuple(method for method in methods.METHODS if method != "grid")  # which wants to know how many trials
FINALISTS, SEEDS = 2, 3  # the best few are judged by the mean over fresh seeds: a winner of noisy trials is lucky

STUDY_NAME = "leaven"
RETRY_OF = "retry_of"  # the trial, by number, whose values a trial repeats because its process died


class Study:
    """A study in a folder: journal.log (Optuna), centre.toml, best.toml, study.json. Use it in a ``with``.

    Raises:
        InputError: if the recipe cannot be trained on the tokens, or the folder is of something else, cannot be made
            or is in use. Nothing has been written then.
    """

    def __init__(self, folder: Path, recipe: Recipe, space: Space, method: str, tokens: TokenSet) -> None:
        check_method(method, METHODS)
        check_trainable(recipe, tokens)
        self.folder, self.recipe, self.space, self.method = folder, recipe, space, method
        self._text = tokens.fingerprint
        self._check()

    def __enter__(self) -> "Study":
        self._hold = held(self.folder, "study folder")
        self._hold.__enter__()
        try:
            self._check()
            self._open()
        except BaseException:
            self._hold.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._hold.__exit__(None, None, None)

    def _check(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"--study {self.folder}: a file; give a folder")
        centre = self.folder / "centre.toml"
        if not centre.exists():
            if self.folder.exists() and any(entry.name != LOCK for entry in self.folder.iterdir()):
                raise InputError(f"--study {self.folder} is not empty and holds no study; use another folder")
            return
        changes = differences(read_recipe(centre), self.recipe)
        if changes:
            listed = "; ".join(f"{path} {there} there, {here} here" for path, there, here in changes)
            raise InputError(f"--study {self.folder} is of another recipe: {listed}; use another --study")

    def _open(self) -> None:
        centre, journal = self.folder / "centre.toml", self.folder / "journal.log"
        if not centre.exists():
            write_recipe(self.recipe, centre)
        _mend(journal)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        distributions = {d.path: FloatDistribution(d.low, d.high, log=True) for d in self.space.dimensions}
        self._study = optuna.create_study(
            study_name=STUDY_NAME,
            storage=JournalStorage(JournalFileBackend(str(journal))),
            sampler=sampler(self.method, Axes(self.space.centre, distributions), self.recipe.data.seed),
            load_if_exists=True,
        )
        settings = {"space": list(self.space.paths), "method": self.method, "text": self._text}
        for key, here in settings.items():
            there = self._study.user_attrs.get(key)
            if there is None:
                self._study.set_user_attr(key, here)
            elif there != here:
                listed = f"{key} {there if isinstance(there, str) else ','.join(there)}"
                raise InputError(f"--study {self.folder} was begun with {listed}; give it the same, or use another")
        if not self._study.trials:
            self._study.enqueue_trial(self.space.centre)

    def run(
        self,
        trials: int,
        workers: int,
        *,
        on_trial: Callable[[Trial, Trial], None] = lambda trial, best: None,
        on_rerun: Callable[[int, int], None] = lambda done, total: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> StudyState:
        """Run until ``trials`` have ended and the finalists are judged, or until ``stop`` says so.

        ``on_trial`` gets each trial that ends and the best one so far, ``on_rerun`` counts the finalists' reruns.
        """
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._retry(trial)
        with Pool(workers) as pool:
            self._search(pool, trials, workers, on_trial, stop)
            if not stop():
                self._judge(pool, on_rerun, stop)
        return self.save()

    def _search(
        self,
        pool: Pool,
        trials: int,
        workers: int,
        on_trial: Callable[[Trial, Trial], None],
        stop: Callable[[], bool],
    ) -> None:
        pending: dict[Future[Outcome], optuna.Trial] = {}
        while not stop():
            while len(pending) < workers and len(self._ended()) + len(pending) < trials:
                trial = self._study.ask()
                values = {d.path: trial.suggest_float(d.path, d.low, d.high, log=True) for d in self.space.dimensions}
                pending[self._start(pool, values)] = trial
            if not pending:
                return
            for future in wait(pending, timeout=0.5, return_when=FIRST_COMPLETED).done:
                trial = pending.pop(future)
                if self._tell(trial, future):
                    ended = {record.number: record for record in map(_record, self._ended())}
                    on_trial(ended[trial.number], min(ended.values(), key=_rank))
                    self.save()

    def _start(self, pool: Pool, values: dict[str, float]) -> "Future[Outcome]":
        """A trial at work. One whose values make no recipe (lr x weight_decay above 1, say) has diverged already."""
        try:
            recipe = moved(self.recipe, values)
        except ValueError:
            future: Future[Outcome] = Future()
            future.set_result(Outcome(math.inf))
            return future
        return pool.submit(train_trial, recipe)

    def _tell(self, trial: optuna.Trial, future: "Future[Outcome]") -> bool:
        """Record how a trial ended; False if its process died and it is to be run once more."""
        try:
            outcome = future.result()
        except BrokenProcessPool:
            if RETRY_OF not in trial.user_attrs:
                self._retry(trial)
                return False
            self._study.tell(trial, state=TrialState.FAIL)
            return True
        for key, value in asdict(outcome).items():
            trial.set_user_attr(key, value)
        trial.set_user_attr("diverged", outcome.diverged)
        self._study.tell(trial, min(outcome.loss, lost_above(self.recipe.model.vocab_size)))
        return True

    def _retry(self, trial: optuna.Trial | FrozenTrial) -> None:
        """Close a trial whose process is gone and queue its values again."""
        self._study.tell(trial.number, state=TrialState.FAIL)
        # A trial killed before its values were all drawn has some of them, or those it was queued with.
        drawn = self._study.get_trials(deepcopy=False)[trial.number]
        values = drawn.system_attrs.get("fixed_params", {}) | drawn.params
        if values:
            origin = trial.user_attrs.get(RETRY_OF, trial.number)
            self._study.enqueue_trial(values, user_attrs={RETRY_OF: origin})

    def _ended(self) -> list[FrozenTrial]:
        """Trials that count, in the order of their numbers: those with a result, and those that died twice."""
        trials = self._study.get_trials(deepcopy=False)
        retries = {(trial.user_attrs.get(RETRY_OF), trial.number) for trial in trials if RETRY_OF in trial.user_attrs}
        last_try = dict(sorted(retries))
        return [
            trial
            for trial in trials
            if trial.state is TrialState.COMPLETE
            or (trial.state is TrialState.FAIL and last_try.get(trial.user_attrs.get(RETRY_OF)) == trial.number)
        ]

    def _judge(self, pool: Pool, on_rerun: Callable[[int, int], None], stop: Callable[[], bool]) -> None:
        """Run the finalists with fresh seeds; what is already in the journal is not run twice."""
        seeds = range(self.recipe.data.seed + 1, self.recipe.data.seed + 1 + SEEDS)
        jobs = {f"{trial.number}:{seed}": (trial, seed) for trial in self._finalists() for seed in seeds}

        def start(key: str) -> "Future[Outcome]":
            trial, seed = jobs[key]
            return pool.submit(train_trial, moved(self.recipe, trial.params, seed))

        pending = {start(key): key for key in jobs if key not in self.reruns}
        died: set[str] = set()
        on_rerun(len(jobs) - len(pending), len(jobs))
        while pending and not stop():
            for future in wait(pending, timeout=0.5, return_when=FIRST_COMPLETED).done:
                key = pending.pop(future)
                try:
                    loss = min(future.result().loss, lost_above(self.recipe.model.vocab_size))
                    self._study.set_user_attr("reruns", self.reruns | {key: loss})
                except BrokenProcessPool:
                    if key in died:
                        raise InputError(
                            "a worker process died twice on the same run; give it more memory or fewer --workers"
                        ) from None
                    died.add(key)
                    pending[start(key)] = key
                on_rerun(len(jobs) - len(pending), len(jobs))

    @property
    def reruns(self) -> dict[str, float]:
        """Validation loss by "trial number:seed"."""
        reruns: dict[str, float] = self._study.user_attrs.get("reruns", {})
        return reruns

    def _finalists(self) -> list[FrozenTrial]:
        fit = [trial for trial in self._ended() if _record(trial).state == "complete"]
        return sorted(fit, key=lambda trial: _rank(_record(trial)))[:FINALISTS]

    def state(self) -> StudyState:
        """The study as it stands; ``best`` and ``noise_floor`` are None until the finalists are judged."""
        # The losses by which the finalists were chosen are left out: the lowest of many is low by luck too.
        losses = {
            trial.number: [loss for key, loss in self.reruns.items() if key.startswith(f"{trial.number}:")]
            for trial in self._finalists()
        }
        judged = {number: values for number, values in losses.items() if len(values) == SEEDS}
        noise, best = None, None
        if judged and len(judged) == len(losses):
            noise, degrees = pooled(judged.values())
            assert noise is not None
            number = min(judged, key=lambda candidate: statistics.fmean(judged[candidate]))
            best = Best(number, statistics.fmean(judged[number]), interval(judged[number], noise, degrees))
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return StudyState(
            name=self.recipe.name,
            method=self.method,
            space=self.space.paths,
            noise_floor=noise,
            best=best,
            trials=tuple(_record(trial) for trial in [*self._ended(), *running]),
        )

    def save(self) -> StudyState:
        """Write study.json, and best.toml once there is a best."""
        state = self.state()
        write_text(self.folder / "study.json", json.dumps(asdict(state), indent=2) + "\n")
        if state.best is not None:
            write_recipe(self.best_recipe(state), self.folder / "best.toml")
        return state

    def document(self, state: StudyState) -> dict[str, Any]:
        """The document of ``leaven tune --json``."""
        best = state.best
        return {
            "best": best
            and {"loss": best.loss, "interval": list(best.interval), "recipe": str(self.folder / "best.toml")},
            "trials": sum(trial.state != "running" for trial in state.trials),
            "failed": sum(trial.state in {"diverged", "failed"} for trial in state.trials),
            "noise_floor": state.noise_floor,
        }

    def best_recipe(self, state: StudyState) -> Recipe:
        """The winner as a recipe, with its base pinned at this scale and a reason for every searched value."""
        assert state.best is not None
        values = next(trial.values for trial in state.trials if trial.number == state.best.number)
        low, high = state.best.interval
        reason = (
            f"study {state.name}, trial {state.best.number} of {len(state.trials)} ({state.method}); "
            f"validation loss {state.best.loss:.4f}, 95% interval {low:.4f} to {high:.4f} over {SEEDS} fresh seeds"
        )
        centre = self.space.centre
        why = {path: f"{reason}; {value / centre[path]:.2f} x the start" for path, value in values.items()}
        base = self.recipe.base.model_dump()
        return moved(self.recipe, values).replace({"scaling.base": base, "why": self.recipe.why | why})


def _mend(journal: Path) -> None:
    """Cut off a line that a crash or a full disk left torn: Optuna would append to it and read neither."""
    if journal.exists():
        content = journal.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(journal, whole)


def _record(trial: FrozenTrial) -> Trial:
    ran = trial.user_attrs
    state = {TrialState.RUNNING: "running", TrialState.COMPLETE: "complete"}.get(trial.state, "failed")
    return Trial(
        number=trial.number,
        state="diverged" if ran.get("diverged") else state,
        loss=trial.value,
        values=dict(trial.params),
        seconds=ran.get("seconds"),
        tokens_per_second=ran["tokens"] / ran["seconds"] if ran.get("seconds") else None,
    )


def _rank(trial: Trial) -> tuple[bool, float]:
    return (trial.state != "complete", trial.loss if trial.loss is not None else math.inf)
