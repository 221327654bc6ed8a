"""What a starter is asked for, and which questions make sense."""

from dataclasses import dataclass

from leaven.catalogue.runs import load_runs
from leaven.recipe.errors import InputError
from leaven.recipe.units import format_quantity

LEAST_PARAMS, MOST_PARAMS = 100_000, 10**13
MOST_TOKENS = 10**15


@dataclass(frozen=True)
class Asked:
    """What `leaven new` is asked for."""

    name: str
    params: int
    tokens: int
    source: str = "python-stdlib"
    vocab: int | None = None
    seq_len: int | None = None
    lead: str | None = None  # the id of a published run whose values are taken together
    gpus: int = 1  # the batch divides over so many
    proxy: int | None = None  # parameters of the proxy, None to choose; 0 for no proxy
    text_tokens: int | None = None  # how many tokens the text has, if that is known


def check(asked: Asked) -> None:
    largest = max(run.params_total for run in load_runs() if run.kind == "dense")
    if not LEAST_PARAMS <= asked.params <= MOST_PARAMS:
        beyond = (
            f"the largest published dense run has {format_quantity(largest)}"
            if asked.params > MOST_PARAMS
            else "a smaller model is nearly all vocabulary"
        )
        raise InputError(
            f"--params {asked.params:,}: give {format_quantity(LEAST_PARAMS)} to {format_quantity(MOST_PARAMS)}; "
            f"{beyond}"
        )
    if not 0 < asked.tokens <= MOST_TOKENS:
        raise InputError(f"--tokens {asked.tokens:,}: give a count up to {format_quantity(MOST_TOKENS)}, e.g. 20B")
    for option, count, least in (("--vocab", asked.vocab, 257), ("--seq-len", asked.seq_len, 16)):
        if count is not None and count < least:
            raise InputError(f"{option} {count}: give {least} or more, or leave it out")
