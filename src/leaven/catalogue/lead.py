"""One published run whose values are taken together (``leaven new --from ID``), and what of it leaven cannot take."""

from collections.abc import Iterator
from typing import get_args

from leaven.catalogue.growth import grown
from leaven.catalogue.run import Run
from leaven.catalogue.runs import find_run, listed, nearest
from leaven.catalogue.terms import without_counterpart
from leaven.catalogue.votes import batch_ramps
from leaven.recipe.errors import InputError
from leaven.recipe.shape import Activation, Positions

# What an ordinary run has and a recipe need not say, or says in other words.
_CARRIED = ("batch.", "schedule.", "precision.", "data.", "init.", "parallel.")


def find_lead(id: str) -> Run:
    """A run that can be started from: dense, with a comparable learning rate, its batch and its length.

    Raises:
        InputError: if there is no such run, or it lacks one of these; names others.
    """
    run = find_run(id)
    lacks = _lacks(run)
    if lacks is None:
        return run
    others = nearest(run.params_active, run.tokens or 20 * run.params_active, limit=20)
    usable = [other.id for other, _ in others if _lacks(other) is None][:3]
    raise InputError(f"--from {id}: {lacks}; near it are {listed(usable)}")


def _lacks(run: Run) -> str | None:
    schedule = run.schedule
    if run.kind != "dense":
        what = "a mixture of experts" if run.kind == "moe" else "a model that sees"
        return f"{what}, and leaven builds dense ones of text"
    if schedule is None or schedule.peak_lr is None:
        return "it publishes no learning rate"
    if not run.lr_comparable:
        how = schedule.parametrisation or run.optimizer or "an optimizer that is not told"
        return f"its learning rate {schedule.peak_lr:g} is that of {how}, which means something else to AdamW"
    if run.batch_tokens is None or run.tokens is None:
        return "it does not tell its batch and its length, without which its learning rate says little"
    if run.arch.d_model is None or run.arch.n_layers is None:
        return "its shape is not published"
    return None


def _growth_told(run: Run) -> bool:
    starts, lengths = batch_ramps([run])
    assert run.tokens
    assert run.batch_tokens
    return bool(starts and lengths) or grown(run, run.tokens, run.batch_tokens, 1) is not None


def left_behind(run: Run) -> Iterator[str]:
    """What of a run no recipe of leaven's can say."""
    arch = run.arch
    if arch.norm_placement not in (None, "pre"):
        yield f"norms at the {arch.norm_placement} of a branch (leaven: ahead of it)"
    if arch.activation and arch.activation not in get_args(Activation):
        yield f"{arch.activation} (instead: {'swiglu' if arch.gated else 'gelu'})"
    if arch.positional and arch.positional != "rotary" and arch.positional not in get_args(Positions):
        yield f"{arch.positional} positions (instead: rope)"
    if run.batch_grew and run.tokens and run.batch_tokens and not _growth_told(run):
        yield "how its batch grew, of which too little is published"
    if any("seq_len" in stage for stage in (run.batch and run.batch.rampup and run.batch.rampup.stages) or ()):
        yield "sequences of other lengths at first"
    for path, value in without_counterpart(run):
        if value and path != "arch.norm_placement" and not path.startswith(_CARRIED):
            yield f"{path.partition('.')[2]} {value}"
