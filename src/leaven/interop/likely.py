"""What a run likely has that another's configuration does not tell, each with its reason."""

from leaven.catalogue.law_table import STEP_LAW
from leaven.catalogue.laws import evaluate
from leaven.catalogue.runs import nearest
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity

TOKENS_PER_PARAMETER = 20


def likely_batch(shape: ModelShape, tokens: int) -> tuple[int, str]:
    """The batch in tokens, in whole sequences, by the step law."""
    laws = evaluate(shape.params, tokens, params_non_embedding=shape.params_non_embedding)
    step_law = next(law for law in laws if law.law == STEP_LAW.name)
    assert step_law.batch_tokens is not None
    scale = f"{format_quantity(shape.params)} parameters, {format_quantity(tokens)} tokens"
    outside = "" if step_law.in_range else f"; a factor of {step_law.extrapolation:.3g} outside its range"
    batch = max(round(step_law.batch_tokens / shape.seq_len), 1) * shape.seq_len
    return batch, f"{step_law.law} at {scale}, in whole sequences{outside}"


def likely_lr(shape: ModelShape, tokens: int) -> tuple[float, str]:
    """The peak of the published run that is nearest in size."""
    for neighbour, _ in nearest(shape.params, tokens, limit=99):
        if neighbour.peak_lr is not None:
            return neighbour.peak_lr, f"the peak of {neighbour.id}, the published run nearest in size"
    raise AssertionError("no published run tells its lr")
