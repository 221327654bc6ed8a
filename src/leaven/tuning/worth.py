"""Estimate what the answer of a study is worth at a larger size (``leaven transfer STUDY/best.toml ...``).

A published loss law says how the loss of the target falls with its tokens. So it also says how many tokens a gain in
nats is worth there. It is not known beforehand which share of the gain survives the transfer; where this was
measured, it was a quarter for values by module (docs/log.md, 2026-11-22). So the worth is given for several shares.
"""

from pathlib import Path

from leaven.catalogue.laws import REPLICATION
from leaven.documents.runs import WorthRow
from leaven.recipe.files import read_text
from leaven.recipe.recipe import Recipe
from leaven.tuning.study_document import StudyDocument

SHARES = (1.0, 0.5, 0.25)  # the screen names them
TOKENS = 1e9, 2.5e12  # a factor of five beyond what the law was fitted to; at 10 M tokens it is wrong by far


def worth_at(answer: Path, target: Recipe) -> list[WorthRow]:
    """Return what the gain of a study is worth at ``target``, for each of ``SHARES``.

    ``answer`` is the best.toml of the study. The list is empty if ``answer`` is another file or lies in no study, if
    the study measured no gain, or if the law says nothing about a run of the target's length.
    """
    try:
        study = StudyDocument.model_validate_json(read_text(answer.parent / "study.json"))
    except ValueError:  # no study, or one that cannot be read
        return []
    tokens, (fewest, most) = target.data.tokens, TOKENS
    if answer.name != "best.toml" or study.gain is None or study.gain <= 0 or not fewest <= tokens <= most:
        return []
    return [
        WorthRow(share=share, gain=share * study.gain, times=REPLICATION.worth_in_tokens(tokens, share * study.gain))
        for share in SHARES
    ]
