"""The tables in the file of a published run, such as ``[optim]``. Unknown values are left out, never guessed."""

from typing import Annotated, Any, Literal

from pydantic import Field

from leaven.recipe.base import Part

Confidence = Literal["file", "secondary", "paper-memory"]
Evidence = Literal["config", "script", "code", "readme", "model-card", "logbook", "paper-text", "notes", "memory"]
NormPlacement = Literal["pre", "post", "output", "sandwich"]
Optimizer = Literal["adam", "adamw", "adafactor", "ademamix", "muon"]
Texts = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has arrays, we keep tuples
_Pair = Annotated[tuple[float, float], Field(strict=False)]
_Text = Annotated[str, Field(min_length=1)]
Tables = Annotated[tuple[dict[str, Any], ...], Field(strict=False)]


class Provenance(Part):
    """The source of a value."""

    source: Annotated[str, Field(min_length=1)] | Annotated[tuple[_Text, ...], Field(strict=False, min_length=1)]
    confidence: Confidence  # file: read in the source; secondary: read in notes about it; paper-memory: remembered

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source


class PublishedGroup(Provenance):
    """A table of published values with their source. The fields in ``exceptions`` have other sources."""

    evidence: Evidence | None = None  # kind of the source
    exceptions: dict[str, Provenance] = Field(default_factory=dict)  # the source of each field with another source
    derived: Texts = ()  # fields that were computed from other values

    def provenance(self, field: str) -> Provenance:
        return self.exceptions.get(field, self)


class Lineage(PublishedGroup):
    """A group of runs that copied one another's learning rate. Medians count a lineage as one run."""

    name: str
    note: str | None = None


class Params(PublishedGroup):
    precision: Literal["exact", "rounded", "nominal"]
    # Why the parameter count computed from the shape differs from the published count; "skip: ..." if the two counts
    # cannot be compared.
    shape_check: str | None = None
    shape_excess: int | None = None  # parameter count computed from the shape, minus the published count


class LayerwiseScaling(Part):
    """Layer sizes that grow from the first layer to the last (OpenELM, arXiv 2404.14619, section 2.1)."""

    ffn_multipliers: _Pair  # d_ff / d_model of the first and the last layer
    qkv_multipliers: _Pair  # width of the queries / d_model of the first and the last layer
    gqa_groups: int  # query heads per key-value head
    ffn_divisor: int  # every d_ff is a multiple of this number


class PublishedArchitecture(PublishedGroup):
    """The architecture of a published run. leaven cannot train some architectures, e.g. latent attention."""

    n_layers: int | None = None
    d_model: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    d_head: int | None = None  # given only if it differs from d_model / n_heads
    d_ff: int | None = None
    vocab_size: int | None = None
    vocab_padded: int | None = None
    activation: Literal["gelu", "relu", "swiglu", "geglu", "squared_relu", "xielu"] | None = None
    activation_note: str | None = None
    gated: bool | None = None
    norm: Literal["layernorm", "rmsnorm"] | None = None
    norm_affine: bool = True
    norm_placement: NormPlacement | None = None
    norm_note: str | None = None
    norm_placement_note: str | None = None
    embedding_norm: bool = False
    parallel_block: bool = False
    positional: Literal["learned", "rotary", "alibi", "relative"] | None = None
    positional_note: str | None = None
    rotary_pct: float = 1.0
    rotary_dims: int | None = None
    rope_theta: float | None = None
    tied_embeddings: bool | None = None
    qk_norm: bool | None = None
    # head: all heads share a gain of size d_head; model: one gain over all heads together
    qk_norm_width: Literal["head", "model"] = "head"
    bias: bool | None = None
    norm_bias: bool | None = None  # given only if it differs from bias
    qkv_bias: bool | None = None  # given only if it differs from bias
    attention: str | None = None
    layerwise_scaling: LayerwiseScaling | None = None
    # Experts: the first n_dense_layers layers have one MLP of width d_ff; each later layer has n_experts of width
    # d_expert.
    n_dense_layers: int | None = None
    n_experts: int | None = None
    experts_per_token: int | None = None
    n_shared_experts: int | None = None
    d_expert: int | None = None
    router: Literal["softmax", "sigmoid"] | None = None  # how the router's logits become scores
    router_normalised: bool | None = None  # whether the scores of the chosen experts are divided by their sum
    router_scale: float | None = None  # factor on the weights of the chosen experts
    expert_groups: int | None = None  # a token uses experts of only some groups (devices or nodes)
    expert_groups_per_token: int | None = None
    mtp_depth: int | None = None  # extra layers for multi-token prediction; parameter counts leave them out
    # Latent attention (MLA, arXiv 2405.04434, section 2.1).
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    language_backbone: str | None = None
    vision_backbone: str | None = None

    @property
    def head_dim(self) -> int | None:
        if self.d_head is None and self.d_model and self.n_heads:
            return self.d_model // self.n_heads
        return self.d_head


class PublishedData(PublishedGroup):
    tokens_total: int | None = None  # tokens that the run consumed
    tokens_planned: int | None = None
    tokens_in_dataset: int | None = None
    seq_len: int | None = None
    dataset: str | None = None
    loss: str | None = None
    note: str | None = None


class BatchRamp(Part):
    """How a run's batch grew. Without this table, it is unknown whether the batch grew."""

    kind: Literal["none", "increments", "linear", "stages"]  # none: the batch did not grow
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


class PublishedBatch(PublishedGroup):
    global_batch_samples: int | None = None
    global_batch_tokens: int | None = None
    batch_tokens_nominal: bool = False  # whether the source prints a rounded number such as "4M"
    rampup: BatchRamp | None = None
    note: str | None = None


class Optim(PublishedGroup):
    optimizer: Optimizer | None = None
    optimizer_note: str | None = None
    beta1: float | None = None
    beta2: float | None = None
    beta2_formula: str | None = None
    beta3: float | None = None
    ademamix_alpha: float | None = None
    ademamix_warmup_steps: int | None = None
    muon_momentum: float | None = None
    muon_ns_steps: int | None = None
    muon_update_rms: float | None = None
    ema_beta: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    weight_decay_formula: str | None = None
    grad_clip: float | None = None
    grad_clip_warmup_steps: int | None = None
    grad_clip_warmup_factor: float | None = None
    update_clip: str | None = None
    qk_clip_threshold: float | None = None
    dropout: float | None = None
    z_loss: float | None = None
    z_loss_used: bool | None = None  # whether a z-loss was used; given if its weight is not published
    moe_load_balance_loss: float | None = None
    moe_router_z_loss: float | None = None
    moe_bias_update_speed: float | None = None
    mtp_loss_weight: float | None = None
    decay_embeddings: bool | None = None
    decay_norm_and_bias: bool | None = None


class PublishedSchedule(PublishedGroup):
    peak_lr: float | None = None
    min_lr: float | None = None
    min_lr_ratio: float | None = None
    start_lr: float | None = None
    warmup_steps: int | None = None
    warmup_tokens: int | None = None
    warmup_samples: int | None = None
    warmup_fraction: float | None = None
    shape: (
        Literal["cosine", "cosine_then_constant", "linear", "wsd", "multi_step", "constant_then_rsqrt", "constant"]
        | None
    ) = None
    shape_note: str | None = None
    decay_steps: int | None = None
    decay_tokens: int | None = None
    decay_samples: int | None = None
    decay_fraction: float | None = None
    decay_start_step: int | None = None
    constant_steps: int | None = None
    constant_tokens: int | None = None
    total_steps: int | None = None
    total_samples: int | None = None
    parametrisation: str | None = None  # given only if peak_lr cannot be compared with other runs: muP, Adafactor
    note: str | None = None


class PublishedInit(PublishedGroup):
    kind: Literal[
        "scaled_normal", "flat_normal", "fan_in", "small_wang", "mitchell", "mup", "deepnorm", "normal_unspecified"
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
    mup_base_d_model: int | None = None
    mup_base_d_ff: float | None = None
    embeddings_scale: float | None = None
    output_logits_alpha: float | None = None
    qk_scale: str | None = None


class TunedBase(PublishedGroup):
    """The result of the study in which leaven tuned a small model. Its values can be transferred to larger models."""

    rule: str  # scaling rule for which the values were tuned
    trials: int
    noise_nats: float  # standard deviation of the loss over seeds
    loss: float  # validation loss in nats per token: mean over the confirmation runs
    loss_interval: _Pair  # 95% confidence interval of the loss
    loss_runs: int
    start_loss: float  # loss with the values from which the search started, mean over seeds
    start_runs: int
    values: dict[str, float]  # best values, by path of a recipe
    # By path: the range in which the loss is within the noise of the best loss, if only this value varies.
    intervals: dict[str, _Pair]
    at_end: Texts = ()  # paths of values that are best at the edge of their search range: the optimum may lie beyond


class PublishedPrecision(PublishedGroup):
    dtype: Literal["fp32", "fp16", "bf16", "fp8"]
    dtype_note: str | None = None
    loss_scaling: str | None = None
    grad_accumulation: str | None = None
    grad_reduction: str | None = None
    parameters: str | None = None
    optimizer_state: str | None = None
    softmax: str | None = None
    cross_entropy: str | None = None


class Parallel(PublishedGroup):
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    zero_stage: int | None = None  # Megatron-LM's distributed optimizer counts as 1, FSDP's full shard as 3
    micro_batch: int | None = None
    grad_accum: int | None = None
    shard_group: int | None = None  # accelerators that share one copy of the weights
    replicas: int | None = None  # number of shard groups
    sequence_parallel: bool | None = None
    framework: str | None = None
    note: str | None = None


class Hardware(PublishedGroup):
    accelerator: str
    accelerator_note: str | None = None
    count: int | None = None
    note: str | None = None


class PublishedThroughput(PublishedGroup):
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    mfu_min: float | None = None
    mfu_max: float | None = None
    mfu_without_attention: float | None = None
    mfu_by_stage: Annotated[tuple[float, ...], Field(strict=False)] | None = None  # of each stage of the batch ramp
    hfu: float | None = None
    convention: str | None = None
    seconds_per_step: float | None = None
    tokens_per_s_per_gpu: float | None = None
    gpu_hours: int | None = None
    implied_model_tflops: float | None = None  # 6 * params * tokens / accelerator seconds, restarts included
    tflops_by_batch: Tables | None = None
    tflops_by_gpus: Tables | None = None


class Instability(Provenance):
    what: str
    action: str | None = None
    outcome: str | None = None
