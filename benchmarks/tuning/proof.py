"""Measure whether tuning by module, and over depth, pays and transfers: `python -m benchmarks.tuning.proof FOLDER`.

Three methods with the same FLOPs, and several searches of each:

- ``global``: all trials over the global values;
- ``per-module``: a third over the global values, then from their best the rest over the values by module, which know
  the trials of the first third (``from_study``);
- ``per-depth``: as ``per-module``, with a tilt over depth of lr, init_std, weight_decay and residual.

All begin with the answer of one global search of their own size (the part ``start``), so that no method gains what a
better start would have given. The best points of each search are trained with two fresh seeds and once at twice the
width and four times the tokens; the lowest sum is the answer. Each answer is trained with fresh seeds at the proxy
and, after `leaven transfer`, at four times the width, twice the depth, and more tokens. There every answer also has a
short sweep of its lr, and the best global answer is trained for longer: the equal-loss speed-up of another one is how
many times the tokens the global answer needs. ``alone`` trains the answers by module and depth with one group of
values back at the start, at both sizes, which says what of the gain of each group carries over.

Every run is a line of FOLDER/runs.jsonl, and the searches are studies in FOLDER: run the command again to resume. On
a CPU, start one command for each search (`--parts searches --searches 0`), and then the other parts.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import queue
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from leaven.data.tokens import TokenSet, prepare
from leaven.planning.flops import flops_per_token
from leaven.recipe.files import read_recipe, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer
from leaven.storage import write_text
from leaven.training.outcome import Outcome
from leaven.training.stack import TrialStack
from leaven.training.trial import WorkerPool, train_trial
from leaven.tuning.algorithm.noise import t95
from leaven.tuning.point import BATCH, WARM_UP, recipe_at
from leaven.tuning.service.recipe_study import Study
from leaven.tuning.service.search_loop import Objectives, Proposal
from leaven.tuning.space import space

PROXY = Path(__file__).with_name("proxy.toml")
ARMS = {
    "global": "global",
    "per-module": "per-module",  # without its tilt of the lr over depth
    "per-depth": "per-module,"
    + ",".join(f"hyperparameters.depth.{quantity}[0]" for quantity in ("lr", "init_std", "weight_decay", "residual")),
}
BEFORE = 100  # seed of the search that finds the common start
SEEDS = tuple(range(1001, 1006))  # of the answers' training; the searches' own are below
FRESH = (901, 902)  # of the finalists' runs
FIRST = 1 / 3  # of the trials of ``per-module`` and ``per-depth`` are over the global values
FINALISTS = 4
MID_WIDER, MID_LONGER = 2, 4
WIDER, DEEPER = 4, 2
CURVE = SEEDS[:3]  # of the first runs at the target, and of the runs for the equal-loss speed-up
SWEEP = SEEDS[:2]  # of the runs that choose the lr at the target
FACTORS = tuple(2 ** (n / 2) for n in range(-4, 5))  # of the lr at the target
LONGER = (1.0, 2.0)  # times the tokens, for the equal-loss speed-up
ALONE = SEEDS[:2]
WORKERS = 8  # trials at a time of each search
QUIET = 0.5  # seconds without a new trial after which a stack that is not full is trained
PARTS = ("start", "searches", "finalists", "proxy", "target", "sweep", "longer", "seeds", "alone")
GROUPS = {
    "lr by module": ("hyperparameters.modules.*.lr",),
    "init_std by module": ("hyperparameters.modules.*.init_std",),
    "residual by module": ("hyperparameters.modules.*.residual",),
    "over depth": ("hyperparameters.depth.*",),
    "weight_decay": ("hyperparameters.weight_decay",),
    "betas and eps": ("hyperparameters.beta1", "hyperparameters.beta2", "hyperparameters.eps"),
}


# ---- the searches: studies in processes of their own, whose trials come here


class RemoteStudy(Study):
    """A study whose trials are trained by another process."""

    server: Connection

    @contextmanager
    def _trainer(self, devices: Sequence[str | None]) -> Iterator[Objectives]:
        waiting: dict[int, queue.Queue[float]] = {}
        sending = threading.Lock()

        def receive() -> None:
            while (answer := self.server.recv()) is not None:
                waiting.pop(answer[0]).put(answer[1])

        def train(proposal: Proposal) -> Outcome:
            try:
                recipe = self.space.recipe_at(proposal, self.space.seed + proposal.seed)
            except ValueError:  # not a recipe
                return Outcome(math.inf)
            waiting[proposal.number] = answer = queue.Queue()
            with sending:
                self.server.send((proposal.number, recipe.model_dump(mode="json")))
            tokens, began = recipe.data.tokens, time.monotonic()
            loss = answer.get()
            seconds = time.monotonic() - began
            return Outcome(loss, tokens, tokens * flops_per_token(recipe.model), seconds)

        receiver = threading.Thread(target=receive, daemon=True)
        receiver.start()
        yield lambda proposals: [train(proposal) for proposal in proposals]
        self.server.send(None)
        receiver.join()


def search(server: Connection, folder: Path, start: Recipe, *, trials: int, arm: str) -> None:
    """One process: the searches of one arm, one after the other."""
    torch.set_num_threads(1)
    seed = start.data.seed
    if arm == "global":
        study(server, folder / f"global-{seed}", start, arm, trials=trials)
    else:
        first, shared = folder / f"first-{seed}", folder / f"first-{seed}.done"
        if arm == "per-module":
            study(server, first, start, "global", trials=trials * FIRST)
            shared.touch()
        while not shared.exists():
            time.sleep(1)
        some = unpinned(read_recipe(first / "best.toml"))
        study(server, folder / f"{arm}-{seed}", some, arm, trials=trials * (1 - FIRST), earlier=first)
    server.send("done")


def study(
    server: Connection, folder: Path, recipe: Recipe, arm: str, *, trials: float, earlier: Path | None = None
) -> None:
    if (folder / "finalists.json").exists():
        return
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    flops = round(trials) * recipe.data.tokens * flops_per_token(recipe.model)
    values = space(recipe, ARMS[arm]).without(BATCH, "of equal FLOPs the smallest batch makes most")
    values = values.without(WARM_UP, "only the global space has it, and its best is at its bound, half of the run")
    if arm == "per-module":
        values = values.without("hyperparameters.depth.lr[0]", "it is in the other arm")
    with RemoteStudy(folder, recipe, values, "trust-region", tokens, from_study=earlier) as searcher:
        searcher.server = server
        state = searcher.run(None, WORKERS, flops=flops, stop_at_noise=False)
    assert state.best is not None, f"every trial of {folder.name} diverged"
    ends = ", ".join(each.path for each in state.coordinates if each.at_end) or "none"
    print(
        f"{folder.name}: {len(state.dimensions)} values, {len(state.trials)} trials, best {state.best.loss:.4f} "
        f"({state.best.interval[0]:.4f} to {state.best.interval[1]:.4f}), noise {state.noise_floor or math.nan:.4f}, "
        f"at an end of the box: {ends}",
        flush=True,
    )
    lowest = sorted((trial for trial in state.trials if trial.loss is not None), key=lambda trial: trial.loss or 0)
    points = [state.octaves]
    points += [trial.octaves for trial in lowest if trial.octaves is not None]
    found = [point for number, point in enumerate(points) if point not in points[:number]][:FINALISTS]
    write_text(folder / "finalists.json", json.dumps(found) + "\n")


def serve(folder: Path, tokens: TokenSet, start: Recipe, asked: argparse.Namespace, arms: Sequence[str]) -> None:
    """Start the searches and train what they propose, until all are done."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for seed, arm in itertools.product(asked.searches, arms):
        here, there = context.Pipe()
        process = context.Process(
            target=search,
            args=(there, folder, start.replace({"data.seed": seed})),
            kwargs={"trials": asked.trials, "arm": arm},
        )
        process.start()
        there.close()  # so that the death of a process ends its pipe
        ends.append(here)
        processes.append(process)
    stacks: dict[int, TrialStack] = {}
    pending: list[tuple[Connection, int, Recipe]] = []
    waited, full, rounds, seconds, trained = 0.0, WORKERS * len(ends), 0, 0.0, 0
    while ends or pending:
        began = time.monotonic()
        # Until the first trials the processes import and tokenise.
        ready = wait(ends, QUIET if pending else None) if ends and len(pending) < full else []
        waited += time.monotonic() - began
        for end in ready:
            assert isinstance(end, Connection)
            try:
                message = end.recv()
            except EOFError:
                message = "done"
            if message == "done":
                ends.remove(end)
            elif message is None:
                end.send(None)  # a study has ended: its receiver, too
            else:
                pending.append((end, message[0], Recipe.model_validate(message[1])))
        if pending and (not ready or len(pending) >= full):
            some, pending = pending[:full], pending[full:]
            # A stack trains its full size, so one that is half empty would waste half of a CPU's time.
            size = full if asked.device == "cuda" else next(n for n in (full // 3, full) if n >= min(len(some), full))
            if size not in stacks:
                stacks[size] = _stack(some[0][2], size, tokens, asked.device)
            stack = stacks[size]
            for (end, number, _), loss in zip(some, stack.train([recipe for *_, recipe in some]), strict=True):
                end.send((number, loss if math.isfinite(loss) else math.inf))
            rounds += 1
            seconds += stack.progress.seconds
            trained += len(some) * stack.progress.tokens
            if rounds % 5 == 1:
                print(
                    f"  round {rounds}: {len(some)} of {full} trials; {trained / seconds / 1e6:.2f} M tokens/s in "
                    f"{seconds:.0f} s, {waited:.0f} s waited",
                    flush=True,
                )
    for process in processes:
        process.join()
        assert process.exitcode == 0


def _stack(like: Recipe, size: int, tokens: TokenSet, device: str) -> TrialStack:
    stack = TrialStack(like, size, tokens, device)
    if device == "cpu":  # 1.4 times as fast for tiny models
        stack.losses, stack.update = torch.compile(stack._losses), torch.compile(stack._update)
    return stack


# ---- the finalists and the answers, trained with fresh seeds


@dataclass(frozen=True)
class Run:
    scale: str  # proxy | mid | target
    arm: str  # start | global | per-module | per-depth | the name of a group that is back at the start
    search: int  # seed of the search; -1 of the start
    seed: int
    longer: float = 1.0
    times_lr: float = 1.0
    finalist: int = -1  # number in finalists.json; -1: the answer


@cache
def centre_of(folder: Path) -> Recipe:
    return read_recipe(folder / "centre.toml")


def finalists(folder: Path, arm: str, search: int) -> list[Recipe]:
    """The best points of a search, as recipes at the proxy."""
    of = folder / f"{arm}-{search}"
    return [pinned(centre_of(of), point) for point in json.loads((of / "finalists.json").read_text())]


def pinned(centre: Recipe, octaves: dict[str, float]) -> Recipe:
    return recipe_at(centre, octaves).replace({"scaling.base": centre.base.model_dump()})


def chosen(found: dict[Run, float], arm: str, search: int, count: int) -> int | None:
    """The finalist with the lowest sum of its mean loss at the proxy and its loss at the size between."""
    sums = []
    for number in range(count):
        proxy = [found.get(Run("proxy", arm, search, seed, finalist=number)) for seed in FRESH]
        mid = found.get(Run("mid", arm, search, FRESH[0], finalist=number))
        known = [loss for loss in (*proxy, mid) if loss is not None]
        if len(known) < 3:
            return None
        sums.append(statistics.fmean(known[:2]) + known[2])
    return min(range(count), key=sums.__getitem__)


def recipe_for(run: Run, folder: Path, found: dict[Run, float], asked: argparse.Namespace) -> Recipe | None:
    """The recipe of a run, or None if its search has not ended, or has no values of its group."""
    if run.arm == "start":
        answer = start_of(folder)
    else:
        group = GROUPS.get(run.arm)
        arm = "per-depth" if group else run.arm
        of = folder / f"{arm}-{run.search}"
        if not (of / "finalists.json").exists():
            return None
        points = json.loads((of / "finalists.json").read_text())
        number = run.finalist if run.finalist >= 0 else chosen(found, arm, run.search, len(points))
        if number is None or number >= len(points):
            return None
        octaves = points[number]
        if group:
            moved = {path for path, by in octaves.items() if by and any(fnmatchcase(path, each) for each in group)}
            if not moved:
                return None
            octaves = {path: 0.0 if path in moved else by for path, by in octaves.items()}
        answer = pinned(centre_of(of), octaves)
    model, size, more, batch = answer.model, {}, 1.0, 1.0
    if run.scale == "mid":
        size, more, batch = {"width": MID_WIDER * model.d_model}, MID_LONGER, MID_LONGER
    elif run.scale == "target":
        size = {"width": WIDER * model.d_model, "depth": DEEPER * model.n_layers}
        more, batch = asked.more_tokens, asked.more_batch
    batch_tokens = round(batch * answer.batch.tokens)
    tokens = round(run.longer * more * answer.data.tokens / batch_tokens) * batch_tokens
    recipe = transfer(answer, tokens=tokens, batch_tokens=batch_tokens, **size)
    lr = recipe.hyperparameters.lr * run.times_lr
    compute = answer.precision.compute if run.scale == "proxy" else asked.larger_compute
    return recipe.replace({"data.seed": run.seed, "hyperparameters.lr": lr, "precision.compute": compute})


def start_of(folder: Path) -> Recipe:
    return unpinned(read_recipe(folder / f"global-{BEFORE}" / "best.toml"))


def unpinned(recipe: Recipe) -> Recipe:
    """The result of a study as the start of another one, at the same scale."""
    return recipe.replace({"scaling.base": None, "why": {}})


def swept(found: dict[Run, float], arm: str, search: int) -> tuple[float, bool]:
    """The best factor of an answer's lr at the target, and True; or the next factor to train, and False, until both
    neighbours of the best one are known."""
    known = {}
    for factor in FACTORS:
        losses = [found.get(Run("target", arm, search, seed, 1.0, factor)) for seed in SWEEP]
        if None not in losses:
            known[factor] = sum(loss for loss in losses if loss is not None)
    if not known:
        return 1.0, False
    at = FACTORS.index(min(known, key=known.__getitem__))
    untried = [factor for factor in (*FACTORS[at + 1 : at + 2], *FACTORS[at - 1 : at]) if factor not in known]
    return (untried[0], False) if untried else (FACTORS[at], True)


def runs_of(part: str, searches: Sequence[int], found: dict[Run, float]) -> list[Run]:
    """The runs of a part, those that decide first. Those of a sweep follow from the runs that are ``found``."""
    answers = [(arm, search) for search in searches for arm in ARMS]
    best = {answer: factor for answer in answers for factor, known in [swept(found, *answer)] if known}
    runs: list[Run] = []
    match part:
        case "finalists":
            for answer, number in itertools.product(answers, range(FINALISTS)):
                runs += [Run("proxy", *answer, seed, finalist=number) for seed in FRESH]
                runs += [Run("mid", *answer, FRESH[0], finalist=number)]
        case "proxy" | "target":
            for seed in SEEDS if part == "proxy" else CURVE:
                runs += [Run(part, "start", -1, seed), *(Run(part, *answer, seed) for answer in answers)]
        case "sweep":
            for answer in answers:
                factor = swept(found, *answer)[0]
                runs += [Run("target", *answer, seed, 1.0, factor) for seed in (CURVE if answer in best else SWEEP)]
        case "longer":
            curves = [("target", of, by) for of, by in best.items() if of[0] == "global"]
            curves += [("proxy", ("global", search), 1.0) for search in searches]
            for longer, (scale, of, by), seed in itertools.product(LONGER, curves, CURVE):
                runs += [Run(scale, *of, seed, longer, by)]
        case "seeds":
            rest = SEEDS[len(CURVE) :]
            runs += [Run("target", *answer, seed, 1.0, by) for seed in rest for answer, by in best.items()]
            runs += [Run("target", *answer, seed) for seed in rest for answer in (("start", -1), *answers)]
        case "alone":
            every = itertools.product(ALONE, ("target", "proxy"), searches, GROUPS)
            runs += [Run(scale, group, search, seed) for seed, scale, search, group in every]
    return list(dict.fromkeys(runs))


def rows(folder: Path) -> dict[Run, float]:
    path = folder / "runs.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return {Run(**line["run"]): math.inf if line["loss"] is None else line["loss"] for line in lines}


def train(folder: Path, part: str, tokens: TokenSet, asked: argparse.Namespace) -> bool:
    """Train the runs of a part that are missing. Train equal recipes, such as the start, once.
    Return whether there were any."""
    found = rows(folder)
    equal: dict[str, list[Run]] = {}
    for run in runs_of(part, asked.searches, found):
        if (recipe := recipe_for(run, folder, found, asked)) is not None:
            equal.setdefault(recipe.model_dump_json(exclude={"why"}), []).append(run)

    def keep(runs: Sequence[Run], loss: float) -> None:
        known = loss if math.isfinite(loss) else None
        with (folder / "runs.jsonl").open("a") as file:
            file.writelines(json.dumps({"run": asdict(run), "loss": known}) + "\n" for run in runs)
        for run in runs:
            print(f"  {' '.join(str(value) for value in asdict(run).values())}: {loss:.4f}", flush=True)

    recipes: dict[Run, Recipe] = {}  # by the first of its runs
    others: dict[Run, list[Run]] = {}
    for key, runs in equal.items():
        missing = [run for run in runs if run not in found]
        if missing and len(missing) < len(runs):
            keep(missing, next(found[run] for run in runs if run in found))
        elif missing:
            recipes[missing[0]], others[missing[0]] = Recipe.model_validate_json(key), missing
    print(f"{part}: {len(recipes)} missing runs", flush=True)

    def shape(run: Run) -> tuple[int, int]:  # all runs of a stack have one model and one duration
        return recipes[run].model.params, recipes[run].data.tokens

    single = [run for run in recipes if asked.device == "cpu" and run.scale != "proxy"]  # too large for a stack there
    with WorkerPool(asked.workers) as pool:
        futures = {pool.submit(train_trial, recipes[run].replace({"layout.compile": True})): run for run in single}
        stacked = sorted(recipes.keys() - futures.values(), key=shape)
        for _, some in itertools.groupby(stacked, key=shape):
            group = list(some)
            size = -(-len(group) // -(-len(group) // asked.stack))  # stacks of equal size
            stack = _stack(recipes[group[0]], size, tokens, asked.device)
            for first in range(0, len(group), size):
                runs = group[first : first + size]
                for run, loss in zip(runs, stack.train([recipes[run] for run in runs]), strict=True):
                    keep(others[run], loss)
        for future in as_completed(futures):
            keep(others[futures[future]], future.result().loss)
    return bool(recipes)


# ---- the table


def table(found: dict[Run, float], searches: Sequence[int]) -> list[str]:
    """Each search is one observation: its mean over the seeds of the training."""

    def mean(run: Run, seeds: Sequence[int]) -> float | None:
        each = [found.get(Run(**{**asdict(run), "seed": seed})) for seed in seeds]
        known = [loss for loss in each if loss is not None]
        return statistics.fmean(known) if len(known) == len(seeds) else None

    def by_search(scale: str, arm: str, sweep: bool) -> dict[int, dict[int, float]]:
        losses = {}
        for s in searches:
            factor, best = swept(found, arm, s) if sweep else (1.0, True)
            run = Run(scale, arm, -1 if arm == "start" else s, 0, 1.0, factor)
            known = {n: loss for n in (len(SEEDS), len(CURVE)) if (loss := mean(run, SEEDS[:n])) is not None}
            losses |= {s: known} if best and known else {}
        return losses

    lines = ["| scale | arm | seeds | loss by search | mean | against global | equal-loss speed-up | by search |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for scale, sweep in (("proxy", False), ("target", False), ("target", True)):
        base = by_search(scale, "global", sweep)
        for arm in (*(() if sweep else ("start",)), *ARMS):
            if not (known := by_search(scale, arm, sweep)):
                continue
            seeds = min(max(each) for each in (*known.values(), *base.values()))
            losses = {s: each[seeds] for s, each in known.items()}
            paired = [loss - base[s][seeds] for s, loss in losses.items() if s in base]
            ratios = []
            for s, each in known.items():
                factor, best = swept(found, "global", s) if scale == "target" else (1.0, True)
                at = {longer: mean(Run(scale, "global", s, 0, longer, factor), CURVE) for longer in LONGER}
                curve = sorted((longer, loss) for longer, loss in at.items() if loss is not None)
                if best and at[1.0] is not None and len(curve) > 1:
                    ratios.append(speed_up(curve, each[len(CURVE)]))
            shown = ", ".join(f"{loss:.4f}" for loss in (losses.values() if arm != "start" else set(losses.values())))
            middle = average(list(losses.values()), ".4f") if arm != "start" else ""
            against = "" if arm == "global" or not paired else average(paired, "+.4f")
            by_each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            what = f"{scale}, lr swept" if sweep else scale
            lines.append(
                f"| {what} | {arm} | {seeds} | {shown} | {middle} | {against} | {times(ratios)} | {by_each} |"
            )
    lines += ["", "| group back at the start | at the proxy, nats | at the target, nats |", "|---|---|---|"]
    for group in GROUPS:
        cells = []
        for scale in ("proxy", "target"):
            costs = []
            for s in searches:
                pairs = [[found.get(Run(scale, arm, s, seed)) for arm in (group, "per-depth")] for seed in ALONE]
                known = [a - b for a, b in pairs if a is not None and b is not None]
                costs += [statistics.fmean(known)] if known else []
            cells.append(f"{average(costs, '+.4f')} ({', '.join(f'{c:+.3f}' for c in costs)})" if costs else "")
        lines.append(f"| {group} | {cells[0]} | {cells[1]} |")
    return lines


def speed_up(curve: Sequence[tuple[float, float]], loss: float) -> float:
    """How many times the tokens the global answer needs for a loss: interpolated in log2 of the tokens, and beyond
    the curve extrapolated from its nearest two points."""
    pairs = list(itertools.pairwise(curve))
    (a, at_a), (b, at_b) = next((pair for pair in pairs if pair[1][1] <= loss), pairs[-1])
    share = (at_a - loss) / (at_a - at_b) if at_a > at_b else math.nan
    return 2 ** (math.log2(a) + share * math.log2(b / a))


def times(ratios: Sequence[float]) -> str:
    """The geometric mean of the speed-ups with its 95% interval."""
    if len(ratios) < 2:
        return "".join(f"{ratio:.2f}" for ratio in ratios)
    known = [math.log2(ratio) for ratio in ratios]
    middle = statistics.fmean(known)
    margin = t95(len(known) - 1) * statistics.stdev(known) / math.sqrt(len(known))
    return f"{2**middle:.2f} ({2 ** (middle - margin):.2f} to {2 ** (middle + margin):.2f})"


def average(values: Sequence[float], form: str) -> str:
    """The mean with its 95% interval by Student's t."""
    if len(values) < 2:
        return "".join(format(value, form) for value in values)
    margin = t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):{form}} ± {margin:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", default="python-stdlib", help="[data] source")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--trials", type=int, default=288, help="of each search, in FLOPs of full trials")
    parser.add_argument("--searches", default="0,1,2", help="seeds of the searches")
    parser.add_argument("--stack", type=int, default=24, help="answers in a stack at most")
    parser.add_argument("--workers", type=int, default=2, help="on a CPU: answers at once")
    parser.add_argument("--more-tokens", type=float, default=4.0, help="of the target, times those of the proxy")
    parser.add_argument("--more-batch", type=float, default=1.0, help="of the target, times that of the proxy")
    parser.add_argument("--larger-compute", default="bf16", help="[precision] compute beyond the proxy")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--set", nargs="*", default=[], help="KEY=JSON of the proxy's recipe")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    asked.searches = [int(seed) for seed in asked.searches.split(",")]
    proxy = read_recipe(PROXY).replace({"data.source": asked.text})
    proxy = proxy.replace({key: json.loads(value) for key, _, value in (s.partition("=") for s in asked.set)})
    write_recipe(proxy, asked.folder / "proxy.toml")
    began = time.monotonic()
    tokens = prepare(proxy.data, proxy.model.vocab_size)
    print(f"{len(tokens.train):,} tokens of text in {time.monotonic() - began:.0f} s", flush=True)
    for part in asked.parts.split(","):
        began = time.monotonic()
        if part == "start":
            first = {"searches": [BEFORE], "trials": round(asked.trials * FIRST)}
            serve(asked.folder, tokens, proxy, argparse.Namespace(**{**vars(asked), **first}), ["global"])
        elif part == "searches":
            serve(asked.folder, tokens, start_of(asked.folder), asked, list(ARMS))
        else:
            while train(asked.folder, part, tokens, asked) and part == "sweep":
                pass
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    lines = table(rows(asked.folder), asked.searches)
    write_text(asked.folder / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
