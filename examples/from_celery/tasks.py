"""Tasks as handlers: retries, steps that follow each other, results, times."""

from typing import Any

import psycopg
from pydantic import BaseModel

from postbus import Bus, Message, Worker
from postbus.worker import Backoff, GiveUp, Retry

bus = Bus()  # only used with connections of handlers, so it is never opened
worker = Worker()  # on $POSTBUS_DSN; was: Celery("shop", broker=..., backend=...)


class Fetch(BaseModel):
    url: str


class Scale(BaseModel):
    picture: int
    width: int = 200


# autoretry_for, retry_backoff and max_retries are settings here. What a handler raises is retried.
@worker.queue(
    "fetch",
    create=True,
    concurrency=4,
    timeout=60,
    max_attempts=5,
    backoff=Backoff(first=2),
    transactional=True,
)
def fetch(m: Message[Fetch], conn: psycopg.Connection[Any]) -> None:
    page = download(m.payload.url)
    if page == "busy":
        raise Retry("the site is busy", delay=600)  # was: self.retry(countdown=600)
    if page == "gone":
        raise GiveUp("there is no such picture")  # was: raise Reject(requeue=False)
    row = conn.execute("insert into picture (source) values (%s) returning id", (page,)).fetchone()
    assert row is not None
    # chain(fetch.s(url), scale.s()): the next step is sent by this one, in the same transaction. It is never
    # lost between the two, and never begun for a picture that was not stored.
    bus.queue("scale", Scale).send(Scale(picture=row[0]), conn=conn)


# A result is a row of yours, written with the ack: was AsyncResult(id).get()
@worker.queue("scale", create=True, transactional=True)
def scale(m: Message[Scale], conn: psycopg.Connection[Any]) -> None:
    conn.execute("update picture set width = %s where id = %s", (m.payload.width, m.payload.picture))


# A crontab of beat. There is no beat process: any worker fires it, once for each time.
@worker.cron("0 3 * * *", timezone="Europe/Zurich", queue="fetch")
def nightly() -> Fetch:
    return Fetch(url="https://example.com/picture-of-the-day")


def download(url: str) -> str:  # stands for a web client
    return {"https://example.com/busy": "busy", "https://example.com/gone": "gone"}.get(url, url)


if __name__ == "__main__":
    worker.main()
