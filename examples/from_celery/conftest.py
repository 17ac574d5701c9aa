"""Every test finds the application's table: it is in the database that theirs are copied from."""

import psycopg
import pytest


@pytest.fixture(scope="session")
def postbus_template(postbus_server: str, postbus_template: str) -> str:
    with psycopg.connect(postbus_server, dbname=postbus_template) as conn:
        conn.execute("create table picture (id serial primary key, source text, width int)")
    return postbus_template
