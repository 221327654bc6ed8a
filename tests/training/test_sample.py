from pathlib import Path

import pytest
import torch

from leaven.model.generate import Sampling
from leaven.training.load import LoadedRun, load_run, sample


@pytest.fixture
def run(scaled_run: Path) -> LoadedRun:
    return load_run(scaled_run)


def test_pieces_add_up_to_the_text(run: LoadedRun) -> None:
    counts = []
    for seed in range(4):
        pieces: list[str] = []
        drawn = sample(run, "def ", sampling=Sampling(), max_tokens=40, seed=seed, on_text=pieces.append)
        assert "".join(pieces) == drawn.text
        assert drawn.ended is (drawn.tokens < 40)
        counts.append(len(pieces))
    assert sum(counts) > 20


def test_characters_of_several_tokens_come_whole(run: LoadedRun) -> None:
    """The model repeats the two bytes of é, one token each."""
    letter = run.tokenizer.encode("é").ids
    assert len(letter) == 2
    with torch.no_grad():  # without branches, the last token alone decides the next
        for block in run.model.layers:
            block.attention.out.weight.zero_()
            block.mlp.out.weight.zero_()
        run.model.embedding.weight.copy_(torch.eye(320, 16))
        run.model.unembedding.weight.zero_()
        for last, following in zip(letter, letter[::-1], strict=True):
            run.model.embedding.weight[last] = torch.nn.functional.one_hot(torch.tensor(last % 16), 16).float()
            run.model.unembedding.weight[following, last % 16] = 50.0
    assert letter[0] % 16 != letter[1] % 16
    pieces: list[str] = []
    greedy = Sampling(temperature=0)
    drawn = sample(run, "é", sampling=greedy, max_tokens=7, on_text=pieces.append)
    assert pieces == ["é", "é", "é", "\N{REPLACEMENT CHARACTER}"]  # the last piece is half a character
    assert drawn.text == "".join(pieces)


def test_a_sample_does_not_depend_on_other_samples(run: LoadedRun) -> None:
    def draw(seed: int, number: int) -> str:
        return sample(run, "x", sampling=Sampling(), max_tokens=12, seed=seed, number=number).text

    texts = {(seed, number): draw(seed, number) for seed in (0, 1) for number in (0, 1)}
    assert len(set(texts.values())) == 4
    assert draw(0, 1) == texts[0, 1]


def test_a_sample_ends_at_the_end_of_text_token(run: LoadedRun) -> None:
    with torch.no_grad():
        run.model.unembedding.weight.zero_()  # equal logits: the first token, the end of text, is chosen
    assert run.end_of_text == 0
    drawn = sample(run, "x", sampling=Sampling(temperature=0), max_tokens=5)
    assert (drawn.text, drawn.tokens, drawn.ended) == ("", 0, True)


def test_the_prompt_is_the_beginning_of_a_document_and_only_text(run: LoadedRun) -> None:
    seen: list[torch.Tensor] = []
    run.model.embedding.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    sample(run, "", sampling=Sampling(), max_tokens=1)
    assert seen[-1].tolist() == [[run.end_of_text]]
    sample(run, "<|endoftext|>", sampling=Sampling(), max_tokens=1)
    assert seen[-1][0, 0] == run.end_of_text
    assert run.end_of_text not in seen[-1][0, 1:]
