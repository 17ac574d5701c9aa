"""Broken engines: each breaks one rule of the stream engine, so that the tests can show they would notice.

A patch fetches a function's definition, changes a piece of its text and insists that the piece was there.
"""

from __future__ import annotations

from tests.stress.sessions import Connection, value


def rewrite(c: Connection, function: str, *changes: tuple[str, str]) -> None:
    """Replace pieces of the text of a function, given as regprocedure."""
    text = str(value(c, "select pg_get_functiondef(%s::regprocedure)", function))
    for old, new in changes:
        assert text.count(old) == 1, f"{function} has {text.count(old)} times: {old}"
        text = text.replace(old, new)
    c.execute(text.encode())


def without_own_xid(c: Connection) -> None:
    """Rule 3: a snapshot is stored as it is, without the xid of the transaction that took it."""
    rewrite(
        c,
        "postbus._with_own_xid(pg_snapshot)",
        ("if v_me is null or not pg_visible_in_snapshot(v_me, p_snapshot) then", "if true then"),
    )


def floor_from_sequence(c: Connection) -> None:
    """Rule 2: the lower bound of fresh events is the id sequence when the snapshot was taken."""
    rewrite(
        c,
        "postbus._tick(int, regclass, int)",
        ("pg_current_xact_id()), v_floor,", "pg_current_xact_id()), v.hi,"),
    )


def floor_from_first_ids(c: Connection) -> None:
    """Rule 2: the lower bound of a merged window is the least of the first ids of its parts."""
    c.execute("""
        create function public.first_ids(p_stream int, p_base bigint, p_upper bigint)
        returns bigint language sql as $$
          select coalesce(min(e.id) - 1, 0)
          from (select t.*, lag(t.snapshot) over (order by t.id) as before
                from postbus.tick t where t.stream_id = p_stream and t.id between p_base and p_upper) t
          join postbus.log e on e.stream_id = p_stream and e.txid >= pg_snapshot_xmax(t.before)
            and pg_visible_in_snapshot(e.txid, t.snapshot)
        $$
    """)
    rewrite(
        c,
        "postbus._make_readers(int)",
        (
            "greatest(p_last, p_base.floor)",
            "greatest(p_last, public.first_ids(p_base.stream_id, p_base.id, p_upper.id))",
        ),
    )
    c.execute("select postbus._make_readers(s.id) from postbus.stream s")


def due_by_sequence(c: Connection) -> None:
    """Rule 4: a tick is due when the id sequence has moved since the newest one."""
    rewrite(
        c,
        "postbus._due(int, postbus.tick)",
        (
            "-- Nothing completed since",
            """return (select pg_sequence_last_value(s.id_seq) > p_tick.hi
              from postbus.stream s where s.id = p_tick.stream_id);
            -- Nothing completed since""",
        ),
    )


def any_isolation_level(c: Connection) -> None:
    """Rule 6: nobody asks for READ COMMITTED."""
    rewrite(
        c,
        "postbus._need_read_committed(text)",
        (
            "not in ('read committed', 'read uncommitted')",
            "not in ('read committed', 'read uncommitted', 'repeatable read')",
        ),
    )


def patient_cleaner(c: Connection) -> None:
    """Not broken, only slow: waits for its lock long enough for a test to do something meanwhile."""
    rewrite(
        c,
        "postbus._clean_leaf(postbus.stream, int)",
        ("SET lock_timeout TO '50ms'", "SET lock_timeout TO '10s'"),
    )


def check_before_lock(c: Connection) -> None:
    """Segments: the cleaner looks at positions and rows first, and then waits for its lock."""
    text = str(
        value(c, "select pg_get_functiondef('postbus._clean_leaf(postbus.stream, int)'::regprocedure)")
    )
    start = text.index("  begin\n    execute format('lock table only")
    end = text.index("  end;\n", start) + len("  end;\n")
    lock = text[start:end]
    truncate = "  execute format('truncate table only"
    assert text.count(truncate) == 1
    assert text.index(truncate) > end
    c.execute((text[:start] + text[end:]).replace(truncate, lock + truncate).encode())
