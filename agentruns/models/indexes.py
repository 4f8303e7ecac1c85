"""An index that finds texts by their beginning, whatever their case: what `istartswith` asks for."""

from __future__ import annotations

from typing import Any

from django.db import models

# As each database needs it to serve the LIKE that Django writes; Django's own indexes cannot say both.
_COLUMNS = {"postgresql": "(UPPER({})) text_pattern_ops", "sqlite": "{} COLLATE NOCASE"}


class PrefixIndex(models.Index):
    """An index on one column; a plain one on databases that are not known here."""

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **kwargs: Any) -> Any:
        """Return the statement that makes it."""
        statement: Any = super().create_sql(model, schema_editor, using, **kwargs)
        (name,) = self.fields
        column = schema_editor.quote_name(model._meta.get_field(name).column)
        statement.parts["columns"] = _COLUMNS.get(schema_editor.connection.vendor, "{}").format(column)
        return statement
