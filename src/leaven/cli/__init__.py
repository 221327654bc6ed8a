"""Defines the command line. Each command's file parses options, calls the library and prints the result."""

import errno
import os
import platform
import re
import shlex
import signal
import sys
import tempfile
import traceback
from collections import Counter
from importlib import import_module
from io import TextIOWrapper
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text
from typer.core import TyperGroup

from leaven import __version__
from leaven.errors import InputError, ProcessLost, out_of_memory, shown
from leaven.storage import AWAY
from leaven.views.terminal.console import console, echo, errors

# The commands ("verbs") and their lines in `leaven --help`. The file of a verb is imported when the verb is called.
VERBS = {
    "recipes": "List, show and compare published training runs with their sources. Check a recipe against them.",
    "laws": "Predict the learning rate, batch size, weight decay and loss with every published scaling law.",
    "new": "Write a recipe, and the recipe of a small proxy model to tune, with a reason for every value.",
    "show": "Print the shape, init std, lr, weight decay, betas, eps and multiplier of every parameter.",
    "transfer": "Scale a recipe to another width, depth, batch size or run length. Warn about untested ranges.",
    "plan": "Find the best parallel layout of a run on a cluster. Predict its memory, speed, time and cost.",
    "hardware": "List the accelerators that the planner knows, with a source for each number.",
    "check": "Check on small models, in minutes, that a scaling rule holds. A check that does not pass exits with 1.",
    "tune": "Search for the best hyperparameters of a small recipe. Run the same command again to resume.",
    "train": "Train a recipe. Run the same command again to resume; on a CPU, resuming changes no bit of the result.",
    "sample": "Generate text from a trained run.",
    "export": "Export weights, or export a recipe as a configuration for another training code.",
    "import": "Import the configuration of another training code as a recipe.",
    "bench": "Measure tokens/s, MFU and memory at several batch sizes. Propose the first batch size of a ramp.",
    "report": "Write a self-contained HTML page about a run, study, check or demo, or a comparison of runs.",
    "serve": "Show runs, studies and checks live in a browser, together with a planner and the published runs.",
    "demo": "Show in minutes whether the best learning rate of a small model, copied or scaled, suits wider models.",
}


class Verbs(TyperGroup):
    """The ``leaven`` command. It imports the file of a subcommand only when the user types that subcommand."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        options = [option for option, text in pairwise(args) if option.startswith("-") and not text]
        options += [text for text in args if re.fullmatch("--[a-z-]+=", text)]
        if options:
            raise InputError(f"{options[0]} has an empty value; is a shell variable empty?")
        name, _, rest = super().resolve_command(ctx, args)
        command = command_of(str(name))
        _refuse_repeats(getattr(command, "commands", {}).get(rest[0] if rest else "", command), rest)
        return name, command, rest


def _refuse_repeats(command: Any, args: list[str]) -> None:
    """Raise InputError if an option that takes one value is given twice, because only the last value would count."""
    context = command.context_class(command, resilient_parsing=True)  # other errors are found when the command runs
    *_, order = command.make_parser(context).parse_args(list(args))
    given = Counter(each for each in order if not (each.multiple or getattr(each, "is_flag", True)))
    if repeated := next((each for each in given if given[each] > 1), None):
        raise InputError(f"{max(repeated.opts, key=len)} is given more than once; give it once")


def command_of(verb: str) -> Any:
    """Import the file of a verb such as ``train``, and return the verb's command."""
    module = import_module(f"leaven.cli.{'import_' if verb == 'import' else verb}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False)
        app.command()(getattr(module, verb))
    command = typer.main.get_command(app)
    command.help = "\n\n".join(filter(None, [VERBS[verb], command.help]))
    for each in [command, *getattr(command, "commands", {}).values()]:
        # Without line breaks inside paragraphs, the terminal wraps the text.
        plain = "\n\n".join(" ".join(paragraph.split()) for paragraph in (each.help or "").split("\n\n"))
        each.help = escape(plain)
    return command


app = typer.Typer(
    cls=Verbs,
    name="leaven",
    help="Tune a small model, and train the big one with the tuned values.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _help in VERBS.items():
    app.command(_name, help=_help)(lambda: None)  # only for the line in --help; `Verbs` finds the real command

# The packages of each extra of pyproject.toml.
EXTRAS = {
    "train": "cmaes greenlet optuna plotly pyarrow safetensors scipy tensorboard tokenizers torch",
    "hf": "datasets",
    "serve": "plotly starlette uvicorn",
    "postgresql": "psycopg",
}

FAILED, WRONG_INPUT, BUG, INTERRUPTED = 1, 2, 70, 75
_NO_PROCESS = (
    "this machine allows no further process or thread; raise its limit (ulimit -u shows it) or use fewer workers, "
    "and run the same command again"
)
DEBUG = "LEAVEN_DEBUG"  # environment variable: if it is set, an error gives a traceback
_CTRL_C = 130  # typer's exit code for a KeyboardInterrupt
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# What the user can do about an error of the file system, by error number. A full disk has its own message.
_ADVICE = {
    **dict.fromkeys((*AWAY, errno.ENXIO), "check that the disk is mounted, and run the same command again"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "use another path, or allow leaven to read and write it"
    ),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP), "check this path"),
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ENOLCK: "mount this disk with file locks, or use another disk",
}


FIRST_STEPS = """leaven chooses the hyperparameters of a language-model pre-training run, checks on small models
that they transfer to the large model, and trains it. Three ways to begin:

  leaven demo                                     does a small model's best learning rate suit wider models?
  leaven plan bloom-176b --gpus 384xA100-80GB     predict memory, speed, time and cost of a run
  leaven new mine.toml --params 1B --tokens 20B   write a recipe for your own run

All commands: leaven --help
"""


@app.callback(invoke_without_command=True)
def _no_verb(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        echo(f"leaven {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        echo(FIRST_STEPS, newline=False)


def main() -> None:
    """Run the command line, and exit. Errors print one line to standard error; with LEAVEN_DEBUG, a traceback.

    The exit code is 2 for wrong input, 70 for a bug, 75 after Ctrl-C or another signal, and 1 for other failures.
    """
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # the encoding of the stream may lack characters
            stream.reconfigure(errors="backslashreplace")
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # not under torchrun; some clusters set RANK in every shell
        code = _run()
        if (loaded := sys.modules.get("multiprocessing")) is not None:
            for process in loaded.active_children():  # a worker that was being started when Ctrl-C interrupted
                process.kill()
        if code == INTERRUPTED:  # a scheduler may repeat the signal until the process has ended
            for name in ("SIGTERM", "SIGHUP"):
                if hasattr(signal, name):
                    signal.signal(getattr(signal, name), signal.SIG_IGN)
        sys.exit(code)
    # Only the first process prints. With a RANK that is no number, each process prints, so that its error is seen.
    console.quiet = errors.quiet = os.environ["RANK"].isdigit() and os.environ["RANK"] != "0"
    code = _run()
    # Under torchrun, torch threads may still wait for other processes. They would abort a normal exit, and torchrun
    # would count that as a failure.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _open_standard_streams() -> None:
    """Open the null device in place of each standard stream that is closed, for example by ``leaven ... >&-``.

    Otherwise, the next opened file would get the number of the stream, and printed text would go into that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # as standard streams are
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _run() -> int:
    try:
        code = app(prog_name="leaven", standalone_mode=False)
    except BrokenPipeError:  # of a print in the user's own code
        sys.stderr.close()
        return FAILED
    except KeyboardInterrupt:  # during imports; if a command is interrupted, typer returns this code
        code = _CTRL_C
    except ProcessLost as error:
        sys.stderr.write(f"error: {shown(str(error))}\n")  # each process prints its own message
        return FAILED
    except BaseException as error:
        # A panic of a Rust library is a BaseException, but not an Exception.
        if os.environ.get(DEBUG) or not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        message, notes = error_message(error), getattr(error, "__notes__", [])
        if errors.quiet and (notes or message is None):
            errors.quiet = False  # no other process prints this error
            errors.print(Text("".join(f"{note}: " for note in notes[:1]), style="bold red"), end="")
        errors.print(Text.assemble(("error: ", "bold red"), " ".join((message or bug_message(error)).split())))
        return BUG if message is None else FAILED if out_of_memory(error) else WRONG_INPUT
    if code == _CTRL_C:
        errors.print("interrupted; run the same command again to resume")
        return INTERRUPTED
    return int(code or 0)


def error_message(error: BaseException) -> str | None:
    """Return the message of an error for the user, or None for a bug."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package == "leaven":
            return None
        extra = next((name for name, packages in EXTRAS.items() if package in packages.split()), None)
        what = f"'leaven[{extra}]'" if extra else package
        return f"this command needs the package {package}, which is not installed; run: pip install {what}"
    if isinstance(error, OSError):
        return _message_of_system(error)
    if out_of_memory(error):
        what = f"out of memory ({str(error) or type(error).__name__}); to"
        files = "use smaller files, " if isinstance(error, MemoryError) else ""  # not the memory of a GPU
        return f'{what} train with less memory, {files}lower micro_batch in [batch], or set it to "auto"'
    return _NO_PROCESS if str(error) == "can't start new thread" else usage_message(error)


def _has_no_folder() -> bool:
    try:
        os.getcwd()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _message_of_system(error: OSError) -> str | None:
    """Return the message for an error of the system, such as a full disk, or None if the user cannot fix it."""
    if isinstance(error, BlockingIOError) and not hasattr(error, "characters_written"):  # not of a full pipe
        return _NO_PROCESS
    if _has_no_folder():
        return "the current folder was removed; type cd with a folder that exists, and run the same command again"
    if error.errno in _DISK_FULL:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; free some space and run the same command again; finished work is kept"
    # An error of a read has no file name.
    if error.errno in _ADVICE and (error.filename or error.errno in {errno.EIO, errno.ESTALE}):
        what, advice = os.strerror(error.errno).lower(), _ADVICE[error.errno]
        return f"{os.fsdecode(error.filename)}: {what}; {advice}" if error.filename else f"{what} on a disk; {advice}"
    return None


def bug_message(error: BaseException) -> str:
    """Write a bug's traceback to a file that only this user can read, and return a message that names the file."""
    what = f"a bug in leaven: {type(error).__name__}: {f'{error}'[:200]}"
    about = (
        f"leaven {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"{shlex.join(['leaven', *sys.argv[1:]])}\n\n{''.join(traceback.format_exception(error))}"
    )
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="leaven-", suffix=".txt", delete=False
        ) as file:
            file.write(shown(about))
    except OSError:
        return f"{what}; to report it, run the command again with {DEBUG}=1, which shows the traceback"
    return f"{what}; please remove private data from the file {file.name}, and report the bug with this file"


def usage_message(error: Any) -> str | None:
    """Return what is wrong with the command line and what to type, or None if ``error`` is no error of typer."""
    # This does not test the class, because some versions of typer contain their own copy of click.
    if not hasattr(error, "format_message"):
        return None
    context: Any = getattr(error, "ctx", None)
    param: Any = getattr(error, "param", None)
    # Some versions of typer and click both suggest a name: typer in `message`, click again in `format_message`.
    message = (error.message if "Did you mean" in error.message else error.format_message()).strip()
    if param is not None and message.startswith("Missing"):
        required = [(param.opts[0], param.metavar) for param in context.command.params if param.required]
        words = [f"{name} {value}" if name.startswith("-") else value for name, value in required]
        return f"{parameter_name(param)} is missing; type: {' '.join([context.command_path, *words])}"
    if param is not None:
        message = error.message.removeprefix("Value error, ")
        return f"{parameter_name(param)}: {message[:1].lower()}{message[1:]}"
    message = f"{message[:1].lower()}{message[1:]}".rstrip(".")
    if context is None or "Did you mean" in message or "Possible options" in message:
        return message
    return f"{message}; type: {context.command_path} --help"


def parameter_name(param: Any) -> str:
    """Return the name of a parameter, such as ``--output/-o`` for an option or ``RECIPE`` for an argument."""
    names = [*param.opts, *param.secondary_opts]
    return "/".join(names) if names[0].startswith("-") else str(param.metavar or param.name.upper())
