"""``postbus worker`` and signals."""

from __future__ import annotations

import signal
import textwrap
import time
from pathlib import Path

import pytest

from postbus import Bus
from tests.worker.command import APP, Command, ended
from tests.worker.conftest import messages
from tests.worker.waiting import eventually


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains(command: Command, bus: Bus, number: signal.Signals) -> None:
    process = command.start("app:worker")
    bus.queue("q").send_batch(["slow", "slow", "rest", "rest"])
    command.until("begin slow 1")
    eventually(lambda: command.log().count("begin slow 1") == 2, "two at a time")
    process.send_signal(number)
    code, err = ended(process)
    assert code == 0, err
    assert f"{number.name}: ending within 20 seconds" in err
    assert command.log().count("end slow") == 2, "what was begun is finished"
    assert messages(bus, "q") == [('"rest"', "ready", 0)] * 2, "the rest is given back"
    assert "Traceback" not in err


def test_the_second_signal_leaves_at_once(command: Command, bus: Bus) -> None:
    process = command.start("app")
    bus.queue("q").send("hangs")
    command.until("begin hangs 1")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    while "SIGTERM: ending" not in process.stderr.readline():
        pass
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 5
    assert "second signal, leaving at once" in err
    assert messages(bus, "q") == [('"hangs"', "in_flight", 1)], "it comes again when its lease ends"


def test_a_thread_that_never_ends(command: Command, bus: Bus) -> None:
    process = command.start("app:worker", "--grace", "0.5")
    bus.queue("q").send("hangs")
    command.until("begin hangs 1")
    began = time.monotonic()
    process.terminate()
    code, err = ended(process)
    assert code == 0
    assert time.monotonic() - began < 10, "does not keep the process"
    assert "1 handlers did not end in time" in err
    assert messages(bus, "q") == [('"hangs"', "ready", 1)]


def test_a_handler_that_neither_ends_nor_lets_itself_be_cancelled(command: Command, bus: Bus) -> None:
    process = command.start("app:stubborn", "--grace", "0.2")
    bus.queue("q").send("holds on")
    command.until("begin holds on 1")
    process.terminate()
    code, err = ended(process)
    assert code == 1
    assert "handlers do not end, leaving without them" in err


def test_the_second_signal_reaches_a_loop_that_is_blocked(command: Command, bus: Bus) -> None:
    process = command.start("app:stubborn")
    bus.queue("q").send("blocks the loop")
    command.until("begin blocks the loop 1")
    process.terminate()
    time.sleep(0.3)  # two signals at once would be one
    process.terminate()
    assert process.wait(5) == 128 + signal.SIGTERM


def test_processes_end_with_the_worker(command: Command, bus: Bus) -> None:
    (command.directory / "app.py").write_text(
        textwrap.dedent(APP)
        + textwrap.dedent("""
        def child(m: Message):
            log(f"child {os.getpid()}")
            time.sleep(600)

        bus = Worker(maintain=False)
        bus.queue("q", process=True)(child)
        """)
    )
    for signals in (1, 2):
        process = command.start("app:bus", "--grace", "0.2" if signals == 1 else "60")
        bus.queue("q").send("x")
        eventually(lambda: len([x for x in command.log() if x.startswith("child")]) >= signals, "at work")  # noqa: B023
        pid = int(command.log()[-1].split()[1])
        process.terminate()
        if signals == 2:
            assert process.stderr is not None
            while "ending" not in process.stderr.readline():
                pass
            process.terminate()
        ended(process)
        eventually(lambda: not Path(f"/proc/{pid}").exists(), "no process is left")  # noqa: B023
        bus.queue("q").purge()
