"""Exports the model of a run in Hugging Face's format, with a model card."""

from pathlib import Path

from leaven.interop.architectures import Architecture, holding
from leaven.interop.weights import model_card, write_huggingface
from leaven.recipe.files import read_text
from leaven.training.load import LoadedRun


def export_run(run: LoadedRun, folder: Path, *, dtype: str = "fp32", licence: str | None = None) -> Architecture:
    """Write the model, the tokenizer and the model card of a run into a new folder. Return the Hugging Face
    architecture of the model.

    Args:
        run: a run, loaded at the checkpoint to export.
        folder: the folder to write; it must be new or empty.
        dtype: number format of the weights: fp32, bf16 or fp16.
        licence: the licence of the training data, for the model card.

    Raises:
        InputError: if no Hugging Face architecture can represent the model, or if the folder is not empty or cannot
            be written. In these cases nothing is written.
    """
    shape = run.recipe.model
    architecture = holding(shape)
    card = model_card(
        run.recipe,
        read_text(run.folder.recipe_file),
        architecture=architecture.name,
        tokens=run.tokens,
        dtype=dtype,
        events=run.folder.events(),
        licence=licence,
    )
    write_huggingface(
        folder,
        shape,
        run.table,
        run.weights,
        tokenizer=read_text(run.folder.tokenizer_file),
        end_of_text=(str(run.tokenizer.id_to_token(run.end_of_text)), run.end_of_text),
        card=card,
        dtype=dtype,
    )
    return architecture
