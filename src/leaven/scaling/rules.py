"""The scaling rules as tables: how each hyperparameter changes with scale, with a source for every cell.

A table has a row for each role of a tensor, such as embedding, hidden weight (inside the blocks) or norm gain.
:mod:`leaven.scaling.cells` explains the cells and their letters, such as I (ratio of the fan in) and L (ratio of the
depth). All tables differ from the papers in these points:

- **Per-tensor ratios.** The papers scale all widths together, by one ratio m_N. Here initial variance, lr and weight
  decay scale with the tensor's fan in: each output is a sum over the fan in, and Adam changes each weight
  by about lr. eps scales with the fan out, because the gradient falls with the width of the tensor's output. If all
  widths grow together, both ratios are m_N.
- **Shared QK gains.** If all heads share a QK-norm gain, its gradient is a sum over the heads. With more heads, each
  term falls, but the sum does not. So the fan out of a shared gain is the head dimension, and eps does not change
  with the number of heads. Gains that are separate for each head are treated as other norms inside the blocks.
- **Decay of gains and biases** only if the hyperparameter ``decay_norm_and_bias`` is true. The default is false, as
  in nanoGPT and OLMo 2, because decay pulls a gain towards 0 and not towards its neutral value 1.
- **Norms on a branch's output.** The papers only have norms before branches. With a norm on the output y of a branch,
  the block adds m g norm(y) to the residual stream. Here m is the branch's multiplier and g is the norm's gain.

  - m is applied after the norm, because a norm undoes every factor before it. m has the published cell. So
    a block's addition to the stream, and its change in a step, scale as without the norm.
  - g has the cells of a gain before a branch. It starts at 1. Its gradient is the sum over tokens of m norm(y) times
    the gradient of the stream. The gradient of the stream is proportional to 1 / width, so the gradient of g falls as
    width^-1 L^-alpha. A step of the L gains, each multiplied by an m of L^-alpha, changes the stream by L x L^-alpha
    x lr, so the cell of lr is L^(alpha-1). Weight decay of g would shrink the branch itself.
  - Some matrices, such as a branch's last one, enter y linearly. Their scale does not change norm(y), but it changes
    how far a step moves norm(y). Adam changes y by lr x fan in x (size of the input). The norm divides this change by
    the size of y, which is std x fan in^(1/2) x (size of the input). So the ratio that matters is lr fan in^(1/2) /
    std. With the published cells, lr ~ I^-1 and variance ~ I^-1, it is the same at every width. Then the gradient has
    the published exponents, and so has eps. (Multiplying std and lr by c, and dividing eps and decay by c, trains the
    same model: tests/scaling/test_invariance.py.)
  - Decay of these matrices sets the ratio step / weight, which is (2 lr decay)^(1/2) in equilibrium (Kosson et al.
    2025, arXiv 2510.19093). So decay ~ I, which keeps lr x decay constant. Fan et al. 2025, arXiv 2510.15262, argue
    for decay ~ I^(1/2): the ratio of a branch's output to its input must not change with the width. Their argument
    does not apply if a norm follows, because then g sets this ratio.
  - Without a norm before the branch, its matrices read the stream itself. The size of the stream does not depend on
    the width. With more depth, it falls to the size of the embedding, because the sum of the branches falls.

``complete-d-p`` differs from Table 1 of its paper in one cell, the eps of the final norm, where the paper has 1. The
gradient of this gain falls as 1 / width (measured exponent -1.05 at initialisation, -0.91 after 150 steps), so its
eps must fall, too. The difference is small as long as eps is much smaller than the gradient.

**Experts.** The base has as many experts as the target, and d_expert grows with the width. Then each expert is an MLP
that reads a constant share of the tokens, so its matrices have the cells of hidden weights. (According to the
abstract of Peng et al. 2026, arXiv 2605.23893, the lr does not change to first order even if this share changes.
Malasnicki et al. 2025, arXiv 2508.09752, derive a rule for width, too.)

The router turns the width into as many logits as there are experts, which is a fixed number:

- A step changes a logit by lr x fan in x (size of the input), so lr ~ I^-1. Each of L blocks changes the stream by
  L^-alpha times the change of its weights, in the same direction, so lr ~ L^(alpha-1), as for hidden weights.
- The gradient of a logit is a sum over the width: the expert's output times the gradient of the stream. Once the
  output is aligned with the gradient, the sum does not change with the width. The router sends this gradient back to
  the stream through its own weights. All other gradients there fall as 1 / width, so the initial weights must, too:
  variance ~ I^-2, as for an unembedding. (With I^-1, the router's gradient would exceed the others by width^(1/2).)
- The gradient of the router's weights is the gradient of the logits times the input. It is constant over the width
  and falls as L^-alpha with depth, as the branch does, so eps ~ L^-alpha.
- The balance loss and the z-loss act on the logits directly. Their coefficients are multiplied by L^-alpha, so that
  their shares of the router's gradient do not change with depth.

**Muon.** With ``optimizer = "muon"``, lr and weight decay of hidden weights and of the matrices of experts have the
cells of ``Rule.muon``. All other parameters have the cells of Adam. No paper cited below has a rule for width,
depth, batch and tokens together, so the cells are derived here:

- Width. A step of Muon is lr x M x (orthogonal matrix), where the factor M depends on the shape (``Muon.matching``).
  So its largest singular value is lr x M. Outputs change by the same amount at every width if this value is
  proportional to sqrt(fan out / fan in) (the spectral condition; Yang, Simon and Bernstein 2023, arXiv 2310.17813).
  So lr is proportional to I^-1/2 O^1/2 M^-1. With ``match = "spectral"``, M is sqrt(max(1, fan out / fan in)), and at
  fixed proportions the lr does not change with width. With ``match = "adamw_rms"``, M is 0.2 sqrt(max(fan out, fan
  in)), and the lr falls as 1 / sqrt(width). The code of arXiv 2512.05620 has I^-1/2 O^1/2, with M = 1.
- Depth. The size of a step does not depend on the gradient's size, as with Adam. Each of L blocks changes the stream
  by L^-alpha x lr, in the same direction. So the sum is constant if lr is proportional to L^(alpha-1), as for Adam.
  The code of 2512.05620 has this lr with alpha = 1, and the code of arXiv 2603.28743 with alpha = 1/2.
- Batch and tokens. Suppose that the momentum averages w steps of batch B, and that most of it is noise. Muon divides
  the momentum by its size, so the noise in a step always has the same size, and the signal in a step is proportional
  to the signal-to-noise ratio, sqrt(w B). The momentum repeats the same noise for w steps. So over K steps, noise
  moves a weight by lr sqrt(K w), and signal by K lr sqrt(w B). With constant w these are the equations of Adam, and
  lr is proportional to B^1/2 D^-t. If w grew with K, as Adam's half-lives do, the lr would have to change as B / D.
  So the rule does not change w, that is, the decay rate ``muon.momentum``.
  Published runs also use one rate, 0.95. According to their abstracts, 2603.15958 finds several pairs of momentum
  and batch equally good, and 2510.03871 finds Adam's rules for Scion. 2603.28743 has D^-0.32 (set
  ``token_exponent``).
- Weight decay keeps lr x decay x steps constant, as for Adam. This is the most disputed cell. In 2512.05620, lr x
  decay is proportional to 1 / width, for models whose tokens grow with the width. The cell here lowers lr x decay
  for such models, too, because more tokens mean more steps. Published runs use a decay of 0.1 everywhere.

After steps of Muon, the size of outputs at small widths still changes by up to width^0.2
(:mod:`leaven.verification.coordinates`). 2512.05620 reports such deviations, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from leaven.documents.runs import CellRow, RuleDocument
from leaven.recipe.shape import Role
from leaven.scaling.cells import LETTERS, Cell

QUANTITIES = ("init_variance", "lr", "eps", "weight_decay", "forward")


@dataclass(frozen=True, eq=False)  # hash by identity, because the fields have no hash
class Rule:
    """A scaling rule. A cell is a factor that scales a hyperparameter from the base to the run.

    The cells in ``cells`` depend on the role of a parameter. All other cells are the same for every role.
    """

    name: str
    source: str
    cells: Mapping[str, Mapping[Role, Cell]]  # by quantity (`QUANTITIES`) and role
    residual: Cell  # multiplies each residual branch
    attention: Cell  # multiplies the scale of the attention logits, 1 / sqrt(d_head)
    half_life: Cell  # multiplies the half-life of Adam's moments in steps; to first order it divides 1 - beta
    muon: Mapping[str, Cell]  # by quantity: cells of matrices that Muon updates, instead of those in ``cells``
    # Factors for batch and tokens, by quantity; they multiply the cells of all roles.
    columns: Mapping[str, Cell] = field(default_factory=dict)

    def of(self, quantity: str, role: Role, muon: bool = False) -> tuple[Cell, ...]:
        """Return the cells whose product scales a hyperparameter. ``muon``: whether Muon updates the tensor."""
        cell = self.muon[quantity] if muon and quantity in self.muon else self.cells[quantity][role]
        return (cell, self.columns[quantity]) if quantity in self.columns else (cell,)

    @property
    def shared(self) -> dict[str, Cell]:
        """The cells that are the same for every role, by printed name."""
        columns = {f"{quantity} (all rows)": cell for quantity, cell in self.columns.items()}
        columns |= {f"{quantity} (Muon)": cell for quantity, cell in self.muon.items()}
        return columns | {"residual": self.residual, "attention": self.attention, "half_life": self.half_life}

    def document(self) -> RuleDocument:
        """Return the document of ``leaven show --rule``: the rule's table, each cell with its source."""

        def row(cell: Cell) -> CellRow:
            return CellRow(text=cell.text, source=cell.source)

        return RuleDocument(
            rule=self.name,
            source=self.source,
            roles={role: {quantity: row(self.cells[quantity][role]) for quantity in QUANTITIES} for role in Role},
            shared={name: row(cell) for name, cell in self.shared.items()},
            letters=LETTERS,
        )


_HIDDEN = (Role.HIDDEN_WEIGHT, Role.EXPERT_WEIGHT)
_HIDDEN_GAINS = (Role.HIDDEN_NORM, Role.QK_NORM, Role.OUTPUT_NORM)
_INPUT = (Role.EMBEDDING_NORM, Role.EMBEDDING_BIAS)
_FINAL = (Role.FINAL_NORM, Role.FINAL_BIAS)
_GAINS_AND_BIASES = (*_INPUT, Role.HIDDEN_BIAS, *_HIDDEN_GAINS, *_FINAL, Role.UNEMBEDDING_BIAS)
_BLOCK = (*_HIDDEN, Role.HIDDEN_BIAS, Role.HIDDEN_NORM)
_READOUT = (Role.UNEMBEDDING, Role.UNEMBEDDING_BIAS)


def _rows(text: str, source: str, *roles: Role) -> dict[Role, Cell]:
    return dict.fromkeys(roles, Cell(text, source))


_TIED = (
    "derived from the unembedding's row: with forward x c, std / c, lr / c, eps x c and decay x c, a model trains in "
    "the same way; here c = 1/N"
)
_STARTS = "derived: not in the table; gains start at 1, biases at 0"
_BEHIND = (
    "derived: as for a gain before a branch (scaling/rules.py); measured: tests/verification/test_planted_faults.py"
)
_ROUTED = "derived: the router maps the width to a fixed number of logits (see the top of scaling/rules.py)"
_STREAM = "derived: not in the table; same as for the embedding: both act on the residual stream before all blocks"
_SAME = "practice: the same value at every scale"
_DIVIDED = Cell("H^-1/2", "Yang et al. 2022, arXiv 2203.03466, definition 4.1: logits q.k / d, times sqrt(base d)")

_SPECTRAL = "derived: a step's largest singular value is proportional to sqrt(fan out / fan in), arXiv 2512.05620"
_SHRINK = "derived: lr x decay x steps is constant; disputed, see arXiv 2512.05620"
_MUON_OVER_DEPTH = {
    "lr": Cell("I^-1/2 O^1/2 M^-1 L^(alpha-1)", f"{_SPECTRAL}; depth: as for Adam"),
    "weight_decay": Cell("I^1/2 O^-1/2 M L^w", _SHRINK),
}

STANDARD = Rule(
    name="standard",
    source="common practice: the same values at every scale",
    cells={quantity: _rows("1", _SAME, *Role) for quantity in QUANTITIES},
    residual=Cell("1", _SAME),
    attention=Cell("1", "Vaswani et al. 2017, arXiv 1706.03762, equation 1: logits q.k / sqrt(d)"),
    half_life=Cell("1", _SAME),
    muon={"lr": Cell("1", _SAME), "weight_decay": Cell("1", _SAME)},
)

_TP5 = "Tensor Programs V, Table 3: "
_MUP = "Complete(d)P, Table 1, muP column, "
_NOT_MUP = "muP does not cover depth, batch or tokens"

MUP = Rule(
    name="mup",
    source="Yang et al. 2022 (Tensor Programs V), arXiv 2203.03466, Table 3, Adam; "
    "eps and decay as in the muP column of Mlodozeniec et al. 2025, Table 1",
    cells={
        "init_variance": {
            **_rows("1", f"{_TP5}input weights and biases", Role.EMBEDDING, *_GAINS_AND_BIASES),
            **_rows("1", _BEHIND, Role.OUTPUT_NORM),
            **_rows("1", f"{_TP5}biases", Role.UNEMBEDDING_BIAS),
            **_rows("I^-1", f"{_TP5}hidden weights", *_HIDDEN),
            **_rows("I^-2", _ROUTED, Role.ROUTER),
            **_rows("I^-2", f"{_TP5}output weights", Role.UNEMBEDDING),
            **_rows("1", _TIED, Role.TIED_EMBEDDING),
        },
        "lr": {
            **_rows("1", f"{_TP5}input weights and biases", Role.EMBEDDING, *_GAINS_AND_BIASES),
            **_rows("1", _BEHIND, Role.OUTPUT_NORM),
            **_rows("1", f"{_TP5}biases", Role.UNEMBEDDING_BIAS),
            **_rows("I^-1", f"{_TP5}hidden weights", *_HIDDEN),
            **_rows("I^-1", _ROUTED, Role.ROUTER),
            **_rows("I^-1", f"{_TP5}output weights", Role.UNEMBEDDING),
            **_rows("1", _TIED, Role.TIED_EMBEDDING),
        },
        "eps": {
            **_rows("O^-1", f"{_MUP}AdamW eps: Hidden weights/biases/norms", *_BLOCK),
            **_rows("O^-1", _BEHIND, Role.OUTPUT_NORM),
            **_rows("O^-1", "derived: NA in Table 1, muP column; same width factor as in complete-d-p", Role.QK_NORM),
            **_rows("1", _ROUTED, Role.ROUTER),
            **_rows("O^-1", f"{_MUP}AdamW eps: Input emb.", Role.EMBEDDING),
            **_rows("O^-1", _STREAM, *_INPUT),
            **_rows("1", f"{_MUP}AdamW eps: Output weights/biases/norms", *_READOUT, *_FINAL),
            **_rows("O^-1", _TIED, Role.TIED_EMBEDDING),
        },
        "weight_decay": {
            **_rows("I", f"{_MUP}weight decay: Hidden weights", *_HIDDEN),
            **_rows("I", _ROUTED, Role.ROUTER),
            **_rows("I", f"{_MUP}weight decay: Unemb. weights", Role.UNEMBEDDING),
            **_rows("1", f"{_MUP}weight decay: Rest", Role.EMBEDDING, *_GAINS_AND_BIASES),
            **_rows("1", _TIED, Role.TIED_EMBEDDING),
        },
        "forward": {
            **_rows("1", f"{_TP5}no forward multiplier (Table 8 has one)", *Role),
            **_rows("I^-1", _TIED, Role.TIED_EMBEDDING),
        },
    },
    residual=Cell("1", f"{_MUP}multipliers: x + Block(x)"),
    attention=_DIVIDED,
    half_life=Cell("1", _NOT_MUP),
    muon={"lr": Cell("I^-1/2 O^1/2 M^-1", _SPECTRAL), "weight_decay": Cell("I^1/2 O^-1/2 M", _SHRINK)},
)

_DEY = "Table 1, "
_UNSAID = f"{_DEY}AdamW eps: residual blocks only; all other parameters keep the base value"

COMPLETE_P = Rule(
    name="completep",
    source="Dey et al. 2025 (CompleteP), arXiv 2505.01618, Table 1 (the form of Table 8 of Tensor Programs V)",
    cells={
        "init_variance": {
            **_rows("1", f"{_DEY}initial variance: embedding", Role.EMBEDDING, Role.TIED_EMBEDDING),
            **_rows("1", _STARTS, *_INPUT),
            **_rows("I^-1", f"{_DEY}initial variance: hidden weights", *_HIDDEN),
            **_rows("I^-2", _ROUTED, Role.ROUTER),
            **_rows("1", f"{_DEY}initial variance: pre-LN", Role.HIDDEN_NORM),
            **_rows("1", "derived: not in the table; same as for the pre-LN", Role.QK_NORM),
            **_rows("1", _BEHIND, Role.OUTPUT_NORM),
            **_rows("1", f"{_DEY}initial variance: final LN", *_FINAL),
            **_rows("1", f"{_DEY}initial variance: unembedding", Role.UNEMBEDDING),
            **_rows("1", "derived: biases start at 0", Role.HIDDEN_BIAS, Role.UNEMBEDDING_BIAS),
        },
        "lr": {
            **_rows("1", f"{_DEY}lr: embedding", Role.EMBEDDING, Role.TIED_EMBEDDING),
            **_rows("1", _STREAM, *_INPUT),
            **_rows("I^-1 L^(alpha-1)", f"{_DEY}lr: hidden weights", *_HIDDEN),
            **_rows("I^-1 L^(alpha-1)", _ROUTED, Role.ROUTER),
            **_rows("L^(alpha-1)", f"{_DEY}lr: hidden biases", Role.HIDDEN_BIAS),
            **_rows("L^(alpha-1)", f"{_DEY}lr: pre-LN", Role.HIDDEN_NORM),
            **_rows("L^(alpha-1)", "derived: not in the table; same as for the pre-LN", Role.QK_NORM),
            **_rows("L^(alpha-1)", _BEHIND, Role.OUTPUT_NORM),
            **_rows("1", f"{_DEY}lr: final LN", *_FINAL),
            **_rows("1", f"{_DEY}lr: unembedding", Role.UNEMBEDDING),
            **_rows("1", "derived: fan in 1, outside the blocks", Role.UNEMBEDDING_BIAS),
        },
        "eps": {
            **_rows("1", _UNSAID, *Role),
            **_rows("O^-1 L^-alpha", f"{_DEY}AdamW eps: residual blocks", *_BLOCK),
            **_rows("O^-1 L^-alpha", "derived: not in the table; same as in complete-d-p", Role.QK_NORM),
            **_rows("O^-1 L^-alpha", _BEHIND, Role.OUTPUT_NORM),
            **_rows("L^-alpha", _ROUTED, Role.ROUTER),
        },
        "weight_decay": {
            **_rows("1", f"{_DEY}weight decay: hidden weights only", *Role),
            **_rows("I L^w", f"{_DEY}weight decay: hidden weights; L^w derived", *_HIDDEN),
            **_rows("I L^w", _ROUTED, Role.ROUTER),
        },
        "forward": {
            **_rows("1", f"{_DEY}forward: unembedding only", *Role),
            **_rows("I^-1", f"{_DEY}forward: unembedding", Role.UNEMBEDDING, Role.TIED_EMBEDDING),
        },
    },
    residual=Cell("L^-alpha", f"{_DEY}residual: x + m_L^-alpha Block(x)"),
    attention=_DIVIDED,
    half_life=Cell("1", "CompleteP does not cover batch or tokens"),
    muon=_MUON_OVER_DEPTH,
)

_T1 = "Table 1, "

COMPLETE_D_P = Rule(
    name="complete-d-p",
    source="Mlodozeniec et al. 2025 (Complete(d)P), arXiv 2512.22382, Table 1; eps of the final norm derived",
    cells={
        "init_variance": {
            **_rows("1", f"{_T1}init variances: Input emb.", Role.EMBEDDING),
            **_rows("1", _STARTS, *_INPUT),
            **_rows("I^-1", f"{_T1}init variances: Hidden weights", *_HIDDEN),
            **_rows("I^-2", _ROUTED, Role.ROUTER),
            **_rows("1", f"{_T1}init variances: Hidden biases/norms", Role.HIDDEN_BIAS, *_HIDDEN_GAINS),
            **_rows("1", _BEHIND, Role.OUTPUT_NORM),
            **_rows("1", f"{_T1}init variances: Unemb. LN", *_FINAL),
            **_rows("I^-2", f"{_T1}init variances: Unemb. weights", Role.UNEMBEDDING),
            **_rows("1", "derived: it starts at 0", Role.UNEMBEDDING_BIAS),
            **_rows("1", _TIED, Role.TIED_EMBEDDING),
        },
        "lr": {
            **_rows("1", f"{_T1}learning rates: Input emb.", Role.EMBEDDING),
            **_rows("1", _STREAM, *_INPUT),
            **_rows("I^-1 L^(alpha-1)", f"{_T1}learning rates: Hidden weights", *_HIDDEN),
            **_rows("I^-1 L^(alpha-1)", _ROUTED, Role.ROUTER),
            **_rows("L^(alpha-1)", f"{_T1}learning rates: Hidden biases/norm", Role.HIDDEN_BIAS, Role.HIDDEN_NORM),
            **_rows("L^(alpha-1)", "derived: a hidden norm; Table 1 has no row for it", Role.QK_NORM),
            **_rows("L^(alpha-1)", _BEHIND, Role.OUTPUT_NORM),
            **_rows("1", f"{_T1}learning rates: Unemb. LN", *_FINAL),
            **_rows("I^-1", f"{_T1}learning rates: Unemb. weights", Role.UNEMBEDDING),
            **_rows(
                "1",
                "derived: a bias has fan in 1; measured: its gradient does not depend on the width",
                Role.UNEMBEDDING_BIAS,
            ),
            **_rows("1", _TIED, Role.TIED_EMBEDDING),
        },
        "eps": {
            **_rows("O^-1 L^-alpha", f"{_T1}AdamW eps: Hidden weights/biases/norms", *_BLOCK),
            **_rows(
                "O^-1 L^-alpha",
                f"{_T1}AdamW eps: QK norms (m_L^-alpha); derived: O^-1, which is 1 if the head dimension is fixed",
                Role.QK_NORM,
            ),
            **_rows("O^-1 L^-alpha", _BEHIND, Role.OUTPUT_NORM),
            **_rows("L^-alpha", _ROUTED, Role.ROUTER),
            **_rows("O^-1", f"{_T1}AdamW eps: Input emb.", Role.EMBEDDING),
            **_rows("O^-1", f"{_STREAM}; measured: width -0.94 to -1.03, depth 0.00 to -0.08", *_INPUT),
            **_rows("1", f"{_T1}AdamW eps: Output weights/biases/norms", *_READOUT),
            **_rows(
                "O^-1",
                "measured: gradient proportional to width^-1.05 (init), width^-0.91 (step 150); Table 1 has no O^-1",
                Role.FINAL_NORM,
            ),
            **_rows(
                "O^-1",
                "derived: as for the final norm's gain; its gradient is this bias's times activations of RMS 1",
                Role.FINAL_BIAS,
            ),
            **_rows("O^-1", _TIED, Role.TIED_EMBEDDING),
        },
        "weight_decay": {
            **_rows("I L^w", f"{_T1}weight decay: Hidden weights; L^w derived", *_HIDDEN),
            **_rows("I L^w", _ROUTED, Role.ROUTER),
            **_rows("I", f"{_T1}weight decay: Unemb. weights", Role.UNEMBEDDING),
            **_rows("1", f"{_T1}weight decay: Rest", Role.EMBEDDING, *_GAINS_AND_BIASES),
            **_rows("1", _TIED, Role.TIED_EMBEDDING),
        },
        "forward": {
            **_rows("1", f"{_T1}multipliers: Unemb. fwd, unaugmented", *Role),
            **_rows("I^-1", _TIED, Role.TIED_EMBEDDING),
        },
    },
    residual=Cell("L^-alpha", f"{_T1}multipliers: MHA residual, MLP residual"),
    attention=_DIVIDED,
    half_life=Cell(
        "B^-1 D", f"{_T1}AdamW (1-beta1), (1-beta2): m_B/m_D; leaven: beta^(m_B/m_D); Muon's momentum is not scaled"
    ),
    muon=_MUON_OVER_DEPTH,
    columns={
        "lr": Cell("B^1/2 D^-t", f"{_T1}learning rates, batch/tokens: sqrt(m_B/m_D), t = 1/2"),
        "eps": Cell("B^-1/2 D^t", f"{_T1}AdamW eps, batch/tokens: sqrt(m_D/m_B), t = 1/2"),
        "weight_decay": Cell("B^1/2 D^(t-1)", f"{_T1}weight decay, batch/tokens: sqrt(m_B/m_D), t = 1/2"),
    },
)

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in (STANDARD, MUP, COMPLETE_P, COMPLETE_D_P)})
