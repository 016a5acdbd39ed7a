"""The base of all objects that pit-deploy writes as JSON and reads again: frozen, strict about fields, documented."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SchemaPart(BaseModel):
    """Fields are described by the text below them, which goes into the JSON schema."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_serialization_defaults_required=True,
    )
