"""Defines the command ``leaven new``."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from leaven.catalogue.starter.draft import StarterRequest, find_reference, used_params
from leaven.cli import next_commands
from leaven.cli.common import (
    JsonOption,
    argument,
    count_above_0,
    count_option,
    option,
    parsed_option,
    print_document,
    recipe_name,
    require_alone,
    require_new,
)
from leaven.data.sources import text_size
from leaven.data.token_files import TOKEN_SUFFIXES
from leaven.documents.planning import AdoptedRecipe
from leaven.errors import InputError
from leaven.planning.budget import size_for_time
from leaven.planning.hardware import parse_cluster
from leaven.planning.start import start
from leaven.planning.this_machine import gpus_here
from leaven.recipe.data import DataSource
from leaven.recipe.files import write_recipe
from leaven.scaling.tested_ranges import unlike, warnings
from leaven.views.terminal.console import warn
from leaven.views.terminal.files import adopted, derived


def new(
    context: typer.Context,
    output: Annotated[
        Path,
        argument(
            "OUT.toml", "The recipe file to write. The recipe of a small proxy model is written to OUT-proxy.toml."
        ),
    ],
    params: Annotated[
        int | None, count_option("Size of the model, embeddings and all experts included, e.g. 1B.")
    ] = None,
    tokens: Annotated[
        int | None, count_option("Length of the run in tokens, e.g. 20B.", "20 per parameter with --from-weights")
    ] = None,
    time: Annotated[
        str | None,
        option(
            "Choose --params and --tokens so that training takes this time on --gpus, e.g. 3h or 2d. Without "
            "--gpus, it is the time on this machine's CPU.",
            metavar="TIME",
        ),
    ] = None,
    proxy: Annotated[
        int | None,
        parsed_option(
            lambda text: 0 if text == "none" else count_above_0(text),
            "COUNT",
            "Size of the proxy model, e.g. 50M, or none to write no proxy recipe.",
            "chosen by published evidence and cost",
        ),
    ] = None,
    from_run: Annotated[
        str | None,
        option(
            "Copy the values of this published run (see leaven recipes list). Without --params, also copy its size "
            "and length.",
            metavar="ID",
            names="--from",
        ),
    ] = None,
    experts: Annotated[
        int | None, count_option("Make a mixture of experts: the number of experts in each layer, e.g. 64.", "dense")
    ] = None,
    active: Annotated[
        int | None, count_option("How many of the experts each token uses, e.g. 8. Needs --experts.")
    ] = None,
    gpus: Annotated[
        str | None, option("Choose the layout for this cluster, e.g. 8xH100-80GB.", metavar="COUNTxNAME")
    ] = None,
    from_weights: Annotated[
        Path | None,
        option(
            "Continue training the Hugging Face model in this folder, instead of choosing a new shape.", metavar="DIR"
        ),
    ] = None,
    source: Annotated[
        str, option(r"The text to train on: a file, a glob or hf://... It becomes the key source in \[data].")
    ] = "python-stdlib",
    vocab: Annotated[int | None, count_option("Vocabulary size.", "chosen by size")] = None,
    seq_len: Annotated[int | None, count_option("Sequence length in tokens.", "chosen by size")] = None,
    force: Annotated[bool, option("Overwrite OUT.toml and OUT-proxy.toml if they exist.", names="--force")] = False,
    json_output: JsonOption = False,
) -> None:
    require_new(output, force)
    proxy_output = next_commands.beside(output, next_commands.PROXY)
    require_new(proxy_output, force)
    if output.stem.endswith((next_commands.PROXY, next_commands.TUNED)):
        raise InputError(
            f"{output}: names ending in -proxy and -tuned are reserved for the recipes derived from OUT.toml; "
            "give another name"
        )
    name = recipe_name(output, "new")
    if from_weights is not None:
        require_alone(context, "--from-weights", "params time proxy from_run experts active gpus vocab seq_len")
        _require_no_proxy(proxy_output)
        _adopt(output, name, from_weights, tokens, source, json_output)
        return
    cluster = parse_cluster(gpus) if gpus else None
    if source.endswith(TOKEN_SUFFIXES) and vocab is None:
        raise InputError(
            f"{source} has token ids; add --vocab COUNT, the size of the vocabulary they were written with"
        )
    mixture = _mixture(context, experts, active)
    size = None if source == "python-stdlib" else text_size(DataSource(source=source))
    text_tokens = size.tokens if size is not None else None
    fit = None
    if time is not None:
        require_alone(context, "--time", "params tokens from_run")
        if cluster is None and gpus_here():
            raise InputError("--gpus is missing; name this machine's GPUs, for example --gpus 1xRTX-4090")
        machine = cluster or parse_cluster("cpu")
        params, tokens, fit = size_for_time(
            machine, time, text_tokens, vocab=vocab, seq_len=seq_len, on_fault=lambda fault: warn([fault])
        )
    if from_run is not None:
        reference = find_reference(from_run)
        mixture = reference.experts
        if params is None:
            params, tokens = reference.params_total, tokens or reference.tokens
    if params is None:
        raise InputError("no size is given; type --params COUNT --tokens COUNT, --time TIME or --from-weights DIR")
    if tokens is None:
        used = used_params(params, mixture)
        raise InputError(f"--tokens is missing; type --tokens {20 * used} for 20 tokens per parameter")
    request = StarterRequest(
        name,
        params,
        tokens,
        source=source,
        vocab=vocab,
        seq_len=seq_len,
        reference=from_run,
        gpus=cluster.gpus if cluster else 1,
        proxy=proxy,
        text_tokens=text_tokens,
        experts=mixture,
    )
    started = start(request, cluster)
    warn(each.message for each in [*unlike(started.source, started.target), *warnings(started.target)])
    if started.proxy is None:
        _require_no_proxy(proxy_output)
    _warn_of_tuned(next_commands.beside(output, next_commands.TUNED))
    files = [(output, started.target)] + ([(proxy_output, started.proxy)] if started.proxy else [])
    for file, recipe in files:
        write_recipe(recipe, file)
    following = next_commands.after_new(output, started.proxy, started.target, cluster)
    if fit is not None:
        first = next_commands.plan_of_new(output, cluster)
        following = [first, *(each for each in following if each != first)]
    document = started.document(output, proxy_output, fit)
    screen = chain(derived(document, files), next_commands.why_hardware(started.target, following))
    print_document(document, screen, json_output, following)


def _mixture(context: typer.Context, experts: int | None, active: int | None) -> tuple[int, int] | None:
    if experts is None and active is None:
        return None
    if experts is None or active is None:
        given, missing = ("--experts", "--active") if active is None else ("--active", "--experts")
        raise InputError(f"{given} needs {missing}; for example --experts 64 --active 8")
    require_alone(context, "--experts", "time from_run")
    return experts, active


def _warn_of_tuned(path: Path) -> None:
    if path.exists():
        warn([f"{path} exists and has the tuned values of an earlier recipe; remove it before you tune this one"])


def _require_no_proxy(path: Path) -> None:
    """Raise InputError if ``path`` exists. Other commands would use it as a proxy, but the new recipe has none."""
    if path.exists():
        raise InputError(
            f"{path} exists and would be used as a proxy, but the new recipe has no proxy; remove that file, or give "
            "another name"
        )


def _adopt(output: Path, name: str, weights: Path, tokens: int | None, source: str, json_output: bool) -> None:
    from leaven.interop.weights import card_caution, read_huggingface, recipe_from, zeros_caution

    plain = read_huggingface(weights)
    recipe = recipe_from(plain, name, source=source, tokens=tokens)
    warn(filter(None, [zeros_caution(weights), card_caution(recipe)]))
    write_recipe(recipe, output)
    document = AdoptedRecipe(
        path=str(output),
        architecture=plain.architecture.name,
        params=recipe.model.params,
        params_active=recipe.model.params_active,
        tokens=recipe.data.tokens,
    )
    screen = adopted(output, recipe, weights, document.architecture)
    print_document(document, screen, json_output, next_commands.after_new(output, None, recipe))
