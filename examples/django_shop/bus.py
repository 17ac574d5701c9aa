"""Where views send to, and where the database is.

A bus that only ever gets Django's connections is never opened: it has no pool, and nothing of it is in the
way of servers that fork.
"""

import os

from django.db import connection
from psycopg.conninfo import make_conninfo

from postbus import Bus

bus = Bus()
confirmations = bus.queue("confirmations")
orders = bus.stream("orders")


def dsn() -> str:  # of the database that Django uses now: in tests it has another name
    return make_conninfo(os.environ["POSTBUS_DSN"], dbname=connection.settings_dict["NAME"])
