"""The fixtures of the plugin, on the server and the template that all tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def postbus_server(server_dsn: str) -> str:
    return server_dsn


@pytest.fixture(scope="session")
def postbus_template(template: str) -> str:
    return template


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
