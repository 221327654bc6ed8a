"""Published training runs, one TOML file each in ``runs/``, every group of values with its source.

To add a run, add a file: its name is the run's id, the groups are those of :mod:`leaven.catalogue.groups`.
"""

import difflib
import math
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from leaven.catalogue.groups import (
    Architecture,
    Batch,
    Data,
    Hardware,
    Init,
    Instability,
    Lineage,
    Optim,
    Parallel,
    Params,
    Precision,
    Schedule,
    Texts,
    Throughput,
)
from leaven.recipe.base import Part
from leaven.recipe.errors import InputError
from leaven.recipe.shape import ModelShape

FOLDER = Path(__file__).parent / "runs"

Decay = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]
_DECAYS: dict[str, Decay] = {
    "cosine": "cosine",
    "cosine_then_constant": "cosine",
    "linear": "linear",
    "wsd": "wsd",
    "multi_step": "wsd",  # constant, then down late: the nearest of our shapes
    "constant_then_rsqrt": "inverse_sqrt",
    "constant": "constant",
}
# The fields that say where a value stands, and the free text: not values of the run.
_NOT_VALUES = {"source", "confidence", "evidence", "exceptions", "derived", "notes", "instabilities"}
# An octave of tokens counts as an eighth of one of parameters: published choices hardly know the tokens.
_TOKEN_WEIGHT = 0.125


class Run(Part):
    """One published run. The groups hold what was published; the properties say it in leaven's terms.

    A property is None where the value is not known.
    """

    id: str
    family: str
    organisation: str
    date: str  # YYYY-MM of the release or the start
    kind: Literal["dense", "moe", "vlm"]
    status: Literal["succeeded", "succeeded-with-interventions"]
    params_total: int
    params_active: int
    lineage: Lineage
    params: Params
    arch: Architecture
    data: Data
    batch: Batch
    optim: Optim
    schedule: Schedule
    init: Init | None = None
    precision: Precision | None = None
    parallel: Parallel | None = None
    hardware: Hardware | None = None
    throughput: Throughput | None = None
    instabilities: Annotated[tuple[Instability, ...], Field(strict=False)] = ()
    notes: Texts = ()

    @property
    def tokens(self) -> int:
        return self.data.tokens_total

    @property
    def batch_tokens(self) -> int:
        """The final global batch in tokens."""
        return self.batch.global_batch_tokens

    @property
    def peak_lr(self) -> float:
        return self.schedule.peak_lr

    @property
    def lr_comparable(self) -> bool:
        """False where the learning rate means something else: muP, and other optimisers than Adam(W)."""
        return self.schedule.parametrisation is None and self.optim.optimizer in ("adam", "adamw")

    @property
    def min_lr_ratio(self) -> float | None:
        schedule = self.schedule
        if schedule.min_lr_ratio is None and schedule.min_lr is not None:
            return schedule.min_lr / schedule.peak_lr
        return schedule.min_lr_ratio

    @property
    def warmup_fraction(self) -> float | None:
        """Warm-up in tokens over the tokens of the run.

        A warm-up in steps is turned into tokens at the final batch, so only where the batch did not ramp.
        """
        schedule = self.schedule
        if schedule.warmup_tokens is not None:
            return schedule.warmup_tokens / self.tokens
        ramped = self.batch.rampup is not None and self.batch.rampup.kind != "none"
        if schedule.warmup_steps is not None and not ramped:
            return schedule.warmup_steps * self.batch_tokens / self.tokens
        return schedule.warmup_fraction

    @property
    def decay(self) -> Decay:
        """The nearest of leaven's decay shapes."""
        return _DECAYS[self.schedule.shape]

    @property
    def init_std(self) -> float | None:
        return self.init.std if self.init else None

    @property
    def residual_init_std(self) -> float | None:
        """Standard deviation of the matrices that write to the residual stream, for the run's own depth.

        None where it is not known, or where it differs from layer to layer (``mitchell``).
        """
        if self.init is None or self.init.residual_std is not None or self.init.std is None:
            return self.init.residual_std if self.init else None
        if self.init.residual_scaling == "1/sqrt(2L)":
            return self.init.std / math.sqrt(2 * self.arch.n_layers)
        return self.init.std if self.init.residual_scaling == "none" else None

    @property
    def params_from_shape(self) -> int:
        """The parameters that the published shape implies, counted module by module."""
        return _count_parameters(self.arch, self.data.seq_len)

    def model_shape(self) -> ModelShape | None:
        """The run's model as leaven would build it; None where leaven has no such model.

        No verb asks for it: it is how the parameter counts of ModelShape, on which planning and transfer stand, are
        held against published ones.
        """
        arch = self.arch
        positions: dict[str, Literal["rope", "learned", "alibi"]] = {
            "rotary": "rope",
            "learned": "learned",
            "alibi": "alibi",
        }
        foreign = (
            arch.norm_placement != "pre",
            not arch.norm_affine,
            arch.norm_bias not in (None, arch.bias),
            arch.parallel_block,
            arch.rotary_pct != 1.0,
            arch.qk_norm and arch.qk_norm_width != "head",
            arch.positional not in positions,
            arch.d_model != arch.n_heads * _d_head(arch),
            arch.activation in ("geglu", "xielu"),
        )
        if any(foreign):
            return None
        return ModelShape.model_validate(
            {
                "n_layers": arch.n_layers,
                "d_model": arch.d_model,
                "n_heads": arch.n_heads,
                "n_kv_heads": arch.n_kv_heads,
                "d_head": _d_head(arch),
                "d_ff": arch.d_ff,
                "vocab_size": arch.vocab_padded or arch.vocab_size,
                "seq_len": self.data.seq_len,
                "norm": arch.norm,
                "activation": arch.activation,
                "positions": positions[arch.positional],
                "qk_norm": arch.qk_norm,
                "tied_embeddings": arch.tied_embeddings,
                "embedding_norm": arch.embedding_norm,
                "bias": arch.bias,
                **({"rope_theta": arch.rope_theta} if arch.rope_theta else {}),
            }
        )

    def flat(self) -> dict[str, Any]:
        """Every known value by its dotted path, without sources and free text."""
        return dict(_flatten(self.model_dump(exclude_none=True), ""))


def load_runs() -> tuple[Run, ...]:
    """All published runs, from the smallest to the largest."""
    return tuple(sorted((_read(path) for path in FOLDER.glob("*.toml")), key=lambda run: run.params_total))


def find_run(id: str) -> Run:
    """One published run by its id.

    Raises:
        InputError: if there is no such run; names the ids most like it.
    """
    path = FOLDER / f"{id}.toml"
    known = sorted(file.stem for file in FOLDER.glob("*.toml"))
    if id not in known:
        close = difflib.get_close_matches(id, known, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(known)}"
        raise InputError(f"no published run {id!r}; {hint}")
    return _read(path)


def nearest(params: int, tokens: int, *, limit: int) -> list[tuple[Run, float]]:
    """The dense runs nearest in size and duration, and their distance in octaves of parameters.

    A lineage has one vote: first the closest run of each lineage, then the others, each by distance. An
    octave of tokens counts as an eighth of one of parameters. Runs whose learning rate means something else
    are left out, see :attr:`Run.lr_comparable`.

    Raises:
        InputError: if there are no parameters or no tokens.
    """
    if params <= 0 or tokens <= 0:
        raise InputError(f"a run of {params} parameters and {tokens} tokens has no neighbours; both must be above 0")
    by_distance = sorted(
        ((run, _distance(run, params, tokens)) for run in load_runs() if run.kind == "dense" and run.lr_comparable),
        key=lambda pair: pair[1],
    )
    voted: set[str] = set()
    first: list[tuple[Run, float]] = []
    rest: list[tuple[Run, float]] = []
    for pair in by_distance:
        lineage = pair[0].lineage.name
        (rest if lineage in voted else first).append(pair)
        voted.add(lineage)
    return (first + rest)[:limit]


def diff(run_a: Run, run_b: Run) -> list[tuple[str, Any, Any]]:
    """The values in which two runs differ: dotted path, value of a, value of b; None where one is silent."""
    a, b = run_a.flat(), run_b.flat()
    paths = [*a, *(path for path in b if path not in a)]
    return [(path, a.get(path), b.get(path)) for path in paths if path != "id" and a.get(path) != b.get(path)]


@cache
def _read(path: Path) -> Run:
    try:
        return Run.model_validate(tomllib.loads(path.read_text(encoding="utf-8")) | {"id": path.stem})
    except (ValidationError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path.name}: {' '.join(str(error).split())}") from error


def _distance(run: Run, params: int, tokens: int) -> float:
    return math.hypot(math.log2(run.params_total / params), _TOKEN_WEIGHT * math.log2(run.tokens / tokens))


def _flatten(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if key in _NOT_VALUES:
            continue
        if isinstance(inner, dict):
            yield from _flatten(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner


def _d_head(arch: Architecture) -> int:
    return arch.d_head or arch.d_model // arch.n_heads


def _count_parameters(arch: Architecture, seq_len: int) -> int:
    d, d_ff = arch.d_model, arch.d_ff
    d_q, d_kv = arch.n_heads * _d_head(arch), arch.n_kv_heads * _d_head(arch)
    n_in = 2 if arch.gated else 1
    matrices = d * d_q + 2 * d * d_kv + d_q * d + (n_in + 1) * d * d_ff
    biases = (d_q + 2 * d_kv + d + n_in * d_ff + d) if arch.bias else 0
    norm_bias = arch.bias if arch.norm_bias is None else arch.norm_bias
    a_norm = (1 + (arch.norm == "layernorm" and norm_bias)) if arch.norm_affine else 0
    if not arch.qk_norm:
        qk_norm = 0
    elif arch.qk_norm_width == "head":
        qk_norm = 2 * _d_head(arch) * a_norm
    else:
        qk_norm = (d_q + d_kv) * a_norm
    block = matrices + biases + 2 * d * a_norm + qk_norm
    vocab = (arch.vocab_padded or arch.vocab_size) * d
    ends = vocab if arch.tied_embeddings else 2 * vocab
    positions = seq_len * d if arch.positional == "learned" else 0
    outer_norms = (1 + arch.embedding_norm) * d * a_norm
    return arch.n_layers * block + ends + positions + outer_norms
