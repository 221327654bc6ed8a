"""Chooses the commands to suggest after a command. With ``--json``, they have the key ``next``.

The usual order is new -> recipes check -> tune -> transfer -> recipes check -> check coordinates -> plan
-> train -> report. ``leaven new`` chooses the names: OUT.toml is the recipe of the large model (the
target). OUT-proxy.toml is the recipe of the small model (the proxy) that is tuned. OUT-tuned.toml is the
target with the tuned values.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from leaven.documents.checks import CheckDocument
from leaven.documents.planning import BudgetDocument, PlanDocument
from leaven.errors import InputError
from leaven.planning.hardware import EXAMPLE_GPU, Cluster, find_accelerator, parse_cluster, trainable_here
from leaven.planning.plan import cluster_for
from leaven.planning.published import known_cluster
from leaven.planning.this_machine import gpus_here
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity
from leaven.views.tables import LABEL
from leaven.views.terminal.findings import written

PROXY, TUNED = "-proxy", "-tuned"


def after_check(path: Path, recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """Return the commands to suggest after ``recipes check`` passed. A tuned recipe gets a coordinate check."""
    check = [_line("check", "coordinates", path, sets=overrides)] if path.stem.endswith(TUNED) else []
    return [*check, *after_coordinates(path, recipe, overrides)]


def after_coordinates(path: Path, recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """Return the commands to suggest after ``check coordinates`` passed: tune an untuned proxy, or else train."""
    if path.stem.endswith(PROXY):
        target = path.with_stem(path.stem.removesuffix(PROXY))
        return tune(path, recipe, read_recipe(target) if target.exists() else None, overrides)
    if not overrides and (proxy := _proxy_to_tune(path)):
        return tune(beside(path, PROXY), proxy, recipe)
    return train(path, recipe, overrides)


def after_findings(changes: Mapping[str, Any]) -> list[str]:
    """Return the user's command with ``--set`` options for ``changes``, or [] if ``changes`` is empty."""
    options = [word for path, to in changes.items() for word in ("--set", f"{path}={written(to)}")]
    return [again(*options)] if options else []


def after_failed_check(check: CheckDocument, run: Path | None, page: Path | None) -> list[str]:
    """Return at most one command to suggest after a check that failed or is undecided: a better check, or a page."""
    failed = [row for row in check.rows if row.passed is False and not row.undecided]
    if not failed and check.options:
        return [again(*" ".join(check.options).split())]
    if failed and check.settings.get("rule") not in {None, "complete-d-p"}:
        return [again("--set", "scaling.rule=complete-d-p")]
    if page is not None:
        return []
    return [_line("report", run, "-o", run / "report.html") if run else again("-o", str(free(Path("check.html"))))]


def after_show(path: Path, overrides: Sequence[str]) -> list[str]:
    return [_line("recipes", "check", path, sets=overrides)]


def after_tune(path: Path, study: Path, command: str = "") -> list[str]:
    """Return the commands to suggest after a study: use the best values, and then report on the study."""
    best = study / "best.toml"
    report = _line("report", study, "-o", study / "report.html")
    if command:  # the user's own training command, with the best values
        return [command, report]
    target = path.with_stem(path.stem.removesuffix(PROXY))
    if _of_study(path) and (name := read_recipe(best).name).endswith(PROXY):  # the name of the first recipe
        target, beside_it = path, Path(f"{name.removesuffix(PROXY)}.toml")
        with suppress(InputError):  # it may be missing, or something else
            target = beside_it if read_recipe(beside_it).name == beside_it.stem else path
    if target == path or not target.exists():
        return [_line("recipes", "check", best), *train(best, read_recipe(best)), report]
    return [_line("transfer", best, "--like", target, "-o", free(beside(target, TUNED))), report]


def after_writing(output: Path | None, recipe: Recipe, name: Path) -> list[str]:
    """Return the commands to suggest after ``transfer`` and ``import config``: check ``output``, or write it."""
    if output is None:
        return [again("-o", str(free(name)))]
    return [_line("recipes", "check", output), *train(output, recipe)]


def after_plan(path: Path, recipe: Recipe, found: PlanDocument, overrides: Sequence[str]) -> list[str]:
    """Return the commands to suggest after the plan of a recipe: tune an untuned proxy, and train as planned.

    With ``overrides``, no tuning is suggested, because they do not apply to the proxy.
    """
    if not found.memory.fits or found.layout["cp"] > 1:  # leaven cannot train context parallelism
        return []
    if path.stem.endswith(PROXY):
        return after_coordinates(path, recipe, overrides)[-1:]  # without the plan, which is done
    own = recipe.layout.model_dump() | {"micro_batch": recipe.batch.micro_batch}
    changes = [
        f"{'batch' if key == 'micro_batch' else 'layout'}.{key}={str(value).lower()}"
        for key, value in found.layout.items()
        if key != "grad_accumulation" and value != own[key]
    ]
    first = []
    if not overrides and (proxy := _proxy_to_tune(path)):
        path, first = beside(path, TUNED), _tune_and_transfer(path, proxy, recipe)
    node_size = parse_cluster(found.cluster).accelerator.node_size
    return [*first, launch(path, [*overrides, *changes], found.gpus, node_size)]


def plan_of_new(path: Path, cluster: Cluster | None) -> str:
    return _line("plan", path, "--gpus", *((cluster,) if cluster else ("cpu", "--measure")))


def after_plan_of_run(id: str, cluster: str) -> list[str]:
    return [_line("new", free(Path(f"{id}.toml")), "--from", id, "--gpus", cluster)]


def after_budget(found: BudgetDocument) -> list[str]:
    """Return the command that writes a recipe for the middle size of ``plan --budget``."""
    middle = found.rows[len(found.rows) // 2]
    params, tokens = (format_quantity(count).replace(" ", "") for count in (middle.params, middle.tokens))
    return [f"leaven new {params}.toml --params {params} --tokens {tokens} --gpus {found.cluster}"]


def after_train(run: Path, recipe: Recipe) -> list[str]:
    """Return the commands to suggest after a run: report, and if supported, sample and export."""
    from leaven.interop.architectures import ARCHITECTURES

    commands = [_line("report", run, "-o", run / "report.html")]
    if not (run / "tokenizer.json").is_file():
        return commands
    commands.append(_line("sample", run, "The "))
    if any(not architecture.misfits(recipe.model) for architecture in ARCHITECTURES):
        parent = run.parent if run.name else Path("..")  # run may be "."
        folder = free(parent / f"{run.resolve().name}-huggingface")
        commands.append(_line("export", "weights", run, folder, "--to", "huggingface"))
    return commands


def after_export_weights(folder: Path) -> list[str]:
    return [_line("new", free(Path(f"{folder.name}.toml")), "--from-weights", folder)]


def tune(path: Path, proxy: Recipe, target: Recipe | None, sets: Sequence[str] = ()) -> list[str]:
    """Return the commands that tune the proxy in ``path``, first ``leaven plan`` if this machine is too small."""
    trials: tuple[object, ...] = ()
    name = proxy.name.removesuffix(PROXY)
    if target is not None:
        work, full = (run.model.params_active * run.data.tokens for run in (proxy, target))
        from leaven.catalogue.starter.proxy import trials_worth

        trials, name = ("--trials", trials_worth(work / full)), target.name
    plan = [] if trainable_here(proxy) else [_line("plan", path, "--gpus", _cluster(proxy, target))]
    return [*plan, _line("tune", path, "--study", Path("studies", name), *trials, sets=sets)]


def after_new(path: Path, proxy: Recipe | None, target: Recipe, cluster: Cluster | None = None) -> list[str]:
    """Return the commands to suggest after ``leaven new``: tune the proxy, if any, and train or plan the target."""
    if proxy is None:
        return [_line("recipes", "check", path), *train(path, target, cluster=cluster)]
    tuned = beside(path, TUNED)
    return [
        _line("recipes", "check", beside(path, PROXY)),
        *_tune_and_transfer(path, proxy, target),
        _line("recipes", "check", tuned),
        _line("check", "coordinates", tuned),
        *train(tuned, target, cluster=cluster),
    ]


def _proxy_to_tune(path: Path) -> Recipe | None:
    proxy = beside(path, PROXY)
    return read_recipe(proxy) if proxy.exists() and not beside(path, TUNED).exists() else None


def _tune_and_transfer(path: Path, proxy: Recipe, target: Recipe) -> list[str]:
    best = Path("studies", target.name, "best.toml")
    transfer = _line("transfer", best, "--like", path, "-o", beside(path, TUNED))
    return [*tune(beside(path, PROXY), proxy, target), transfer]


def train(path: Path, recipe: Recipe, sets: Sequence[str] = (), *, cluster: Cluster | None = None) -> list[str]:
    """Return the command that trains a recipe, or that plans it if this machine is too small for it."""
    if trainable_here(recipe):
        return [launch(path, sets, recipe.layout.ranks, gpus_here() or recipe.layout.ranks)]
    return [_line("plan", path, "--gpus", cluster or _cluster(recipe), sets=sets)]


def _cluster(recipe: Recipe, target: Recipe | None = None) -> str:
    """Return the recipe's known cluster, or else enough of the target's GPUs (or of `EXAMPLE_GPU`) to train it."""
    if known := known_cluster(recipe):
        return known.cluster
    known = known_cluster(target) if target is not None else None
    if known is None or known.cluster == "cpu":
        return cluster_for(recipe, find_accelerator(EXAMPLE_GPU))
    return cluster_for(recipe, parse_cluster(known.cluster).accelerator)


def why_hardware(recipe: Recipe, following: Sequence[str]) -> list[str]:
    """Return a line that says why the first ``leaven plan`` command has its ``--gpus``, or [] if this is unknown."""
    plans = [command for command in following if command.startswith("leaven plan ")]
    known = known_cluster(recipe) if plans else None
    return [f"{'hardware':<{LABEL}}{known.reason}"] if known and f" --gpus {known.cluster}" in plans[0] else []


def again(*words: str) -> str:
    """Return the command that the user typed, without ``--json`` and with the options ``words`` added.

    An option in ``words`` replaces the same option in the command, and ``--set`` of the same value.
    """
    added = list(zip(words[::2], words[1::2], strict=True))
    sets = [word.partition("=")[0] for option, word in added if option == "--set"]
    replaced = {option for option, _ in added} - {"--set"}
    kept, at, typed = list[str](), 0, [word for word in sys.argv[1:] if word != "--json"]
    while at < len(typed):
        name, joined, value = typed[at].partition("=")
        size = 1 if joined or not name.startswith("-") else 2
        path = (value if joined else "".join(typed[at + 1 : at + 2])).partition("=")[0]
        if name not in replaced and not (name == "--set" and path in sets):
            kept.append(typed[at])
            at += 1
        else:
            at += size
    return _line(*kept, *words)


def _line(*words: object, sets: Sequence[str] = (), start: Sequence[str] = ("leaven",)) -> str:
    last = {change.partition("=")[0].strip(): change for change in sets}  # a suggested value replaces a typed one
    options = [word for change in last.values() for word in ("--set", change)]
    return " ".join(_quoted(word) for word in [*start, *map(_typed, words), *options])


def _typed(word: object) -> str:
    """Return a word as a user types it: a path that begins with a hyphen, which would be an option, after ``./``."""
    return f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)


def _quoted(word: str) -> str:
    """Return ``word`` quoted for a shell, as ``$'...'`` if it has control characters.

    leaven prints control characters as escapes such as ``\\u001b``, which bash and zsh decode only inside ``$'...'``.
    """
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'"


def launch(path: Path, sets: Sequence[str], ranks: int = 1, node_size: int = 1) -> str:
    """Return the command that trains a recipe. Several ranks need torchrun, with ``node_size`` ranks on a node."""
    run = free(Path("runs", path.resolve().parent.name if _of_study(path) else path.stem))
    if ranks == 1:
        return _line("train", path, "--run", run, sets=sets)
    return _line("train", path, "--run-folder", run, sets=sets, start=[*_torchrun(ranks, node_size), "-m", "leaven"])


def _of_study(path: Path) -> bool:
    return path.name in {"best.toml", "fewest.toml"} and (path.parent / "study.json").exists()


def _torchrun(ranks: int, node_size: int) -> list[str]:
    nodes = -(-ranks // node_size)
    words = ["torchrun", "--nproc-per-node", str(ranks // nodes)]
    if nodes > 1:
        words[1:1] = ["--nnodes", str(nodes)]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "first-node:29500"]
    return words


def beside(path: Path, suffix: str) -> Path:
    """Return the path with a suffix added to its name, for example ``mine-proxy.toml`` for ``mine.toml``."""
    return path.with_stem(path.stem + suffix)


def free(path: Path) -> Path:
    """Return ``path``. If it exists, add the first free number (-2, -3, ...) to its name."""
    free, number = path, 2
    while free.exists():
        free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return free
