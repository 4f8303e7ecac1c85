"""Columns and indexes for any text of a model or a tool, on every database, and for the journal's times."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings as django_settings
from django.db import models

from agentruns.conf import settings
from agentruns.utils import clock, json as canonical
from agentruns.utils.bounds import NAME_LENGTH

if TYPE_CHECKING:
    AnyCharField = models.CharField[Any, Any]
    AnyTextField = models.TextField[Any, Any]
else:
    AnyCharField = models.CharField
    AnyTextField = models.TextField

# The form each database needs to serve Django's LIKE; Django's own indexes cannot express both.
_COLUMNS = {"postgresql": "(UPPER({})) text_pattern_ops", "sqlite": "{} COLLATE NOCASE"}


class CanonicalField(AnyTextField):
    """A JSON value stored as its canonical text, because `jsonb` reorders keys and changes numbers."""

    _pyi_private_set_type: Any
    _pyi_private_get_type: Any

    def from_db_value(self, value: str | None, *args: Any) -> Any:
        return None if value is None else canonical.loads(value)

    def get_prep_value(self, value: Any) -> Any:
        return None if value is None else canonical.dumps(value)

    def to_python(self, value: Any) -> Any:
        # A dump holds what `value_to_string` wrote.
        return canonical.loads(value) if isinstance(value, str) else value

    def value_to_string(self, obj: models.Model) -> str:
        return canonical.dumps(self.value_from_object(obj))


class EscapedTextField(AnyTextField):
    """Text of any origin: NUL and lone surrogates are stored escaped and read back as they were."""

    def from_db_value(self, value: str | None, *args: Any) -> str | None:
        return None if value is None else canonical.unescape_text(value)

    def get_prep_value(self, value: Any) -> Any:
        return None if value is None else canonical.escape_text(str(value))


def now() -> datetime:
    """Read the time from the journal's clock; Django's `auto_now` would use this machine's clock."""
    return clock.now(settings.DATABASE)


def loose_key(
    to: str, verbose_name: Any, related_name: str, *, null: bool = True, db_index: bool = True
) -> models.ForeignKey[Any, Any]:
    """Build a foreign key without a constraint or a cascade: the row outlives the row that it names."""
    options: Any = {"null": null, "db_index": db_index, "db_constraint": False}
    options |= {"verbose_name": verbose_name, "related_name": related_name}
    return models.ForeignKey(to, on_delete=models.DO_NOTHING, **options)


def user_key(verbose_name: Any, related_name: str, **options: bool) -> models.ForeignKey[Any, Any]:
    """Build a loose foreign key to a user, who may also be in another database."""
    return loose_key(django_settings.AUTH_USER_MODEL, verbose_name, related_name, **options)


class PersonNameField(AnyCharField):
    """A person's name for lists and searches, cut to the column's length if a project has longer names."""

    def get_prep_value(self, value: Any) -> Any:
        return None if value is None else canonical.escape_text(str(value))[:NAME_LENGTH]


class PrefixIndex(models.Index):
    """An index for `istartswith` on one column of PostgreSQL or SQLite; a plain index on other databases."""

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **kwargs: Any) -> Any:
        """Build the statement that creates the index."""
        statement: Any = super().create_sql(model, schema_editor, using, **kwargs)
        (name,) = self.fields
        column = schema_editor.quote_name(model._meta.get_field(name).column)
        statement.parts["columns"] = _COLUMNS.get(schema_editor.connection.vendor, "{}").format(column)
        return statement


def check_columns(instance: models.Model) -> None:
    """Raise ValidationError, TypeError or ValueError for a value that some database would refuse, or cut."""
    for field in instance._meta.concrete_fields:
        value = getattr(instance, field.attname)
        if value is None and not field.null and not field.primary_key:
            raise TypeError(f"{field.name} is missing")
        if value is None or isinstance(field, models.ForeignKey | CanonicalField):
            continue
        if isinstance(field, models.IntegerField) and type(value) is not int:
            raise TypeError(f"{field.name} is {value!r}, no integer")
        if isinstance(field, models.CharField | models.TextField):
            if not isinstance(value, str):
                raise TypeError(f"{field.name} is {value!r}, no text")
            if isinstance(field, EscapedTextField | PersonNameField):
                continue
            if "\0" in value:
                raise ValueError(f"{field.name} has a NUL")
            value.encode()
        field.run_validators(value)
