"""A study: a search over short runs of a recipe, each in its own process, that writes the best recipe.

The store has all trials (``objective.py``). The folder has files computed from them: study.json, best.toml,
fewest.toml and centre.toml, rewritten when trials end, and checkpoints of running trials.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

import optuna

from leaven.data.tokens import TokenSet
from leaven.planning.flops import flops_per_token
from leaven.recipe.errors import InputError
from leaven.recipe.files import make_folder, read_recipe, write_recipe, write_text
from leaven.recipe.recipe import Recipe, differences
from leaven.training.engine import check_trainable
from leaven.training.run_folder import listed
from leaven.training.trial import branches_of, cooldown_start
from leaven.tuning.algorithm.answer import answer, front
from leaven.tuning.algorithm.trust_region import START, Axes
from leaven.tuning.document import UNDER_WAY, Answer, StudyDocument, StudyTrial
from leaven.tuning.point import BATCH, COOLDOWN, DECAY, TOKENS, WARM_UP, moved
from leaven.tuning.service import trial_log
from leaven.tuning.service.agreement import agree, begin, check_name
from leaven.tuning.service.interface import Found, NothingFound, Proposal
from leaven.tuning.service.objective import about, search
from leaven.tuning.service.plan import record
from leaven.tuning.service.samplers import check_method, ped_anova, region_of
from leaven.tuning.service.stores import StoreGone, is_made, open_store
from leaven.tuning.service.trainer import Trainer, forget
from leaven.tuning.space import Space
from leaven.tuning.wording import why

CHECKPOINTS = "checkpoints"
OURS = ("journal.log*", ".*.tmp", CHECKPOINTS)  # files left by a study that was killed as it began
ANSWERED = "leaven:answered"  # an attribute of the study: a command has run it to its end
SAID_AFTER = 5.0  # seconds for which a store is away
SAVING = 0.1  # of the time, at most, goes into study.json; of thousands of trials it takes seconds each time


class Screen(Protocol):
    """The screen of a running study."""

    def asked(self, number: int, worker: str, /) -> None: ...
    def ended(self, state: StudyDocument, /) -> None: ...
    def note(self, text: str, /) -> None: ...


class Study:
    """A study in a folder, or in a database with a folder for its results. Use it as a context manager.

    Args:
        out: the folder.
        store: the URL of a database; a journal in the folder without.
        durations: in tokens, to be compared in each trial; its loss is that of the longest.

    Raises:
        InputError: if the recipe cannot be trained on the tokens, or the folder belongs to something else or
            cannot be created; on entering, if the store belongs to something else or does not exist. Nothing has
            been written then.
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
        check_name(recipe.name)
        check_trainable(recipe, tokens)
        *branches, longest = branches_of(recipe, durations, tokens) or [recipe]
        cooldowns = sum(branch.data.tokens - cooldown_start(branch) for branch in branches)
        self._run_flops = flops_per_token(recipe.model) * (longest.data.tokens + cooldowns)
        if durations:
            space = space.without(BATCH, "durations are whole batches, and at most sizes they are not")
            space = space.without(TOKENS, "the durations are given").without(DECAY, "durations are of wsd alone")
            space = space.below(WARM_UP, min(durations))
        if TOKENS in space.paths and max(tokens.epochs(recipe.data.tokens).values()) <= 1:
            raise InputError(
                f"--space {TOKENS}: no text is repeated, so that more tokens are always better and cost more; "
                "leave it out, or compare durations with --durations"
            )
        if method == "grid":
            space = space.within_near()
        self.out, self.recipe, self.space, self.method = out, recipe, space, method
        self._tokens, self._durations = tokens, tuple(durations)
        self._where: str | Path = store or out / "journal.log"
        self._name = f"--study {store or out}"
        self._found: Found | None = None
        self.nothing = ""  # why there is no best, once a run of this command came to none
        self._screen: Screen | None = None
        self._stop: Callable[[], bool] = lambda: False
        self._rests_until = 0.0  # by time.monotonic()
        self._check()

    def _check(self) -> None:
        out = self.out.absolute()
        nearest = next(path for path in (out, *out.parents) if os.path.lexists(path))  # Path.exists may be refused
        if not nearest.is_dir():
            raise InputError(f"{nearest}: a file; give a folder")
        if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
            raise InputError(f"{self.out}: nothing can be written in {nearest}; use another folder")
        centre = self.out / "centre.toml"
        if centre.exists():
            self._same(read_recipe(centre), str(self.out))
        elif self.out.exists() and not all(any(fnmatch(e.name, own) for own in OURS) for e in self.out.iterdir()):
            raise InputError(f"{self.out} is not empty and holds no study; use another folder")

    def _same(self, there: Recipe, what: str) -> None:
        if changes := differences(there, self.recipe):
            raise InputError(f"{what} has another recipe: {listed(changes)}; use another --study")

    def __enter__(self) -> "Study":
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._check_results(lambda: is_made(self._where))
        if isinstance(self._where, Path):
            make_folder(self.out)
        self._store = open_store(self._where, self._waited)
        others = [other.study_name for other in self._store.get_all_studies() if other.study_name != self.recipe.name]
        if others and isinstance(self._where, Path):
            raise InputError(f"{self._name} holds a study {others[0]}, not {self.recipe.name}; use another --study")
        self._check_results(self._has_trials)
        # Other machines have no folder: what the study is of is in the store too.
        here = about(self.method, self._axes, self.recipe.data.seed, None)
        here |= {"text": self._tokens.fingerprint, "durations": list(self._durations)}
        kept = {"recipe": self.recipe.model_dump(mode="json")}
        self._study, there = begin(
            self._store, self.recipe.name, optuna.samplers.RandomSampler(), here | kept, self._name
        )
        if "recipe" in there:
            self._same(Recipe.model_validate(there["recipe"]), self._name)
        agree(there, here, self._name, "give it the same, or use another --study")
        make_folder(self.out)
        if not (self.out / "centre.toml").exists():
            write_recipe(self.recipe, self.out / "centre.toml")
        return self

    def _check_results(self, stored: Callable[[], bool]) -> None:
        """Check that the folder has no results of a study whose store is missing or empty.

        Raises:
            InputError: if it is.
        """
        try:
            told = json.loads((self.out / "study.json").read_text())["trials"]
            ended = sum(trial["state"] not in UNDER_WAY for trial in told)
        except (OSError, ValueError, TypeError, KeyError):
            return  # nothing that anyone could read
        if ended and not stored():
            raise InputError(
                f"{self.out} has the results of {ended} trials, and {self._name} has none of them; bring the store "
                "back, or use another folder"
            )

    def _has_trials(self) -> bool:
        name = self.recipe.name
        there = name in [other.study_name for other in self._store.get_all_studies()]
        return there and bool(self._store.get_all_trials(self._store.get_study_id_from_name(name), deepcopy=False))

    def __exit__(self, *exception: object) -> None:
        self._store.remove_session()

    def _waited(self, seconds: float) -> None:
        """Called while the store is unreachable."""
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
        stop_at_noise: bool = True,
        lease_seconds: float = 60.0,
        checkpoint_seconds: float = 60.0,
    ) -> StudyDocument:
        """Run until the budget of all commands is used and the best points are confirmed, or until ``stop``.

        Args:
            trials, flops, hours: see :class:`leaven.tuning.service.budget.Budget`.
            workers: number of processes, of one thread each.
            checkpoint_seconds: seconds between checkpoints of a trial.

        Raises:
            StoreGone: if the store became unreachable and did not come back.
        """
        self._screen, self._stop = screen, stop
        here = Trainer(
            self.recipe,
            self._tokens,
            self._durations,
            self.out / CHECKPOINTS,
            stop,
            checkpoint_seconds,
            gives_up=COOLDOWN not in self.space.paths,
        )
        with here.in_processes(workers) as train:
            try:
                found = search(
                    train,
                    self.space.limits,
                    None,
                    trials,
                    self.method,
                    self.recipe.data.seed,
                    workers,
                    scales=self.space.scales,
                    near=self.space.near,
                    flops=flops,
                    hours=hours,
                    run_flops=self._run_flops,
                    stop_at_noise=stop_at_noise,
                    storage=self._store,
                    name=self.recipe.name,
                    stop=stop,
                    watch=self,
                    lease_seconds=lease_seconds,
                )
                self._found, self.nothing = None if stop() else found, ""
            except NothingFound as nothing:
                self._found, self.nothing = None, self.answer.advice or str(nothing)
        if self._found is not None:
            self._study.set_user_attr(ANSWERED, True)
        for run in self._runs:
            if run.failed or run.finished:
                forget(self.out / CHECKPOINTS, run.origin.number)
        try:
            state = self.save()
        except InputError as error:
            raise StoreGone(f"{error}; the trials are in the store: run it again to write it") from None
        if screen is not None:
            screen.ended(state)
        return state

    def asked(self, proposal: Proposal) -> None:
        if self._screen is not None:
            self._screen.asked(proposal.number, f"w{proposal.worker + 1}")

    def ended(self, numbers: Sequence[int]) -> None:
        """Trials have ended: what they leave is in the store by now. What follows from all of them waits where it
        would take more than its share of the time."""
        for run in self._runs:
            if run.last.number in numbers:
                forget(self.out / CHECKPOINTS, run.origin.number)
        began = time.monotonic()
        if began < self._rests_until:
            return
        try:
            state = self.save()
        except InputError as error:  # a full disk, say; the trials are in the store
            if self._screen is not None:
                self._screen.note(str(error))
            return
        if self._screen is not None:
            self._screen.ended(state)
        now = time.monotonic()
        self._rests_until = now + (now - began) * (1 / SAVING - 1)

    def state(self) -> StudyDocument:
        """Return the study's document; it has a ``best`` once a command has used up a budget."""
        found = self.answer
        trials = tuple(replace(each, values=self.space.values(each.octaves or {})) for each in self._trials)
        return StudyDocument(
            **vars(found)
            | {"best": found.best if self._over else None, "dimensions": self.space.dimensions, "trials": trials},
            name=self.recipe.name,
            method=self.method,
            space=self.space.paths,
            radius=self._radius(),
            stalled=self._found is not None and self._found.stalled,
            durations=self._durations,
            front=front(trials),
        )

    @property
    def answer(self) -> Answer:
        """Return the answer so far."""
        return answer(self._trials, self.space.dimensions, over=self._over, optunas=ped_anova)

    @property
    def _over(self) -> bool:
        """Whether a command has used up its budget, which may have been smaller than the present one."""
        return self._found is not None or bool(self._study.user_attrs.get(ANSWERED))

    @property
    def _axes(self) -> Axes:
        return Axes.of(self.space.dimensions)

    @property
    def _runs(self) -> list[trial_log.Evaluation]:
        return trial_log.runs(self._study.get_trials(deepcopy=False), len(self.space.dimensions))

    @property
    def _trials(self) -> list[StudyTrial]:
        """Return all runs; their values are still log2 multipliers."""
        axes = self._axes
        return [record(run, axes) for run in self._runs]

    def _radius(self) -> float | None:
        if self.method != "trust-region":
            return None
        trials = trial_log.finished(self._study)
        return region_of(trials, self._axes).radius if trials else START

    def save(self) -> StudyDocument:
        """Write study.json; with a best point also best.toml, and fewest.toml if that is a different point."""
        state = self.state()
        write_text(self.out / "study.json", state.model_dump_json(indent=2) + "\n")
        if state.best is not None:
            write_recipe(self._recipe_at(state.octaves, state), self.out / "best.toml")
            if (fewer := state.fewer) is not None:
                write_recipe(self._recipe_at(fewer, state, fewest=True), self.out / "fewest.toml")
            else:  # of an answer before this one
                (self.out / "fewest.toml").unlink(missing_ok=True)
        return state

    def _recipe_at(self, octaves: Mapping[str, float], state: StudyDocument, *, fewest: bool = False) -> Recipe:
        """Return the recipe at a point, with its base at this scale and a reason for every searched value."""
        reasons = {path: why(path, state, self.space.values, fewest=fewest) for path in self.space.paths}
        base = self.recipe.base.model_dump()
        return moved(self.recipe, octaves).replace({"scaling.base": base, "why": self.recipe.why | reasons})
