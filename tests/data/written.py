"""Write token ids in the formats of other programs, from the formats' own descriptions."""

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

Documents = Sequence[Sequence[int]]


def documents(seed: int = 0, count: int = 60, end_of_text: int | None = None) -> list[list[int]]:
    """Return documents of 20 to 120 ids below 300, without ``end_of_text`` except at their ends."""
    chance = np.random.default_rng(seed)
    texts = [chance.integers(10, 300, int(chance.integers(20, 120))).tolist() for _ in range(count)]
    return texts if end_of_text is None else [[*text, end_of_text] for text in texts]


def flat(texts: Documents) -> list[int]:
    return [token for text in texts for token in text]


def nanogpt(path: Path, texts: Documents, dtype: str = "<u2") -> str:
    """Write ids alone (karpathy/nanoGPT, data/openwebtext/prepare.py)."""
    path.write_bytes(np.array(flat(texts), dtype).tobytes())
    return str(path)


def llm_c(path: Path, texts: Documents, header: Sequence[int] = (20240520, 1), dtype: str = "<u2") -> str:
    """Write 256 int32 and then the ids (karpathy/llm.c, dev/data/data_common.py)."""
    ids = flat(texts)
    path.write_bytes(struct.pack("<256i", *header, len(ids), *[0] * 253) + np.array(ids, dtype).tobytes())
    return str(path)


def megatron(path: Path, texts: Documents, code: int = 8, sentences: int = 1) -> str:
    """Write PATH and its index (NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py).

    ``code`` 8 is uint16 and 4 is int32. Each document has ``sentences`` sequences.
    """
    dtype, size = {8: ("<u2", 2), 4: ("<i4", 4)}[code]
    path.write_bytes(np.array(flat(texts), dtype).tobytes())
    lengths: list[int] = []
    firsts = [0]
    for text in texts:
        cuts = [len(text) * part // sentences for part in range(sentences + 1)]
        lengths += [stop - start for start, stop in pairwise(cuts)]
        firsts.append(len(lengths))
    places = [sum(lengths[:number]) * size for number in range(len(lengths))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(firsts))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(places)}q", *places)
    path.with_suffix(".idx").write_bytes(index + struct.pack(f"<{len(firsts)}q", *firsts))
    return str(path)


def numpy_file(path: Path, texts: Documents) -> str:
    np.save(path, np.array(flat(texts), np.uint32))
    return str(path)


def hugging_face(path: Path, texts: Documents, column: str = "input_ids") -> str:
    import datasets

    datasets.disable_progress_bars()
    halves = [{column: [list(text) for text in half]} for half in (texts[:25], texts[25:])]
    whole = datasets.concatenate_datasets([datasets.Dataset.from_dict(half) for half in halves])
    whole.save_to_disk(path, num_shards=3)
    return f"hf://{path}"


FLAT: dict[str, Callable[[Path, Documents], str]] = {
    "nanogpt.bin": nanogpt,
    "llm.bin": llm_c,
    "llama.bin": lambda path, texts: llm_c(path, texts, (20240801, 7), "<u4"),
    "shard.npy": numpy_file,
}
"""Writers of formats that do not say where documents end, by the name of a file."""

WITH_DOCUMENTS: dict[str, Callable[[Path, Documents], str]] = {
    "short.bin": megatron,
    "long.bin": lambda path, texts: megatron(path, texts, code=4),
    "sentences.bin": lambda path, texts: megatron(path, texts, sentences=3),
    "set": hugging_face,
}
