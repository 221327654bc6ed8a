"""Turn the `[data]` section of a recipe into token ids.

Text is tokenised once, and its token ids are cached. The cache folder contains ``surveys`` (sizes and
hashes of source files), ``tokenizers``, and ``tokens`` (one folder for each pair of text and tokenizer).
Sources with token ids are read from their own files (:mod:`leaven.data.token_source`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from leaven import storage
from leaven.data.corpus import Corpus, Meter, OnProgress, open_corpora
from leaven.data.hub import SCHEME
from leaven.data.shards import ShardedTokens, Shards, shards
from leaven.data.sources import SourceParts, refuse_repeated_files, source_parts
from leaven.data.stream import Mixture, Stream, validation_windows
from leaven.data.token_source import TokenReader
from leaven.data.tokenizer import Encoder, first_texts, given_tokenizer, train_tokenizer
from leaven.errors import InputError
from leaven.recipe.data import Data
from leaven.recipe.files import cache_folder
from leaven.recipe.units import listed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 3
"""Version of the cache. Increase it when the same source would give different tokens or files."""

LEFT_OVER = 0.01  # a larger share of a source in tokens that fill no sequence is named
LARGE_SHARE = 0.2  # a larger share of a text for validation is named; usual is a twentieth
MOST_WINDOWS = 1_000  # validation windows; a line proposes no more
_SHOWN = 40  # characters of a word that a line shows
UNEVEN = 0.05  # a larger difference between the shares of a source in validation and training is named


@dataclass(frozen=True, eq=False)
class TokenSet:
    """The tokens of all sources of a recipe. In sources of text, an end-of-text token follows every document."""

    names: tuple[str, ...]  # names of the sources, as in the recipe
    proportions: tuple[Fraction, ...]  # share of each source in the samples
    sources: tuple[Shards, ...]
    vocab_size: int  # largest token id of the tokenizer + 1; without a tokenizer, vocab_size of the model
    end_of_text: int | None  # id of the end-of-text token; None if unknown
    fingerprint: str  # hash of the tokens
    tokenizer_path: Path | None  # None if all sources have token ids and the recipe names no tokenizer
    notes: tuple[str, ...] = ()  # lines about skipped, missing or damaged data, and assumptions about token ids
    data: Data | None = None  # the section of the recipe that names them; None for made-up tokens
    model_vocab_size: int | None = None  # vocab_size of the model for which they were prepared, if known

    @property
    def train(self) -> ShardedTokens:
        """The training tokens of all sources, one source after the other. `stream` mixes the sources."""
        return ShardedTokens([shard for source in self.sources for shard in source.train.shards])

    @property
    def validation(self) -> ShardedTokens:
        return ShardedTokens([shard for source in self.sources for shard in source.validation.shards])

    @property
    def train_bytes(self) -> int:
        return sum(source.train_bytes for source in self.sources)

    @property
    def validation_bytes(self) -> int:
        return sum(source.validation_bytes for source in self.sources)

    def stream(self, seq_len: int, seed: int) -> "Stream | Mixture":
        """Return the endless stream of training samples. Raise InputError if a source is too short for one sample."""
        if len(self.sources) == 1:
            return Stream(self.sources[0].train, seq_len, seed)
        # The order within a source does not depend on the other sources or on weights.
        seeds = [int(storage.digest(f"{seed} {name}".encode(), 16)[:16], 16) for name in self.names]
        streams = (Stream(source.train, seq_len, own) for source, own in zip(self.sources, seeds, strict=True))
        return Mixture(tuple(streams), self.proportions)

    def validation_windows(self, seq_len: int, limit_tokens: int) -> NDArray[np.int64]:
        """Return validation windows, [N, T + 1] with T = ``seq_len``. Raise InputError if a source has not even one.

        The windows are divided among the sources as the training data are, with at least one for each source. So the
        mean loss of the windows is about that of the mixture. N is at most about ``limit_tokens`` / T. A source with
        too few windows for its share repeats them. If all sources have too few, N is smaller.
        """
        return np.concatenate(self._windows_by_source(seq_len, limit_tokens))

    def uneven_validation(self, seq_len: int, limit_tokens: int) -> str | None:
        """Return a warning if the sources' shares of the validation windows are far from their proportions."""
        numbers = [len(windows) for windows in self._windows_by_source(seq_len, limit_tokens)]
        if self._even(numbers):
            return None
        shares = [number / sum(numbers) for number in numbers]
        worst = max(range(len(shares)), key=lambda at: abs(shares[at] - self.proportions[at]))
        enough = (n * seq_len for n in range(sum(numbers) + 1, MOST_WINDOWS))
        better = next((limit for limit in enough if self._even(self._wanted(seq_len, limit))), None)
        return (
            f"{self.names[worst]} has {shares[worst]:.0%} of the {sum(numbers)} validation sequences, but "
            f"{float(self.proportions[worst]):.0%} of the training data"
        ) + (f"; set evaluation.tokens = {better:_}" if better else "")

    def _wanted(self, seq_len: int, limit_tokens: int) -> list[int]:
        return [max(int(limit_tokens * share) // seq_len, 1) for share in self.proportions]

    def _even(self, numbers: Sequence[int]) -> bool:
        total, pairs = sum(numbers), zip(numbers, self.proportions, strict=True)
        return all(abs(number / total - share) <= UNEVEN for number, share in pairs)

    def _windows_by_source(self, seq_len: int, limit_tokens: int) -> list[NDArray[np.int64]]:
        wanted = self._wanted(seq_len, limit_tokens)
        found = [
            validation_windows(source.validation, seq_len, int(limit_tokens * share))
            for source, share in zip(self.sources, self.proportions, strict=True)
        ]
        scale = max(len(windows) / number for windows, number in zip(found, wanted, strict=True))
        while True:
            numbers = [
                max(round(scale * number), len(windows)) for windows, number in zip(found, wanted, strict=True)
            ]
            if scale >= 1 or self._even(numbers):
                return [np.resize(windows, (n, seq_len + 1)) for windows, n in zip(found, numbers, strict=True)]
            scale = min(2 * scale, 1.0)

    def left_over(self, seq_len: int, tokens: int) -> dict[str, int]:
        """Return {source name: number of last tokens} for each source that a run of ``tokens`` tokens reads whole,
        and of which windows of ``seq_len`` leave out more than `LEFT_OVER`."""
        whole = [source.train for source in self.sources]
        rests = zip(self.epochs(tokens).items(), whole, strict=True)
        found = {name: (len(ids) - 1) % seq_len for (name, epochs), ids in rests if epochs >= 1}
        sizes = dict(zip(self.names, map(len, whole), strict=True))
        return {name: rest for name, rest in found.items() if rest > LEFT_OVER * sizes[name]}

    def epochs(self, tokens: int) -> dict[str, float]:
        """Return {source name: number of epochs} for a run of ``tokens`` tokens."""
        shares = zip(self.names, self.proportions, self.sources, strict=True)
        return {name: float(share * tokens) / len(source.train) for name, share, source in shares}


def prepare(
    data: Data,
    vocab_size: int,
    cache: Path | str | None = None,
    progress: OnProgress | None = None,
    processes: int | None = None,
) -> TokenSet:
    """Return the tokens that a `[data]` section names. Text is tokenised if it is not in the cache.

    Processes are spawned, so a script must call this function under ``if __name__ == "__main__"``.
    This function does not warn of skipped text, such as a line that is not JSON. ``notes`` of the result reports it,
    and :func:`leaven.train` warns of it.

    Args:
        vocab_size: number of token ids of the model, and largest size of a trained tokenizer.
        cache: the folder of the cache; by default :func:`leaven.recipe.files.cache_folder`.
        progress: called with a stage (reading, tokenizer or encoding), the bytes processed and all bytes.
        processes: number of processes that encode text; by default one per core if there is enough text.

    Raise InputError if a source, the tokenizer, the vocabulary or the cache folder cannot be used.
    """
    parts = {source.source: source_parts(source) for source in data.sources}
    of_ids = {name: found for name, found in parts.items() if found.ids}
    _validate(data, vocab_size, of_ids)
    refuse_repeated_files(parts)
    cache = storage.expanded(cache or cache_folder())
    texts = [source for source in data.sources if source.source not in of_ids]
    given = given_tokenizer(data.tokenizer, vocab_size) if texts or data.tokenizer != "bpe" else None
    found: dict[str, Shards] = {}
    path, encoder, end_of_text = None, None, data.end_of_text
    try:
        memory = cache / "surveys"
        of_texts = [parts[source.source].texts for source in texts]
        corpora = open_corpora(texts, data.corrupt_share, memory, progress, of_texts)
        if texts or given is not None:
            path, encoder = _tokenizer(cache / "tokenizers", given, corpora, vocab_size, progress)
            content = storage.digest(path.read_bytes(), 16)
            if encoder.end_of_text != encoder.named_ends[0]:  # of an older cache, documents end with the first
                content += f" {encoder.end_of_text}"
            end_of_text = encoder.end_of_text if end_of_text is None else end_of_text
            if texts and end_of_text != encoder.end_of_text:
                raise InputError(
                    f"end_of_text {end_of_text:,} differs from {encoder.end_of_text:,}, the end-of-text token of "
                    "data.tokenizer; remove end_of_text from [data], or give another tokenizer"
                )
            meter = Meter(progress, "encoding", sum(corpus.n_bytes for corpus in corpora))
            for corpus in corpora:
                key = storage.digest(f"{FORMAT} {corpus.fingerprint} {content}".encode(), 16)
                found[corpus.source] = shards(cache / "tokens" / key, corpus, encoder, meter, processes)
            meter.finish()
        known = vocab_size if encoder is None else encoder.vocab_size
        needs_ends = data.end_of_text is not None or data.documents == "isolated"
        reader = TokenReader(known, end_of_text, needs_ends, memory, progress)
        ids = [source for source in data.sources if source.source in of_ids]
        found |= zip(of_ids, reader.shards([(source, of_ids[source.source]) for source in ids]), strict=True)
    except OSError as error:
        raise InputError(
            f"the cache folder {cache} cannot be used ({error.strerror or error}); "
            "set LEAVEN_CACHE to a folder that can be written and locked and has enough space"
        ) from None
    sources = [found[source.source] for source in data.sources]
    skipped = [corpus.skipped for corpus in corpora if corpus.skipped]
    if texts and encoder is not None and not encoder.has_all_bytes:
        skipped.append(
            "data.tokenizer lacks tokens for some bytes: text outside its vocabulary becomes unknown tokens or is "
            "left out; to keep all text, give a byte-level tokenizer, or one with byte_fallback"
        )
    lost = encoder.not_kept if texts and encoder is not None else []
    if texts and given is not None and encoder is not None and not lost:
        word = encoder.lost_word(first_texts(corpora))
        lost = [] if word is None else [f"some text, such as {word[:_SHOWN]!r}"]
    if lost:
        skipped.append(
            f"data.tokenizer does not keep {listed(lost, 'and')}: the run trains on the changed text, "
            "and its bits per byte are of the changed text; to keep all text, give a tokenizer without such a "
            "normalizer or pre-tokenizer"
        )
    for name, part in found.items():
        held_out = part.validation_bytes / ((part.train_bytes + part.validation_bytes) or 1)
        if held_out > LARGE_SHARE:
            skipped.append(
                f"{name}: {held_out:.0%} of the text is for validation, because whole documents are held out, and "
                "these are few or long"
            )
    fingerprint = sources[0].fingerprint
    if len(sources) > 1:
        fingerprint = storage.digest("".join(source.fingerprint for source in sources).encode(), 16)
    return TokenSet(
        names=tuple(source.source for source in data.sources),
        proportions=data.proportions,
        sources=tuple(sources),
        vocab_size=known,
        end_of_text=end_of_text,
        fingerprint=fingerprint,
        tokenizer_path=path,
        notes=(
            *skipped,
            *(note for found_parts in parts.values() for note in found_parts.notes),
            *(note for source in sources for note in source.notes),
        ),
        data=data,
        model_vocab_size=vocab_size,
    )


def _validate(data: Data, vocab_size: int, of_ids: Mapping[str, SourceParts]) -> None:
    for source in data.sources:
        if source.source not in of_ids and source.dtype:
            raise InputError(f"dtype is for token ids, but data.source {source.source!r} is text; remove dtype")
        if source.dtype and source.source.startswith(SCHEME):
            raise InputError(f"data.source {source.source!r} states its own dtype; remove dtype")
    if of_ids and data.tokenizer == "bpe" and len(of_ids) < len(data.sources):
        raise InputError(
            f"data.source {next(iter(of_ids))!r} has token ids, but with data.tokenizer = 'bpe' the text of the "
            "other sources would get ids of a new tokenizer; set data.tokenizer to the tokenizer.json that wrote "
            "the ids"
        )
    if data.end_of_text is not None:
        if not of_ids:
            raise InputError("end_of_text is for token ids, but all of data.source is text; remove it from [data]")
        if data.end_of_text >= vocab_size:
            raise InputError(
                f"end_of_text {data.end_of_text:,} is not below vocab_size {vocab_size:,}; give the id of a token"
            )


def _tokenizer(
    folder: Path, given: "Tokenizer | None", corpora: Sequence[Corpus], vocab_size: int, progress: OnProgress | None
) -> tuple[Path, Encoder]:
    """Return the cached file and the encoder of ``given`` or, if None, of a tokenizer trained on ``corpora``."""
    if given is not None:
        return _keep(folder, given)
    text = " ".join(corpus.fingerprint for corpus in corpora)
    name = folder / f"bpe-{storage.digest(f'{FORMAT} {text} {vocab_size}'.encode(), 16)}"
    if (found := _kept(folder, name)) is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with storage.lock(folder / ".lock"):
        found = _kept(folder, name)
        if found is None:
            found = _keep(folder, train_tokenizer(corpora, vocab_size, progress))
            storage.write(name, f"{name.name} {found[0].parent.name}".encode())
    return found


def _keep(folder: Path, tokenizer: "Tokenizer") -> tuple[Path, Encoder]:
    """Save a tokenizer in a folder named by its hash. Return its file and its encoder."""
    raw = tokenizer.to_str(pretty=True).encode()
    path = folder / storage.digest(raw, 16) / "tokenizer.json"
    if not path.exists() or path.read_bytes() != raw:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write(path, raw)
    return path, Encoder(tokenizer)


def _kept(folder: Path, name: Path) -> tuple[Path, Encoder] | None:
    """Read a tokenizer's hash from the file ``name``. Return the tokenizer's file and encoder; None if one of the two
    files is damaged, or a copy under another name."""
    from tokenizers import Tokenizer

    try:
        *names, content = storage.read(name).decode("ascii").split()  # an earlier version wrote no name
        path = folder / content / "tokenizer.json"
        raw = storage.read(path)
    except (OSError, ValueError):
        return None
    if names not in ([], [name.name]) or storage.digest(raw, 16) != content:
        return None
    return path, Encoder(Tokenizer.from_str(raw.decode()))
