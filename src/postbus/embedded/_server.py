"""The embedded server as its users see it: start, share, stop."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from psycopg.conninfo import make_conninfo

from postbus.embedded import _checks, _launch
from postbus.embedded._binaries import Binaries, find_binaries
from postbus.embedded._home import Home, Postmaster, default_home
from postbus.errors import EmbeddedError

_TEMPORARY_SETTINGS = {"fsync": "off", "full_page_writes": "off"}


class Server:
    """A private PostgreSQL that lives as long as its users.

    The first process to start it makes the cluster (`initdb`) and runs it; other processes that name the
    same directory share it; it shuts down cleanly when the last of them stops it, exits, or is killed. The
    data stay and the next start is warm. Clients connect over a Unix socket in a directory that only this
    user can open; TCP on 127.0.0.1 with a generated password is there for the asking.

    Args:
        data_dir: the directory to keep everything in; by default one per user and major version, under
            ``$POSTBUS_HOME`` or ``~/.local/share/postbus``.
        port: listen on 127.0.0.1 as well; 0 picks a free port. By default there is no TCP.
        settings: server settings (``{"max_connections": 50}``). They apply when this process is the one
            that starts the server, not when it joins one that runs.
        binaries: the PostgreSQL to run; by default the first that `find_binaries` finds.
        timeout: seconds to wait for a start or for somebody else's stop.

    Example:
        >>> with Server("/tmp/bus", settings={"work_mem": "16MB"}) as server:  # doctest: +SKIP
        ...     conn = psycopg.connect(server.dsn)
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        *,
        port: int | None = None,
        settings: Mapping[str, object] | None = None,
        binaries: Binaries | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._dir = Path(data_dir).expanduser().absolute() if data_dir is not None else None
        self._want_port = port
        self._settings = dict(settings or {})
        self._binaries = binaries
        self._timeout = timeout
        self._temporary = False
        self._home: Home | None = None
        self._postmaster: Postmaster | None = None
        self._holding: int | None = None
        self._version = ""

    @classmethod
    def temporary(cls, *, inside: str | Path | None = None, **options: Any) -> Self:
        """Return a server whose directory is made on start and removed on stop, with fsync off.

        Args:
            inside: where to make the directory; by default where temporary files go.
            options: as for the class, but for ``data_dir``.
        """
        settings = {**_TEMPORARY_SETTINGS, **(options.pop("settings", None) or {})}
        server = cls(None, settings=settings, **options)
        server._temporary = True
        server._dir = Path(inside).absolute() if inside is not None else None
        return server

    def start(self) -> Self:
        """Start the server, or join the one that runs in this directory.

        Raises:
            EmbeddedError: with the end of the server log and a remedy.
        """
        if self._holding is not None:
            if self.running:
                return self
            self._let_go()
        home = self._prepare()
        deadline = time.monotonic() + self._timeout
        starting = home.lock("start.lock", fcntl.LOCK_EX, deadline)
        try:
            # Waits here while a server whose last user has just gone shuts down.
            self._hold(home.lock("holders.lock", fcntl.LOCK_SH, deadline))
            if not home.locked("supervisor.lock"):
                _launch.launch(
                    home,
                    _checks.fitting(home, self._find()),
                    port=self._want_port,
                    settings=self._settings,
                    temporary=self._temporary,
                    timeout=self._timeout,
                )
            self._postmaster, self._version = _checks.wait_until_ready(home, deadline)
            _checks.port(home, self._postmaster, self._want_port)
        except BaseException:
            self._let_go()
            self._remove_if_temporary()
            raise
        finally:
            os.close(starting)
        return self

    def stop(self) -> None:
        """Let go of the server. It stops if nobody else uses it, and then this waits until it has."""
        if self._holding is None or self._home is None:
            return
        home = self._home
        self._let_go()
        _launch.wait_until_stopped(home, time.monotonic() + self._timeout)
        self._remove_if_temporary()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def dsn(self) -> str:
        """How to connect to the database ``postgres`` as its superuser, over the Unix socket."""
        return self.dsn_for("postgres")

    def dsn_for(self, dbname: str) -> str:
        """How to connect to the named database."""
        return make_conninfo(host=str(self.socket_dir), port=self.port, user="postgres", dbname=dbname)

    @property
    def tcp_dsn(self) -> str:
        """How to connect over TCP, with the password in it; only if ``port`` was asked for."""
        if not self._running_postmaster().listen:
            raise EmbeddedError("the embedded server does not listen on TCP", remedy="Start it with port=0.")
        password = self._known_home().password()
        return make_conninfo(
            host="127.0.0.1", port=self.port, user="postgres", dbname="postgres", password=password
        )

    @property
    def running(self) -> bool:
        """Whether this object holds a server and that server is alive."""
        if self._holding is None or self._home is None:
            return False
        return self._home.locked("supervisor.lock")

    @property
    def data_dir(self) -> Path:
        """The directory that holds the cluster, the log and the socket."""
        return self._known_home().path

    @property
    def log_path(self) -> Path:
        """The server log."""
        return self._known_home().log

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        return self._running_postmaster().pid

    @property
    def port(self) -> int:
        """The port number, which also names the socket file."""
        return self._running_postmaster().port

    @property
    def socket_dir(self) -> Path:
        """The directory of the Unix socket."""
        return Path(self._running_postmaster().socket_dir)

    @property
    def version(self) -> str:
        """The version of the running server, for example ``18.6``."""
        self._running_postmaster()
        return self._version

    def _prepare(self) -> Home:
        if self._temporary and self._home is None:
            self._home = Home(Path(tempfile.mkdtemp(prefix="postbus-", dir=self._dir)).resolve())
        elif self._home is None:
            self._home = Home((self._dir or default_home(self._find().major)).resolve())
        self._home.create()
        return self._home

    def _find(self) -> Binaries:
        if self._binaries is None:
            self._binaries = find_binaries()
        return self._binaries

    def _remove_if_temporary(self) -> None:
        if self._temporary and self._home is not None:
            shutil.rmtree(self._home.path, ignore_errors=True)
            self._home = None

    def _hold(self, fd: int) -> None:
        self._holding = fd
        _held.add(self)

    def _let_go(self) -> None:
        _held.discard(self)
        fd, self._holding, self._postmaster = self._holding, None, None
        if fd is not None:
            os.close(fd)

    def _known_home(self) -> Home:
        if self._home is None:
            raise EmbeddedError("the embedded server was not started", remedy="Call start() first.")
        return self._home

    def _running_postmaster(self) -> Postmaster:
        if self._postmaster is None:
            raise EmbeddedError("the embedded server is not running", remedy="Call start() first.")
        return self._postmaster


_held: weakref.WeakSet[Server] = weakref.WeakSet()


def _stop_all() -> None:
    for server in list(_held):
        server.stop()
    _launch.forget()


def _forget_all() -> None:
    """In a forked child: the lock belongs to the parent, whose end shall stop the server."""
    for server in list(_held):
        server._let_go()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_forget_all)
