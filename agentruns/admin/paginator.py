"""Counting that ends: a list is never counted to its last row, however many there are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.core.paginator import Paginator
from django.db.models import IntegerField, QuerySet, Subquery
from django.utils.formats import number_format

if TYPE_CHECKING:
    Base = Paginator[Any]
else:
    Base = Paginator

MOST = 10_000


@dataclass(frozen=True, slots=True)
class Bounded:
    """A number of rows; with `more` there are more than that."""

    number: int
    more: bool = False

    def __str__(self) -> str:
        number = number_format(self.number, force_grouping=True)
        return f"{number}+" if self.more else number

    def __bool__(self) -> bool:
        return self.number > 0


def of(number: int, most: int) -> Bounded:
    """Return a number of which only `most` are told."""
    return Bounded(min(number, most), number > most)


def counted(rows: QuerySet[Any], most: int = MOST) -> Bounded:
    """Count rows, by one query that looks at one row more than `most`."""
    # Not their keys: the index that finds the rows is then all that is read. Of `annotate(one=Value(1))`
    # Django drops the constant and selects nothing.
    return of(rows.order_by().extra(select={"one": "1"}).values("one")[: most + 1].count(), most)


class CountOf(Subquery):
    """How many rows there are, within another query: one more than `most` at the most."""

    template = "(SELECT COUNT(*) FROM (%(subquery)s) AS counted)"

    def __init__(self, rows: QuerySet[Any], most: int = MOST) -> None:
        super().__init__(rows.order_by().values("pk")[: most + 1], output_field=IntegerField())


class BoundedPaginator(Base):
    """Pages of the first `MOST` rows; what lies beyond is found by a filter or the search."""

    @cached_property
    def counted(self) -> Bounded:
        """How many rows there are, as far as they are counted."""
        rows: Any = self.object_list
        return counted(rows)

    @cached_property
    def count(self) -> int:
        """How many rows the pages have."""
        return self.counted.number
