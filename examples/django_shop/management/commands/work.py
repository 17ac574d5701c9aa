"""`manage work`: the worker, until a signal comes."""

from typing import Any

from django.core.management.base import BaseCommand

from examples.django_shop.worker import worker


class Command(BaseCommand):
    def handle(self, *args: Any, **options: Any) -> None:
        worker.main()
