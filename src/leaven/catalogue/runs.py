"""Published training runs, one TOML file each in ``runs/``, every group of values with its source; beside them the
bases that leaven tuned itself, which have a group ``[tuning]`` and no vote among the published.

To add a run, add a file: its name is the run's id, the groups are those of :mod:`leaven.catalogue.groups`.
"""

import difflib
import math
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leaven.catalogue.run import Kind, Run, Stack, alike
from leaven.recipe.errors import InputError

__all__ = [
    "FOLDER",
    "Run",
    "Stack",
    "closest",
    "diff",
    "find_run",
    "listed",
    "load_runs",
    "nearest",
    "own_runs",
    "size_ratio",
]

FOLDER = Path(__file__).parent / "runs"
# An octave of tokens counts as an eighth of one of parameters: published choices hardly know the tokens.
_TOKEN_WEIGHT = 0.125


def load_runs() -> tuple[Run, ...]:
    """All published runs, from the smallest to the largest."""
    return tuple(run for run in _load(FOLDER) if run.tuning is None)


def own_runs() -> tuple[Run, ...]:
    """The small runs that leaven tuned itself, from the smallest to the largest: bases to transfer from."""
    return tuple(run for run in _load(FOLDER) if run.tuning is not None)


def find_run(id: str) -> Run:
    """One run by its id, published or a base of leaven's own.

    Raises:
        InputError: if there is no such run; names the ids most like it.
    """
    path = FOLDER / f"{id}.toml"
    known = sorted(file.stem for file in FOLDER.glob("*.toml"))
    if id not in known:
        raise InputError(f"no published run {id!r}; did you mean {listed(closest(id, known))}?")
    return _read(path)


def closest(name: str, known: Iterable[str]) -> list[str]:
    """The three names most like one that is not known."""
    return difflib.get_close_matches(name.lower(), sorted(known), n=3, cutoff=0.0)


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" or " if names[:-1] else "") + names[-1]


def nearest(
    params: int,
    tokens: int,
    *,
    limit: int,
    factor: float = 4.0,
    stack: Stack | None = None,
    kind: Kind = "dense",
) -> list[tuple[Run, float]]:
    """The runs nearest in stack, size and duration, and their distance in octaves of parameters.

    Only runs within ``factor`` of the size, if there are any; else the nearest of all, so that the list is never
    empty: see :func:`size_ratio`. Within it those of the same stack come first. A lineage has one vote: first the
    best run of each lineage, then the others, each in that order. An octave of tokens counts as an eighth of one of
    parameters.
    Runs whose learning rate means something else are left out, see :attr:`Run.lr_comparable`; a stack that names
    another optimiser asks for the learning rates of that.

    Raises:
        InputError: if there are no parameters or no tokens, or no run of this kind has a learning rate to compare.
    """
    if params <= 0 or tokens <= 0:
        raise InputError(f"a run of {params} parameters and {tokens} tokens has no neighbours; both must be above 0")
    if not factor >= 1:  # nor nan
        raise InputError(f"a factor of {factor:g} leaves no size; give one of at least 1, for example 4")
    stack = stack or Stack()
    optimizers = alike(stack.optimizer or "adamw")
    found = [
        (run, _distance(run, params, run.tokens, tokens))
        for run in load_runs()
        if run.kind == kind and run.comparable_lr(optimizers) and run.tokens
    ]
    if not found:
        raise InputError(f"no published {kind} run with {listed(optimizers)} has a learning rate to compare")
    within = [pair for pair in found if size_ratio(pair[0], params) <= factor]
    ranked = sorted(within or found, key=lambda pair: (bool(within) and not stack.fits(pair[0].stack), pair[1]))
    voted: set[str] = set()
    first: list[tuple[Run, float]] = []
    rest: list[tuple[Run, float]] = []
    for pair in ranked:
        lineage = pair[0].lineage.name
        (rest if lineage in voted else first).append(pair)
        voted.add(lineage)
    return (first + rest)[:limit]


def size_ratio(run: Run, params: int) -> float:
    """How far apart two sizes are, as a factor of at least 1."""
    return max(run.params_total / params, params / run.params_total)


def diff(run_a: Run, run_b: Run) -> list[tuple[str, Any, Any]]:
    """The values in which two runs differ: dotted path, value of a, value of b; None where one is silent."""
    a, b = run_a.flat(), run_b.flat()
    paths = [*a, *(path for path in b if path not in a)]
    return [(path, a.get(path), b.get(path)) for path in paths if path != "id" and a.get(path) != b.get(path)]


@cache  # the checks of one recipe ask for the runs hundreds of times
def _load(folder: Path) -> tuple[Run, ...]:
    return tuple(sorted((_read(path) for path in folder.glob("*.toml")), key=lambda run: (run.params_total, run.id)))


@cache
def _read(path: Path) -> Run:
    try:
        return Run.model_validate(tomllib.loads(path.read_text(encoding="utf-8")) | {"id": path.stem})
    except ValidationError as error:
        raise InputError(f"{path.name}: {_explain(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path.name}: {error}") from None


def _explain(error: ValidationError) -> str:
    """Field by field: ``optim.beta2: Input should be a valid number``."""
    found = []
    for one in error.errors(include_url=False):
        where = ".".join(map(str, one["loc"]))
        found.append(f"{where}: {one['msg']}" if where else one["msg"].removeprefix("Value error, "))
    return "; ".join(found)


def _distance(run: Run, params: int, run_tokens: int, tokens: int) -> float:
    return math.hypot(math.log2(run.params_total / params), _TOKEN_WEIGHT * math.log2(run_tokens / tokens))
