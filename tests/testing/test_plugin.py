"""The plugin as its users see it: pytest in a process of its own."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import entry_points

import psycopg
import pytest

from postbus import testing
from tests.docs.pages import ROOT

pytest_plugins = ["pytester"]

LOAD = ("-p", "postbus.testing.plugin", "-p", "no:cacheprovider", "-W", "error")


@pytest.fixture
def project(pytester: pytest.Pytester, server_dsn: str, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A directory for test files; they run on the server of this test process."""
    monkeypatch.setenv("POSTBUS_TEST_DSN", server_dsn)
    monkeypatch.setenv("POSTBUS_DSN", "host=nowhere.invalid")
    return pytester


NOTE_THE_DATABASE = """
import pytest

@pytest.fixture(autouse=True)
def note(postbus_dsn, postbus_template):
    with open("databases", "a") as f:
        print(*[postbus_template, postbus_dsn.split("/")[3].split("?")[0]], sep="\\n", file=f)
"""


def databases(project: pytest.Pytester, server_dsn: str) -> tuple[set[str], set[str]]:
    """Those that were used, and those of them that are still there."""
    used = set((project.path / "databases").read_text(encoding="utf-8").split())
    with psycopg.connect(server_dsn) as conn:
        return used, used & {name for (name,) in conn.execute("select datname from pg_database")}


def test_it_is_found() -> None:
    [found] = entry_points(group="pytest11", name="postbus.testing.plugin")
    assert found.load().__name__ == "postbus.testing.plugin"


def test_every_fixture_is_documented() -> None:
    tree = ast.parse((ROOT / "src/postbus/testing/plugin.py").read_text(encoding="utf-8"))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    fixtures = {f.name for f in functions if f.decorator_list}
    page = (ROOT / "docs/reference/testing.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| (?:a test|the session)", page, re.MULTILINE)) == fixtures


def test_everything_public_is_documented() -> None:
    page = (ROOT / "docs/reference/testing.md").read_text(encoding="utf-8")
    assert [name for name in testing.__all__ if f"`{name}" not in page] == []


def test_fixtures(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import os
        import pytest
        from postbus import Bus, Worker

        worker = Worker()

        @worker.queue("emails", create=True)
        def send_email(m): ...

        @pytest.mark.parametrize("n", [1, 2])
        def test_a_database_of_its_own(bus, n):
            assert bus.queue("emails", create=True).send(n) == 1

        def test_everything(bus, clock, drain, assert_sent, assert_published, assert_empty, dead_letters):
            emails = bus.queue("emails", create=True)
            emails.send({"to": "a"}, delay=60)
            bus.stream("orders", create=True).publish(1)
            assert_published("orders", payload=1)
            assert drain(worker) == []
            clock.move(minutes=1)
            [handled] = drain(worker)
            assert handled.message.payload == {"to": "a"}
            assert_empty("emails")
            assert dead_letters("emails") == []

        def test_the_environment(postbus_dsn):
            assert os.environ["POSTBUS_DSN"] == postbus_dsn
            with Bus() as bus:
                assert bus.queue("emails", create=True).send(1) == 1

        def test_the_environment_afterwards():
            assert os.environ["POSTBUS_DSN"] == "host=nowhere.invalid"
        """
    )
    project.runpytest_subprocess(*LOAD).assert_outcomes(passed=5)


def test_a_server_of_its_own(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTBUS_TEST_DSN")
    project.makepyfile(
        """
        def test_it(bus, postbus_server):
            assert "host=/" in postbus_server
            assert bus.queue("emails", create=True).send(1) == 1
        """
    )
    project.runpytest_subprocess(*LOAD).assert_outcomes(passed=1)


def test_databases_of_several_processes(project: pytest.Pytester, server_dsn: str) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("n", range(6))
        def test_it(bus, n, assert_sent):
            bus.queue("emails", create=True).send(n)
            assert_sent("emails", count=1)
            assert n != 3
        """
    )
    project.makeconftest(NOTE_THE_DATABASE)
    project.runpytest_subprocess(*LOAD, "-n", "2").assert_outcomes(passed=5, failed=1)
    used, left = databases(project, server_dsn)
    assert (len(used), left) == (8, set())  # with a template for each process


def test_asynchronous_tests(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest
        from postbus import Worker

        worker = Worker()

        @worker.queue("emails")
        async def send_email(m): ...

        @pytest.fixture
        def anyio_backend():
            return "asyncio"

        @pytest.mark.anyio
        async def test_it(async_bus, async_drain, assert_sent):
            emails = await async_bus.queue("emails", create=True)
            await emails.send(1)
            assert_sent("emails", payload=1)
            assert len(await async_drain(worker)) == 1
        """
    )
    project.runpytest_subprocess(*LOAD).assert_outcomes(passed=1)


def test_failures_can_be_read(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        def test_it(bus, assert_sent):
            bus.queue("emails", create=True).send({"to": "a"}, key="tenant-1")
            assert_sent("emails", payload={"to": "b"})
        """
    )
    result = project.runpytest_subprocess(*LOAD)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">*assert_sent('emails', payload={'to': 'b'})".replace("'", '"'),
            "E*AssertionError: queue 'emails' has no messages with payload={'to': 'b'}; it has 1:",
            "E*1 type='default' key='tenant-1' payload={'to': 'a'} ready",
        ]
    )
    result.stdout.no_fnmatch_line("*_assertions.py*")  # the code of the assertion is not shown


def test_runs_that_do_not_use_it_do_not_pay_for_it(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import sys

        def test_it(request):
            assert request.config.pluginmanager.has_plugin("postbus.testing.plugin")
            loaded = {name.partition(".")[0] for name in sys.modules}
            assert not loaded & {"psycopg", "psycopg_pool", "msgspec", "asyncio"}
            assert {name for name in sys.modules if name.startswith("postbus")} == {
                "postbus", "postbus._version", "postbus.testing", "postbus.testing.plugin"}
        """
    )
    off = [x for name in ("anyio", "xdist", "hypothesispytest", "timeout") for x in ("-p", f"no:{name}")]
    project.runpytest_subprocess(*LOAD, *off).assert_outcomes(passed=1)


def test_it_is_loaded_once(project: pytest.Pytester) -> None:
    project.makeconftest("pytest_plugins = ['postbus.testing.plugin']")
    project.makepyfile("def test_it(): ...")
    project.runpytest_subprocess(*LOAD, "-p", "postbus.testing.plugin").assert_outcomes(passed=1)


def test_import_postbus_does_not_need_pytest(project: pytest.Pytester) -> None:
    code = "import sys, postbus, postbus.testing; postbus.testing.drain; sys.exit('pytest' in sys.modules)"
    assert project.run(sys.executable, "-c", code).ret == 0
