import itertools
import math
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState, create_trial
from tests.errors import refused

from leaven.errors import InputError
from leaven.training.outcome import Outcome
from leaven.tuning import search
from leaven.tuning.algorithm.trust_region import Axes, region, results
from leaven.tuning.service import search_plan, stored_study
from leaven.tuning.service.search import FINEST, OCTAVES, SearchResult
from leaven.tuning.service.search_loop import HUGE, Proposal, WorkerDied
from leaven.tuning.service.search_plan import METHODS, Budget, NothingFound, SearchPlan, busy, grid, most_at_once
from leaven.tuning.service.stored_study import TrialRequest, trials_of
from leaven.tuning.service.stores import open_store
from leaven.tuning.service.study_settings import join_study

SPACE = {"a": (-3.0, 3.0), "b": (-2.0, 4.0)}


def bowl(x: dict[str, float]) -> float:
    return 2.0 + (x["a"] - 1) ** 2 + 0.3 * (x["b"] + 0.5) ** 2


class Noisy:
    """The parabola with noise, which diverges where b is above 1."""

    def __init__(self, sd: float, seed: int = 0) -> None:
        self.sd, self.rng, self.calls = sd, np.random.default_rng(seed), 0

    def __call__(self, x: dict[str, float]) -> float:
        self.calls += 1
        return math.nan if x["b"] > 1 else bowl(x) + self.rng.normal(0.0, self.sd)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gets_below_the_start(method: str) -> None:
    if method in {"cma", "gp"}:
        pytest.importorskip({"cma": "cmaes", "gp": "scipy"}[method])
    objective = Noisy(0.01)
    found = search(objective, SPACE, trials=14 if method == "gp" else 24, method=method, seed=2)
    assert objective.calls == len(found.trials) <= 24
    assert bowl(found.params) < bowl({"a": 0, "b": 0}) - 0.1
    assert found.params["b"] <= 1
    assert found.interval[0] < found.loss < found.interval[1]
    assert found.noise == pytest.approx(0.01, rel=1.5)
    # Among several it was chosen by reruns, and measured by two more; alone, the reruns measure it.
    reruns = [trial for trial in found.trials if trial.purpose == "rerun" and trial.params == found.params]
    measured = [trial.loss for trial in reruns if trial.finalist is None] or [trial.loss for trial in reruns]
    assert len(measured) == found.fresh == (1 if method == "gp" else 2)  # a small budget runs its finalist once
    assert found.loss == pytest.approx(np.mean(measured))


def test_search_and_sampler_import_neither_torch_nor_scipy_nor_plotly() -> None:
    look = "import sys; from leaven.tuning import TrustRegionSampler, search; TrustRegionSampler()"
    look += "; print({'torch', 'scipy', 'plotly'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("method", ["trust-region", "random"])
def test_the_same_seed_and_results_give_the_same_trials(method: str) -> None:
    runs = [search(Noisy(0.01), SPACE, trials=20, method=method, seed=seed) for seed in (3, 3, 2**32)]
    assert runs[0] == runs[1]
    assert runs[0].trials != runs[2].trials


def test_without_noise_it_stops_at_the_optimum_and_says_so() -> None:
    found = search(bowl, SPACE, trials=200)
    assert found.stalled
    assert len(found.trials) < 100
    assert found.params == pytest.approx({"a": 1.0, "b": -0.5}, abs=2e-3)
    assert found.noise == 0
    assert not search(bowl, SPACE, trials=30, stop_at_noise=False).stalled


@pytest.mark.parametrize("trials", [12, 16, 24])
@pytest.mark.parametrize("noise", [0.0007, 0.003])
def test_losses_that_the_surrogate_misses_by_many_times_the_noise_decide(trials: int, noise: float) -> None:
    """A loss with a kink, over four decades of lr, is not quadratic in its logarithm."""

    def kinked(proposal: Proposal) -> float:
        lr = 1e-3 * 2 ** proposal["lr"]
        return 3 + 50 * abs(lr - 0.01) + noise * float(np.random.default_rng([proposal.seed, int(lr * 1e9)]).normal())

    found = search(kinked, {"lr": (-3.3, 6.6)}, trials=trials)
    lowest = min(trial.loss for trial in found.trials if trial.loss is not None)
    assert 50 * abs(1e-3 * 2 ** found.params["lr"] - 0.01) < lowest - 3 + 0.02


def test_pure_noise_stops_the_search_and_the_interval_holds_the_true_loss() -> None:
    rng = np.random.default_rng(0)
    found = search(lambda x: 2.0 + rng.normal(0, 0.01), SPACE, trials=200, noise=0.01)
    assert found.stalled
    assert len(found.trials) < 100
    assert found.interval[0] < 2.0 < found.interval[1]


@pytest.mark.parametrize("method", ["trust-region", "random"])
def test_the_start_is_the_first_trial(method: str) -> None:
    for trials, repeats in ((8, 1), (12, 2), (24, 3)):  # to measure the noise
        found = search(bowl, SPACE, {"b": 1.0}, trials=trials, method=method)
        at_start = [trial.params == {"a": 0.0, "b": 1.0} for trial in found.trials]
        assert at_start[: repeats + 1] == [True] * repeats + [False]
    given = search(bowl, SPACE, {"b": 1.0}, trials=24, method=method, noise=0.1)
    assert given.trials[1].params != given.trials[0].params
    low, high = given.interval
    assert high - low == pytest.approx(2 * 1.96 * 0.1 / math.sqrt(2), rel=1e-3)


def test_a_stored_study_resumes_and_refuses_other_settings(tmp_path: Path) -> None:
    storage = tmp_path / "study.log"
    whole = search(bowl, SPACE, trials=20, seed=2)
    calls = 0

    def failing(x: dict[str, float]) -> float:
        nonlocal calls
        calls += 1
        if calls > 7:
            raise OSError("the machine is gone")
        return bowl(x)

    with pytest.raises(OSError, match="gone"):
        search(failing, SPACE, trials=20, seed=2, storage=storage)
    objective = Noisy(0.0)
    found = search(objective, SPACE, trials=20, seed=2, storage=storage)
    assert objective.calls == 13
    assert found.trials[:7] == whole.trials[:7]
    with pytest.warns(
        UserWarning, match="ran no trial, because the stored study leaven already has all of its 20 trials; if"
    ):
        again = search(objective, SPACE, trials=20, seed=2, storage=storage)
    assert (again, objective.calls) == (found, 13)
    more = search(objective, SPACE, trials=32, seed=2, storage=str(storage))
    assert objective.calls == 25
    assert {trial.finalist for trial in more.trials[20:24]} == {None}
    for changed, said in (
        ({"seed": 3}, "other settings: seed was 2, is now 3; give it another name"),
        ({"scales": {"b": 2.0}}, "other settings: scales.b was 1.0, is now 2.0; give it another name"),
    ):
        with pytest.raises(InputError, match=said):
            search(bowl, SPACE, storage=storage, **({"trials": 20, "seed": 2} | changed))  # type: ignore[arg-type]


def test_a_box_of_a_stored_study_is_not_searched_without_a_word(tmp_path: Path) -> None:
    storage = tmp_path / "study.log"
    search(bowl, SPACE, trials=1, method="random", near={"a": (-1, 1)}, storage=storage)
    with refused("other settings: near.a was [-1.0, 1.0], is now not set; give it another name"):
        search(bowl, SPACE, trials=1, method="random", storage=storage)


def change_journal(old: str, new: str) -> Callable[[Path], None]:
    """Return a function that changes the journal: the regular expression ``old`` is replaced once."""

    def change(path: Path) -> None:
        text, found = re.subn(old, new, path.read_text(), count=1)
        assert found
        path.write_text(text)

    return change


def change_database(statement: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as database:
            assert database.execute(statement).rowcount > 0
            database.commit()

    return change


OF_TRIAL = r'\{[^\n]*"trial_id":3,'


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of stores with seven trials, from which tests copy theirs."""
    return tmp_path_factory.mktemp("stores")


JOURNAL = [  # what is replaced, by what, and the message
    (rf'({OF_TRIAL}[^\n]*"values":\[)\d', r"\g<1>9", "trial 3 of .* was changed after it had"),
    (rf'({OF_TRIAL}"user_attr":{{"ended":)1', r"\g<1>2", "trial 3 of .* was changed"),
    (rf'{OF_TRIAL}"user_attr":{{"tokens"[^\n]*\n', "", "trial 3 of .* was changed"),
    (rf'{OF_TRIAL}"user_attr":{{"digest"[^\n]*\n', "", "trial 3 of .* was changed"),
    (r'\{"op_code":4,[^\n]*"job":"search:3"[^\n]*\n', "", "has lost a trial before"),
    (r"\{[^\n]*\n", "", "a line is missing or was changed"),
    (r'"datetime_start":"2', '"datetime_start":"x', "a line is missing or was changed"),
    (r'"scales":\{"a":1.0', '"scales":{"a":1.5', "the stored settings were changed"),
]
DATABASE = {
    "UPDATE trial_values SET value = value + 1e-9 WHERE trial_id = 4": "trial 3 of .* was changed after it had",
    "UPDATE trial_user_attributes SET key = NULL WHERE trial_id = 4 AND key = 'tokens'": "trial 3 of .* was changed",
    "DELETE FROM trials WHERE number = 3": "has lost trial 3; restore",
    "UPDATE trials SET state = 'PRUNED' WHERE number = 3": "trial 3 of .* was changed after it had ended",
    "DELETE FROM trial_values WHERE trial_id = 4": "trial 3 of .* was changed after it had ended",
    "DELETE FROM trial_user_attributes WHERE trial_id = 4": "has lost a trial before trial 4",
    "UPDATE trial_params SET distribution_json = '{}' WHERE trial_id = 4": "store is damaged .*; restore it",
    "UPDATE trial_values SET value_type = 'INF_POS'": "store is damaged .*; restore it",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("url", "change", "message"),
    [
        *(("{}", change_journal(old, new), message) for old, new, message in JOURNAL),
        *(("sqlite:///{}", change_database(statement), message) for statement, message in DATABASE.items()),
    ],
)
def test_a_changed_or_deleted_value_of_a_store_is_noticed(
    tmp_path: Path, stores: Path, url: str, change: Callable[[Path], None], message: str
) -> None:
    def again(file: Path, trials: int) -> SearchResult:
        objective = lambda x: Outcome(bowl(x), tokens=7)  # noqa: E731
        return search(objective, SPACE, trials=trials, method="random", storage=url.format(file))

    whole, file = stores / url.partition(":")[0], tmp_path / "store"
    if not whole.exists():
        again(whole, 6)
        assert len(again(whole, 7).trials) == 7
    shutil.copy(whole, file)
    change(file)
    with pytest.raises(InputError, match=message) as found:
        again(file, 8)
    assert "\n" not in str(found.value)


@pytest.mark.long
@pytest.mark.parametrize("url", ["{}", "sqlite:///{}"])
def test_digests_of_unusual_numbers_and_choices_match(tmp_path: Path, url: str) -> None:
    unusual, space = itertools.cycle([-0.0, 1e-300, 2**53 + 0.0, math.nan]), SPACE | {"c": range(3)}

    def objective(x: Proposal) -> Outcome:
        loss = next(unusual)
        of_numpy = {"tokens": np.int64(5), "curve": np.array([[1, -0.0]]), "stopped": np.bool_(x.number == 6)}
        return Outcome(loss, branches=((1, loss),), **of_numpy, seconds=None)  # type: ignore[arg-type]

    for trials in (9, 9, 10):
        found = search(objective, space, trials=trials, method="random", storage=url.format(tmp_path / "store"))
        assert len(found.trials) == trials


def test_trials_without_a_digest_are_refused(tmp_path: Path) -> None:
    """An older version wrote them."""
    file = tmp_path / "study.log"
    search(bowl, SPACE, trials=6, storage=file)
    *_, digest = re.findall(r'\{[^\n]*"user_attr":\{"digest"[^\n]*\n', text := file.read_text())
    file.write_text(text.replace(digest, ""))
    with refused("was changed after it had ended, or an older version wrote it"):
        search(bowl, SPACE, trials=8, storage=file)


def test_a_long_curve_is_thinned() -> None:
    curve = tuple((step, abs(step - 77_777) + 0.5) for step in range(1, 100_001))
    kept = stored_study.thinned((*curve, (100_001, math.inf)))
    assert len(kept) <= stored_study.POINTS
    assert kept[-1] == curve[-1]
    step, loss = kept[0]
    assert loss == pytest.approx(sum(each for _, each in curve[:step]) / step)
    assert stored_study.thinned(curve[:200]) == [*curve[:200]]
    assert stored_study.thinned(()) == []


def test_trials_that_have_not_changed_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search reads all trials several times for each of its trials."""
    stored, checked = stored_trials(5), list[int]()
    assert len(stored.trials) == 5
    monkeypatch.setattr(stored_study, "_replaces", lambda trial, _: checked.append(trial.number) or False)
    assert [trial.number for trial in stored.trials] == list(range(5))
    stored.create(TrialRequest("search", "search:5", point={"lr": 1.0}), "x", None)
    assert len(stored.trials) == stored.read().started == 6
    assert checked.count(5) == len(checked) == 1


def test_trials_that_go_while_a_command_runs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_trials(3)
    kept = stored.study.get_trials(deepcopy=False)[:2]
    monkeypatch.setattr(stored.study, "get_trials", lambda **_: kept)
    with pytest.raises(InputError, match="has lost trial 2; restore"):
        stored.read()


@pytest.mark.long
@pytest.mark.parametrize("overwritten", [True, False])
@pytest.mark.parametrize("replaced", ["when it runs", "when it has ended", "later", "at last"])
def test_an_older_copy_that_replaces_the_database_of_a_command_is_noticed(
    tmp_path: Path, stores: Path, replaced: str, overwritten: bool
) -> None:
    """The copy lacks the second trial. It is written into the file, or takes its name."""
    file, first, axes = tmp_path / "store", stores / "one trial", Axes({"lr": (-3.0, 3.0)})

    def opened(file: Path) -> stored_study.StoredStudy:
        return join_study(
            open_store(f"sqlite:///{file}"), "s", "s", "", method="random", axes=axes, seed=0, noise=None
        )

    def begin(study: stored_study.StoredStudy, number: int) -> None:
        assert study.create(TrialRequest("search", f"search:{number}", point={"lr": 1.0}), "x", None)

    def replace(now: str) -> None:
        if now == replaced:
            shutil.copy(first, tmp_path / "copy")
            (shutil.copyfile if overwritten else shutil.move)(tmp_path / "copy", file)

    if not first.exists():
        begin(new := opened(first), 0)
        new.record(0, Outcome(1.0))
    shutil.copy(first, file)
    begin(stored := opened(file), 1)
    replace("when it runs")
    with refused("lost trial"):
        stored.read()
        stored.record(1, Outcome(1.0))
        replace("when it has ended")
        stored.read()
        replace("later")
        stored.read()
        replace("at last")
        begin(stored, 2)
    replace(replaced)
    begin(same := opened(file), 1)  # between two commands, an older copy may replace it
    assert len(same.trials) == 2


def test_with_many_trials_the_surrogate_is_not_fitted_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_trials(7)
    plan = SearchPlan(stored.axes, "trust-region", 0, Budget(100), None, stop_at_noise=False)
    regions = [plan._region(stored.trials[:count]) for count in (4, 5, 6, 7)]
    assert len(set(map(id, regions))) == 4
    monkeypatch.setattr(search_plan, "REFITTED", 1 / 3)
    regions = [plan._region(stored.trials[:count]) for count in (4, 5, 6, 7)]
    assert len(set(map(id, regions))) == 3
    assert regions[2] is regions[3]


def stored_trials(count: int) -> stored_study.StoredStudy:
    """Return a study in memory with ``count`` finished trials."""
    axes = Axes({"lr": (-3.0, 3.0)})
    stored = join_study(InMemoryStorage(), "s", "s", "", method="random", axes=axes, seed=0, noise=None)
    for number in range(count):
        stored.create(TrialRequest("search", f"search:{number}", point=axes.params(np.ones(1))), "x", None)
        stored.record(number, Outcome(1.0, curve=((1, 1.0),)))
    return stored


def test_a_budget_is_not_exceeded_by_resuming_with_another() -> None:
    store, runs = InMemoryStorage(), Runs()
    found = search(runs, SPACE, trials=32, storage=store)
    assert len(runs.asked) == 32
    for budget in ({"trials": 32, "hours": 5.0}, {"trials": 20}, {"trials": 34, "hours": 6.0}):
        again = search(runs, SPACE, storage=store, **budget)  # type: ignore[arg-type]
        assert len(runs.asked) <= max(32, budget["trials"])
        assert again.params == found.params


def test_a_start_that_diverges_is_left() -> None:
    found = search(lambda x: math.inf if x["a"] > -0.3 else x["a"] ** 2 + x["b"] ** 2, SPACE, trials=40)
    assert found.params["a"] <= -0.3
    assert math.isfinite(found.loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "trust-regoin"}, "method trust-regoin: unknown; did you mean trust-region?"),
        ({"objective": 3}, "objective = 3: input should be callable"),
        ({"space": {"a": (1, -1)}}, "space.a = (1, -1): give the lowest and the highest log2 multiplier, between"),
        ({"space": {"a": range(1)}}, "space.a = range(0, 1): give range(n) with at least 2 levels"),
        ({"space": {str(i): (-1, 1) for i in range(9)}, "method": "grid"}, "a grid over 9 hyperparameters has"),
        ({"method": "grid", "trials": 10**12}, "the grid has more than 100,000 points; give at most 100_000 trials"),
        ({"start": {"a": 4}}, "start.a = 4.0: give a number from -3 to 3"),
        ({"start": {"c": 0}}, "start.c: not a name in space, which has a, b"),
        ({"space": {"a": (1, 2)}}, "start.a = 0.0: give a number from 1 to 2"),
        ({"space": {"a": range(3)}, "start": {"a": 3}}, "start.a = 3.0: give the index of a level, 0 to 2"),
        ({"space": {"a": range(3)}, "near": {"a": (-1, 1)}}, "near.a: near is for numbers, but a is a choice"),
        ({"scales": {"a": 0.0}}, "scales.a = 0.0: input should be greater than or equal to 0.000000001"),
        ({"trials": None}, "the search has no budget; give trials, flops or hours"),
        ({"hours": math.inf}, "hours = inf: input should be a finite number"),
        ({"noise": 1e-170}, "noise = 1e-170: give 0, or a number from 1e-50 to 1e+50"),
        ({"name": ""}, "the study's name is ''; give a name of 1 to 512 characters"),
        ({"storage": 5}, "storage = 5: give the path of an Optuna journal file, or sqlite:///FILE"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_runs(change: dict[str, object], message: str) -> None:
    def never(x: dict[str, float]) -> float:
        raise AssertionError(x)

    with refused(message):
        search(**({"objective": never, "space": SPACE, "trials": 10} | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("beyond", "diverges"),
    [(0.99 * HUGE, False), (1.01 * HUGE, True), (10**400, True)],
    ids=["below", "above", "no float"],
)
def test_a_loss_above_the_largest_is_a_divergence(beyond: float, diverges: bool) -> None:
    found = search(lambda x: beyond if x["a"] > 0.1 else bowl(x), SPACE, trials=24)
    there = [trial.loss for trial in found.trials if trial.params["a"] > 0.1]
    assert there
    assert set(there) == {math.inf if diverges else beyond}
    assert found.params["a"] <= 0.1


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("method", "scale"), [*((m, 1.0) for m in METHODS if m != "gp"), ("cma", FINEST)])
def test_the_widest_limits_with_the_largest_losses_are_searched(method: str, scale: float) -> None:
    limits, scales = dict.fromkeys("ab", (-OCTAVES, OCTAVES)), dict.fromkeys("ab", scale)

    def steep(x: dict[str, float]) -> float:
        return HUGE * max(-1.0, min(1.0, (x["a"] + x["b"]) / OCTAVES))

    found = search(steep, limits, trials=14, method=method, scales=scales, noise=HUGE)
    assert len(found.trials) == 14
    assert math.isfinite(found.loss)


def test_a_grid_runs_all_of_its_points() -> None:
    found = search(bowl, SPACE, trials=36, method="grid")
    points = {tuple(trial.params.values()) for trial in found.trials if trial.finalist is None}
    assert points >= {(a, b) for a in np.linspace(-3, 3, 5) for b in np.linspace(-2, 4, 5)}
    assert bowl(found.params) == min(bowl({"a": a, "b": b}) for a, b in points)


@pytest.mark.parametrize(("trials", "points"), [(12, 12), (26, 12), (27, 27), (99_999, 182**2 * 3)])
def test_a_grid_is_as_fine_as_its_trials_allow(trials: int, points: int) -> None:
    assert len(grid(Axes({**SPACE, "c": range(3)}), trials)) == points


class Runs:
    def __init__(self, answer: Callable[[Proposal], float | Outcome] = bowl) -> None:
        self.answer, self.asked = answer, list[Proposal]()

    def __call__(self, x: Proposal) -> float | Outcome:
        self.asked.append(x)
        return self.answer(x)


def trials_in(store: InMemoryStorage) -> list[optuna.trial.FrozenTrial]:
    (study,) = store.get_all_studies()
    return store.get_all_trials(study._study_id)


def test_the_order_of_runs_is_noise_search_reruns_confirmation() -> None:
    runs = Runs(Noisy(0.01))
    found = search(runs, SPACE, trials=64)
    assert [x.seed for x in runs.asked[:3]] == [0, 1, 2]
    assert {x.seed for x in runs.asked[3:-8]} == {0}
    reruns = [t for t in found.trials if t.purpose == "rerun"]
    assert Counter(t.finalist for t in reruns) == {0: 2, 1: 2, None: 4}
    # The chosen point twice more, in turn with the start.
    last = [(tuple(x.values()), x.seed) for x in runs.asked[-4:]]
    chosen = tuple(found.params.values())
    assert last == [(chosen, 3), ((0.0, 0.0), 3), (chosen, 4), ((0.0, 0.0), 4)]
    assert set(Counter((tuple(x.values()), x.seed) for x in runs.asked).values()) == {1}
    assert not any(t.seed == 0 for t in reruns)


def test_without_noise_no_run_is_spent_on_confirmation() -> None:
    found = search(bowl, SPACE, trials=12)
    assert [trial.purpose for trial in found.trials] == ["search", "noise"] + ["search"] * 10
    assert (found.noise, found.interval) == (0.0, (found.loss, found.loss))
    assert found.loss == min(trial.loss for trial in found.trials) < 2.01


def test_a_small_budget_confirms_nothing() -> None:
    clear = search(Noisy(0.01), SPACE, trials=12, noise=0.01)
    assert Counter(trial.purpose for trial in clear.trials) == {"search": 12}
    assert (clear.fresh, clear.interval, clear.in_doubt) == (0, (-math.inf, math.inf), False)
    assert search(Noisy(0.01), SPACE, {"a": 0.9, "b": -0.35}, trials=12, noise=0.01).in_doubt


def test_the_last_proposal_is_the_predicted_minimum() -> None:
    found = search(Noisy(0.02), SPACE, trials=12, noise=0.02)
    axes = Axes(SPACE)
    points = np.array([list(trial.params.values()) for trial in found.trials[:-1]])
    now = region(axes, points, np.array([trial.loss for trial in found.trials[:-1]]), 0.02)
    np.testing.assert_allclose(list(found.trials[-1].params.values()), now.predicted)


@pytest.mark.parametrize("trials", [2, 3, 4])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_short_search_runs_no_point_twice(trials: int, workers: int) -> None:
    found = search(bowl, SPACE, trials=trials, workers=workers)
    assert len({tuple(trial.params.values()) for trial in found.trials}) == trials


def test_a_run_whose_process_died_is_retried_once_and_counts_once() -> None:
    def mortal(x: Proposal) -> float:
        deaths[x.origin] += 1
        if (x.origin == 4 and deaths[4] == 1) or x.origin == 7:
            raise WorkerDied
        return bowl(x)

    deaths: Counter[int] = Counter()
    runs, store = Runs(mortal), InMemoryStorage()
    found = search(runs, SPACE, trials=12, method="random", storage=store)
    assert (deaths[4], deaths[7]) == (2, 2)
    assert {x.origin: x for x in runs.asked}[4] == {x.number: x for x in runs.asked}[4]  # the same point again
    assert len(found.trials) == 11  # the one that failed has no result, and no third chance
    assert len({x.origin for x in runs.asked}) == 12
    assert [t.user_attrs["retry_of"] for t in trials_in(store) if "retry_of" in t.user_attrs] == [4, 7]


@pytest.mark.parametrize(
    ("trials", "workers", "attempts"),
    [(12, 1, "7"), (12, 4, "[4-7]"), (5, 1, "4")],
    ids=["one worker", "four workers", "the last two trials"],
)
def test_trials_that_fail_in_a_row_are_given_back_to_the_study(trials: int, workers: int, attempts: str) -> None:
    """As if a disk had been away after three trials."""
    store, broken = InMemoryStorage(), True

    def objective(x: Proposal) -> float:
        if broken and x.origin > 2:
            raise WorkerDied("ended with exit code 127")
        return bowl(x)

    options: dict[str, Any] = {"trials": trials, "workers": workers, "method": "random", "storage": store}
    search(objective, SPACE, **options | {"trials": 3})
    with pytest.raises(
        InputError, match=rf"^{attempts} attempts in a row failed on .*: trial \d+ ended with .* 127; "
    ):
        search(objective, SPACE, **options)
    broken = False
    assert len(search(objective, SPACE, **options).trials) == trials


def test_a_search_in_which_most_points_fail_by_their_values_ends_after_a_few_commands() -> None:
    store, attempts, commands = InMemoryStorage(), Counter[int](), 0

    def objective(x: Proposal) -> float:
        attempts[x.origin] += 1
        if x["a"] > -1:
            raise WorkerDied
        return bowl(x)

    found = None
    while found is None:
        commands += 1
        with suppress(InputError):
            found = search(objective, SPACE, {"a": -2.0, "b": 0.0}, 24, "random", storage=store)
    assert commands <= 5
    assert max(attempts.values()) == 4  # two, and two more if the trial was given back
    assert len(attempts) == 24


def test_points_that_fail_by_their_values_beside_others_that_work_do_not_end_a_search() -> None:
    failed = threading.Semaphore(0)

    def objective(x: Proposal) -> float:
        if x.origin in {4, 5}:
            failed.release()
            raise WorkerDied
        if x.origin > 5:  # it ends after all failures
            for _ in range(4):
                assert failed.acquire(timeout=60)
            failed.release(4)
        return bowl(x)

    assert len(search(objective, SPACE, trials=8, workers=4, method="random").trials) == 6


def test_a_broken_gpu_beside_one_that_works_gives_its_trials_back() -> None:
    store, deaths = InMemoryStorage(), list[int]()

    def objective(x: Proposal) -> float:
        if x.worker == 1:
            deaths.append(x.origin)
            raise WorkerDied("ended with exit code 1")
        end = time.monotonic() + 60
        while len(set(deaths)) < 4 and time.monotonic() < end:  # a trial that takes longer than four failures
            time.sleep(0.001)
        return bowl(x)

    with pytest.raises(InputError, match="in a row failed on this machine: trial .* ended with exit code 1;"):
        search(objective, SPACE, trials=14, workers=2, method="random", storage=store)
    assert len(set(deaths)) == 4
    assert len(search(bowl, SPACE, trials=14, method="random", storage=store).trials) == 14


def test_trials_that_fail_on_a_broken_machine_run_on_another_one() -> None:
    store, begun = InMemoryStorage(), threading.Event()

    def healthy(x: Proposal) -> float:
        begun.set()
        time.sleep(0.02)
        return bowl(x)

    def command(objective: Callable[[Proposal], float]) -> SearchResult | InputError:
        try:
            return search(objective, SPACE, trials=20, method="random", storage=store)
        except InputError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(command, healthy)
        begun.wait()
        bad = pool.submit(command, die)
    found = good.result()
    assert "attempts in a row failed on this machine" in str(bad.result())
    assert isinstance(found, SearchResult)
    assert len(found.trials) == 20


def test_two_searches_at_once_share_the_work() -> None:
    whole, store = search(bowl, SPACE, trials=40, method="random"), InMemoryStorage()
    runs = Runs()
    both = threading.Barrier(2)

    def one(_: int) -> SearchResult:
        both.wait(timeout=60)
        return search(runs, SPACE, trials=40, method="random", storage=store)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, range(2))
    assert first.trials == second.trials
    assert Counter(t.purpose for t in first.trials) == Counter(t.purpose for t in whole.trials)
    assert set(Counter((tuple(x.values()), x.seed) for x in runs.asked).values()) == {1}


def test_a_budget_of_flops_reserves_the_reruns() -> None:
    noisy = Noisy(0.01)
    found = search(lambda x: Outcome(noisy(x), flops=2.0), SPACE, trials=None, flops=128.0, method="random")
    assert len(found.trials) == 64
    assert Counter(t.purpose for t in found.trials)["rerun"] == 8
    with pytest.raises(InputError, match="the budget is in FLOPs, but the objective returns no FLOPs"):
        search(bowl, SPACE, trials=None, flops=60.0)


def test_hours_count_while_something_runs() -> None:
    study = optuna.create_study()
    for began, ended in ((0, 3600), (1800, 5400), (50_000, 51_800), (51_000, None)):
        state = TrialState.RUNNING if ended is None else TrialState.COMPLETE
        attributes = {"owner": "x", "began": began} | ({"ended": ended} if ended else {})
        study.add_trial(create_trial(state=state, value=ended and 1.0, user_attrs=attributes))
    runs = trials_of(study.trials, Axes({}))
    at_once = runs[:2]
    assert busy(runs, 52_000) == 5400 + 2000
    budget = Budget(hours=2.0)
    assert budget.finals(at_once, 6000) == (0, 0)  # at three quarters of an hour a run, half an hour pays none
    assert budget.left(at_once, 6000) == pytest.approx(2 / 3)
    assert Budget(hours=8.0).finals(at_once, 6000) == (1, 1)


def test_hours_count_each_attempt_until_it_ended() -> None:
    """An attempt ends at the last heartbeat of its owner, not when another command closes it a night later."""
    study = optuna.create_study()
    for began, last_beat, more in ((0, 3600, {"job": "search:0"}), (90_000, 90_900, {"job": "retry:0"})):
        attributes = {"owner": "x", "began": began, "last_beat": last_beat, **more}
        study.add_trial(create_trial(state=TrialState.FAIL, user_attrs=attributes))
    trials = trials_of(study.trials, Axes({}))
    assert [trial.state for trial in trials] == ["failed"]
    assert busy(trials, 200_000) == 3600 + 900


@pytest.mark.parametrize("jump", [-36_000.0, 36_000.0, 1.7e9])
def test_a_clock_that_is_set_during_a_search_costs_no_hours(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    real, ran = time.time, list[float]()

    def objective(x: Proposal) -> float:
        ran.append(x["a"])
        if len(ran) == 2:
            monkeypatch.setattr(time, "time", lambda: real() + jump)
        return bowl(x)

    search(objective, SPACE, hours=1, trials=5, method="random", noise=0.01)
    assert len(ran) == 5


def test_pruned_runs_count_in_the_surrogate_and_are_never_the_answer() -> None:
    def impatient(x: Proposal) -> Outcome:
        if x.baseline is not None and x["a"] > 0.8:
            return Outcome(bowl(x) - 1.0, tokens=5, stopped=True)  # as if it had promised much
        return Outcome(bowl(x), tokens=10, curve=((10, bowl(x)),))

    runs, store = Runs(impatient), InMemoryStorage()
    found = search(runs, SPACE, trials=32, storage=store, noise=0.01)
    pruned = [t for t in trials_in(store) if t.state is TrialState.PRUNED]
    assert pruned
    assert all(t.user_attrs["stopped"] and t.value == t.user_attrs["expected"] for t in pruned)
    assert found.params not in [t.params for t in pruned]
    assert len(found.trials) == 32
    assert all(x.baseline is None for x in runs.asked[-2:])
    baselines = [x.baseline for x in runs.asked if x.baseline is not None]
    found_losses = [baseline.loss for baseline in baselines]
    assert found_losses == sorted(found_losses, reverse=True)
    assert {baseline.noise for baseline in baselines} == {0.01}


@pytest.mark.parametrize(
    "last",
    [
        pytest.param("ended", id="another command closes it before its result"),
        pytest.param("digest", id="an older version closes it after a kill between its digest and its state"),
    ],
)
def test_a_trial_that_is_closed_while_its_result_is_written_is_retried(last: str) -> None:
    class Closed(InMemoryStorage):
        done = False

        def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
            super().set_trial_user_attr(trial_id, key, value)
            if key == last and not self.done:
                self.done = True
                self.set_trial_state_values(trial_id, TrialState.FAIL)

    found = search(bowl, SPACE, trials=4, method="random", storage=Closed())
    assert [trial.number for trial in found.trials] == [1, 2, 3, 4]


@pytest.mark.parametrize("names", ["a", "ab"])
def test_no_point_is_run_twice_with_one_seed_if_the_optimum_is_at_an_end(names: str) -> None:
    found = search(lambda x: sum((x[name] - 3) ** 2 for name in names), dict.fromkeys(names, (-2, 2)), trials=24)
    runs = [(tuple(trial.params.values()), trial.seed) for trial in found.trials]
    assert len(set(runs)) == len(runs)
    assert max(abs(found.params[name] - 2) for name in names) < 0.2


WRONG: list[dict[str, Any]] = [{"loss": None}, {"tokens": "5"}, {"curve": ((1,),)}, {"branches": (("a", "b"),)}]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        *((result, InputError) for result in (None, True, "2.5", b"2", [1.0, 2.0])),
        *((Outcome(**{"loss": 1.0} | wrong), InputError) for wrong in WRONG),
        (SystemExit(), SystemExit),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_an_objective_that_returns_no_loss_or_raises_releases_its_trial(
    result: Any, error: type[BaseException]
) -> None:
    def objective(x: Proposal) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    store = InMemoryStorage()
    with pytest.raises(error, match="the objective returned .*; return a loss" if error is InputError else None):
        search(objective, SPACE, trials=4, storage=store)
    assert [(t.state, t.user_attrs["released"]) for t in trials_in(store)] == [(TrialState.FAIL, True)]


def test_a_study_of_another_program_is_refused() -> None:
    store = InMemoryStorage()
    study = optuna.create_study(storage=store, study_name="leaven")
    study.add_trial(create_trial(state=TrialState.COMPLETE, value=1.0))
    with pytest.raises(InputError, match="the stored study leaven was created by an older version of leaven"):
        search(bowl, SPACE, trials=4, storage=store)
    assert len(trials_in(store)) == 1


def test_of_two_searches_with_different_spaces_at_once_one_is_refused() -> None:
    other, looked = list[Future[SearchResult]](), threading.Event()

    class Slow(InMemoryStorage):
        """Starts the second search when the study exists but has no settings yet."""

        def create_new_study(self, directions: Any, study_name: str | None = None) -> int:
            made = super().create_new_study(directions, study_name)
            other.append(pool.submit(search, bowl, SPACE | {"b": (-1.0, 1.0)}, trials=4, storage=self))
            assert looked.wait(60)
            return made

        def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
            looked.set()
            return super().get_study_user_attrs(study_id)

    with ThreadPoolExecutor(1) as pool:
        found = search(bowl, SPACE, trials=4, storage=Slow())
        with pytest.raises(
            InputError, match=r"other settings: space.b was \[-2.0, 4.0, 0.0\], is now \[-1.0, 1.0, 0.0\]; give"
        ):
            other[0].result()
    assert len(found.trials) == 4


def test_results_are_ordered_by_unix_time_and_pruned_ones_have_their_expected_loss() -> None:
    """Optuna's own times are local to each machine."""
    study, axes = optuna.create_study(), Axes({})

    def add(ended: float, value: float | None, state: TrialState = TrialState.COMPLETE, **attributes: object) -> None:
        attributes |= {"owner": "x", "ended": ended}
        study.add_trial(create_trial(state=state, value=value, user_attrs=attributes))

    add(20.0, 2.0)
    add(10.0, None, TrialState.PRUNED, expected=2.5)
    add(10.0, 7.0, diverged=True)
    add(5.0, None, TrialState.FAIL)
    ended, _, losses = results(trials_of(study.trials, axes), axes)
    assert ([run.number for run in ended], losses.tolist()) == ([1, 2, 0], [2.5, math.inf, 2.0])


def diverge(x: Proposal) -> float:
    return math.inf


def die(x: Proposal) -> float:
    raise WorkerDied


@pytest.mark.parametrize(
    ("objective", "options", "message"),
    [
        (diverge, {"trials": 12}, "^all 12 trials diverged, including the start: give a start at which .* finite$"),
        (diverge, {"trials": 6, "space": {"lr": (-3, 3)}}, r"^all 6 .* start from lr at 1/[\d.]+ of its old value"),
        (lambda x: Outcome(2.0, stopped=True), {"trials": 8}, "no trial finished: 8 were pruned, 0 diverged"),
        (die, {"trials": 3, "method": "random"}, "no trial ended: 3 died at every attempt"),
        (bowl, {"trials": 3, "stop": lambda: True}, "stopped before any trial ended"),
    ],
)
def test_a_search_without_a_result_ends_and_says_why(
    objective: Callable[[Any], float], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(NothingFound, match=message):
        search(objective, **{"space": SPACE, "trials": None, **options})


def test_a_budget_of_flops_holds_for_any_number_of_workers() -> None:
    """Without ``run_flops`` the first run starts alone, to measure what a run costs."""
    begun, begun_at_first_end = 0, list[int]()

    def objective(x: Proposal) -> Outcome:
        nonlocal begun
        begun += 1
        if x.number == 0:
            time.sleep(0.1)  # long enough for all others to start
            begun_at_first_end.append(begun)
        return Outcome(bowl(x), flops=2.0)

    assert len(search(objective, SPACE, trials=None, flops=8.0, workers=16).trials) == 4
    assert begun_at_first_end == [1]
    assert len(search(objective, SPACE, trials=None, flops=8.0, run_flops=2.0, workers=16).trials) == 4


def test_the_start_is_the_answer_if_it_diverges_with_one_seed_and_nothing_else_ran() -> None:
    runs = Runs(lambda x: math.nan if x.seed == 1 else 3.0)
    found = search(runs, SPACE, trials=12, stop=lambda: len(runs.asked) == 2)
    assert (found.params, found.loss) == ({"a": 0.0, "b": 0.0}, 3.0)


def test_a_died_run_does_not_change_later_proposals() -> None:
    def proposals(dies: bool) -> list[dict[str, float]]:
        def mortal(x: Proposal) -> float:
            if dies and x.number == 4:
                raise WorkerDied
            return bowl(x)

        runs = Runs(mortal)
        search(runs, SPACE, trials=10, noise=0.01)
        return list({x.origin: dict(x) for x in runs.asked}.values())

    assert proposals(dies=True) == proposals(dies=False)


def test_the_next_best_point_takes_the_place_of_a_finalist_that_diverges() -> None:
    noisy = Noisy(0.01)
    found = search(Runs(lambda x: math.inf if x.seed and x["a"] > 0.9 else noisy(x)), SPACE, trials=96)
    reruns = [trial for trial in found.trials if trial.finalist is not None]
    diverged = {trial.finalist for trial in reruns if math.isinf(trial.loss)}
    assert diverged
    assert all(sum(trial.finalist == which for trial in reruns) == 1 for which in diverged)
    assert 0.3 < found.params["a"] <= 0.9


def test_how_many_trials_may_run_at_once_without_a_caution() -> None:
    assert [most_at_once(trials) for trials in (3, 15, 16, 24, 48, 96)] == [1, 1.25, 2, 2, 4, 8]


def test_other_prior_knowledge_than_that_of_a_stored_study_is_named(tmp_path: Path) -> None:
    def found(optimum: float, trials: int) -> None:
        expected = {"a": (optimum, 0.5)}
        search(lambda at: at["a"] ** 2, {"a": SPACE["a"]}, None, trials, storage=tmp_path / "s", expected=expected)

    found(1.0, 2)
    with pytest.warns(UserWarning, match="expected. has other content than when the study was created"):
        found(-1.0, 3)
    with warnings.catch_warnings(action="error"):
        found(1.0, 4)
