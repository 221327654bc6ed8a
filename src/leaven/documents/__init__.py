"""Documents: the typed and versioned result of every verb. `--json` prints it, a view draws it.

Keys are never renamed or removed; new keys may be added. The number in ``schema`` changes when the meaning of a key
changes. docs/documents.md is generated from these files: the comment of a field is its description there.
"""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

Number = int | float
"""A count is a whole number in JSON, a measurement a decimal number."""


class Entry(BaseModel):
    """A part of a document. Unknown keys, from files of newer versions, are ignored when it is read."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Document(Entry):
    """The result of a verb: ``class TrainDocument(Document, schema="train/1")``."""

    SCHEMA: ClassVar[str] = ""

    def __init_subclass__(cls, schema: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.SCHEMA = f"leaven.{schema}"

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        """Accept what :meth:`dump` wrote."""
        if isinstance(values, dict) and "schema" in values:
            if values["schema"] != cls.SCHEMA:
                raise ValueError(f"the schema is {values['schema']}, expected {cls.SCHEMA}")
            values = {key: value for key, value in values.items() if key != "schema"}
        return values

    def dump(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {**self.model_dump(mode="json", by_alias=True), "schema": self.SCHEMA}
