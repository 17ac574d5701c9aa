"""A view, and the address it has."""

import json
from typing import Any

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

from .bus import confirmations, orders
from .models import Order


def place(request: HttpRequest) -> Any:
    new = json.loads(request.body)
    with transaction.atomic():
        order = Order.objects.create(email=new["email"], item=new["item"])
        # In Django's own transaction: there when it commits, and never there if it rolls back. on_commit is
        # not needed, and nothing is lost if the process dies right after the commit.
        confirmations.send({"order": order.id}, conn=connection)
        orders.publish({"order": order.id}, type="order.placed", key=order.email, conn=connection)
    return JsonResponse({"id": order.id}, status=201)


urlpatterns = [path("orders", place)]
