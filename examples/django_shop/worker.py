"""Handlers. They are plain functions, so they run in threads, and Django's ORM may be used."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.db import close_old_connections, connection, transaction
from django.db.models import F

from postbus import Message, Worker

from .bus import bus
from .models import Order

worker = Worker()  # on $POSTBUS_DSN


# What Django does around a request: connections that are old or broken do not live on in the threads.
def with_django(handler: Callable[[Message[Any]], None]) -> Callable[[Message[Any]], None]:
    @wraps(handler)
    def call(m: Message[Any]) -> None:
        close_old_connections()
        try:
            handler(m)
        finally:
            close_old_connections()

    return call


# A message comes twice if a worker dies between the mail and the ack, so this one looks first.
@worker.queue("confirmations", concurrency=4, max_attempts=5)
@with_django
def confirm(m: Message[Any]) -> None:
    order = Order.objects.get(pk=m.payload["order"])
    if not order.confirmed:
        logging.info("mail to %s", order.email)
        Order.objects.filter(pk=order.pk).update(confirmed=True)


# What the ORM writes and the ack commit together: each order gets exactly one parcel.
@worker.stream("orders", group="packing", start="earliest", manual_ack=True)
@with_django
def pack(m: Message[Any]) -> None:
    with transaction.atomic():
        Order.objects.filter(pk=m.payload["order"]).update(parcels=F("parcels") + 1)
        bus.ack(m, conn=connection)
