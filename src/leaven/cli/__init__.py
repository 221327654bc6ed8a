"""The verbs: a small file each, which parses, calls one function and hands the document to a view."""

import errno
import os
import sys
from importlib import import_module
from typing import Any, NoReturn

import typer
from rich.text import Text
from typer.core import TyperGroup

from leaven.cli.usage_errors import mended
from leaven.recipe.errors import InputError, Lost, out_of_memory
from leaven.views.terminal.console import console, errors

# What `leaven --help` says of each verb. Its file, of the same name, is imported when it is called.
VERBS = {
    "recipes": "Published runs; every value names its source.",
    "laws": "Learning rate, batch, decay and loss by every published law: conditions, fitted range, spread.",
    "new": "Write a recipe and the proxy to tune for it, with a reason for every value.",
    "show": "Print what every parameter gets: shape, role, init std, lr, weight decay, betas, eps, multiplier.",
    "transfer": "Take a recipe to another width, depth, batch or duration; warns where that was never tested.",
    "plan": "Will it fit, how fast, how long, at what cost; finds the best layout. With --budget: sizes that fit.",
    "hardware": "The accelerators that the planner knows: rates, memory, power and links, each with its source.",
    "check": "Does a rule hold? Checks on small models, minutes each; exit code 1 if one fails.",
    "tune": "Search the hyperparameters of a small recipe. Run it again to resume, on several machines to share it.",
    "train": "Train a recipe. Run it again to resume, with the same losses to the last bit.",
    "sample": "Generate text from a trained run.",
    "export": "Write weights or configurations in other people's formats.",
    "import": "Read other people's configurations as a recipe.",
    "bench": "Tokens/s, MFU and memory over micro-batch and global batch; where a ramp should start. Writes nothing.",
    "report": "Write one self-contained HTML page about a run, a study, a check, a demo or the published runs.",
    "demo": "All of it on this machine, on real text: tune a little model, transfer, train a bigger one, report.",
}


class Verbs(TyperGroup):
    """The verbs, each imported when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        module = import_module(f"leaven.cli.{'import_' if name == 'import' else name}")
        verb = typer.main.get_command(module.app)
        verb.help = "\n\n".join(filter(None, [VERBS[str(name)], verb.help]))
        return name, verb, rest


app = typer.Typer(
    cls=Verbs,
    name="leaven",
    help="Tune a little model, train the big one.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _help in VERBS.items():
    app.command(_name, help=_help)(lambda: None)  # only its line in the list: Verbs finds the verb itself

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 75
_CTRL_C = 130  # what typer makes of a KeyboardInterrupt
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@app.callback(invoke_without_command=True)
def _no_verb(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run a verb. What is wrong with the input is one line on standard error and exit code 2, never a traceback."""
    if "RANK" not in os.environ:
        _main()
        return
    console.quiet = errors.quiet = os.environ["RANK"] != "0"  # one of many talks
    try:
        _main()
    except SystemExit as left:
        # One of many processes: threads of torch's that still wait for others would abort it at its end, which
        # torchrun takes for a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(left.code if isinstance(left.code, int) else FAILED)


def _main() -> None:
    try:
        code = app(prog_name="leaven", standalone_mode=False)
    except InputError as error:
        _say_of_one(error)
        _fail(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "leaven":
            raise
        _fail(f"this needs {error.name}, which is not installed: pip install 'leaven[train]'")
    except BrokenPipeError:  # leaven ... | head
        sys.stderr.close()
        sys.exit(FAILED)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _say_of_one(error)
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{error.strerror}{where}; make room and run the same command again, what was complete is kept")
    except Exception as error:
        if isinstance(error, Lost):
            sys.stderr.write(f"error: {error}\n")  # each process has its own
            sys.exit(FAILED)
        _say_of_one(error)
        if out_of_memory(error):
            why = str(error) or type(error).__name__
            _fail(f'out of memory; for a training lower [batch] micro_batch or set it to "auto" ({why})', FAILED)
        said = mended(error)
        if said is None:
            raise
        _fail(said)
    else:
        if code == _CTRL_C:
            errors.print("interrupted; the same command goes on from what is on disk")
            sys.exit(INTERRUPTED)
        sys.exit(code or 0)


def _say_of_one(error: Exception) -> None:
    """Let this process speak, though it is not the first, if what befell it is known to no other."""
    if getattr(error, "__notes__", None) and errors.quiet:
        errors.quiet = False
        errors.print(Text.assemble((f"{error.__notes__[0]}: ", "bold red")), end="")


def _fail(message: str, code: int = WRONG_INPUT) -> NoReturn:
    line = Text.assemble(("error: ", "bold red"), " ".join(message.split()))
    errors.print(line)
    sys.exit(code)
