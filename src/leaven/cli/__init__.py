"""The command line. Each verb has a file, which parses the options, calls the library and prints its document."""

import errno
import os
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text
from typer.core import TyperGroup

from leaven import __version__
from leaven.cli.usage_errors import usage_message
from leaven.recipe.errors import InputError, ProcessLost, out_of_memory
from leaven.views.terminal.console import console, errors

# The lines of `leaven --help`. The file of a verb has its name and is imported when the verb is called.
VERBS = {
    "recipes": "List and compare published training runs, with sources; check a recipe against them.",
    "laws": "Predict learning rate, batch size, weight decay and loss by every published scaling law.",
    "new": "Write a recipe and the small proxy recipe to tune for it, with a reason for every value.",
    "show": "Print the shape, init std, lr, weight decay, betas, eps and multiplier of every parameter.",
    "transfer": "Scale a recipe to another width, depth, batch size or duration; warn where that was never tested.",
    "plan": "Predict memory, speed, time and cost on a cluster; find the best layout. With --budget: sizes that fit.",
    "hardware": "List the accelerators that the planner knows, each number with its source.",
    "check": "Check on small models that a scaling rule holds, in minutes. Exit code 1 if the check fails.",
    "tune": "Search the hyperparameters of a small recipe. Run it again to resume, or on more machines to go faster.",
    "train": "Train a recipe. Run it again to resume; the losses are the same to the last bit.",
    "sample": "Generate text from a trained run.",
    "export": "Export weights, or a configuration for another training code.",
    "import": "Import the configuration of another training code as a recipe.",
    "bench": "Measure tokens/s, MFU and memory over batch sizes, and where a batch ramp should start.",
    "report": "Write a self-contained HTML page about a run, a study, a check, a demo or the published runs.",
    "serve": "Show runs, studies and checks live in a browser, with a planner and the published runs.",
    "demo": "Tune a small model on real text, transfer its values, train a larger model and write a report.",
}


class Verbs(TyperGroup):
    """The group of all verbs, which imports a verb when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        module = import_module(f"leaven.cli.{'import_' if name == 'import' else name}")
        verb = typer.main.get_command(module.app)
        verb.help = "\n\n".join(filter(None, [VERBS[str(name)], verb.help]))
        for command in [verb, *getattr(verb, "commands", {}).values()]:
            command.help = _unwrapped(command.help or "")
        return name, verb, rest


def _unwrapped(text: str) -> str:
    """Paragraphs without the line breaks of the source, so that the terminal wraps them."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


app = typer.Typer(
    cls=Verbs,
    name="leaven",
    help="Tune a small model, train the big one.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _help in VERBS.items():
    app.command(_name, help=_help)(lambda: None)  # a line of --help; `Verbs` finds the verb itself

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 75
_CTRL_C = 130  # typer's exit code for a KeyboardInterrupt
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


# What `leaven` prints without arguments.
FIRST_STEPS = """leaven chooses the hyperparameters of a language-model pre-training run, shows on small models
that they transfer to the large one, and trains it. Three ways to begin:

  leaven demo                                     tune, transfer and train on this machine
  leaven plan bloom-176b --gpus 384xA100-80GB     memory, speed, time and cost of a run; starts nothing
  leaven new mine.toml --params 1B --tokens 20B   a recipe for your own run, with a reason for each value

All commands: leaven --help
"""


@app.callback(invoke_without_command=True)
def _no_verb(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"leaven {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(FIRST_STEPS, nl=False)


def main() -> None:
    """Run a verb. Wrong input gives one line on standard error and exit code 2, never a traceback."""
    if "RANK" not in os.environ:
        _main()
        return
    console.quiet = errors.quiet = os.environ["RANK"] != "0"  # only the first process prints
    try:
        _main()
    except SystemExit as left:
        # Under torchrun, threads of torch may still wait for other processes. They would abort a normal exit, which
        # torchrun counts as a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(left.code if isinstance(left.code, int) else FAILED)


def _main() -> None:
    try:
        code = app(prog_name="leaven", standalone_mode=False)
    except InputError as error:
        _let_this_process_print(error)
        _fail(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "leaven":
            raise
        _fail(f"this needs {error.name}, which is not installed: pip install 'leaven[train]'")
    except BrokenPipeError:  # leaven ... | head
        sys.stderr.close()
        sys.exit(FAILED)
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        _let_this_process_print(error)
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{error.strerror}{where}; free some space and run the same command again, finished work is kept")
    except Exception as error:
        if isinstance(error, ProcessLost):
            sys.stderr.write(f"error: {error}\n")  # each process has its own
            sys.exit(FAILED)
        _let_this_process_print(error)
        if out_of_memory(error):
            why = str(error) or type(error).__name__
            _fail(f'out of memory ({why}); to train with less, lower [batch] micro_batch or set it to "auto"', FAILED)
        message = usage_message(error)
        if message is None:
            raise
        _fail(message)
    else:
        if code == _CTRL_C:
            errors.print("interrupted; run the same command again to resume")
            sys.exit(INTERRUPTED)
        sys.exit(code or 0)


def _let_this_process_print(error: Exception) -> None:
    """Print from this process, even if it is not the first, when only this process knows about the error."""
    if getattr(error, "__notes__", None) and errors.quiet:
        errors.quiet = False
        errors.print(Text.assemble((f"{error.__notes__[0]}: ", "bold red")), end="")


def _fail(message: str, code: int = WRONG_INPUT) -> NoReturn:
    line = Text.assemble(("error: ", "bold red"), " ".join(message.split()))
    errors.print(line)
    sys.exit(code)
