"""A shell command whose loss a study minimises, and the command file that describes it together with a search space.

A command file is TOML::

    command = "python train.py --learning_rate={lr} --seed={seed} --out_dir={out}"
    loss.pattern = 'step {step}: val loss {loss}'
    [space]
    lr = {start = 6e-4, low = 1e-5, high = 1e-2}
    optimizer = {choices = ["adamw", "lion"]}

The command, ``environment``, the path of the losses and the file ``config`` may have placeholders: names in
braces. Each name is a searched value, or one of these:

- ``{seed}``: the seed of the trial.
- ``{out}``: a folder for the output of the trial, empty at first. With ``resume = true``, a retry gets the folder of
  the first attempt.
- ``{worker}``: the index of the worker that runs the command, from 0.
- ``{config}``: the path of a copy of the file ``config`` in which all placeholders are filled in.

``leaven tune RECIPE --command TEXT`` searches values of a recipe instead. Then the path or short path of any value of
the recipe is a placeholder (``{hyperparameters.lr}`` or ``{lr}``). ``{recipe}`` is the path of a file with the
trial's recipe.

Write ``{{name}}`` for the text ``{name}``. ``${name}`` is left to the shell. leaven quotes a value that the shell
would misread, such as a text with spaces. So the placeholder of such a value must not be inside quotes.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import tomlkit
from pydantic import AfterValidator, Field, model_validator

from leaven.errors import InputError, suggestion
from leaven.recipe.base import Part
from leaven.recipe.files import parse_toml, read_text, render, update, validated
from leaven.recipe.recipe import Difference, differing, short_path
from leaven.tuning.point import Value, distance_in, moved
from leaven.tuning.space import SearchSpace, Space
from leaven.tuning.study_document import Dimension

SEED, OUT, WORKER, CONFIG, RECIPE = "seed", "out", "worker", "config", "recipe"
OF_TRIAL = (SEED, OUT, WORKER, CONFIG)  # placeholders that are not searched values
NAME = r"[A-Za-z_][\w-]*"
_PLACEHOLDER = re.compile(r"\{(\{[A-Za-z_][\w.\-\[\]]*\})\}|(?<!\$)\{([A-Za-z_][\w.\-\[\]]*)\}")
_NESTED = re.compile(r"`|<<|\$[('\"]|\$\{\w*[^\w}]")  # parts of a command in which quotes mean something else
# What {loss} takes: all characters of a number, also of one that cannot be read, such as 1,234.5, 2.3k or ****. A
# comma belongs to it only after bare digits: in 2.3,5 and nan,5, the comma begins the next column.
LOSS_TEXT = r"(?:\*+|(?:[-+]?\d++,(?=\d))*(?:[\w.+#-]|[^\x00-\x7f]|'(?=\d))*)"
_STEP = r"\d+(?:[,_]\d{3})*"
SOURCES = ("pattern", "jsonl", "tensorboard", "wandb")
# Keys that may differ between the processes of one study, for example on another machine.
OF_MACHINE = ("timeout_seconds", "prune", "devices", "resume")
DIGITS = 6  # significant digits of a searched number in the command


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError("a command line cannot have the character \\u0000; remove it")
    return text


# Names of environment variables with secrets, such as WANDB_API_KEY and HF_TOKEN, but not PAD_TOKEN.
_SECRET = re.compile(
    r"(?:PASSW(?:OR)?D|SECRET|CREDENTIALS?|_PWD|(?:API|ACCESS|SECRET|PRIVATE)KEY|^KEY|(?<!SORT)(?<!PARTITION)_KEY"
    r"|(?<!PAD_)(?<!BOS_)(?<!EOS_)(?<!EOT_)(?<!END_)(?<!STOP_)(?<!UNK_)(?<!SEP_)(?<!CLS_)(?<!MASK_)(?<!MAX_)(?<!NUM_)"
    r"(?<!IMAGE_)TOKEN)$",
    re.IGNORECASE,
)


def _variables(environment: dict[str, str]) -> dict[str, str]:
    if wrong := [name for name in environment if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]:
        raise ValueError(f"{wrong[0]!r} cannot be the name of a variable; use letters, digits and _")
    return environment


Text = Annotated[str, AfterValidator(_text)]  # text that can be an argument of a process or a file name


def _expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


class LossSource(Part):
    """Where a command reports its losses. A trial's loss is the last one, or infinite if the trial diverged."""

    pattern: str | None = None  # a regular expression with {loss} for the number and {step} for the step
    file: Text | None = None  # the text file that the pattern reads; by default the output of the command
    jsonl: Text | None = None  # a file with a JSON object per line
    tensorboard: Text | None = None  # a folder with TensorBoard event files
    wandb: Text | None = None  # a folder with an offline run of Weights & Biases
    key: str | None = None  # the name of the loss in a JSON line, in TensorBoard or in W&B
    step: str | None = None  # the name of the step in a JSON line
    tokens_per_step: Annotated[int, Field(gt=0)] | None = None  # tokens of a step; if given, curves are over tokens

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if not given:
            raise ValueError(f"no source is given; give one of {', '.join(SOURCES)}")
        if len(given) > 1:
            raise ValueError(f"several sources of a loss: {', '.join(given)}; keep one")
        if self.pattern is not None:
            if "{loss}" not in self.pattern:
                raise ValueError(
                    "the pattern has no {loss}; write {loss} where the number is, as in 'val loss {loss}'"
                )
            if "{loss}" in self.pattern.replace("{loss}", "", 1):
                raise ValueError(
                    "the pattern has {loss} twice; write it once, as in '(?:val|validation) loss {loss}'"
                )
            _expression(self.expression)
        elif self.key is None:
            raise ValueError(f'{given[0]} needs the name of the loss; add loss.key = "NAME"')
        wrong = {"pattern": ("key", "step"), "jsonl": ("file",)}.get(given[0], ("file", "step"))
        if unused := next((name for name in wrong if getattr(self, name) is not None), None):
            raise ValueError(f"{unused} has no effect with {given[0]}; remove it")
        return self

    @property
    def expression(self) -> str:
        """The ``pattern`` as a regular expression: {loss} and {step} become named groups. Trainers pad numbers with
        spaces, so extra spaces around a placeholder match, but "val{loss}" does not match the 5 of "val 5 of 10"."""
        found = self.pattern or ""
        for name, padding, text in (("loss", r"(?:(?<!\w)[ ]{1,99}+)?+", LOSS_TEXT), ("step", "[ ]{0,99}+", _STEP)):
            found = re.sub(rf"(\{{{name}\}}) (?![*+?{{])", r"\1[ ]{0,99} ", found, count=1)
            found = found.replace(f"{{{name}}}", f"{padding}(?P<{name}>{text})", 1)
        return found

    @property
    def progress(self) -> str:
        """What the x-axis of loss curves counts: tokens, steps or reported losses."""
        if self.tokens_per_step is not None:
            return "tokens"
        stepped = self.step or "{step}" in (self.pattern or "") or self.tensorboard or self.wandb
        return "steps" if stepped else "losses"

    @property
    def where(self) -> str | None:
        """The file or folder with the losses. None: the command prints them."""
        return self.file if self.pattern is not None else self.jsonl or self.tensorboard or self.wandb


class Command(Part):
    """A shell command that trains once and reports its loss."""

    command: Annotated[Text, Field(min_length=1)]  # run by the shell in the current folder
    loss: LossSource
    environment: Annotated[dict[str, Text], AfterValidator(_variables)] = {}  # additional environment variables
    config: Text | None = None  # the path of a text file that leaven fills in for every trial
    # Number of GPUs of a trial. None: 1 with --workers auto, otherwise all GPUs.
    devices: Annotated[int, Field(gt=0)] | None = None
    timeout_seconds: Annotated[float, Field(gt=0)] | None = None  # a trial that takes longer has failed
    # A regular expression. A trial whose output has a match has diverged.
    diverged: Annotated[str, AfterValidator(_expression)] | None = None
    resume: bool = False  # whether all attempts at a trial share the folder {out}, so that the command can resume
    prune: bool = True  # whether a trial ends early if its losses are too far behind those of the best trial

    @model_validator(mode="after")
    def _stepped(self) -> Self:
        if self.resume and self.prune and self.loss.progress == "losses":
            raise ValueError(
                "with resume = true, a retry may report losses of the first attempt again, so pruning needs "
                "the steps; add {step} to loss.pattern (or loss.step to loss.jsonl), or write prune = false"
            )
        return self

    @cached_property
    def template(self) -> str:
        return "" if self.config is None else read_text(self.config)

    @property
    def used(self) -> set[str]:
        """The names of all placeholders, including those in the file ``config`` if ``{config}`` is used."""
        return self._required | (_names(self.template) if CONFIG in self._required else set())

    @property
    def _required(self) -> set[str]:
        """The names of the placeholders that must have a value."""
        return _names(self.command, *self.environment.values(), self.loss.where or "")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that all processes of a study must share."""
        shared = self.model_dump(include={"command", "loss", "environment", "diverged"}, exclude_none=True)
        text = blake2b(self.template.encode(), digest_size=8).hexdigest()
        return shared | ({} if self.config is None else {"config": text})

    def check(self, space: SearchSpace) -> None:
        """Raise InputError if a placeholder has no value, if a searched value has no placeholder (``{recipe}`` stands
        for all values of a recipe), if only one of ``config`` and ``{config}`` is given, or if all trials would read
        their losses from the same path."""
        known = space.placeholders(dict.fromkeys(space.paths, 0.0), space.seed)
        of_recipe = RECIPE in self.used and space.kind == "recipe"
        names = {*known, *OF_TRIAL, *([RECIPE] if of_recipe else [])}
        for name in sorted(self._required - names):
            values = [f"{{{value}}}" for value in (*space.paths, *map(short_path, space.paths), *OF_TRIAL)]
            hint = suggestion(f"{{{name}}}", values, f"searched: {', '.join(map(short_path, space.paths))};")
            raise InputError(
                f"{{{name}}} in the command names no known value; {hint} to keep it as text, write {{{{{name}}}}}"
            )
        if self.loss.where is not None and OUT not in _names(self.loss.where):
            raise InputError(
                f"the losses are read from {self.loss.where}, which all trials share, so a trial could read the "
                "losses of another trial; write them into the trial's folder {out}, and read them from {out}/NAME"
            )
        if self.config is None and CONFIG in self.used:
            raise InputError('the command has {config}, but config is not set; add config = "FILE"')
        if self.config is not None and CONFIG not in self.used:
            raise InputError(
                f"the command does not read {self.config}; in the command, write {{config}} for the path of this file"
            )
        for path in space.paths:
            if not (of_recipe or {path, short_path(path)} & self.used):
                raise InputError(
                    f"the command has no {{{short_path(path)}}}, which is searched; add it, or search other values"
                )

    def filled(self, values: Mapping[str, Value]) -> str:
        """Return the command with its placeholders filled in, quoted for the shell if necessary. Raise InputError if
        a value needs quotes, but its placeholder is inside quotes, a comment or a substitution of the shell."""
        quoted = {name: shlex.quote(text_of(value)) for name, value in values.items()}
        for name in sorted(_in_quotes(self.command)):
            if name in values and quoted[name] != (text := text_of(values[name])):
                raise InputError(
                    f"{{{name}}} is inside quotes, a comment or a command substitution, where the shell "
                    f"would misread its value {text!r}; write {{{name}}} outside of it"
                )
        return fill(self.command, quoted)

    def line(self, values: Mapping[str, Value]) -> str:
        """Return a shell command line that makes the folder ``{out}``, sets ``environment`` and runs the command. It
        reads secrets, such as WANDB_API_KEY, from the shell that runs it."""
        line = self.filled(values)
        if self.environment:
            environment = [
                f'{name}="${{{name}:?set it as in the command file}}"'
                if _SECRET.search(name) and not _names(text)
                else shlex.quote(f"{name}={fill(text, values)}")
                for name, text in self.environment.items()
            ]
            line = " ".join(["env", *environment, "sh -c", shlex.quote(line)])
        return f"mkdir -p {shlex.quote(text_of(values[OUT]))} && {line}" if OUT in self.used else line


class SearchedValue(Part):
    """A searched value of a command: a number from ``low`` to ``high``, or one of several ``choices``."""

    start: int | float | None = None  # where the search begins; if it is an integer, so are all values of the search
    low: int | float | None = None  # the lowest value of the search
    high: int | float | None = None  # the highest value
    unit: Literal["octave", "tenth", "beta"] = "octave"  # unit of distances, see :func:`leaven.tuning.point.moved`
    # The possible values; the search starts at the first.
    choices: Annotated[list[bool | int | float | str], Field(min_length=2)] | None = None

    @model_validator(mode="after")
    def _valid(self) -> Self:
        if self.choices is not None:
            if (self.start, self.low, self.high) != (None, None, None):
                raise ValueError("give choices, or start, low and high, not both")
            texts = {_text(text_of(choice)) for choice in self.choices}
            if min(len(set(self.choices)), len(texts)) < len(self.choices):
                raise ValueError("two choices are equal, or look alike in a command; remove one")
            return self
        if self.start is None or self.low is None or self.high is None:
            raise ValueError("give start, low and high; or choices, as in {choices = [1, 2]}")
        if not self.low <= self.start <= self.high or self.low == self.high:
            raise ValueError(f"start = {self.start:g} is not between low = {self.low:g} and high = {self.high:g}")
        if isinstance(self.start, int) and not (isinstance(self.low, int) and isinstance(self.high, int)):
            raise ValueError(
                f"start = {self.start} is a whole number, but low or high is not; write start = {self.start}.0, or "
                "give low and high as whole numbers"
            )
        if self.unit == "octave" and self.low <= 0:
            raise ValueError(
                "a search multiplies this value by factors, so low must be above 0; to search by addition, set "
                'unit = "tenth"'
            )
        if self.unit == "beta" and not 0 < self.low <= self.high < 1:
            raise ValueError('with unit = "beta", low and high must be between 0 and 1')
        return self

    def moved(self, octaves: float) -> Value:
        """Return the value at the distance ``octaves``, in ``unit``, from ``start``, rounded and clipped to ``low``
        and ``high``. If there are ``choices``, ``octaves`` is the index of the choice to return."""
        if self.choices is not None:
            return self.choices[round(octaves)]
        start, low, high = self._range
        if not octaves:
            return start
        value = moved(self.unit, start, octaves)
        rounded = round(value) if isinstance(start, int) else float(f"{value:.{DIGITS}g}")
        return min(max(rounded, low), high)

    def distance(self, value: Value) -> float:
        """Return the distance of ``value`` from the field ``start``, in ``unit``. For a choice, return its index."""
        if self.choices is not None:
            return float(self.choices.index(value))
        return distance_in(self.unit, self._range[0], float(value))

    @property
    def _range(self) -> tuple[float, float, float]:
        return cast(tuple[float, float, float], (self.start, self.low, self.high))

    def dimension(self, name: str) -> Dimension:
        if self.choices is not None:
            levels = tuple(text_of(choice) for choice in self.choices)
            return Dimension(name, levels[0], 0.0, len(levels) - 1.0, unit="choice", levels=levels, ends=("", ""))
        start, *bounds = self._range
        (low, below), (high, above) = sorted(
            (self.distance(value), f"the bound, {side} = {value:g}")
            for side, value in zip(("low", "high"), bounds, strict=True)
        )
        unit = "tenth" if self.unit == "tenth" else "octave"
        whole = isinstance(start, int)
        scale = 10.0 if whole and unit == "tenth" else 1.0  # fewer than 5 tenths would be rounded to the start
        return Dimension(name, float(start), low, high, scale, unit, ends=(below, above), whole=whole)


def _names_of_values(space: dict[str, SearchedValue]) -> dict[str, SearchedValue]:
    if not space:
        raise ValueError("nothing is searched; add a value, as in lr = {start = 1e-3, low = 1e-5, high = 1e-1}")
    for name in space:
        if not re.fullmatch(NAME, name) or name in OF_TRIAL:
            raise ValueError(
                f"{name} cannot be the name of a value; use letters, digits and _; {', '.join(OF_TRIAL)} are reserved"
            )
    return space


def _name_of_study(name: str) -> str:
    if not re.fullmatch(r"\w[^/\x00-\x1f]*", name):
        raise ValueError(f"{name!r} cannot be the name of a study; begin with a letter or a digit, and use no /")
    return name


class CommandFile(Command):
    """The content of a command file: a command and its search space."""

    name: Annotated[str, AfterValidator(_name_of_study)]  # the name of the study; by default the name of the file
    # The seed of the search. {seed} is this seed, or in repeated trials this seed + 1, + 2, ...
    seed: Annotated[int, Field(ge=0)] = 0
    space: Annotated[dict[str, SearchedValue], AfterValidator(_names_of_values)]
    why: dict[str, str] = {}  # for each value by name: why the search starts at it

    def values(self, octaves: Mapping[str, float]) -> dict[str, Value]:
        """Return the searched values by name. ``octaves`` has their distances from the start values."""
        return {name: self.space[name].moved(x) for name, x in octaves.items()}


@dataclass(frozen=True, kw_only=True)
class CommandSpace(SearchSpace):
    file: CommandFile
    text: str  # the content of the file, with its comments

    kind = "command file"

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def why(self) -> Mapping[str, str]:
        return self.file.why

    @property
    def seed(self) -> int:
        return self.file.seed

    def values(self, octaves: Mapping[str, float]) -> dict[str, Value]:
        return self.file.values(octaves)

    def placeholders(self, octaves: Mapping[str, float], seed: int) -> dict[str, Value]:
        return self.values(octaves)

    def text_at(self, octaves: Mapping[str, float], reasons: Mapping[str, str]) -> str:
        document = tomlkit.parse(self.text)
        changes: dict[str, Any] = {}
        for name, value in self.values(octaves).items():
            choices = self.file.space[name].choices
            changes[name] = (
                {"start": value} if choices is None else {"choices": [value, *(c for c in choices if c != value)]}
            )
        update(document, {"name": self.name, "space": changes, "why": {**self.file.why, **reasons}}, prune=False)
        return str(tomlkit.dumps(document))

    def changes_since(self, path: Path) -> list[Difference]:
        there, here = (
            file.model_dump(exclude={"why", *OF_MACHINE}) for file in (command_space(path).file, self.file)
        )
        return differing(there, here)


def command_space(path: Path, overrides: list[str] | None = None) -> CommandSpace:
    """Return the search space of a command file. ``overrides`` are the values of ``--set``, such as ``seed=4``."""
    text = read_text(path)
    document = {"name": path.stem} | parse_toml(text, str(path), overrides or [])
    file = validated(CommandFile, document, str(path))
    if overrides:
        text = tomlkit.dumps(document)
    return CommandSpace(
        file=file, text=text, dimensions=tuple(value.dimension(name) for name, value in file.space.items())
    )


def is_command_file(path: Path) -> bool:
    """Return whether a TOML file is a command file and not a recipe."""
    return path.is_file() and "command" in parse_toml(read_text(path), str(path))


def text_of(value: Value) -> str:
    """Return a value as a text that means the same in a command line, TOML, JSON and YAML, such as ``1.0e-05``."""
    text = value if isinstance(value, str) else json.dumps(value)
    # YAML 1.1 reads 1e-05 as text, but 1.0e-05 as a number.
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def fill(text: str, values: Mapping[str, Value]) -> str:
    """Return the text with values in place of placeholders. ``{{name}}`` becomes ``{name}``; other braces stay."""

    def replaced(found: re.Match[str]) -> str:
        return found[1] or (text_of(values[found[2]]) if found[2] in values else found[0])

    return _PLACEHOLDER.sub(replaced, text)


def values_of(  # noqa: PLR0917 - one of each
    command: Command, space: SearchSpace, point: Mapping[str, float], folder: Path, seed: int = 0, worker: int = 0
) -> dict[str, Value]:
    """Return the value of each placeholder, by name, for an attempt at ``point`` in ``folder``. ``{seed}`` is
    ``space.seed + seed``. Raise ValueError if the values are invalid together."""
    folder, seed = folder.absolute(), space.seed + seed
    found = space.placeholders(point, seed) | {SEED: seed, WORKER: worker, OUT: str(folder / "out")}
    if command.config is not None:
        found[CONFIG] = str(folder / CONFIG / Path(command.config).name)
    return found | {RECIPE: str(folder / "recipe.toml")}


def inputs_of(
    command: Command, space: SearchSpace, point: Mapping[str, float], values: Mapping[str, Value]
) -> dict[Path, str]:
    """Return {path: content} of the files ``{config}`` and ``{recipe}``, if used. ``values``: :func:`values_of`."""
    found = dict[Path, str]()
    if command.config is not None:
        found[Path(str(values[CONFIG]))] = fill(command.template, values)
    if RECIPE in command.used and isinstance(space, Space):
        found[Path(str(values[RECIPE]))] = render(space.recipe_at(point, int(values[SEED])))
    return found


def _names(*texts: str) -> set[str]:
    return {found[2] for text in texts for found in _PLACEHOLDER.finditer(text) if found[2]}


def _in_quotes(command: str) -> set[str]:
    """Return the names of placeholders (``{lr}``) that may be in quotes, in a comment or after a backslash, because
    ``shlex.split`` does not see them as separate words. Return all placeholders if the command has nested syntax,
    such as a backquote, or cannot be split."""
    if _NESTED.search(command):
        return _names(command)
    names = list[str]()

    def word(found: re.Match[str]) -> str:
        names.append(found[2] or "")
        return f" \0{len(names) - 1} " if found[2] else found[0]

    text = re.sub(r"(?<=[^\s;&|()])#", "_", _PLACEHOLDER.sub(word, command))  # inside a word, # begins no comment
    try:
        words = set(shlex.split(text, comments=True))
    except ValueError:  # an open quote
        words = set()
    return {name for number, name in enumerate(names) if name and f"\0{number}" not in words}
