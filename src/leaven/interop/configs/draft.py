"""Builds a recipe from the configuration of another trainer.

:class:`Settings` has the trainer's settings and defaults. :class:`Draft` collects the recipe's values and reasons.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from leaven.catalogue.laws import main_laws
from leaven.catalogue.neighbours import nearest
from leaven.errors import InputError
from leaven.interop.configs.compare import SAME_START, ParameterSettings
from leaven.interop.huggingface_config import HuggingFaceModel, given_keys
from leaven.recipe.files import validated
from leaven.recipe.init_std import INITS, Init
from leaven.recipe.recipe import Recipe, set_path
from leaven.recipe.shape import ModelShape, Role
from leaven.recipe.units import format_number, format_quantity

TOKENS_PER_PARAMETER = 20


@dataclass(frozen=True)
class Imported:
    """A recipe that was made from the files of another trainer."""

    recipe: Recipe
    unknown: tuple[str, ...]  # values that are missing in the files, and what was assumed
    unread: tuple[str, ...]  # keys of the files that no recipe can represent


@dataclass
class Draft:
    """A recipe under construction: its values by dotted path, and the reasons for most of them."""

    origin: str  # the imported file or folder, for messages
    values: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)  # missing values, and what was assumed
    unread: list[str] = field(default_factory=list)  # keys that no recipe can represent

    def set(self, path: str, value: Any, why: str) -> None:
        self.values[path] = value
        self.why[path] = why

    def set_architecture(self, model: HuggingFaceModel, file: str) -> None:
        """Set the model shape and the init std from a config.json, which the reasons call ``file``."""
        architecture = model.architecture

        def origin(*keys: str) -> str:
            there = [
                stated
                for stated, value in model.config.items()
                if architecture.aliases.get(stated, stated) in keys and value is not None
            ]
            return f"{' and '.join(there)} of {file}" if there else f"default of {architecture.name}, not in {file}"

        self.values |= {f"model.{key}": value for key, value in model.shape.model_dump(exclude_none=True).items()}
        self.why |= {f"model.{key}": f"every {architecture.name} has it" for key in architecture.holds}
        for key, theirs in architecture.keys.items():
            if theirs:
                more = ("rope_scaling", "rope_parameters") if key in {"rope_theta", "rotary_fraction"} else ()
                self.why[f"model.{key}"] = origin(*theirs, *more)
        if model.shape.dropout and architecture.keys["dropout"] == ["attention_dropout"]:
            self.unread.append("attention_dropout: leaven's dropout also applies to the embedding and the branches")
        std = float(given_keys(architecture, model.config)["initializer_range"])
        self.set("hyperparameters.init_std", std, origin("initializer_range"))

    def set_parameters(
        self, settings: Mapping[str, ParameterSettings], shape: ModelShape, init_why: str, why: str
    ) -> None:
        """Set the hyperparameters and the multipliers of modules from the settings of each parameter.

        A hyperparameter gets the most common nonzero value of the hidden weights, or else the first nonzero value of
        any parameter. A module gets a multiplier if its value in block 0 differs from the hyperparameter. If the
        initial stds of all matrices match a published init, such as ``depth-scaled``, ``init`` is set instead of
        ``init_std``. ``init_why`` is the reason for initial values, and ``why`` the reason for all other values.

        Raise InputError if modules have different betas, and one of these is not between 0 and 1.
        """
        parameters = list(shape.parameters())
        matrices = [each for each in parameters if each.role.is_matrix]

        def has_init(init: Init) -> bool:
            pairs = ((settings[each.name].init_std, init.std(each, shape.n_layers, shape.gated)) for each in matrices)
            return all(math.isclose(ours, theirs, rel_tol=SAME_START) for ours, theirs in pairs)

        named = next((name for name, init in INITS.items() if has_init(init)), None)
        if named:
            self.set("hyperparameters.init", named, init_why)
        for matrix, mean, why_not in ((True, 0.0, "the mean of matrices is 0"), (False, 1.0, "gains start at 1")):
            for module in dict.fromkeys(each.module for each in parameters if each.role.is_matrix is matrix):
                starts = [settings[each.name] for each in parameters if each.module == module]
                std = max(each.init_std for each in starts)
                other = mean + max((each.init_mean - mean for each in starts), key=abs)
                random = f" with std {std:g}" if std and not matrix else ""
                if other != mean or random:
                    self.unread.append(f"initial values of {module}, {other:g}{random}: in leaven, {why_not}")
        decayed = any(settings[each.name].weight_decay for each in parameters if not each.role.is_matrix)
        self.set("hyperparameters.decay_norm_and_bias", decayed, why)
        for quantity in ("lr", "weight_decay", "beta1", "beta2", "eps", *(() if named else ("init_std",))):
            reason = init_why if quantity == "init_std" else why
            modules: dict[str, list[float]] = {}
            for each in parameters:
                if each.role.is_matrix or (quantity != "init_std" and (quantity != "weight_decay" or decayed)):
                    modules.setdefault(each.module, []).append(getattr(settings[each.name], quantity))
            hidden = Counter(modules[each.module][0] for each in matrices if each.role is Role.HIDDEN_WEIGHT)
            every = [value for values in modules.values() for value in values]
            base = next((value for value in [*(value for value, _ in hidden.most_common()), *every] if value), 0.0)
            self.set(f"hyperparameters.{quantity}", base, reason)
            for module, values in modules.items():
                first = values[0]
                if len(set(values)) > 1:
                    low, high = min(values), max(values)
                    self.unread.append(
                        f"{quantity} of {module}, {low:g} to {high:g} over depth: the value of block 0 is used"
                    )
                if first != base:
                    if quantity.startswith("beta") and not (0 < first < 1 and 0 < base < 1):
                        raise InputError(
                            f"{self.origin}: {quantity} is {first:g} in {module} and {base:g} in other modules; set "
                            "both to the same value, or to values above 0 and below 1"
                        )
                    share = math.log(first) / math.log(base) if quantity.startswith("beta") else first / base
                    self.set(f"hyperparameters.modules.{module}.{quantity}", float(f"{share:.12g}"), reason)

    def shape(self) -> ModelShape:
        values: dict[str, Any] = {}
        for path, value in self.values.items():
            if path.startswith("model."):
                set_path(values, path.removeprefix("model."), value)
        return validated(ModelShape, values, f"{self.origin}: not a shape that leaven supports")

    def guess(self, path: str, value: Any, why: str) -> None:
        """Set an estimate of a value that the files lack, and list the value as unknown."""
        self.set(path, value, f"not in {self.origin}: {why}")
        self.unknown.append(f"{path}: {why}")

    def guess_tokens(self, shape: ModelShape) -> None:
        tokens = TOKENS_PER_PARAMETER * shape.params_active
        self.guess("data.tokens", tokens, f"{TOKENS_PER_PARAMETER} tokens per parameter, as for a run from scratch")

    def finish(self, name: str, shape: ModelShape) -> Imported:
        """Return the imported recipe, with estimates of missing training tokens, batch size, lr and warm-up."""
        if "data.tokens" not in self.values:
            self.guess_tokens(shape)
        tokens = self.values["data.tokens"]
        if "batch.tokens" not in self.values:
            self.guess("batch.tokens", *likely_batch(shape, tokens))
        if "hyperparameters.lr" not in self.values:
            self.guess("hyperparameters.lr", *likely_lr(shape, tokens))
        if "schedule.warmup_tokens" not in self.values:
            self.guess("schedule.warmup_tokens", *likely_warmup(shape, tokens))
        self.unknown.append("data.source: the default is used; set it to your own text")
        # The values are for the size of the model itself, so no rule may change them.
        self.values.setdefault("scaling.rule", "standard")
        return Imported(self.recipe(name), tuple(self.unknown), tuple(self.unread))

    def recipe(self, name: str) -> Recipe:
        """Return the recipe with the values set so far, or raise InputError if they are not valid."""
        document: dict[str, Any] = {"name": name, "why": self.why}
        for path, value in self.values.items():
            set_path(document, path, value)
        return validated(Recipe, document, f"{self.origin}: not a valid recipe")


@dataclass
class Settings:
    """The settings of another trainer (given values and defaults), and the draft of the recipe made from them.

    ``table`` describes each setting with these keys:

    - ``kind``: "count" (a whole number), "number", "word" (a string), "switch" (on or off) or "table";
    - ``min``: the smallest allowed count;
    - ``default``: the trainer's default. A count or number with neither a given value nor a default is an InputError;
    - ``path``: the recipe key with the same meaning as the setting;
    - ``values``: the recipe's value for each possible word, or the recipe's two values for off and on;
    - ``optional``: if true, ``path`` stays unset when the setting is not given;
    - ``unused``: the reason, if the setting has no effect on a recipe.
    """

    draft: Draft  # the recipe that `put` and `put_all` fill
    origin: str  # the imported file, for messages
    table: Mapping[str, Mapping[str, Any]]  # description of each setting, by name
    default: str  # the reason of a recipe value that is the trainer's default; {} stands for the setting's name
    prefix: str = ""  # text before the name of a setting, such as "--"
    suffix: str = ""  # text after the names of settings in a reason
    given: dict[str, Any] = field(default_factory=dict)
    unset: dict[str, str] = field(default_factory=dict)  # by setting: what only the script knows, such as "$LR"

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting, given or default, converted to its kind.

        If it has neither value, a switch is False, a word is "" and a table is {}. Raise InputError for a count or
        number that has neither value, and for a value that is of the wrong kind or too small.
        """
        kind, default = self.table[name]["kind"], self.table[name].get("default")
        value, label = self.given.get(name, default), self.label(name)
        if kind == "switch":
            if value not in (None, False, True):
                raise InputError(f"{label} {value!r} must be true or false")
            return bool(value)
        if kind == "word":
            return str(value or "")
        if kind == "table":
            if not isinstance(value or {}, dict):
                raise InputError(f"{label} {value!r} must be a table")
            return value or {}
        if value is None and name in self.unset:
            raise InputError(
                f"{label} is {self.unset[name]}, which is unknown until the script runs; write the number; or write "
                "echo before the training command, run the script, and import the line that it prints"
            )
        if value is None:
            raise InputError(f"{label} is missing, and a recipe needs it; add it")
        number = as_number(value, label)
        if kind == "number":
            return number
        if number != int(number):
            raise InputError(f"{label} {value:g} must be a whole number")
        if number < (least := self.table[name].get("min", -math.inf)):
            raise InputError(f"{label} {int(number)} must be at least {least}")
        return int(number)

    def label(self, name: str) -> str:
        """Return the file and the name of a setting, such as ``train.sh: --lr``."""
        return f"{self.origin}: {self.prefix}{name}"

    def choice(self, name: str) -> Any:
        """Return the recipe's value for a setting, from ``table[name]["values"]``, or raise InputError."""
        known = self.table[name]["values"]
        if isinstance(known, Mapping) and self[name] not in known:
            raise InputError(f"{self.label(name)} {self[name]}: leaven supports only {', '.join(known)}")
        return known[self[name]]

    def why(self, *names: str) -> str:
        """Return the reason for a recipe value that follows from the settings ``names``.

        The reason names the settings that the user gave, such as "--bf16", or else the default of the first setting.
        If a value is unknown until the script runs, the reason says only this.
        """
        there = [f"{self.prefix}{name}" for name in names if name in self.given]
        for name in names:
            if name in self.unset:
                return f"{self.default.format(name)}: {self.unset[name]} is unknown until the script runs"
        return " and ".join(there) + self.suffix if there else self.default.format(names[0])

    def put(self, path: str, value: Any, *names: str) -> None:
        """Set the recipe value at ``path``, with the reason that :meth:`why` returns for the settings ``names``."""
        self.draft.set(path, value, self.why(*names))

    def put_all(self) -> None:
        """Set the draft's missing values from settings with a ``path``. Skip optional settings that are not given."""
        for name, row in self.table.items():
            path = row.get("path")
            if path and path not in self.draft.values and not (row.get("optional") and name not in self):
                self.put(path, self.choice(name) if "values" in row else self[name], name)


def as_number(value: Any, label: str) -> float:
    """Convert a value to a finite number, or raise an InputError that begins with ``label``."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{label} {value} must be a number") from None
    if not math.isfinite(number):
        raise InputError(f"{label} {value} must be a finite number")
    return number


def likely_batch(shape: ModelShape, tokens: int) -> tuple[int, str]:
    """Return (batch size in tokens, reason). The size follows the Step Law, in whole sequences."""
    step_law = next(law for law in main_laws(shape, tokens) if law.law == "Step Law 2025")
    assert step_law.batch_tokens is not None
    scale = f"{format_quantity(shape.params_active)} parameters, {format_quantity(tokens)} tokens"
    outside = (
        ""
        if step_law.in_range
        else f"; a factor of {format_number(step_law.extrapolation or 1)} outside the law's range"
    )
    batch = max(round(step_law.batch_tokens / shape.seq_len), 1) * shape.seq_len
    return batch, f"{step_law.law} at {scale}, rounded to whole sequences{outside}"


def likely_lr(shape: ModelShape, tokens: int) -> tuple[float, str]:
    """Return the peak lr of the closest published run, and the reason."""
    peak_lr, why = _of_nearest("peak_lr", shape, tokens)
    return peak_lr, f"the peak of {why}"


def likely_warmup(shape: ModelShape, tokens: int) -> tuple[int, str]:
    """Return (warm-up tokens, reason). The warm-up fraction is as in the nearest published run."""
    share, why = _of_nearest("warmup_fraction", shape, tokens)
    return round(share * tokens), f"{share:.2g} of the run, as in {why}"


def _of_nearest(key: str, shape: ModelShape, tokens: int) -> tuple[float, str]:
    """Return the value of ``key`` from the nearest published run that has one, and a text that names the run."""
    experts = bool(shape.experts)
    counted = ", counted by the parameters that a token uses" if experts else ""
    for run, _ in nearest(shape.params_active, tokens, kind="moe" if experts else "dense", used=experts):
        if (value := getattr(run, key)) is not None:
            return value, f"{run.id}, the closest published run{counted}"
    raise AssertionError(f"no published {'moe' if experts else 'dense'} run has a value of {key}")
