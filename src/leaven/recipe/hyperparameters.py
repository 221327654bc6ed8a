"""The hyperparameters of a recipe: values in base coordinates, multipliers of modules, and multipliers over depth."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from leaven.recipe.base import Part
from leaven.recipe.init_std import INITS, InitName
from leaven.recipe.shape import BRANCH_ENDS, Role

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
# TOML has arrays only, so an array is accepted for a tuple.
Profile = Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]


class Multipliers(Part):
    """The factors by which the values of one module differ from the global values. A factor of 1.0 changes no bit."""

    lr: Positive = 1.0
    init_std: NonNegative = 1.0
    weight_decay: NonNegative = 1.0
    # A multiplier m of a beta gives beta ** m, which stays within (0, 1). It divides the moment's half-life by m; to
    # first order it multiplies 1 - beta by m.
    beta1: Positive = 1.0
    beta2: Positive = 1.0
    eps: Positive = 1.0
    residual: Positive = 1.0  # only for ``attention.out`` and ``mlp.out``, which end a branch


class DepthProfile(Part):
    """Multipliers at evenly spaced relative depths from 0 to 1, for any number of layers.

    Between these depths the logarithms are interpolated linearly: halfway between 1/4 and 4 is 1. A module's
    multiplier is multiplied by the multiplier for its depth, so that a search treats both as a sum of logarithms
    (Mlodozeniec et al. 2025).
    """

    lr: Profile = (1.0,)
    init_std: Profile = (1.0,)
    weight_decay: Profile = (1.0,)
    beta1: Profile = (1.0,)
    beta2: Profile = (1.0,)
    eps: Profile = (1.0,)
    residual: Profile = (1.0,)

    @staticmethod
    def at(profile: tuple[float, ...], layer: int, n_layers: int) -> float:
        """Return the multiplier of block ``layer`` of ``n_layers``.

        The first block is at depth 0, the last at depth 1.
        """
        position = (layer / (n_layers - 1) if n_layers > 1 else 0.0) * (len(profile) - 1)
        below = min(int(position), len(profile) - 1)
        above = min(below + 1, len(profile) - 1)
        share = position - below
        if share == 0 or profile[below] == profile[above]:
            return profile[below]
        return float(profile[below] ** (1 - share) * profile[above] ** share)


class Clip(Part):
    """How gradients are clipped.

    ``global`` limits the norm over all parameters. ``per-module`` limits the norm of each module in each block
    separately. ``running`` limits the global norm to ``limit`` times its running root mean square, which averages
    over as many steps as Adam's second moment does.
    """

    mode: Literal["global", "per-module", "running"]
    limit: NonNegative = 1.0  # 0 switches clipping off

    @staticmethod
    def read(value: Any) -> Any:
        """Return a plain number as the limit of the global mode, and other values unchanged."""
        return {"mode": "global", "limit": value} if isinstance(value, int | float | str) else value

    def written(self) -> Any:
        return self.limit if self.mode == "global" else {"mode": self.mode, "limit": self.limit}


class Hyperparameters(Part):
    """The hyperparameters in base coordinates: the values that are right at the scale ``[scaling].base``."""

    # adamw decouples the decay (each step shrinks a weight by lr x weight_decay); adam adds weight_decay x weight to
    # the gradient, which Adam then normalises away in part (Loshchilov and Hutter 2019, arXiv 1711.05101).
    optimizer: Literal["adamw", "adam"] = "adamw"
    lr: Positive  # peak learning rate
    # rule: the scaling rule derives every standard deviation from init_std; or the name of a published init
    # (:data:`leaven.recipe.init_std.INITS`), which sets every standard deviation itself.
    init: InitName = "rule"
    init_std: Positive | None = None
    weight_decay: NonNegative = 0.1
    decay_norm_and_bias: bool = False  # also decays gains and biases; published recipes do not (nanoGPT, OLMo 2)
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Positive = 1e-8
    residual: Positive = 1.0  # multiplies every branch before it is added to the residual stream
    # A limit on the global gradient norm (0 switches clipping off), or a :class:`Clip`.
    grad_clip: Annotated[Clip, BeforeValidator(Clip.read), PlainSerializer(Clip.written)] = Clip(mode="global")
    modules: dict[str, Multipliers] = {}
    depth: DepthProfile = DepthProfile()

    @model_validator(mode="after")
    def _validate_init(self) -> "Hyperparameters":
        if self.init == "rule" and self.init_std is None:
            names = ", ".join(INITS)
            raise ValueError(f"init_std: missing; give it, or name a published init instead: init = {names}")
        if self.init != "rule" and self.init_std is not None:
            raise ValueError(
                f'init = "{self.init}" sets every standard deviation itself; take init_std out (on the command line: '
                "--set hyperparameters.init_std=); multipliers of modules and depth still apply"
            )
        return self

    @model_validator(mode="after")
    def _validate_decay(self) -> "Hyperparameters":
        if self.optimizer == "adamw" and self.lr * self.weight_decay >= 1:
            raise ValueError(
                f"lr x weight_decay = {self.lr * self.weight_decay:g} erases a weight in one step; keep it below 1"
            )
        return self

    def require_modules(self, known: Mapping[str, Role]) -> None:
        """Check that modules with multipliers exist, and that each multiplier has an effect.

        Raises:
            ValueError: otherwise; the message names the module, and the most similar module if there is none of this
                name.
        """
        for module, multipliers in self.modules.items():
            stated = [quantity for quantity in Multipliers.model_fields if getattr(multipliers, quantity) != 1]
            for quantity in ("lr", *stated):  # every module has an lr, so an unknown module is reported
                if reason := self.refusal(known, module, quantity):
                    raise ValueError(reason)

    def refusal(self, known: Mapping[str, Role], module: str, quantity: str) -> str | None:
        """Return why a multiplier of a module is refused, or None if it has an effect."""
        where = "hyperparameters.modules"
        if module not in known:
            close = get_close_matches(module, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            return f"{where}: no module {module!r} in this model; {hint}"
        if quantity == "residual" and module not in BRANCH_ENDS:
            ends = " and ".join(BRANCH_ENDS)
            return f"{where}: {module} does not end a branch and has no residual multiplier; only {ends} have one"
        if known[module].is_matrix:
            return None
        if quantity == "init_std":
            return f"{where}: {module} has no init_std: gains start at 1, biases at 0; take it out"
        if quantity == "weight_decay" and not self.decay_norm_and_bias:
            return (
                f"{where}: {module} is not decayed; take its weight_decay out, or set "
                "hyperparameters.decay_norm_and_bias = true"
            )
        return None
