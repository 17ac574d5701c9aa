"""The table of the shop."""

from typing import Any

from django.db import models


class Order(models.Model):
    id: Any = models.BigAutoField(primary_key=True)
    email: Any = models.EmailField()
    item: Any = models.TextField()
    confirmed: Any = models.BooleanField(default=False)
    parcels: Any = models.IntegerField(default=0)
