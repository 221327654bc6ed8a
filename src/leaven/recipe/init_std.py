"""Published initialisations by name: the standard deviation of every matrix as a function of the model's shape.

Each init applies to models of any width and depth. A recipe that names an init has no ``init_std``, and the scaling
rule does not change its init: :func:`require_one_rule` refuses a recipe in which both would change it. Multipliers of
modules and of depth still apply. In all inits, gains start at 1 and biases at 0. Where the original is truncated at 3
sigma (Mitchell, the unembedding of ``depth-scaled``), leaven draws from the full normal distribution, whose std
differs by at most 1.4%.

:data:`COMPARED` also has inits that a recipe cannot name, because they need another architecture or special learning
rates. They serve for comparison only.
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
    """The letters of a formula: width d, layers L, layer l (from 0), fan in f and fan out o of the matrix."""

    d: int
    L: int
    l: int  # noqa: E741
    f: int
    o: int


@dataclass(frozen=True)
class Formula:
    """A formula of a standard deviation, as text (with the letters of :class:`MatrixPlace`) and as a function."""

    text: str
    std: Callable[[MatrixPlace], float]


@dataclass(frozen=True)
class Init:
    """A published initialisation.

    ``outputs`` applies to the matrices that write to the residual stream, ``inputs`` to all others. ``embedding`` and
    ``unembedding`` are given if they differ from ``inputs``; a tied matrix is drawn like the unembedding. With
    ``gated_in``, ``mlp.in`` of a gated MLP is drawn like the outputs. ``modules`` has further exceptions.
    """

    source: str
    inputs: Formula
    outputs: Formula
    embedding: Formula | None = None
    unembedding: Formula | None = None
    gated_in: bool = False
    modules: Mapping[str, Formula] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Return the formulas of this init in one line."""
        named = {"embedding": self.embedding, "outputs": self.outputs, "unembedding": self.unembedding}
        if self.gated_in:
            named["a gated mlp.in"] = self.outputs
        named |= self.modules
        apart = [f"{what} {formula.text}" for what, formula in named.items() if formula not in (None, self.inputs)]
        return ", ".join([self.inputs.text, *apart])

    @property
    def sees_depth(self) -> bool:
        """Return whether the std at the end of a branch depends on the depth of the model."""
        shallow, deep = (MatrixPlace(d=64, L=depth, l=depth - 1, f=64, o=64) for depth in (2, 4))
        return self.outputs.std(shallow) != self.outputs.std(deep)

    def formula(self, parameter: Parameter, gated: bool) -> Formula:
        if parameter.module in self.modules:
            return self.modules[parameter.module]
        outputs = (*BRANCH_ENDS, "mlp.in") if self.gated_in and gated else BRANCH_ENDS
        if parameter.module in outputs:
            return self.outputs
        if parameter.module == "embedding" and parameter.role is Role.EMBEDDING:
            return self.embedding or self.inputs
        if parameter.role in {Role.UNEMBEDDING, Role.TIED_EMBEDDING}:
            return self.unembedding or self.inputs
        return self.inputs

    def std(self, parameter: Parameter, n_layers: int, gated: bool) -> float:
        """Return the initial standard deviation of one matrix in a model with ``n_layers`` blocks."""
        out, into = parameter.shape
        width = out if parameter.module in BRANCH_ENDS else into
        return self.formula(parameter, gated).std(MatrixPlace(width, n_layers, parameter.layer or 0, into, out))


_GPT2 = Formula("0.02", lambda at: 0.02)
_SMALL = Formula("sqrt(2 / (5 d))", lambda at: math.sqrt(2 / (5 * at.d)))
_MT_NLG = Formula("sqrt(1 / (3 d))", lambda at: math.sqrt(1 / (3 * at.d)))
_LECUN = Formula("1 / sqrt(d)", lambda at: at.d**-0.5)
_FAN_IN = Formula("1 / sqrt(f)", lambda at: at.f**-0.5)
_ZERO = Formula("0", lambda at: 0.0)
_DEEPNET = Formula(
    "(8 L)^-1/4 sqrt(2 / (f + o))", lambda at: math.pow(8 * at.L, -0.25) * math.sqrt(2 / (at.f + at.o))
)
_MUP_SIGMA, _MUP_WIDTH = 0.08, 256

INITS: Mapping[str, Init] = MappingProxyType(
    {
        "gpt2": Init(
            source="GPT-2 as in karpathy/nanoGPT, model.py: 0.02, 2 L branches add up in the residual stream",
            inputs=_GPT2,
            outputs=Formula("0.02 / sqrt(2 L)", lambda at: 0.02 / math.sqrt(2 * at.L)),
        ),
        "small-init": Init(
            source="Nguyen and Salazar 2019, arXiv 1910.05895, as in EleutherAI/gpt-neox, init_functions.py",
            inputs=_SMALL,
            outputs=_SMALL,
        ),
        "mt-nlg": Init(
            source="MT-NLG 530B, arXiv 2201.11990, and BLOOM-176B; outputs as Megatron-LM scales them",
            inputs=_MT_NLG,
            outputs=Formula(
                "sqrt(1 / (3 d)) / sqrt(2 L)", lambda at: math.sqrt(1 / (3 * at.d)) / math.sqrt(2 * at.L)
            ),
        ),
        "wang": Init(
            source="EleutherAI/gpt-neox, init_functions.py (GPT-NeoX-20B, Pythia): small-init, outputs by Wang",
            inputs=_SMALL,
            outputs=Formula("2 / (L sqrt(d))", lambda at: 2 / (at.L * math.sqrt(at.d))),
        ),
        "tinyllama": Init(
            source="jzhang38/TinyLlama, lit_gpt/model.py: small-init, outputs half of Wang's",
            inputs=_SMALL,
            outputs=Formula("1 / (L sqrt(d))", lambda at: 1 / (at.L * math.sqrt(at.d))),
        ),
        "mitchell": Init(
            source="allenai/OLMo, model.py (OLMo 1, open_lm); Lingua with factor current_depth; truncated at 3 sigma",
            inputs=_LECUN,
            outputs=Formula("1 / sqrt(2 f (l + 1))", lambda at: 1 / math.sqrt(2 * at.f * (at.l + 1))),
        ),
        "fan-in": Init(
            source="LeCun et al. 1998: StarCoder, SmolLM, and facebookresearch/lingua as it comes (no factor)",
            inputs=_FAN_IN,
            outputs=_FAN_IN,
            embedding=_LECUN,
        ),
        "openelm": Init(
            source="OpenELM, arXiv 2404.14619; Lingua's factor global_depth has L + 1 for L",
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
            source="karpathy/nanochat; goes with its own lr for each group; q, k and v are drawn uniformly",
            inputs=_LECUN,
            outputs=_ZERO,
            embedding=Formula("0.8", lambda at: 0.8),
            unembedding=Formula("0.001", lambda at: 0.001),
            modules={"mlp.in": Formula("0.4 / sqrt(d)", lambda at: 0.4 * at.d**-0.5)},
        ),
        "deepnet": Init(
            source="Wang et al. 2022, arXiv 2203.00555, decoder only; goes with norms after the branches and a "
            "residual stream times (2 L)^1/4",
            inputs=Formula("sqrt(2 / (f + o))", lambda at: math.sqrt(2 / (at.f + at.o))),
            outputs=_DEEPNET,
            embedding=_LECUN,
            unembedding=_LECUN,
            modules={"attention.value": _DEEPNET, "mlp.in": _DEEPNET, "mlp.gate": _DEEPNET},
        ),
        "mup": Init(
            source="Yang et al. 2022, arXiv 2203.03466; Cerebras-GPT's base, 0.08 at width 256; goes with rule mup",
            inputs=Formula("0.08 sqrt(256 / d)", lambda at: _MUP_SIGMA * math.sqrt(_MUP_WIDTH / at.d)),
            outputs=Formula(
                "0.08 sqrt(256 / (2 d L))", lambda at: _MUP_SIGMA * math.sqrt(_MUP_WIDTH / (2 * at.d * at.L))
            ),
            embedding=Formula("0.08", lambda at: _MUP_SIGMA),
            unembedding=Formula("0.08", lambda at: _MUP_SIGMA),
        ),
    }
)

# Rules that multiply each branch by a power of the depth; all but ``standard`` change the init with the width. A test
# compares both with the rules, which are in a layer above.
SCALES_BRANCHES = frozenset({"completep", "complete-d-p"})


def require_one_rule(init: str, rule: str, *, wider: bool, deeper: bool) -> None:
    """Check that a named init and a scaling rule do not both change the init between base and target.

    Over width, every rule but ``standard`` scales the init of some module by another power of the width than a named
    init does. Over depth, a branch multiplier L^-alpha and a smaller init of the branch's last matrix would count the
    depth twice.

    Raises:
        ValueError: if both would change the init; the message names both and says what to do.
    """
    if init == "rule" or rule == "standard":
        return
    instead = 'set scaling.rule = "standard", or init = "rule" with an init_std that is right at the base'
    if wider:
        raise ValueError(
            f'init = "{init}" and rule {rule} both scale the init with the width, and the base has another width; '
            f"{instead}"
        )
    if deeper and rule in SCALES_BRANCHES and INITS[init].sees_depth:
        raise ValueError(
            f'init = "{init}" starts the ends of branches at {INITS[init].outputs.text}, and rule {rule} multiplies '
            f"branches by L^-alpha as well: the depth would count twice, since the base has another depth; {instead}"
        )
