"""The shop on Django: docs/guide/django.md."""

from __future__ import annotations

import re

import pytest

from postbus.testing import Assertions, url
from tests.conftest import Database
from tests.examples.running import run, running, until

MANAGE = "examples.django_shop.manage"
# What a web server does, in a process that has Django set up.
PLACE = """
from django.test import Client
order = {"email": "someone@example.com", "item": "tea"}
assert Client().post("/orders", order, "application/json").status_code == 201
"""


@pytest.fixture
def dsn(server_dsn: str, emptydb: Database) -> str:
    return url(server_dsn, emptydb.name)


def test_its_own_tests(dsn: str) -> None:
    printed = run(MANAGE, "test", "examples.django_shop", POSTBUS_DSN=dsn)
    assert re.search(r"^Ran 2 tests in .*\n\nOK$", printed, re.MULTILINE), printed


def test_from_nothing_to_parcels(dsn: str, emptydb: Database) -> None:
    run(MANAGE, "migrate", POSTBUS_DSN=dsn)
    run(MANAGE, "shell", "--no-imports", "-c", PLACE, POSTBUS_DSN=dsn)
    Assertions(dsn).assert_sent("confirmations", payload={"order": 1}, count=1)
    conn = emptydb.connect()
    query = "select confirmed, parcels from django_shop_order"
    assert conn.execute(query).fetchall() == [(False, 0)]
    with running(MANAGE, "work", POSTBUS_DSN=dsn):
        until(lambda: conn.execute(query).fetchall() == [(True, 1)])
    Assertions(dsn).assert_empty("confirmations")
    Assertions(dsn).assert_empty("orders", group="packing")


def test_migrations_are_complete(dsn: str) -> None:
    assert "No changes detected" in run(MANAGE, "makemigrations", "--check", POSTBUS_DSN=dsn)
