"""The proxy that the matrix relies on finds every form of a commit, and loses no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest
from django.db import connection

from tests.crash.proxy import COMMITTED, PORT, ROLLED_BACK, Proxy
from tests.settings import DATABASE
from tests.waiting import LIMIT

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(DATABASE == "sqlite", reason="SQLite has no server to stand before"),
]
APPEND = "WITH c AS MATERIALIZED (SELECT 1) INSERT INTO written SELECT %s FROM c"


@pytest.fixture
def written() -> Iterator[None]:
    """A table."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE written (number int)")
        yield
        cursor.execute("DROP TABLE written")


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("how", [COMMITTED, ROLLED_BACK])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_transaction"])
@pytest.mark.parametrize("protocol", ["simple", "extended", "prepared"])
def test_each_form_of_a_commit_is_lost(protocol: str, inside: bool, how: str, proxy: Proxy) -> None:
    settings = connection.settings_dict
    client = psycopg.connect(
        dbname=settings["NAME"], user=settings["USER"], host=proxy.folder, port=PORT, autocommit=True
    )
    cursor = psycopg.ClientCursor(client) if protocol == "simple" else client.cursor()
    prepare = {"prepared": True, "extended": False}.get(protocol)
    cursor.execute(APPEND, [1], prepare=prepare)
    proxy.lose_next_commit(how)
    cursor.execute("SELECT number FROM written", prepare=prepare)  # no commit of anything
    assert cursor.fetchall() == [(1,)]
    with pytest.raises(psycopg.OperationalError):
        if inside:
            with client.transaction():
                cursor.execute(APPEND, [2], prepare=prepare)
                assert not proxy.cut.is_set()
        else:
            cursor.execute(APPEND, [2], prepare=prepare)
    assert proxy.over.wait(LIMIT)
    with suppress(psycopg.Error):
        client.close()
    with connection.cursor() as reader:
        reader.execute("SELECT number FROM written ORDER BY number")
        assert reader.fetchall() == [(1,), (2,)][: 2 if how == COMMITTED else 1]
