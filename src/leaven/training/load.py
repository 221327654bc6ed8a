"""Loads the model of a run, generates text from it, and exports it in Hugging Face's format."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from leaven import storage
from leaven.data.tokenizer import Encoder
from leaven.documents.runs import SampleRow
from leaven.errors import InputError, shown
from leaven.interop.architectures import Architecture, holding
from leaven.interop.weights import model_card, write_huggingface
from leaven.model.experts import MixtureOfExperts
from leaven.model.generate import Sampling, generate
from leaven.model.initialisation import name_seed
from leaven.model.transformer import Transformer
from leaven.recipe.files import read_text, render
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import ParameterTable, parameter_table
from leaven.training.average import AVERAGE
from leaven.training.checkpoint import END_OF_TEXT, read_checkpoint
from leaven.training.integrity import (
    TOKENIZER,
    changed_files,
    missing_checkpoint,
    newest_state,
    progress,
    require_own_files,
    saved_checkpoints,
    unusable_checkpoints,
)
from leaven.training.load_balance import BIASES
from leaven.training.rewind import changed_values, rewinds_of, text_left_out
from leaven.training.run_folder import RunFolder, checkpoints, tokens_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class LoadedRun:
    """A run with its tokenizer and the weights of one checkpoint."""

    folder: RunFolder
    recipe: Recipe
    table: ParameterTable
    weights: Mapping[str, Tensor]  # the parameters, or their averages, by name
    tokenizer: "Tokenizer"
    tokens: int  # number of tokens trained up to the checkpoint
    skipped: Mapping[str, str]  # names of newer checkpoints, and what each is: "damaged" or "missing"
    changed: str | None = None  # sentences about changes of events.jsonl and metrics.jsonl, or None
    events: Sequence[Mapping[str, Any]] = ()  # events of the run; empty if events.jsonl was changed or lacks a rewind
    averaged: bool = False  # whether ``weights`` are the averaged weights
    # The biases with which the routers choose experts after the last step, (layers, experts), also if ``weights`` are
    # averages. None unless experts are balanced by biases.
    router_bias_LE: Tensor | None = None
    # Id of the token that ended documents in training; None if unknown, "first" if an older version chose the first
    # usual name in the tokenizer.
    trained_end: int | Literal["first"] | None = None

    @cached_property
    def model(self) -> Transformer:
        """The model, on the CPU, in fp32 and in evaluation mode."""
        with torch.device("meta"):
            model = Transformer(
                self.recipe.model, self.table.multipliers, self.table.attention_scale, self.table.router_losses
            )
        model.load_state_dict(self.weights, assign=True)
        if self.router_bias_LE is not None:
            for block, bias_E in zip(model.layers, self.router_bias_LE, strict=True):
                if isinstance(block.mlp, MixtureOfExperts):
                    block.mlp.bias_E = bias_E
        return model.eval()

    @cached_property
    def end_of_text(self) -> int:
        """Id of the token that separates documents."""
        if not isinstance(self.trained_end, int):
            encoder = Encoder(self.tokenizer)
            return encoder.end_of_text if self.trained_end is None else encoder.named_ends[0]
        if self.tokenizer.id_to_token(self.trained_end) is None:
            raise InputError(
                f"{self.folder.tokenizer_file} has no token {self.trained_end:,}, which ended documents in training; "
                "replace this file with the tokenizer.json that made the token ids"
            )
        return self.trained_end


def load(run: Path | str, tokens: int | None = None) -> "tuple[Transformer, Tokenizer]":
    """Return a run's model and tokenizer from the checkpoint at ``tokens`` trained tokens, by default from the
    newest undamaged checkpoint. Warnings report changed files and unusable newer checkpoints.

    The model is on the CPU, in fp32 and in evaluation mode; ``model(token_ids)`` maps (batch, time) to
    logits (batch, time, vocabulary).

    Raises:
        InputError: if the folder has no run, tokenizer or undamaged checkpoint, has files of another run, or has a
            recipe.toml that was changed after the checkpoint.
    """
    loaded = load_run(run, tokens)
    for name, why in loaded.skipped.items():
        message = f"checkpoint {name} of {run} is {why}; the checkpoint before it is used"
        warnings.warn(shown(message), stacklevel=2)
    if loaded.changed is not None:
        warnings.warn(shown(loaded.changed), stacklevel=2)
    return loaded.model, loaded.tokenizer


def load_run(run: Path | str, tokens: int | None = None, *, averaged: bool = False) -> LoadedRun:
    """Return a run with the weights that :func:`load` would use. With ``averaged``, use their averages. Raise
    InputError as :func:`load` does, or if the checkpoint has no averaged weights."""
    folder = RunFolder(storage.expanded(run))
    if not folder.recipe_file.is_file():
        problem = "holds no recipe.toml" if folder.path.is_dir() else "no such folder"
        raise InputError(f"{run}: {problem}; give the folder that leaven train --run has written")
    recipe = folder.recipe()
    require_own_files(folder, newest_state(folder))
    saved = saved_checkpoints(folder) if tokens is None else ()  # first: the run may be saving another checkpoint
    checkpoint, damaged = read_checkpoint(folder.checkpoints, rewinds_of(folder), tokens, recipe=recipe)
    if checkpoint is None:
        there = [tokens_of(path) for path in checkpoints(folder.checkpoints)]
        if tokens is not None and there and tokens not in there:
            why = f"no checkpoint at {tokens:,} tokens; there are {', '.join(f'{each:_}' for each in there)}"
        elif (unusable := unusable_checkpoints(folder, damaged, tokens)) is not None:
            why = unusable
        elif trained := progress(folder):
            why = f"no checkpoint, but {trained}; bring back {folder.checkpoints} (is its disk mounted?)"
        else:
            why = "no checkpoint yet; leaven train writes one at the start of a run"
        raise InputError(f"{run}: {why}")
    require_own_files(folder, checkpoint.state)
    missing = missing_checkpoint(saved, checkpoint.progress.tokens)
    if averaged and not any(name.startswith(f"{AVERAGE}.") for name in checkpoint.optimizer):
        why = "the recipe has no [average]"
        if recipe.average is not None:
            begins = round((1 - recipe.average.last) * recipe.data.tokens)
            at = f"at {checkpoint.progress.tokens:,} tokens the average has not begun"
            why = f"{at}; it begins after {begins:,}"
        raise InputError(f"{run}: no averaged weights: {why}; leave out --averaged")
    if not folder.tokenizer_file.is_file():
        if TOKENIZER in checkpoint.state:
            raise InputError(
                f"{folder.tokenizer_file} is missing; bring it back, or repeat the leaven train command of this run, "
                "which writes it again"
            )
        raise InputError(
            f"{run}: no tokenizer.json, because the run was trained on token ids; copy the tokenizer.json that was "
            "used to make the token ids into this folder"
        )
    from tokenizers import Tokenizer

    text = read_text(folder.tokenizer_file)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises no narrower class
        why = f"damaged ({error}); replace it with the tokenizer.json that the run was trained with"
        raise InputError(f"{folder.tokenizer_file}: {why}") from None
    events, changed = folder.events(), changed_files(folder)
    return LoadedRun(
        folder=folder,
        recipe=recipe,
        table=parameter_table(recipe),
        weights={name: checkpoint.optimizer[f"{AVERAGE}.{name}"] for name in checkpoint.model}
        if averaged
        else checkpoint.model,
        tokenizer=tokenizer,
        tokens=checkpoint.progress.tokens,
        skipped=({missing: "missing"} if missing else {}) | {path.name: "damaged" for path in damaged},
        changed="; ".join(changed.values()) or None,
        events=() if folder.events_file.name in changed or folder.rewinds_ahead(events) > 0 else events,
        averaged=averaged,
        router_bias_LE=checkpoint.optimizer.get(BIASES),
        trained_end=end
        if (end := recipe.data.end_of_text) is not None
        else checkpoint.state.get(END_OF_TEXT, "first"),
    )


def prompt_length(run: LoadedRun, prompt: str) -> int:
    run.tokenizer.encode_special_tokens = True  # as in :func:`sample`
    return len(run.tokenizer.encode(prompt, add_special_tokens=False).ids)


def sample(
    run: LoadedRun,
    prompt: str,
    *,
    sampling: Sampling,
    max_tokens: int,
    seed: int = 0,
    number: int = 0,
    on_text: Callable[[str], None] = lambda text: None,
) -> SampleRow:
    """Generate a text that continues ``prompt``, the start of a document. ``seed`` and ``number`` determine
    the random numbers. ``on_text`` receives each new piece of text."""
    tokenizer = run.tokenizer
    tokenizer.encode_special_tokens = True  # as in training: text that spells a special token is text
    given = tokenizer.encode(prompt, add_special_tokens=False).ids
    drawn: list[int] = []
    # Decode prompt and sample together: the text of a token may depend on the token before.
    start = shown = len(tokenizer.decode(given))
    for token in generate(
        run.model,
        [run.end_of_text, *given],
        sampling=sampling,
        generator=torch.Generator().manual_seed(name_seed(seed, "sample", number)),
        vocabulary=Encoder(tokenizer).vocab_size,  # the model's may be larger
        end=run.end_of_text,
        max_tokens=max_tokens,
    ):
        drawn.append(token)
        text = tokenizer.decode([*given, *drawn])
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # stands for an incomplete character
            on_text(text[shown:])
            shown = len(text)
    text = tokenizer.decode([*given, *drawn])
    if text[shown:]:
        on_text(text[shown:])
    return SampleRow(text=text[start:], tokens=len(drawn), ended=len(drawn) < max_tokens)


def export_run(run: LoadedRun, folder: Path, *, dtype: str = "fp32", licence: str | None = None) -> Architecture:
    """Write the model, the tokenizer and the model card of a run into a new folder: completely, or not at all. Return
    the model's architecture. ``dtype`` is fp32, bf16 or fp16. ``licence`` is that of the training data.

    Raises:
        InputError: if no Hugging Face architecture fits the model, the folder cannot be used, or a weight is not
            finite.
    """
    shape = run.recipe.model
    architecture, left_out = holding(shape), text_left_out(run.folder)
    card = model_card(
        run.recipe,
        render(run.recipe, read_text(run.folder.recipe_file)),
        architecture=architecture.name,
        tokens=run.tokens,
        dtype=dtype,
        events=run.events,
        averaged=run.averaged,
        licence=licence,
        during=[*changed_values(run.folder), *([f"{left_out} left out"] if left_out else [])],
    )
    write_huggingface(
        folder,
        shape,
        run.table,
        run.weights,
        tokenizer=read_text(run.folder.tokenizer_file),
        end_of_text=(str(run.tokenizer.id_to_token(run.end_of_text)), run.end_of_text),
        router_bias_LE=run.router_bias_LE,
        card=card,
        dtype=dtype,
    )
    return architecture
