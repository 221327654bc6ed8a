"""Published initialisations by name: the standard deviation of every matrix as a function of the model's shape.

A recipe that names an init has no ``init_std``. The recipe's multipliers for modules and for depth still apply.
leaven never truncates the normal distribution. The published ``mitchell`` and ``depth-scaled`` (unembedding only) are
truncated at 3 sigma, which changes the std by 1.4%. :data:`COMPARED` has further inits, for comparison only.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from leaven.recipe.shape import BRANCH_ENDS, Parameter, Role

InitName = Literal[
    "rule", "gpt2", "small-init", "mt-nlg", "wang", "tinyllama", "mitchell", "fan-in", "openelm", "depth-scaled"
]


@dataclass(frozen=True)
class MatrixPlace:
    """The variables of a :class:`Formula`: sizes of the model, and sizes and layer of one matrix."""

    d: int  # width of the model
    L: int  # number of layers
    l: int  # index of the layer, from 0  # noqa: E741
    f: int  # fan in of the matrix
    o: int  # fan out of the matrix


@dataclass(frozen=True)
class Formula:
    text: str  # the formula as printed; its letters are the fields of :class:`MatrixPlace`
    std: Callable[[MatrixPlace], float]


@dataclass(frozen=True)
class Init:
    """A published initialisation: formulas for the std of each kind of matrix."""

    source: str
    inputs: Formula  # for all matrices without another formula
    outputs: Formula  # for the matrices that write to the residual stream (:data:`BRANCH_ENDS`)
    embedding: Formula | None = None  # None: the formula ``inputs``
    unembedding: Formula | None = None  # also for a tied embedding; None: the formula ``inputs``
    gated_in: bool = False  # whether mlp.in of a gated MLP uses the formula ``outputs``
    modules: Mapping[str, Formula] = field(default_factory=dict)  # formulas of single modules

    @property
    def text(self) -> str:
        named = {"embedding": self.embedding, "outputs": self.outputs, "unembedding": self.unembedding}
        if self.gated_in:
            named["a gated mlp.in"] = self.outputs
        named |= self.modules
        apart = [f"{what} {formula.text}" for what, formula in named.items() if formula not in (None, self.inputs)]
        return ", ".join([self.inputs.text, *apart])

    @property
    def sees_depth(self) -> bool:
        """Return whether the std of a branch's last matrix depends on the layer or the number of layers."""
        shallow, deep = (MatrixPlace(d=64, L=depth, l=depth - 1, f=64, o=64) for depth in (2, 4))
        return self.outputs.std(shallow) != self.outputs.std(deep)

    def formula(self, parameter: Parameter, gated: bool) -> Formula:
        if parameter.module in self.modules:
            return self.modules[parameter.module]
        is_input = parameter.module.startswith("mlp.") and parameter.module.endswith(".in")
        if parameter.module in BRANCH_ENDS or (self.gated_in and gated and is_input):
            return self.outputs
        if parameter.module == "embedding" and parameter.role is Role.EMBEDDING:
            return self.embedding or self.inputs
        if parameter.role in {Role.UNEMBEDDING, Role.TIED_EMBEDDING}:
            return self.unembedding or self.inputs
        return self.inputs

    def std(self, parameter: Parameter, n_layers: int, gated: bool) -> float:
        """Return the initial std of a matrix. ``gated``: the model has gated MLPs, for which some inits differ."""
        out, into = parameter.shape[-2:]
        width = out if parameter.module in BRANCH_ENDS else into
        return self.formula(parameter, gated).std(MatrixPlace(width, n_layers, parameter.layer or 0, into, out))


def usual_std(width: int) -> float:
    """Return sqrt(1 / (3 d)), the init std of MT-NLG 530B and BLOOM-176B, as a reference for other stds."""
    return math.sqrt(1 / (3 * width))


_GPT2 = Formula("0.02", lambda at: 0.02)
_SMALL = Formula("sqrt(2 / (5 d))", lambda at: math.sqrt(2 / (5 * at.d)))
_LECUN = Formula("1 / sqrt(d)", lambda at: at.d**-0.5)
_FAN_IN = Formula("1 / sqrt(f)", lambda at: at.f**-0.5)
_DEEPNET = Formula(
    "(8 L)^-1/4 sqrt(2 / (f + o))", lambda at: math.pow(8 * at.L, -0.25) * math.sqrt(2 / (at.f + at.o))
)
_MUP_SIGMA, _MUP_WIDTH = 0.08, 256

INITS: Mapping[str, Init] = MappingProxyType(
    {
        "gpt2": Init(
            source="GPT-2 as in karpathy/nanoGPT, model.py: the residual stream adds up 2 L branches",
            inputs=_GPT2,
            outputs=Formula("0.02 / sqrt(2 L)", lambda at: 0.02 / math.sqrt(2 * at.L)),
        ),
        "small-init": Init(
            source="Nguyen and Salazar 2019, arXiv 1910.05895, as in EleutherAI/gpt-neox, init_functions.py",
            inputs=_SMALL,
            outputs=_SMALL,
        ),
        "mt-nlg": Init(
            source="MT-NLG 530B, arXiv 2201.11990, and BLOOM-176B; outputs scaled as in Megatron-LM",
            inputs=Formula("sqrt(1 / (3 d))", lambda at: usual_std(at.d)),
            outputs=Formula(
                "sqrt(1 / (3 d)) / sqrt(2 L)", lambda at: math.sqrt(1 / (3 * at.d)) / math.sqrt(2 * at.L)
            ),
        ),
        "wang": Init(
            source="EleutherAI/gpt-neox, init_functions.py (GPT-NeoX-20B, Pythia): small_init, wang_init for outputs",
            inputs=_SMALL,
            outputs=Formula("2 / (L sqrt(d))", lambda at: 2 / (at.L * math.sqrt(at.d))),
        ),
        "tinyllama": Init(
            source="jzhang38/TinyLlama, lit_gpt/model.py: small_init, half of wang_init for outputs",
            inputs=_SMALL,
            outputs=Formula("1 / (L sqrt(d))", lambda at: 1 / (at.L * math.sqrt(at.d))),
        ),
        "mitchell": Init(
            source="allenai/OLMo, model.py (OLMo 1, open_lm); Lingua with factor current_depth; truncated at 3 sigma",
            inputs=_LECUN,
            outputs=Formula("1 / sqrt(2 f (l + 1))", lambda at: 1 / math.sqrt(2 * at.f * (at.l + 1))),
        ),
        "fan-in": Init(
            source="LeCun et al. 1998; used in StarCoder, SmolLM and, by default, facebookresearch/lingua",
            inputs=_FAN_IN,
            outputs=_FAN_IN,
            embedding=_LECUN,
        ),
        "openelm": Init(
            source="OpenELM, arXiv 2404.14619; Lingua's factor global_depth uses L + 1 in place of L",
            inputs=_LECUN,
            outputs=Formula("1 / sqrt(2 d L)", lambda at: 1 / math.sqrt(2 * at.d * at.L)),
        ),
        "depth-scaled": Init(
            source="pytorch/torchtitan, models/common/param_init.py, and OLMo-core's llama_depth; after Zhang et al. "
            "2019, arXiv 1908.11365",
            inputs=_GPT2,
            outputs=Formula("0.02 / sqrt(2 (l + 1))", lambda at: 0.02 / math.sqrt(2 * (at.l + 1))),
            embedding=Formula("1", lambda at: 1.0),
            unembedding=_LECUN,
            gated_in=True,
        ),
    }
)

COMPARED: Mapping[str, Init] = MappingProxyType(
    {
        **INITS,
        "nanochat": Init(
            source="karpathy/nanochat; needs a different lr for each parameter group; q, k and v are drawn uniformly",
            inputs=_LECUN,
            outputs=Formula("0", lambda at: 0.0),
            embedding=Formula("0.8", lambda at: 0.8),
            unembedding=Formula("0.001", lambda at: 0.001),
            modules={"mlp.in": Formula("0.4 / sqrt(d)", lambda at: 0.4 * at.d**-0.5)},
        ),
        "deepnet": Init(
            source="Wang et al. 2022, arXiv 2203.00555, decoder only; needs norms after the branches and a "
            "residual stream multiplied by (2 L)^1/4",
            inputs=Formula("sqrt(2 / (f + o))", lambda at: math.sqrt(2 / (at.f + at.o))),
            outputs=_DEEPNET,
            embedding=_LECUN,
            unembedding=_LECUN,
            modules={"attention.value": _DEEPNET, "mlp.in": _DEEPNET, "mlp.gate": _DEEPNET},
        ),
        "mup": Init(
            source="Yang et al. 2022, arXiv 2203.03466; Cerebras-GPT's base, 0.08 at width 256; needs the rule mup",
            inputs=Formula("0.08 sqrt(256 / d)", lambda at: _MUP_SIGMA * math.sqrt(_MUP_WIDTH / at.d)),
            outputs=Formula(
                "0.08 sqrt(256 / (2 d L))", lambda at: _MUP_SIGMA * math.sqrt(_MUP_WIDTH / (2 * at.d * at.L))
            ),
            embedding=Formula("0.08", lambda at: _MUP_SIGMA),
            unembedding=Formula("0.08", lambda at: _MUP_SIGMA),
        ),
    }
)

# Scaling rules that multiply each branch by a power of the depth. They are named here because this package cannot
# import :mod:`leaven.scaling.rules`; a test compares the two.
SCALES_BRANCHES = frozenset({"completep", "complete-d-p"})


def require_one_rule(init: str, rule: str, *, wider: bool, deeper: bool) -> None:
    """Raise ValueError if a scaling rule would scale the stds of a published init a second time.

    ``wider``: the base and the recipe's model differ in width. ``deeper``: they differ in depth.
    """
    if init == "rule" or rule == "standard":
        return
    instead = 'set scaling.rule = "standard", or init = "rule" and an init_std for the base model'
    if wider:
        raise ValueError(
            f'base and model differ in width: init = "{init}" itself sets the std for every width, but rule {rule} '
            f"would also scale this std; {instead}"
        )
    if deeper and rule in SCALES_BRANCHES and INITS[init].sees_depth:
        raise ValueError(
            f'base and model differ in depth, and the depth would count twice: init = "{init}" scales the std of '
            f"each branch's last matrix with the number of blocks L ({INITS[init].outputs.text}), and rule {rule} "
            f"multiplies each branch by L^-alpha; {instead}"
        )
