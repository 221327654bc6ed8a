"""The hyperparameters of a recipe: global values, multipliers for modules, and multipliers over depth."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from leaven.errors import suggestion
from leaven.recipe.base import Part
from leaven.recipe.init_std import INITS, InitName
from leaven.recipe.shape import BRANCH_ENDS, Role

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
# TOML has arrays only, so an array is accepted for a tuple.
Profile = Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]


class Multipliers(Part):
    """Multipliers for the hyperparameters of one module, such as ``mlp.out``."""

    lr: Positive = 1.0
    init_std: NonNegative = 1.0
    weight_decay: NonNegative = 1.0
    # A multiplier m of a beta replaces the beta by beta ** m. The result is between 0 and 1, and the half-life of
    # Adam's moment is divided by m: m = 2 -> half the half-life.
    beta1: Positive = 1.0
    beta2: Positive = 1.0
    eps: Positive = 1.0
    residual: Positive = 1.0  # multiplies the output of a residual branch; only for its last matrix, e.g. mlp.out


class DepthProfile(Part):
    """Multipliers that change with the depth of a block, on top of the multipliers of modules.

    Each tuple has the multipliers at evenly spaced depths, from the first block to the last. Between these depths the
    logarithm of the multiplier is interpolated linearly (Mlodozeniec et al. 2025).
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
        """Return the multiplier of block ``layer`` (counted from 0), interpolated in ``profile``."""
        position = (layer / (n_layers - 1) if n_layers > 1 else 0.0) * (len(profile) - 1)
        below = min(int(position), len(profile) - 1)
        above = min(below + 1, len(profile) - 1)
        share = position - below
        if share == 0 or profile[below] == profile[above]:
            return profile[below]
        return float(profile[below] ** (1 - share) * profile[above] ** share)


class Clip(Part):
    # global: the norm over all parameters is at most ``limit``. per-module: the norm of each module in each block is
    # at most ``limit``. running: the global norm is at most ``limit`` x the running root mean square of the
    # clipped norms of earlier steps, which decays with Adam's beta2.
    mode: Literal["global", "per-module", "running"]
    limit: NonNegative = 1.0  # the largest norm, or with "running", a factor on the running norm; 0: no clipping

    @staticmethod
    def read(value: Any) -> Any:
        """Turn a bare limit, such as 1.0, into a table of this limit with the mode "global". Keep any other value."""
        return {"mode": "global", "limit": value} if isinstance(value, int | float | str) else value

    def written(self) -> Any:
        return self.limit if self.mode == "global" else {"mode": self.mode, "limit": self.limit}


class Muon(Part):
    """The settings of Muon, which updates the matrices of attention, MLPs and experts if ``optimizer`` is ``muon``.

    Muon replaces the momentum of a matrix by an approximation of the nearest matrix with orthogonal rows or columns
    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/). Queries, keys and values are three matrices, the
    gate and input of an MLP are two (as in Moonlight, arXiv 2502.16982). AdamW updates all other parameters.
    """

    lr: Positive | None = None  # peak learning rate of the matrices; None: ``hyperparameters.lr``
    weight_decay: NonNegative | None = None  # decay of the matrices; None: ``hyperparameters.weight_decay``
    momentum: Beta = 0.95  # decay rate of the momentum: the factor on the old momentum in each step
    nesterov: bool = True  # Nesterov momentum: each step also uses the new gradient directly
    # How the size of a step depends on the shape (``out`` x ``in``) of the matrix. spectral: the step's largest
    # singular value is lr x sqrt(max(1, out / in)) (Jordan et al.). adamw_rms: the step's RMS is 0.2 x lr, about as
    # in AdamW, so lr and decay of AdamW can be used (Moonlight). torch.optim.Muon calls these ``adjust_lr_fn``
    # original and match_rms_adamw.
    match: Literal["spectral", "adamw_rms"] = "adamw_rms"
    ns_steps: int = Field(default=5, ge=1, lt=100)  # Newton-Schulz iterations that make the momentum orthogonal

    def matching(self, out: float, into: float) -> float:
        """Return the factor f in Muon's step, lr x f x U. U is the orthogonalised update (``out`` x ``into``)."""
        if self.match == "spectral":
            return math.sqrt(max(1.0, out / into))
        return 0.2 * math.sqrt(max(out, into))


class Hyperparameters(Part):
    """Hyperparameters at a recipe's base scale. The scaling rule converts them to the recipe's own scale."""

    # adamw: each step shrinks a weight by lr x weight_decay x weight. adam: weight_decay x weight is added to the
    # gradient, and Adam divides the sum by the gradient's size (Loshchilov and Hutter 2019, arXiv 1711.05101). muon:
    # Muon for the matrices of attention, MLPs and experts (:class:`Muon`), and adamw for the rest.
    optimizer: Literal["adamw", "adam", "muon"] = "adamw"
    lr: Positive  # peak learning rate
    # rule: the scaling rule computes the std of every matrix from init_std. Other names are published inits
    # (:data:`leaven.recipe.init_std.INITS`), which compute it from the shape of the model, without init_std.
    init: InitName = "rule"
    init_std: Positive | None = None  # std of the initial weights; required with init = "rule"
    weight_decay: NonNegative = 0.1
    decay_norm_and_bias: bool = False  # whether weight decay also applies to gains and biases
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Positive = 1e-8
    residual: Positive = 1.0  # multiplies the output of every branch before it is added to the residual stream
    # A limit on the global gradient norm (0 switches clipping off), or a :class:`Clip`.
    grad_clip: Annotated[Clip, BeforeValidator(Clip.read), PlainSerializer(Clip.written)] = Clip(mode="global")
    # Coefficient of the z-loss. Training minimises loss + z_loss x (log Z)^2 for each token, where Z is the sum of
    # exp(logit) over the vocabulary. The logged loss is without the z-loss. PaLM: 1e-4, OLMo 2: 1e-5. No rule scales
    # this coefficient.
    z_loss: NonNegative = 0.0
    modules: dict[str, Multipliers] = {}  # multipliers by the name of a module, such as mlp.out
    depth: DepthProfile = DepthProfile()
    muon: Muon | None = None  # only with optimizer = "muon"; a missing table then has the defaults of :class:`Muon`

    added: ClassVar = ("muon", "z_loss")

    @model_validator(mode="before")
    @classmethod
    def _complete_muon(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("optimizer") == "muon" and values.get("muon") is None:
            return {**values, "muon": {}}
        return values

    def muon_of(self, role: Role) -> Muon | None:
        return self.muon if role.in_branches else None

    @property
    def ns_steps(self) -> int:
        return self.muon.ns_steps if self.muon else 0

    def of_matrices(self, quantity: Literal["lr", "weight_decay"]) -> float:
        """Return the lr or weight decay of matrices in blocks, from ``muon`` or else the shared value."""
        own: float | None = getattr(self.muon, quantity, None)
        shared: float = getattr(self, quantity)
        return shared if own is None else own

    @model_validator(mode="after")
    def _validate_muon(self) -> "Hyperparameters":
        if self.muon is None:
            return self
        if self.optimizer != "muon":
            raise ValueError(
                f'muon: has no effect with optimizer = "{self.optimizer}"; set optimizer = "muon", or remove the '
                "table muon (on the command line: --set hyperparameters.muon=)"
            )
        if self.muon.match == "spectral" and self.muon.lr is None:
            raise ValueError(
                'muon.lr: missing; with match = "spectral" the lr of AdamW is far too small for Muon: set muon.lr, '
                'for example to 0.02, or use match = "adamw_rms"'
            )
        return self

    @model_validator(mode="after")
    def _validate_init(self) -> "Hyperparameters":
        if self.init == "rule" and self.init_std is None:
            names = ", ".join(INITS)
            raise ValueError(f"init_std: missing; give it, or name a published init instead: init = {names}")
        if self.init != "rule" and self.init_std is not None:
            raise ValueError(
                f'init = "{self.init}" computes every standard deviation from the shape; remove init_std (on the '
                "command line: --set hyperparameters.init_std=); multipliers of modules and depth still apply"
            )
        return self

    @model_validator(mode="after")
    def _validate_decay(self) -> "Hyperparameters":
        for name, shrink in (
            ("lr x weight_decay", self.lr * self.weight_decay),
            ("muon.lr x muon.weight_decay", self.of_matrices("lr") * self.of_matrices("weight_decay")),
        ):
            if self.optimizer != "adam" and shrink >= 1:
                raise ValueError(
                    f"{name} = {shrink:g} erases a weight in one step; lower lr or weight_decay until "
                    "their product is below 1"
                )
        return self

    def require_modules(self, known: Mapping[str, Role]) -> None:
        """Raise ValueError if a multiplier has no effect, or its module is not in the model."""
        for module, multipliers in self.modules.items():
            stated = [quantity for quantity in Multipliers.model_fields if getattr(multipliers, quantity) != 1]
            for quantity in ("lr", *stated):  # every module has an lr, so an unknown module is reported
                if reason := self.refusal(known, module, quantity):
                    raise ValueError(reason)

    def refusal(self, known: Mapping[str, Role], module: str, quantity: str) -> str | None:
        """Return why a module cannot have a multiplier of ``quantity``, or None if it can."""
        where = "hyperparameters.modules"
        if module not in known:
            hint = suggestion(module, known, f"there are {', '.join(known)}")
            return f"{where}: no module {module!r} in this model; {hint}"
        if quantity == "residual" and module not in BRANCH_ENDS:
            ends = " and ".join(end for end in BRANCH_ENDS if end in known)
            return (
                f"{where}: {module} has no residual multiplier; only the last matrix of a residual branch has one: "
                f"{ends}"
            )
        if known[module].is_matrix:
            lacks = quantity in {"beta2", "eps"} and self.muon_of(known[module])
            return f"{where}: Muon updates {module}, and has no {quantity}; remove {quantity}" if lacks else None
        if quantity == "init_std":
            return f"{where}: {module} has no init_std: gains start at 1, biases at 0; remove init_std"
        if quantity == "weight_decay" and not self.decay_norm_and_bias:
            return (
                f"{where}: {module} is not decayed; remove its weight_decay, or set "
                "hyperparameters.decay_norm_and_bias = true"
            )
        return None
