"""Isolated documents: logits and gradients equal those of each document alone."""

import pytest
import torch
import torch.nn.functional as F
from tests.model.test_transformer import random_model

from leaven.model.loss import IGNORED, isolated
from leaven.model.transformer import places

END = 49
FAMILIES = {
    "rope": {"qk_norm": True},
    "learned": {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True, "n_kv_heads": 6},
    "alibi": {"positions": "alibi", "n_kv_heads": 3},
    "window, alibi": {"positions": "alibi", "n_kv_heads": 3, "window": 4},
    "window": {"window": 4, "global_every": 2, "rotary_fraction": 0.5},
    "softcap, window": {"attention_softcap": 1.0, "window": 4, "global_every": 2},
}
LENGTHS = ((5, 1, 3, 7), (16,), (1, 1, 14), (10, 6))
"""Lengths of the documents in each window; the window cuts the last one."""

families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def packed() -> torch.Tensor:
    """Return windows (4, 17) of documents with the lengths in `LENGTHS`. Each document ends with an end-of-text
    token, except the last of a window."""
    windows = torch.randint(0, END, (len(LENGTHS), 17), generator=torch.Generator().manual_seed(2))
    for window, lengths in zip(windows, LENGTHS, strict=True):
        for end in torch.tensor(lengths).cumsum(0)[:-1] - 1:
            window[end] = END
    return windows


@families
def test_the_gradients_of_packed_documents_are_the_same_as_alone(family: dict[str, object]) -> None:
    model, windows = random_model(family), packed()
    documents, targets = isolated(windows, END)
    logits = model(windows[:, :-1], documents)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum").backward()
    together = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for window, lengths in zip(windows, LENGTHS, strict=True):
        first = 0
        for number, length in enumerate(lengths, start=1):
            part = window[first : first + length + 1]
            # An end-of-text token has no target, but the last document of a window is cut before its own.
            counted = length if number == len(lengths) else length - 1
            logits = model(part[None, :-1])[0]
            F.cross_entropy(logits[:counted], part[1 : counted + 1], reduction="sum").backward()
            first += length
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@families
def test_the_layers_save_one_mask(family: dict[str, object], compute: torch.dtype) -> None:
    """Layers with different windows have different masks."""
    model, windows, saved = random_model(family).float(), packed(), dict[int, torch.Tensor]()
    documents, _ = isolated(windows, END)
    length = documents.shape[1]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (length, length):
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    lower = torch.autocast("cpu", compute, enabled=compute != torch.float32, cache_enabled=False)
    with lower, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(windows[:, :-1], documents)
    by_layer = {model.shape.window_of(layer) for layer in range(model.shape.n_layers)}
    softcap = model.shape.attention_softcap is not None
    assert logits.requires_grad
    assert [tensor.dtype for tensor in saved.values()] == ([torch.bool] if softcap else [compute] * len(by_layer))


def test_documents_and_targets_of_a_window() -> None:
    windows = torch.tensor([[1, 9, 2, 3, 9, 9, 4, 5], [9, 1, 2, 3, 4, 5, 6, 9]])
    documents, targets = isolated(windows, 9)
    assert documents.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    x = IGNORED
    assert targets.tolist() == [[9, x, 3, 9, x, x, 5], [x, 2, 3, 4, 5, 6, 9]]
    rows = places(documents, documents)
    assert isinstance(rows, torch.Tensor)
    assert rows.tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    assert places(None, documents).tolist() == list(range(7))
