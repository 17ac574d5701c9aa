"""Errors of the engine become the classes of the package."""

from __future__ import annotations

import psycopg
import pytest

from postbus import errors
from tests.conftest import Database


def raise_in_sql(db: Database, sqlstate: str) -> None:
    statement = f"""do $$ begin
        raise exception 'queue "q" is odd'
            using errcode = '{sqlstate}', hint = 'Do this.', detail = 'So odd.';
    end $$"""
    db.connect().execute(statement.encode())


@pytest.mark.parametrize(
    ("sqlstate", "expected"),
    [
        ("PB001", errors.NotFound),
        ("PB002", errors.AlreadyExists),
        ("PB003", errors.BadArgument),
        ("PB004", errors.LeaseLost),
        ("PB005", errors.PositionLost),
        ("PB006", errors.QueueFull),
        ("PB007", errors.AccessDenied),
        ("PB008", errors.WrongVersion),
        ("PB999", errors.PostbusError),
    ],
)
def test_each_sqlstate_has_its_class(
    emptydb: Database, sqlstate: str, expected: type[errors.PostbusError]
) -> None:
    with pytest.raises(errors.PostbusError) as caught, errors.translated():
        raise_in_sql(emptydb, sqlstate)
    error = caught.value
    assert type(error) is expected
    assert error.sqlstate == sqlstate
    assert str(error) == 'queue "q" is odd\nSo odd.\nDo this.'
    assert isinstance(error.__cause__, psycopg.Error)


def test_other_errors_pass_unchanged(emptydb: Database) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero), errors.translated():
        emptydb.connect().execute("select 1 / 0")
