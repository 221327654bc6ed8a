"""A recipe for somebody else's model: its shape and its weights, and what training it further needs besides."""

from typing import Any

from pydantic import ValidationError

from leaven.data.tokenizer import given_tokenizer
from leaven.interop.likely import TOKENS_PER_PARAMETER, likely_batch, likely_lr
from leaven.interop.weights import Plain
from leaven.recipe.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.recipe import Recipe


def adopt(plain: Plain, name: str, *, source: str, tokens: int | None = None) -> Recipe:
    """The recipe that starts from a model's weights, with a reason for every value that is not a default.

    It is its own base: no multiplier is anything but 1, whatever the rule, until it is transferred.

    Raises:
        InputError: if the model has no tokenizer.json that fits it, without which its weights say nothing.
    """
    tokenizer, config = plain.folder / "tokenizer.json", f"{plain.folder}/config.json"
    if not tokenizer.is_file():
        raise InputError(
            f"{plain.folder}: no tokenizer.json; save the model's tokenizer there with transformers' save_pretrained"
        )
    shape, architecture = plain.shape, plain.architecture
    given_tokenizer(str(tokenizer), shape.vocab_size)
    given = architecture.given(plain.config)

    def origin(*keys: str) -> str:
        there = [key for key in keys if plain.config.get(key) is not None]
        return (
            f"{' and '.join(there)} of {config}" if there else f"what a {architecture.name} has: {config} is silent"
        )

    duration = tokens or TOKENS_PER_PARAMETER * shape.params
    batch_tokens, batch_reason = likely_batch(shape, duration)
    lr, lr_reason = likely_lr(shape, duration)
    stated = {key: theirs for key, theirs in architecture.keys.items() if theirs}
    if "rope_theta" in stated:
        stated["rope_theta"] += ("rope_scaling", "rope_parameters")
    because = {f"model.{key}": origin(*theirs) for key, theirs in stated.items()}
    because |= {f"model.{key}": f"what a {architecture.name} is" for key in architecture.holds}
    document: dict[str, Any] = {
        "name": name,
        "model": shape.model_dump(),
        "data": {"source": source, "tokenizer": str(tokenizer), "tokens": duration},
        "start": {"weights": str(plain.folder)},
        "batch": {"tokens": batch_tokens},
        "schedule": {"warmup_tokens": duration // 100},
        "hyperparameters": {
            "lr": lr,
            "init_std": float(given["initializer_range"]),
        },
        "why": because
        | {
            "data.tokenizer": "the model's own: another one's ids would mean nothing to these weights",
            "data.tokens": "asked for"
            if tokens
            else f"{TOKENS_PER_PARAMETER} a parameter, as a run from scratch takes (Chinchilla); less may do here",
            "start.weights": f"a {architecture.name}; what the rule multiplies is divided out of them",
            "batch.tokens": batch_reason,
            "schedule.warmup_tokens": "1% of the run: the moments of Adam start anew",
            "hyperparameters.lr": f"{lr_reason}, for config.json tells none: trained weights go up again to about "
            "the peak of their pre-training (Ibrahim et al. 2024, arXiv 2403.08763); tune it",
            "hyperparameters.init_std": f"{origin('initializer_range')}; with [start] weights nothing is drawn",
        },
    }
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{config}: no recipe of leaven's: {explain(error)}") from None
