"""Published tables as the benchmark reads them: YAML of the schema of shared/reference/planner-tables.yaml.

A table is rows of fields under fields of its own; a field of a row goes before the table's, that before its
``model``'s, and what is only said in words ("8B", "fsdp32 x tp8", "tp 8, mbs 4") comes last. Nothing is known of a
table's id, and what is not known here is ignored.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from leaven.recipe.errors import InputError

# Other spellings of a field, the one used here first.
_ALIASES = {
    "L": ("layers", "n_layers", "num_layers"),
    "h": ("hidden", "hidden_size", "d_model"),
    "a": ("heads", "n_heads", "num_heads"),
    "kv_heads": ("kv", "n_kv_heads", "num_kv_heads"),
    "ffn": ("d_ff", "ffn_hidden", "ffn_hidden_size"),
    "vocab": ("V", "vocab_size"),
    "seq_len": ("seq", "s", "sequence_length"),
    "gpus": ("n_gpus", "num_gpus", "n"),
    "mbs": ("lbs", "micro_batch", "mbs_max", "b"),
    "gas": ("grad_accumulation",),
    "gbs": ("batch", "global_batch", "B"),
    "vpp": ("virtual_stages", "v"),
    "mp": ("model_parallel", "model_parallel_size", "mp_size"),
    "iter_s": ("step_s", "seconds", "step_seconds", "iteration_s"),
    "tps": ("tps_per_gpu", "tokens_per_second_per_gpu", "tps_vanilla"),
    "tflops": ("tflops_per_gpu",),
    "aggregate_pflops": ("pflops", "aggregate_pflop"),
    "mfu_pct": ("mfu", "pct_peak", "peak_pct"),
    "model_name": ("model", "size_name"),
}
# What is parallel or how much, in words: "fsdp8 x cp1 x tp8", "tp 8, pp 35", "lbs 12".
_WORD = re.compile(r"\b(fsdp|dp|tp|pp|cp|ep|mbs|lbs|gbs|vpp|gas)[ =]?(\d+)\b", re.IGNORECASE)
_SEQUENCE = re.compile(r"\b(?:seq|sequence length|at) (\d{3,6})(?: tokens)?\b|\bseq(?:_len)? ?=? ?(\d{3,6})")


@dataclass(frozen=True)
class Row:
    """A row with what its table says of all of them."""

    own: dict[str, Any]
    table: "Table"

    def get(self, name: str, default: Any = None) -> Any:
        """A field by its name or another spelling; the row's before the table's before what the words say."""
        return self.fields.get(name, default)

    def number(self, name: str) -> float | None:
        """A field as a number, "16M" too; None if it is not there or is none."""
        return number(self.get(name))

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else round(value)

    @cached_property
    def fields(self) -> dict[str, Any]:
        found = self.table.said | words(str(self.own.get("layout", ""))) | self.table.fields | self.own
        if "layout" in self.own:  # the words of a row are its own
            found |= {key: value for key, value in words(str(self.own["layout"])).items() if key not in self.own}
        # an alias of the row goes before the table's own spelling
        for source in (self.table.fields, self.own):
            for name, others in _ALIASES.items():
                for other in others:
                    if other in source and name not in source:
                        found[name] = source[other]
        return found

    @property
    def where(self) -> str:
        return str(self.own.get("src", f"row {self.table.rows.index(self) + 1}"))

    @property
    def words(self) -> str:
        """All that is said of this row, in one line, for what is only there in words."""
        spoken = ("layout", "options", "optimizer", "ac", "precision", "case", "setting", "note", "scheme")
        return " ".join(str(self.fields[key]) for key in spoken if key in self.fields)


@dataclass
class Table:
    id: str
    fields: dict[str, Any]
    sources: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    file: list["Table"] = field(default_factory=list)

    @property
    def siblings(self) -> list[Row]:
        """The rows of all tables of the same source."""
        source = self.fields.get("source")
        return [row for other in self.file if other.fields.get("source") == source for row in other.rows]

    @cached_property
    def said(self) -> dict[str, Any]:
        return words(str(self.fields.get("note", "")))

    @property
    def origin(self) -> str:
        """What ran these rows, in words: the source and how it optimises."""
        key = str(self.fields.get("source", ""))
        return " ".join((key, str(self.sources.get(key, "")), str(self.fields.get("optimizer", ""))))

    @cached_property
    def decimals(self) -> dict[str, int]:
        """The most decimals that a column is printed with."""
        found: dict[str, int] = {}
        for row in self.rows:
            for key, value in row.own.items():
                if isinstance(value, float):
                    found[key] = max(found.get(key, 0), len(f"{value:.10g}".partition(".")[2]))
        return found

    def rounding(self, value: float, *names: str) -> float:
        """Half a unit of the last digit that a column (by any of its names) is printed with: 0.05 for 137.5.

        Of sizes in whole numbers, the last digit that is not 0, for 1T is printed as 1000.
        """
        spellings = [other for name in names for other in (name, *_ALIASES.get(name, ()))]
        decimals = max((self.decimals.get(name, 0) for name in spellings), default=0)
        if decimals or "params_b" not in names:
            return 0.5 * 10.0**-decimals
        digits = str(round(value))
        return 0.5 * 10.0 ** (len(digits) - len(digits.rstrip("0")))


def words(text: str) -> dict[str, Any]:
    """What a line of words says of a layout."""
    found: dict[str, Any] = {}
    for key, value in _WORD.findall(text):
        name = {"fsdp": "dp", "lbs": "mbs"}.get(key.lower(), key.lower())
        found.setdefault(name, int(value))
        if key.lower() == "fsdp":
            found.setdefault("zero", 3)
    sequence = _SEQUENCE.search(text)
    if sequence:
        found["seq_len"] = int(sequence[1] or sequence[2])
    return found


def number(value: Any) -> float | None:
    """A number, also one written ``16M``, ``300B`` or ``1.4T``."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    match = re.fullmatch(r"\s*([\d._,]+)\s*([kKMBGT]?)\s*", str(value)) if isinstance(value, str) else None
    if match is None:
        return None
    scale = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}[match[2]]
    try:
        return float(re.sub("[_,]", "", match[1])) * scale
    except ValueError:
        return None


def read(path: Path) -> list[Table]:
    """The tables of a file.

    Raises:
        InputError: if there is no such file, it is not YAML, or it has no tables; says which.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {(error.strerror or str(error)).lower()}; name a file of tables") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: no text; name a YAML file of tables") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise InputError(f"{path}: not YAML{line}; name a YAML file of tables") from None
    tables = document.get("tables") if isinstance(document, dict) else None
    if not isinstance(tables, list) or not tables:
        raise InputError(f"{path}: has no tables; a list 'tables', each with an 'id' and 'rows', is what is read")
    found: list[Table] = []
    for index, given in enumerate(tables, 1):
        rows = given.get("rows") if isinstance(given, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(f"{path}: table {index} has no list of rows; each row is 'field: value' pairs")
        model = given.get("model") if isinstance(given.get("model"), dict) else {}
        own = {
            key: value for key, value in given.items() if key not in {"id", "rows"} and not isinstance(value, dict)
        }
        table = Table(
            str(given.get("id", f"table {index}")), {**model, **own}, document.get("sources") or {}, file=found
        )
        table.rows = [Row(row, table) for row in rows]
        found.append(table)
    return found
