"""The shop: three tables, and a day of business. `python -m examples.shop_lake.shop`."""

import os
import random

import psycopg

from postbus import Bus

TABLES = ("shop.order_line", "shop.orders", "shop.customer")
STREAM = "shop-changes"
SCHEMA = """
create schema shop;
create table shop.customer (id int primary key, name text not null, city text not null);
create table shop.orders (
  id bigint primary key generated always as identity,
  customer int not null references shop.customer,
  placed_at timestamptz not null default now(),
  cancelled boolean not null default false
);
create table shop.order_line (
  orders bigint references shop.orders on delete cascade,
  line int,
  item text not null,
  quantity int not null,
  price numeric(8, 2) not null,
  primary key (orders, line)
);
insert into shop.customer
values (1, 'Ann', 'Bern'), (2, 'Bob', 'Basel'), (3, 'Cleo', 'Bern'), (4, 'Dan', 'Genf');
"""
PRICES = {"tea": "4.50", "coffee": "6.20", "cake": "3.80", "bread": "5.10"}


def open_shop(dsn: str) -> None:
    """Make the tables, and publish their changes: one stream takes all three."""
    with Bus(dsn) as bus:
        bus.stream(STREAM, create=True)
    with psycopg.connect(dsn) as conn:
        if conn.execute("select to_regnamespace('shop')").fetchone() == (None,):
            conn.execute(SCHEMA)
            for table in TABLES:
                conn.execute("select postbus.capture(%s::text::regclass, %s)", [table, STREAM])


def do_business(dsn: str, orders: int, seed: int = 1) -> None:
    """Orders with their lines, in transactions; some are cancelled or deleted, and a customer moves."""
    chance = random.Random(seed)  # noqa: S311
    with psycopg.connect(dsn, autocommit=True) as conn:
        for _ in range(orders):
            with conn.transaction():
                row = conn.execute(
                    "insert into shop.orders (customer) values (%s) returning id", [chance.randint(1, 4)]
                ).fetchone()
                assert row is not None
                for line, item in enumerate(chance.sample(sorted(PRICES), chance.randint(1, 3)), 1):
                    conn.execute(
                        "insert into shop.order_line values (%s, %s, %s, %s, %s)",
                        [row[0], line, item, chance.randint(1, 5), PRICES[item]],
                    )
        conn.execute("update shop.orders set cancelled = true where id % 7 = 0")
        conn.execute("delete from shop.orders where id % 11 = 0")
        conn.execute("update shop.customer set city = 'Chur' where id = %s", [chance.randint(1, 4)])


def main() -> None:
    dsn = os.environ["POSTBUS_DSN"]
    open_shop(dsn)
    do_business(dsn, 100, random.randrange(2**32))  # noqa: S311


if __name__ == "__main__":
    main()
