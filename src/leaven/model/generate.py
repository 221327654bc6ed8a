"""Text from a model, a token at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaven.model.transformer import Transformer


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: from the ``top_k`` likeliest (0: all), of these from the fewest that hold
    ``top_p`` of the probability (Holtzman et al. 2020, arXiv 1904.09751), both after the logits are divided by
    ``temperature``. At temperature 0 it is the likeliest."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """(V) -> (V), in float64."""
        logits_V = logits_V.double()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits_V.argmax(), len(logits_V)).double()
        ordered_V, places_V = torch.sort(logits_V / self.temperature, descending=True, stable=True)
        if self.top_k:
            ordered_V[self.top_k :] = -torch.inf
        likely_V = ordered_V.softmax(0)
        before_V = likely_V.cumsum(0) - likely_V
        likely_V = torch.where(before_V < self.top_p, likely_V, 0.0)
        return torch.zeros_like(likely_V).scatter(0, places_V, likely_V / likely_V.sum())


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Sequence[int],
    *,
    sampling: Sampling,
    generator: torch.Generator,
    vocabulary: int,
    end: int,
    max_tokens: int,
) -> Iterator[int]:
    """The tokens that follow ``tokens``, until ``end`` (which is not given) or ``max_tokens`` of them.

    Tokens from ``vocabulary`` on have no text and are not drawn. The model sees the last ``seq_len`` tokens, all of
    them anew for each token: nothing is cached, so a token costs a forward pass over its context.
    """
    device, context = model.embedding.weight.device, list(tokens)
    for _ in range(max_tokens):
        window_BT = torch.tensor([context[-model.shape.seq_len :]], device=device)
        last_D = model.hidden(window_BT)[0, -1]  # the logits of the others are not needed
        logits_V = model.logit_multiplier * (model.readout @ last_D)
        likely_V = sampling.probabilities(logits_V[:vocabulary].cpu())
        token = int(torch.multinomial(likely_V, 1, generator=generator))
        if token == end:
            return
        yield token
        context.append(token)
