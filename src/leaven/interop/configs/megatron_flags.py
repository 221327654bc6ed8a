"""The flags of Megatron-LM that a recipe has a place for, as numbers and words, and those of other kinds of models.

Flags and defaults are those of the sources that :mod:`leaven.interop.configs.megatron` names.
"""

import math
from dataclasses import dataclass
from typing import Any

from leaven.interop.configs import flags as f
from leaven.interop.configs.draft import Draft
from leaven.recipe.errors import InputError

# What makes another model or another optimizer of it. A prefix ends with a star.
UNSUPPORTED = {
    "num-experts": "mixtures of experts",
    "moe-*": "mixtures of experts",
    "multi-latent-attention": "multi-latent attention",
    "mtp-num-layers": "multi-token prediction",
    "hybrid-*": "hybrids with state-space layers",
    "is-hybrid-model": "hybrids with state-space layers",
    "use-mup": "Megatron's muP, whose readout and eps are none of leaven's rules",
    "window-size": "windows of attention",
    "quick-geglu": "geglu",
    "apply-layernorm-1p": "gains around 1",
    "use-rope-scaling": "scaled rotary positions",
    "rotary-seq-len-interpolation-factor": "scaled rotary positions",
    "init-method-xavier-uniform": "uniform initialisation",
    "heterogeneous-layers-config-path": "layers that differ",
    "apply-query-key-layer-scaling": "attention scaled by layer",
    "norm-before-residual*": "post-norm",
    "apply-residual-connection-post-layernorm": "residual connection that starts behind the norm",
    "rotary-interleaved": "rotary positions of neighbouring pairs",
    "no-rope-freq": "layers without positions",
    "softmax-type": "other softmax",
    "attention-output-gate": "gates of attention",
    "glu-linear-offset": "offset gated unit",
    "activation-func-clamp-value": "clamped activation",
    "experimental-attention-variant": "other attention",
}
ALIASES = {"layernorm-epsilon": "norm-epsilon"}
"""Names of older versions."""
DEFAULTS: dict[str, Any] = {
    "position-embedding-type": "learned_absolute",
    "normalization": "LayerNorm",
    "norm-epsilon": 1e-5,
    "rotary-base": 10_000,
    "rotary-percent": 1.0,
    "attention-dropout": 0.1,
    "hidden-dropout": 0.1,
    "init-method-std": 0.02,
    "weight-decay": 0.01,
    "adam-beta1": 0.9,
    "adam-beta2": 0.999,
    "adam-eps": 1e-8,
    "clip-grad": 1.0,
    "lr-decay-style": "linear",
    "lr-wsd-decay-style": "exponential",
    "min-lr": 0.0,
    "seed": 1234,
    "make-vocab-size-divisible-by": 128,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "optimizer": "adam",
}
NUMBERS = {
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels", "seq-length",
    "max-position-embeddings", "norm-epsilon", "rotary-base", "rotary-percent", "attention-dropout", "hidden-dropout",
    "vocab-size", "padded-vocab-size", "num-query-groups", "lr", "decoupled-lr", "min-lr", "decoupled-min-lr",
    "init-method-std", "embedding-init-method-std", "weight-decay", "adam-beta1", "adam-beta2", "adam-eps",
    "clip-grad", "micro-batch-size", "global-batch-size", "train-samples", "train-iters", "lr-decay-samples",
    "lr-decay-iters", "lr-warmup-samples", "lr-warmup-iters", "lr-warmup-fraction", "lr-wsd-decay-samples",
    "lr-wsd-decay-iters", "seed", "tensor-model-parallel-size", "pipeline-model-parallel-size",
    "context-parallel-size", "make-vocab-size-divisible-by", "num-virtual-stages-per-pipeline-rank",
    "recompute-num-layers",
}  # fmt: skip
WORDS = {
    "position-embedding-type", "normalization", "lr-decay-style", "lr-wsd-decay-style", "optimizer",
    "rampup-batch-size", "step-batch-size-schedule", "recompute-granularity", "recompute-method",
    "data-parallel-sharding-strategy", "glu-activation",
}  # fmt: skip
SWITCHES = {
    "swiglu", "squared-relu", "openai-gelu", "no-bias-gelu-fusion", "disable-bias-linear", "group-query-attention",
    "untie-embeddings-and-output-weights", "qk-layernorm", "bf16", "fp16", "use-distributed-optimizer",
    "use-megatron-fsdp", "reset-position-ids", "reset-attention-mask", "eod-mask-loss", "recompute-activations",
    "use-rotary-position-embeddings", "add-qkv-bias", "embed-layernorm",
}  # fmt: skip


@dataclass
class MegatronFlags:
    """The flags that are known, each as a number or a word; ``why`` says where a value is from."""

    origin: str
    numbers: dict[str, float]
    words: dict[str, str]
    switches: set[str]
    waiting: dict[str, str]

    def number(self, name: str) -> float:
        if name in self.numbers:
            return self.numbers[name]
        if name not in DEFAULTS and name in self.waiting:
            raise InputError(f"{self.origin}: --{name} waits for {self.waiting[name]}; write the number")
        if name not in DEFAULTS:
            raise InputError(f"{self.origin}: no --{name}, without which there is no recipe; add it")
        return float(DEFAULTS[name])

    def told(self, name: str) -> bool:
        """Whether it stands there, with its number or without: to be read with :meth:`number`, which says so."""
        return name in self.numbers or name in self.waiting

    def count(self, name: str) -> int:
        value = self.number(name)
        if value != int(value):
            raise InputError(f"{self.origin}: --{name} {value:g}: has to be a whole number")
        return int(value)

    def word(self, name: str) -> str:
        return self.words.get(name, str(DEFAULTS.get(name, "")))

    def why(self, *names: str) -> str:
        there = [f"--{name}" for name in names if name in {*self.numbers, *self.words, *self.switches}]
        for name in names:
            if name in self.waiting:
                return f"Megatron's default, for --{name} waits for {self.waiting[name]}"
        return " and ".join(there) if there else f"Megatron's default of --{names[0]}"


def known_flags(found: f.Flags, origin: str, draft: Draft) -> MegatronFlags:
    given = MegatronFlags(origin, {}, {}, set(), {})
    for flag, words in found.values.items():
        name = flag.replace("_", "-")
        name = ALIASES.get(name, name)
        for unsupported, what in UNSUPPORTED.items():
            if name == unsupported or (unsupported.endswith("*") and name.startswith(unsupported[:-1])):
                raise InputError(f"{origin}: --{flag}: leaven has no {what}")
        waiting = [variable for word in words[:1] for variable in f.open_variables(word)]
        if name in SWITCHES:
            given.switches.add(name)
        elif name not in NUMBERS | WORDS:
            draft.unread.append(f"--{flag}")
        elif waiting:
            given.waiting[name] = ", ".join(waiting)
            draft.unknown.append(f"--{flag}: {given.waiting[name]} is not set in the file")
        elif not words:
            raise InputError(f"{origin}: --{flag} has no value")
        elif name in WORDS:
            given.words[name] = " ".join(words)
        else:
            given.numbers[name] = as_number(words[0], flag, origin)
    return given


def as_number(word: str, flag: str, origin: str) -> float:
    try:
        number = float(word)
    except ValueError:
        raise InputError(f"{origin}: --{flag} {word}: has to be a number") from None
    if not math.isfinite(number):
        raise InputError(f"{origin}: --{flag} {word}: has to be a finite number")
    return number
