"""An index that finds texts by their beginning, ignoring case: it serves `istartswith`."""

from __future__ import annotations

from typing import Any

from django.db import models

# The form each database needs to serve Django's LIKE; Django's own indexes cannot express both.
_COLUMNS = {"postgresql": "(UPPER({})) text_pattern_ops", "sqlite": "{} COLLATE NOCASE"}


class PrefixIndex(models.Index):
    """An index on one column; a plain one on other databases."""

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **kwargs: Any) -> Any:
        """Return the statement that creates it."""
        statement: Any = super().create_sql(model, schema_editor, using, **kwargs)
        (name,) = self.fields
        column = schema_editor.quote_name(model._meta.get_field(name).column)
        statement.parts["columns"] = _COLUMNS.get(schema_editor.connection.vendor, "{}").format(column)
        return statement
