import pytest
import torch

from leaven.training.loop import Callback, Loop, PlainTraining


@pytest.mark.parametrize("lookahead", [False, True])
def test_on_due_is_not_called_after_the_last_step(lookahead: bool) -> None:
    weight = torch.zeros(1, requires_grad=True)
    training = PlainTraining(torch.optim.SGD([weight], 0.1), lambda tokens: weight.sum(), batch_tokens=10, end=60)
    called = []

    class Every20(Callback):
        every_tokens = 20

        def on_due(self) -> None:
            called.append(training.tokens)

    assert Loop(training, [Every20()], lookahead=lookahead).run()
    assert called == [20, 40]
