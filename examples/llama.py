"""A Hugging Face Llama under a rule, for `leaven check`, from this folder:

    leaven check coordinates llama:complete_d_p
    leaven check coordinates llama:standard        # fails, and should
    leaven check gradients llama:complete_d_p
    leaven check transfer llama:complete_d_p --run runs/lr --scales 64x2,128x4
    leaven check equivalence llama:complete_d_p --run runs/batch --scale 64x2

The model is built from a configuration; nothing is downloaded. It is fed the text of Python's standard library, or of
`--source`; a factory that returns a third thing, `batch(seed, step) -> (inputs, targets)`, feeds its own.
"""

from functools import partial
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

import leaven

BASE_WIDTH, BASE_DEPTH, HEAD = 64, 2, 16
BASE = leaven.Ratios()


def llama(width: int, depth: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=depth,
            num_attention_heads=width // HEAD,
            num_key_value_heads=width // HEAD,
            vocab_size=512,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        )
    )


def factory(
    width: int, depth: int, rule: str, seed: int = 0, ratios: leaven.Ratios = BASE
) -> tuple[Any, list[dict[str, Any]]]:
    """Return the model of a size, and its AdamW groups under the rule; `ratios` say how much larger its batch is."""
    model = llama(width, depth)
    std = BASE_WIDTH**-0.5
    groups = leaven.parametrize(
        model,
        base=llama(BASE_WIDTH, BASE_DEPTH),
        hyperparameters={
            "lr": 0.01,
            "init_std": std,
            # A stream of size 1, branches small beside it, a readout of 1 / width: where large models are, and slopes
            # show at once. A readout of 0 would leave the first gradients 0, and nothing to judge them by.
            "residual": 0.5,
            "modules": {"embedding": {"init_std": 1 / std}, "unembedding": {"init_std": 1 / BASE_WIDTH / std}},
        },
        ratios=ratios,
        rule=rule,
        initialise=True,
        seed=seed,
    )
    return model, groups


complete_d_p = partial(factory, rule="complete-d-p")
standard = partial(factory, rule="standard")
