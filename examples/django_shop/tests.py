"""Tests in a database that Django makes: `manage test examples.django_shop`."""

from unittest import mock

from django.test import TransactionTestCase

from postbus.testing import Assertions, drain

from .bus import dsn
from .models import Order
from .worker import worker


# Not a TestCase: those never commit, and workers see only what is committed.
class ShopTest(TransactionTestCase):
    def place(self) -> None:
        self.client.post("/orders", {"email": "someone@example.com", "item": "tea"}, "application/json")

    def test_an_order_is_confirmed_and_packed(self) -> None:
        self.place()
        order = Order.objects.get()
        Assertions(dsn()).assert_sent("confirmations", payload={"order": order.pk})
        drain(worker, dsn())
        order.refresh_from_db()
        self.assertTrue(order.confirmed)
        self.assertEqual(order.parcels, 1)

    def test_nothing_is_sent_for_an_order_that_fails(self) -> None:
        failing = mock.patch("examples.django_shop.views.orders.publish", side_effect=OSError)
        with failing, self.assertRaises(OSError):
            self.place()
        self.assertEqual(Order.objects.count(), 0)
        Assertions(dsn()).assert_empty("confirmations")
