"""Tests of the shop, with the fixtures of the pytest plugin."""

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from httpx import ASGITransport, AsyncClient

from . import worker as shop
from .app import Confirmation, app

ORDER = {"email": "someone@example.com", "item": "tea"}
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def client(postbus_dsn: str) -> AsyncIterator[AsyncClient]:
    # The database of this test is also in $POSTBUS_DSN, where the application looks.
    web = AsyncClient(transport=ASGITransport(app), base_url="http://shop")
    async with app.router.lifespan_context(app), web:
        yield web


async def test_an_order_and_its_messages(
    client: AsyncClient, assert_sent: Any, assert_published: Any
) -> None:
    assert (await client.post("/orders", json=ORDER)).json() == {"id": 1}
    assert_sent("confirmations", payload=Confirmation(order=1, email="someone@example.com"))
    assert_published("orders", type="order.placed", payload={"order": 1, "item": "tea"})


async def test_the_worker(client: AsyncClient, async_drain: Any, postbus_dsn: str) -> None:
    await client.post("/orders", json=ORDER)
    await client.post("/orders", json=ORDER)
    assert len(await async_drain(shop.worker)) == 4  # two messages, two events
    with psycopg.connect(postbus_dsn) as conn:
        assert conn.execute("select * from sold").fetchall() == [("tea", 2)]


async def test_no_mail_server(
    client: AsyncClient, async_drain: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send_mail(to: str, text: str) -> None:
        raise ConnectionError("no mail server")

    await client.post("/orders", json=ORDER)
    with monkeypatch.context() as patch:
        patch.setattr(shop, "send_mail", send_mail)
        with pytest.raises(ConnectionError):
            await async_drain(shop.worker)
    assert await async_drain(shop.worker) == []  # it waits for its next attempt
    clock.move(minutes=1)
    [handled] = await async_drain(shop.worker)
    assert (handled.outcome, handled.message.attempt) == ("done", 2)
