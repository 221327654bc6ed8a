"""Define documents: the typed and versioned results of leaven's commands.

``--json`` prints a document, and :mod:`leaven.views` shows it. Keys may be added, but are never renamed or removed.
The number in ``schema`` changes when the meaning of a key changes. docs/reference/documents.md is generated from
these files: the comment of a field becomes its description.
"""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

Number = int | float
"""A number that may be whole in JSON (a count) or decimal (a measurement)."""


class Entry(BaseModel):
    """A part of a document. Unknown keys are ignored, so that files of newer versions can be read."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class Document(Entry):
    """The result of a command, declared as ``class TrainDocument(Document, schema="train/1")``."""

    SCHEMA: ClassVar[str] = ""

    def __init_subclass__(cls, schema: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.SCHEMA = f"leaven.{schema}"

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        """Check and remove the key ``schema``, which :meth:`dump` adds."""
        if isinstance(values, dict) and "schema" in values:
            if values["schema"] != cls.SCHEMA:
                raise ValueError(f"the schema is {values['schema']}, expected {cls.SCHEMA}")
            values = {key: value for key, value in values.items() if key != "schema"}
        return values

    def dump(self) -> dict[str, Any]:
        """Return the document with its schema as plain data for ``--json``."""
        return {**self.model_dump(mode="json", by_alias=True), "schema": self.SCHEMA}
