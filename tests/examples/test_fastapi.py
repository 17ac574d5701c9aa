"""The shop on FastAPI: docs/guide/fastapi.md."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from httpx import ASGITransport, AsyncClient

from examples.fastapi_shop.app import app
from postbus.testing import Assertions, url
from tests.conftest import Database
from tests.examples.running import run_tests, running, until

ORDER = {"email": "someone@example.com", "item": "tea"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def dsn(server_dsn: str, db: Database, monkeypatch: pytest.MonkeyPatch) -> str:
    dsn = url(server_dsn, db.name)
    monkeypatch.setenv("POSTBUS_DSN", dsn)
    return dsn


@pytest.fixture
async def client(dsn: str) -> AsyncIterator[AsyncClient]:
    web = AsyncClient(transport=ASGITransport(app), base_url="http://shop")
    async with app.router.lifespan_context(app), web:
        yield web


def test_its_own_tests(server_dsn: str) -> None:
    assert run_tests("examples/fastapi_shop", server_dsn) == 3


@pytest.mark.anyio
async def test_an_order_that_fails_sends_nothing(client: AsyncClient, db: Database) -> None:
    """The row, the message and the event are written, and then the event's stream is gone."""
    conn = db.connect()
    conn.execute("select postbus.drop_stream('orders')")
    with pytest.raises(Exception, match="orders"):
        await client.post("/orders", json=ORDER)
    assert conn.execute("select count(*) from shop_order").fetchone() == (0,)
    Assertions(db.dsn).assert_empty("confirmations")


@pytest.mark.anyio
async def test_cancelling(client: AsyncClient, db: Database) -> None:
    number = (await client.post("/orders", json=ORDER)).json()["id"]
    for _ in range(2):
        assert (await client.delete(f"/orders/{number}")).status_code == 204
    Assertions(db.dsn).assert_published("orders", type="order.cancelled", payload={"order": number}, count=1)
    assert db.connect().execute("select count(*) from shop_order").fetchone() == (0,)


@pytest.mark.anyio
async def test_the_worker_as_a_process(client: AsyncClient, dsn: str, db: Database) -> None:
    for _ in range(3):
        await client.post("/orders", json=ORDER)
    conn = db.connect()

    def sold() -> bool:
        there = conn.execute("select to_regclass('sold') is not null").fetchone() == (True,)
        return there and conn.execute("select * from sold").fetchall() == [("tea", 3)]

    with running("examples.fastapi_shop.worker", POSTBUS_DSN=dsn):
        until(sold)
    Assertions(dsn).assert_empty("confirmations")
