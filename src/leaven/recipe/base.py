"""The base class of all parts of a recipe."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Part(BaseModel):
    """A part of a recipe. It is immutable, refuses unknown keys, and does not convert strings to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    added: ClassVar[tuple[str, ...]] = ()
    """Fields that a document leaves out at their defaults, so that recipes and their hashes from before these fields
    stay the same."""

    @model_serializer(mode="wrap")
    def _leave_out(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = write(self)
        for name in self.added:
            if getattr(self, name) == type(self).model_fields[name].default:
                document.pop(name, None)
        return document
