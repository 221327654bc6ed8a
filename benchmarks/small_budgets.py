"""Compare searches of few values with few trials: `python -m benchmarks.small_budgets [--steplaw FILE] [--seeds 20]`.

Minimises smooth functions of 2 to 5 values whose minimum is about an octave (a factor of two) from the start, with
and without noise. Regret is the noise-free loss of the result above the minimum, in per cent of the start's. The
trust region is `leaven.tuning.search`, including its trials that measure noise and confirm the result; in a second
column the noise is given. Every other method spends all trials on its search, and its result is the trial with the
lowest loss. "sampler" is ``leaven.tuning.TrustRegionSampler``, which runs in a plain ``study.optimize``, as the other
samplers do. ``--families modules`` has 30 values, or as many as ``--values``, and divergences
(benchmarks/_landscapes.py).

Above, the start is in the middle of a range of 6 octaves, which favours methods that search near the start. Names
with "far" have a range of 8 octaves; start and optimum of a far bowl, cliff or valley are anywhere in the middle 6 of
these, independently of each other. Of "far modules", whose optimum stays near the start, only the range is moved.

``--steplaw`` adds losses as functions of lr and batch, interpolated from a published sweep of 17 sizes (Li et al.
2025, arXiv 2503.04715), with starts within 0.06 nats of the minimum. FILE is the table of their runs, which is not
part of this project; it is downloaded if it is missing.

Constants were chosen on seeds below 100, the table uses seeds from 100 on. Results are saved in a file, one line per
search: run the command again to resume.
"""

import argparse
import csv
import hashlib
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import optuna
from benchmarks._landscapes import EXCESS, FLOOR, landscape
from benchmarks._turbo import turbo

from leaven.tuning import TrustRegionSampler, search

REACH = 3.0  # octaves from the start to either bound
FAR_REACH = 4.0  # octaves from the middle of the range of a "far" function to either bound
FIRST = 100  # first seed
FAMILIES = {"bowl": (2, 4, 5), "cliff": (3,), "valley": (2,), "step law": (2,)}  # numbers of values by function
MODULES = {"modules": (30,)}  # the landscapes of _landscapes.py
FAR = {f"far {name}": sizes for name, sizes in (FAMILIES | MODULES).items() if name != "step law"}
STEP_LAW = (  # at a commit of 2025, with its SHA-256
    "https://raw.githubusercontent.com/step-law/steplaw/32a8f4cc50247695fb56cc6c9117abdf67c97763/data/dense_lr_bs_loss.csv",
    "9e46181076c04d450294d75dfe6f72adc416e231e154a07b337e378f9410002c",
)
Array = np.ndarray
Function = Callable[[Array], float]  # from octaves to a loss: 1 at the start, 0 at the minimum


@dataclass(frozen=True)
class Problem:
    """A function to minimise within bounds."""

    loss: Function
    low: Array  # (D,), octaves from the start to the lower bounds
    high: Array  # (D,)
    near: bool  # whether the optimum is about an octave from the start along each value

    @classmethod
    def of(cls, family: str, d: int, seed: int, surfaces: "list[Surface]") -> "Problem":
        ends = np.full(d, REACH)
        if family == "step law":
            return cls(of_a_sweep(surfaces, seed), -ends, ends, True)
        if family not in FAR:
            return cls(made_up(family, d, seed), -ends, ends, True)
        rng, family = np.random.default_rng([d, seed, 1]), family.removeprefix("far ")
        while True:
            start, optimum = rng.uniform(-REACH, REACH, (2, d))
            loss = made_up(family, d, seed, optimum - start)
            if np.isfinite(loss(np.zeros(d))):  # else the start diverges
                return cls(loss, -FAR_REACH - start, FAR_REACH - start, family in MODULES)


Surface = tuple[Callable[[Array], Array], Array]
Method = Callable[[Function, Problem, int, int], Array]  # of the noisy function, its problem, trials and a seed


def made_up(family: str, d: int, seed: int, optimum: Array | None = None) -> Function:
    """Return a function with rotated axes and curvatures that differ by up to a factor of 20.

    ``optimum`` is in octaves from the start, by default about one along each value; "modules" have their own.

    ``bowl`` is quadratic near the minimum and linear far away. ``cliff`` rises faster on one side, and diverges where
    the first value is too large. ``valley`` is a bowl along a curve.
    """
    if family == "modules":
        made = landscape(d, seed)
        return lambda x: (made.loss(x) - FLOOR) / EXCESS
    rng = np.random.default_rng([d, seed, sorted(FAMILIES).index(family)])
    near = np.clip(rng.normal(0, 1, d), -2, 2)
    optimum = near if optimum is None else optimum
    rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
    mix = 0.25 if family == "valley" else 0.5
    axes = np.diag(10 ** (rng.uniform(-1.3, 0, d) / 2)) @ ((1 - mix) * np.eye(d) + mix * rotation)
    edge, skew, bend = max(optimum[0], 0) + rng.uniform(0.7, 2), rng.uniform(0.3, 0.8, d), rng.uniform(-0.3, 0.3)

    def loss(x: Array) -> float:
        away = x - optimum
        if family == "valley":
            away[0] += bend * (x[1] ** 2 - optimum[1] ** 2)
        u = axes @ away
        if family == "cliff":
            return float(np.sum((np.exp(skew * u) - skew * u - 1) / skew**2)) if x[0] < edge else np.inf
        return float(np.sum(np.sqrt(1 + u**2 / 2) - 1))

    at_start = loss(np.zeros(d))
    return lambda x: loss(np.array(x)) / at_start


def fetched(file: Path) -> Path:
    """Return the file with the runs of Step Law. Download it if it is missing, and check that it is the known one."""
    url, digest = STEP_LAW
    if not file.exists():
        with urlopen(url, timeout=60) as page:
            content = page.read()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
        raise SystemExit(f"{file} is not the table of {url}; remove it, and run the same command again")
    return file


def published(file: Path) -> list[Surface]:
    """Return for each model size of the sweep the loss as a smooth function of log2 (lr, batch), and its points."""
    from scipy.interpolate import CloughTocher2DInterpolator

    runs: dict[tuple[str, str], dict[tuple[float, float], float]] = defaultdict(dict)
    with file.open() as lines:
        for row in csv.DictReader(lines):
            at = float(np.log2(float(row["lr"]))), float(np.log2(float(row["bs"])))
            runs[row["N"], row["D"]][at] = float(row["smooth loss"])
    surfaces = []
    for of in runs.values():
        points, losses = np.array(list(of)), np.array(list(of.values()))
        least = losses.min() - 0.01  # log(loss - least) is smoother than the loss
        shape = CloughTocher2DInterpolator(points, np.log(np.minimum(losses - least, 1.0)))
        surfaces.append((lambda x, shape=shape, least=least: least + np.exp(shape(x)), points))
    return surfaces


def of_a_sweep(surfaces: list[Surface], seed: int) -> Function:
    """Return one of the surfaces as a function of octaves from a random start, scaled to 1 at the start."""
    surface, points = surfaces[seed % len(surfaces)]
    rng, low, high = np.random.default_rng(seed), points.min(0), points.max(0)
    grid = np.stack(np.meshgrid(*np.linspace(low, high, 81).T), -1).reshape(-1, 2)
    losses = surface(grid)
    least, optimum = float(np.nanmin(losses)), grid[np.nanargmin(losses)]
    for _ in range(1000):
        start = np.clip(optimum + rng.normal(0, 1.3, 2), low + 0.2, high - 0.2)
        excess = float(surface(start[None])[0]) - least
        if excess < 0.06 and np.linalg.norm(start - optimum) > 0.7:
            break

    def loss(x: Array) -> float:
        found = float(surface(np.clip(start + x, low, high)[None])[0])
        return (found - least) / excess if np.isfinite(found) else 20.0

    return loss


def plain_quadratic(objective: Function, problem: Problem, trials: int, seed: int) -> Array:
    """Fit a full quadratic around the best trial, weighted within 1.5 octaves, and try its minimum there."""
    rng, d = np.random.default_rng(seed), len(problem.low)
    points = [np.zeros(d), *np.vstack([np.eye(d), -np.eye(d)])][:trials]
    losses = [objective(x) for x in points]
    i, j = np.triu_indices(d)
    while len(points) < trials:
        ended = np.isfinite(losses)
        near, found = np.array(points)[ended], np.array(losses)[ended]
        best = near[found.argmin()]
        weight = np.exp(-np.sum((near - best) ** 2, 1) / 4.5) ** 0.5
        terms = np.hstack([np.ones((len(near), 1)), near - best, (near - best)[:, i] * (near - best)[:, j]])
        ridge = 1e-4 * np.var(found) * np.diag([0.0] + [1.0] * (terms.shape[1] - 1))
        left = (terms * weight[:, None] ** 2).T
        fit = np.linalg.solve(left @ terms + ridge, left @ found)
        tries = rng.uniform(-1.5, 1.5, (4000, d))
        tries = np.vstack([tries * scale for scale in (1, 0.3, 0.1)])
        value = np.hstack([np.ones((len(tries), 1)), tries, tries[:, i] * tries[:, j]]) @ fit
        following = np.clip(best + tries[value.argmin()], problem.low, problem.high)
        if min(np.linalg.norm(following - x) for x in points) < 0.03:
            following = np.clip(best + rng.normal(0, 0.3, d), problem.low, problem.high)
        points.append(following)
        losses.append(objective(following))
    return points[int(np.argmin(losses))]


def by_optuna(name: str) -> Method:
    def method(objective: Function, problem: Problem, trials: int, seed: int) -> Array:
        d = len(problem.low)
        limits = {f"x{i}": ends for i, ends in enumerate(zip(problem.low, problem.high, strict=True))}
        names = list(limits)
        # The initial standard deviation of CMA-ES: half an octave if the optimum is about an octave away.
        spread = 0.5 / (problem.high - problem.low)[0] if problem.near else None
        # The highest loss; the start has 1. Optuna's samplers need a finite loss if a run diverges. Among many runs
        # that diverge, a loss of 20 would hide the differences between the others.
        highest = np.inf if name == "sampler" else 20.0 if d <= 5 else 2.0
        sampler = {
            "sampler": lambda: TrustRegionSampler(seed=seed),
            "gp": lambda: optuna.samplers.GPSampler(seed=seed),
            "tpe": lambda: optuna.samplers.TPESampler(seed=seed, multivariate=True),
            "cma": lambda: optuna.samplers.CmaEsSampler(x0=dict.fromkeys(names, 0.0), sigma0=spread, seed=seed),
            "random": lambda: optuna.samplers.RandomSampler(seed=seed),
            "turbo": lambda: turbo(d, seed),
        }[name]()
        study = optuna.create_study(sampler=sampler)
        study.enqueue_trial(dict.fromkeys(names, 0.0))

        def trial(of: optuna.Trial) -> float:
            return min(objective(np.array([of.suggest_float(x, *limits[x]) for x in names])), highest)

        study.optimize(trial, n_trials=trials)
        return np.array([study.best_params[x] for x in names])

    return method


def trust_region(objective: Function, problem: Problem, trials: int, seed: int, noise: float | None = None) -> Array:
    space = {f"x{i}": ends for i, ends in enumerate(zip(problem.low, problem.high, strict=True))}
    names = list(space)
    found = search(
        lambda x: objective(np.array([x[name] for name in names])),
        space,
        trials=trials,
        seed=seed,
        noise=noise,
        stop_at_noise=False,
    )
    return np.array([found.params[name] for name in names])


METHODS: dict[str, Method] = {
    "trust region": trust_region,
    "plain quadratic": plain_quadratic,
    **{name: by_optuna(name) for name in ("sampler", "gp", "turbo", "cma", "tpe", "random")},
}
GIVEN = "noise given"


def regret(method: str, problem: Problem, trials: int, *, seed: int, noise: float) -> float:
    """Return the regret of a search in per cent of the start's, at most 100, also if its result diverges."""
    rng = np.random.default_rng([seed, trials])

    def objective(x: Array) -> float:
        return problem.loss(x) + noise * rng.normal()

    if method == GIVEN:
        found = trust_region(objective, problem, trials, seed, noise)
    else:
        found = METHODS[method](objective, problem, trials, seed)
    return 100 * min(problem.loss(np.clip(found, problem.low, problem.high)), 1.0)


def table(runs: dict[str, float], methods: list[str], *, medians: bool = False) -> list[str]:
    """Return regrets as a Markdown table, with the lowest of each row in bold: means and standard errors, or medians
    and quartiles."""
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for key, value in runs.items():
        method, *rest, _ = key.split("|")
        cells["|".join(rest), method].append(value)
    lines = [f"| surface | values | noise | trials | {' | '.join(methods)} |", "|---" * (4 + len(methods)) + "|"]
    for row in dict.fromkeys(row for row, _ in cells):
        centre = np.median if medians else np.mean
        middles = {m: float(centre(cells[row, m])) for m in methods if (row, m) in cells}
        texts = []
        for m in methods:
            of = cells.get((row, m))
            spread = "({:.1f} to {:.1f})".format(*np.quantile(of, (0.25, 0.75))) if of and medians else ""
            spread = spread or f"± {np.std(of) / len(of) ** 0.5:.1f}" if of else ""
            text = f"{middles[m]:.1f} {spread}" if of else ""
            texts.append(f"**{text}**" if of and middles[m] == min(middles.values()) else text)
        lines.append(f"| {' | '.join([*row.split('|'), *texts])} |")
    return lines


def picture(runs: dict[str, float], methods: list[str]) -> str:
    """Return an SVG of mean regrets over trials, with a panel for each surface and noise, a line for each method."""
    means: dict[str, dict[str, dict[int, list[float]]]] = {}
    for key, value in runs.items():
        method, family, d, noise, trials, _ = key.split("|")
        of = means.setdefault(f"{family}, {d} values, noise {noise}", {}).setdefault(method, {})
        of.setdefault(int(trials), []).append(value)
    hues = dict(
        zip(
            METHODS,
            ("#c2185b", "#1976d2", "#795548", "#388e3c", "#00838f", "#f57c00", "#7b1fa2", "#9e9e9e"),
            strict=True,
        )
    )
    wide, high, columns = 300, 170, 3
    rows = -(-len(means) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * wide} {rows * high + 54}" role="img" '
        'font-family="sans-serif" font-size="11">',
        "<style>text { fill: #333 } .g { stroke: #8884 } @media (prefers-color-scheme: dark) { text { fill: #ccc } }",
        "</style>",
        "<title>Mean regret (per cent of the start's) over the number of trials</title>",
    ]
    shown = [m for m in methods if m in hues]
    for i, method in enumerate(shown):
        at = 20 + i * 110
        parts.append(f'<line x1="{at}" x2="{at + 22}" y1="14" y2="14" stroke="{hues[method]}" stroke-width="2.5"/>')
        parts.append(f'<text x="{at + 28}" y="18">{method}</text>')
    parts.append('<text x="20" y="36">mean regret, per cent of the start\'s, over the number of trials</text>')
    for number, (title, by_method) in enumerate(means.items()):
        left, top = number % columns * wide + 40, number // columns * high + 64
        parts.append(f'<text x="{left}" y="{top - 8}" font-weight="bold">{title}</text>')
        every = sorted({trials for of in by_method.values() for trials in of})

        def x(trials: int, left: int = left, every: list[int] = every) -> float:
            return left + 235 * (np.log2(trials / every[0]) / max(np.log2(every[-1] / every[0]), 1))

        def y(regret: float, top: int = top) -> float:
            return top + 110 * (2 - np.log10(np.clip(regret, 0.1, 100))) / 3

        for tick in (100, 10, 1, 0.1):
            parts.append(f'<line class="g" x1="{left}" x2="{left + 240}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
            parts.append(f'<text x="{left - 5}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
        parts += [f'<text x="{x(n):.1f}" y="{top + 126}" text-anchor="middle">{n}</text>' for n in every]
        for method in shown:
            of = by_method.get(method, {})
            line = " ".join(f"{x(n):.1f},{y(float(np.mean(of[n]))):.1f}" for n in every if n in of)
            style = f'stroke="{hues[method]}" stroke-width="{3 if method == "trust region" else 1.5}"'
            parts.append(f'<polyline points="{line}" fill="none" {style}/>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steplaw", type=Path, help="FILE for the runs of Step Law")
    parser.add_argument("--methods", nargs="*", default=[GIVEN, *METHODS], choices=[GIVEN, *METHODS])
    parser.add_argument("--families", nargs="*", choices=[*FAMILIES, *MODULES, *FAR], help="default: the first four")
    parser.add_argument("--values", type=int, help="number of values, instead of those of each family")
    parser.add_argument("--medians", action="store_true", help="medians and quartiles instead of means")
    parser.add_argument("--trials", default="8,16,32")
    parser.add_argument("--noise", default="0,0.1", help="standard deviations / loss of the start above the optimum")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--results", type=Path, default=Path("runs/small_budgets.jsonl"))
    parser.add_argument("--picture", type=Path, help="also draw the results in this SVG file")
    parser.add_argument("--quick", action="store_true", help="2 values, 8 trials, 2 seeds, without GP")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    surfaces = published(fetched(options.steplaw)) if options.steplaw else []
    families = {name: sizes for name, sizes in FAMILIES.items() if surfaces or name != "step law"}
    if options.families:
        families = {name: (FAMILIES | MODULES | FAR)[name] for name in options.families}
    if options.values:
        families = dict.fromkeys(families, (options.values,))
    if options.quick:
        families, options.trials, options.seeds = {"bowl": (2,), "valley": (2,)}, "8", 2
        options.methods = [GIVEN, "trust region", "plain quadratic", "random"]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    runs: dict[str, float] = {key: value for line in lines for key, value in json.loads(line).items()}
    for noise in map(float, options.noise.split(",")):
        for family, sizes in families.items():
            for d in sizes:
                for trials in map(int, options.trials.split(",")):
                    for method in options.methods:
                        for seed in range(FIRST, FIRST + options.seeds):
                            key = f"{method}|{family}|{d}|{noise:.0%}|{trials}|{seed}"
                            if key not in runs:
                                problem = Problem.of(family, d, seed, surfaces)
                                runs[key] = regret(method, problem, trials, seed=seed, noise=noise)
                                with options.results.open("a") as file:
                                    file.write(json.dumps({key: runs[key]}) + "\n")
    print("\n".join(table(runs, options.methods, medians=options.medians)))
    if options.picture:
        options.picture.write_text(picture(runs, options.methods))


if __name__ == "__main__":
    main()
