"""The web application: an order and the messages about it are written in one transaction."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from postbus import AsyncBus


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    item: Mapped[str]


class NewOrder(BaseModel):
    email: str
    item: str


# What the worker gets. Both sides import it, so that they cannot disagree.
class Confirmation(BaseModel):
    order: int
    email: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    dsn = os.environ["POSTBUS_DSN"]
    engine = create_async_engine(dsn.replace("postgresql://", "postgresql+psycopg://", 1))
    async with engine.begin() as conn:
        await conn.run_sync(Base.metadata.create_all)
    async with AsyncBus(dsn, install=True) as bus:
        app.state.bus = bus
        app.state.sessions = async_sessionmaker(engine)
        app.state.confirmations = await bus.queue("confirmations", Confirmation, create=True)
        app.state.orders = await bus.stream("orders", create=True)
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place(new: NewOrder, request: Request) -> dict[str, int]:
    state = request.app.state
    # The transaction ends inside of the function. In a dependency with yield it would end after the answer
    # has gone out: the customer would be told of an order that may yet fail to commit.
    async with state.sessions.begin() as session:
        order = Order(email=new.email, item=new.item)
        session.add(order)
        await session.flush()  # it has an id now
        confirmation = Confirmation(order=order.id, email=order.email)
        await state.confirmations.send(confirmation, key=order.email, conn=session)
        event = {"order": order.id, "item": order.item}
        await state.orders.publish(event, type="order.placed", key=order.email, conn=session)
        number = order.id
    return {"id": number}


# The same without SQLAlchemy, on a connection of the bus.
@app.delete("/orders/{number}", status_code=204)
async def cancel(number: int, request: Request) -> None:
    state = request.app.state
    async with state.bus.pool.connection() as conn, conn.transaction():
        cursor = await conn.execute("delete from shop_order where id = %s", (number,))
        if cursor.rowcount:
            await state.orders.publish({"order": number}, type="order.cancelled", conn=conn)
