"""The groups of a published run. Every group says where its values stand and how well we know them.

A field is absent where it is not known; nothing is guessed. The vocabulary is that of the file format
(``global_batch_tokens``, ``zero_stage``): :class:`leaven.catalogue.runs.Run` offers it in leaven's own terms.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from leaven.recipe.base import Part

Confidence = Literal["file", "secondary", "paper-memory"]
Evidence = Literal["config", "script", "code", "readme", "model-card", "logbook", "paper-text", "notes", "memory"]
Texts = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has arrays, we keep tuples
Tables = Annotated[tuple[dict[str, Any], ...], Field(strict=False)]


class Provenance(Part):
    """Where a value stands: ``file`` was read there, ``secondary`` in notes on it, the rest is memory."""

    source: str | Texts
    confidence: Confidence

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source


class Group(Provenance):
    """Values from one source; ``exceptions`` stand elsewhere, ``derived`` were computed from others."""

    evidence: Evidence | None = None
    exceptions: dict[str, Provenance] = Field(default_factory=dict)
    derived: Texts = ()

    def provenance(self, field: str) -> Provenance:
        """Where one field of the group stands."""
        return self.exceptions.get(field, self)


class Lineage(Group):
    """Whose learning-rate table the run follows. Runs of one lineage are one opinion, not many."""

    name: str


class Params(Group):
    precision: Literal["exact", "rounded", "nominal"]
    shape_check: str | None = None


class Architecture(Group):
    """The published architecture, wider than what leaven builds: output norms, embedding norms, ALiBi."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int | None = None  # only where it is not d_model / n_heads
    d_ff: int
    vocab_size: int
    vocab_padded: int | None = None
    activation: Literal["gelu", "relu", "swiglu", "geglu", "squared_relu", "xielu"]
    gated: bool
    norm: Literal["layernorm", "rmsnorm"]
    norm_affine: bool = True
    norm_placement: Literal["pre", "post", "output"]
    norm_note: str | None = None
    norm_placement_note: str | None = None
    embedding_norm: bool = False
    parallel_block: bool = False
    positional: Literal["learned", "rotary", "alibi", "relative"]
    positional_note: str | None = None
    rotary_pct: float = 1.0
    rope_theta: float | None = None
    tied_embeddings: bool
    qk_norm: bool
    qk_norm_width: Literal["head", "model"] = "head"  # one gain for all heads, or one over all of them
    bias: bool
    norm_bias: bool | None = None  # only where it is not that of the matrices
    attention: str | None = None


class Data(Group):
    tokens_total: int
    tokens_planned: int | None = None
    tokens_in_dataset: int | None = None
    seq_len: int
    dataset: str | None = None
    loss: str | None = None
    note: str | None = None


class BatchRamp(BaseModel):
    """How the batch grew. ``none`` is a statement of the source; an absent ramp is not."""

    model_config = Part.model_config

    kind: Literal["none", "increments", "linear", "stages"]
    start_samples: int | None = None
    increment_samples: int | None = None
    over_samples: int | None = None
    final_samples: int | None = None
    n_increments: int | None = None
    samples_per_increment: int | None = None
    end_samples: int | None = None
    start_tokens: int | None = None
    end_tokens: int | None = None
    over_tokens: int | None = None
    over_tokens_min: int | None = None
    over_tokens_max: int | None = None
    over_fraction_of_samples: float | None = None
    stages: Tables | None = None
    switch_points_published: bool | None = None
    note: str | None = None


class Batch(Group):
    global_batch_samples: int | None = None
    global_batch_tokens: int
    batch_tokens_nominal: bool = False  # the source prints a rounded "4M"
    rampup: BatchRamp | None = None
    note: str | None = None


class Optim(Group):
    optimizer: Literal["adam", "adamw", "adafactor", "ademamix", "muon"]
    optimizer_note: str | None = None
    beta1: float | None = None
    beta2: float | None = None
    beta3: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip: float | None = None
    dropout: float | None = None
    z_loss: float | None = None
    decay_embeddings: bool | None = None
    decay_norm_and_bias: bool | None = None


class Schedule(Group):
    peak_lr: float
    min_lr: float | None = None
    min_lr_ratio: float | None = None
    start_lr: float | None = None
    warmup_steps: int | None = None
    warmup_tokens: int | None = None
    warmup_samples: int | None = None
    warmup_fraction: float | None = None
    shape: Literal[
        "cosine",
        "cosine_then_constant",
        "linear",
        "wsd",
        "multi_step",
        "constant_then_rsqrt",
        "constant",
    ]
    shape_note: str | None = None
    decay_steps: int | None = None
    decay_tokens: int | None = None
    decay_samples: int | None = None
    decay_start_step: int | None = None
    constant_steps: int | None = None
    total_steps: int | None = None
    total_samples: int | None = None
    parametrisation: str | None = None  # present only where peak_lr must not be compared: muP, Adafactor


class Init(Group):
    kind: Literal[
        "scaled_normal",
        "flat_normal",
        "fan_in",
        "small_wang",
        "mitchell",
        "mup",
        "deepnorm",
        "normal_unspecified",
    ]
    scheme: str | None = None
    std: float | None = None
    std_formula: str | None = None
    residual_scaling: str | None = None
    residual_std: float | None = None
    residual_std_formula: str | None = None
    truncated_at_sigma: float | None = None
    embedding_std: float | None = None
    bias_init: float | None = None


class Precision(Group):
    dtype: Literal["fp32", "fp16", "bf16", "fp8"]
    dtype_note: str | None = None
    loss_scaling: str | None = None
    grad_accumulation: str | None = None
    grad_reduction: str | None = None
    optimizer_state: str | None = None
    softmax: str | None = None
    cross_entropy: str | None = None


class Parallel(Group):
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    zero_stage: int | None = None  # Megatron's distributed optimizer is 1, FSDP's full shard 3
    micro_batch: int | None = None
    grad_accum: int | None = None
    sequence_parallel: bool | None = None
    framework: str | None = None
    note: str | None = None


class Hardware(Group):
    accelerator: str
    count: int | None = None
    note: str | None = None


class Throughput(Group):
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    convention: str | None = None
    tokens_per_s_per_gpu: float | None = None
    gpu_hours: int | None = None
    implied_model_tflops: float | None = None  # 6 * params * tokens / accelerator seconds, restarts included
    tflops_by_batch: Tables | None = None


class Instability(Provenance):
    what: str
    action: str | None = None
    outcome: str | None = None
