"""Check the options of `leaven new`, and find the published run that ``--from`` names."""

from dataclasses import dataclass

from leaven.catalogue.neighbours import nearest
from leaven.catalogue.runs import PublishedRun, find_run, listed, load_runs
from leaven.recipe.errors import InputError
from leaven.recipe.units import format_quantity

LEAST_PARAMS, MOST_PARAMS = 100_000, 10**13
MOST_TOKENS = 10**15


@dataclass(frozen=True)
class StarterRequest:
    """The options of `leaven new`."""

    name: str
    params: int  # size of the model
    tokens: int  # length of the run
    source: str = "python-stdlib"  # the training text
    vocab: int | None = None  # None: leaven chooses
    seq_len: int | None = None  # None: leaven chooses
    reference: str | None = None  # ``--from``: id of a published run whose values replace the votes of many runs
    gpus: int = 1  # the batch must divide over these GPUs
    proxy: int | None = None  # parameters of the proxy; None: leaven chooses; 0: no proxy
    text_tokens: int | None = None  # tokens of the text, if known

    def validate(self) -> None:
        """Check that all counts are in range.

        Raises:
            InputError: if a count is out of range.
        """
        if not LEAST_PARAMS <= self.params <= MOST_PARAMS:
            largest = max(run.params_total for run in load_runs() if run.kind == "dense")
            beyond = (
                f"the largest published dense run has {format_quantity(largest)}"
                if self.params > MOST_PARAMS
                else "a smaller model is nearly all vocabulary"
            )
            raise InputError(
                f"--params {self.params:,}: give {format_quantity(LEAST_PARAMS)} to {format_quantity(MOST_PARAMS)}; "
                f"{beyond}"
            )
        if not 0 < self.tokens <= MOST_TOKENS:
            raise InputError(f"--tokens {self.tokens:,}: give a count up to {format_quantity(MOST_TOKENS)}, e.g. 20B")
        for option, count, least in (("--vocab", self.vocab, 257), ("--seq-len", self.seq_len, 16)):
            if count is not None and count < least:
                raise InputError(f"{option} {count}: give {least} or more, or leave it out")


def find_reference(id: str) -> PublishedRun:
    """Return the published run that ``--from`` names.

    Raises:
        InputError: if there is no such run, or if it cannot be used. The run must be dense, with an lr for plain Adam
            or AdamW and with known shape, batch and length. The message names runs that can be used.
    """
    run = find_run(id)
    lacks = _lacks(run)
    if lacks is None:
        return run
    others = nearest(run.params_active, run.tokens or 20 * run.params_active, limit=20)
    usable = [other.id for other, _ in others if _lacks(other) is None][:3]
    raise InputError(f"--from {id}: {lacks}; give a run of similar size: {listed(usable)}")


def _lacks(run: PublishedRun) -> str | None:
    schedule = run.schedule
    if run.kind != "dense":
        what = "a mixture of experts" if run.kind == "moe" else "a model with vision"
        return f"{what}, but leaven builds only dense models of text"
    if schedule is None or schedule.peak_lr is None:
        return "it publishes no learning rate"
    if not run.lr_comparable:
        how = schedule.parametrisation or run.optimizer or "an unknown optimizer"
        return f"its learning rate {schedule.peak_lr:g} is for {how} and cannot be used with plain AdamW"
    if run.batch_tokens is None or run.tokens is None:
        return "its batch or its number of tokens is not published, so its learning rate says little"
    if run.arch.d_model is None or run.arch.n_layers is None:
        return "its shape is not published"
    return None
