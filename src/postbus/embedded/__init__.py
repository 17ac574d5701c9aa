"""A PostgreSQL of one's own: find the binaries, start a private server, stop it with its last user.

Example:
    >>> from postbus.embedded import Server
    >>> with Server.temporary() as server:  # doctest: +SKIP
    ...     conn = psycopg.connect(server.dsn)
"""

from postbus.embedded._binaries import Binaries, find_binaries
from postbus.embedded._server import Server

__all__ = ["Binaries", "Server", "find_binaries"]
