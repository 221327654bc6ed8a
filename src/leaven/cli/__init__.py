"""The verbs: a small file each, which parses, calls one function and prints."""

import errno
import os
import sys
from typing import NoReturn

import typer
from rich.text import Text

from leaven.cli import (
    bench,
    check,
    demo,
    export,
    hardware,
    import_,
    laws,
    new,
    plan,
    recipes,
    report,
    sample,
    show,
    train,
    transfer,
    tune,
)
from leaven.cli._common import console, errors
from leaven.cli._usage import mended
from leaven.recipe.errors import InputError, Lost, out_of_memory

app = typer.Typer(
    name="leaven",
    help="Tune a little model, train the big one.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(recipes.app, name="recipes")
app.command("laws")(laws.laws)
app.command("new")(new.new)
app.command("show")(show.show)
app.command("transfer")(transfer.transfer_)
app.command("plan")(plan.plan)
app.command("hardware")(hardware.hardware)
app.add_typer(check.app, name="check")
app.command("tune")(tune.tune)
app.command("train")(train.train_)
app.command("sample")(sample.sample_)
app.add_typer(export.app, name="export")
app.add_typer(import_.app, name="import")
app.command("bench")(bench.bench_)
app.command("report")(report.report)
app.command("demo")(demo.demo)

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 75
_CTRL_C = 130  # what typer makes of a KeyboardInterrupt
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
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
