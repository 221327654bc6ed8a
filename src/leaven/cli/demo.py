"""Defines the command ``leaven demo``."""

from pathlib import Path
from typing import Annotated, Literal

from leaven.cli.common import JsonOption, device_option, exit_interrupted, option, print_document, stop_on_signal
from leaven.errors import InputError
from leaven.planning.this_machine import cores


def demo(
    run: Annotated[Path, option("The folder for the runs, the recipes and the page.")] = Path("runs/demo"),
    size: Annotated[
        Literal["full", "quick"] | None,
        option(
            "full: about five minutes on two slow cores. quick: about one minute, with fewer widths.",
            "full",
        ),
    ] = None,
    quick: Annotated[bool, option("The same as --size quick.", names="--quick")] = False,
    source: Annotated[
        str | None,
        option(
            "The text to train on: a file, a glob or hf://..., as for data.source in a recipe.",
            "tiny-shakespeare, which comes with leaven",
        ),
    ] = None,
    workers: Annotated[
        int | None, option("Number of worker processes. The losses do not depend on it.", "one per core", min=1)
    ] = None,
    device: Annotated[str, device_option("cpu: the same losses on every machine")] = "cpu",
    json_output: JsonOption = False,
) -> None:
    from leaven.demo import run_demo
    from leaven.verification.runs import ChecksStopped
    from leaven.views.demo import demo_summary

    if quick and size not in {None, "quick"}:
        raise InputError(f"--quick contradicts --size {size}; give one of them")
    with stop_on_signal() as stop:
        try:
            document = run_demo(run, "quick" if quick else size, source, workers or cores(), stop)
        except ChecksStopped:
            exit_interrupted(f"stopped; run the same command again to resume from {run}")
    print_document(document, demo_summary(document), json_output, document.next)
