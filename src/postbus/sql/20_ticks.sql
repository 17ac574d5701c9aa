-- Ticks: which transactions a reader has seen.
--
-- A tick stores a snapshot. An event belongs to the window (a, b] when its txid is visible in b's snapshot and not in
-- a's: exact whatever order transactions commit in, and producers never wait. docs/adr/0001-ticks.md has the rules;
-- each of them was paid for with lost events in a stress test.

-- An xid that no transaction reaches: something that is not in force yet.
create or replace function postbus._never()
returns xid8
language sql
immutable
begin atomic
  select '18446744073709551615'::xid8;
end;

-- An xid that is larger than every xid assigned before the call and already finished: that of a subtransaction which
-- is rolled back at once. Works also where the transaction has had its own xid for long.
create or replace function postbus._later_xid()
returns xid8
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_top bigint := pg_current_xact_id()::text::bigint;
  v_sub xid;
  v bigint;
begin
  begin
    insert into postbus.xid_probe values (true) returning xmin into v_sub;
    raise sqlstate 'PB000';
  exception when sqlstate 'PB000' then
    null;
  end;
  v := (v_top >> 32 << 32) | v_sub::text::bigint;
  if v < v_top then
    v := v + (1::bigint << 32);
  end if;
  return v::text::xid8;
end
$$;

-- A snapshot never lists the caller's own xid; once a later xid completes it looks visible, and what this transaction
-- publishes afterwards would be in no window. Every recorded snapshot passes through here.
create or replace function postbus._with_own_xid(p_snapshot pg_snapshot)
returns pg_snapshot
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_me xid8 := pg_current_xact_id_if_assigned();
begin
  if v_me is null or not pg_visible_in_snapshot(v_me, p_snapshot) then
    return p_snapshot;
  end if;
  return (select format('%s:%s:%s', least(pg_snapshot_xmin(p_snapshot), v_me), pg_snapshot_xmax(p_snapshot),
      string_agg(y.x::text, ',' order by y.x))::pg_snapshot
    from (select pg_snapshot_xip(p_snapshot) as x union select v_me) y);
end
$$;

-- Snapshot and tick id in one short section, so that ids and snapshots of a stream go up together. The raise rolls the
-- block back, which frees the lock at once and can never leak it. Null when somebody else is in the section.
create or replace function postbus._cut(
  p_stream int,
  p_seq regclass,
  out snapshot pg_snapshot,
  out id bigint,
  out hi bigint
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  begin
    if pg_try_advisory_xact_lock(1886351988, p_stream) then
      snapshot := pg_current_snapshot();
      id := nextval('postbus.tick_id');
      hi := coalesce(pg_sequence_last_value(p_seq), 0);
    end if;
    raise sqlstate 'PB000';
  exception when sqlstate 'PB000' then
    null;
  end;
  if snapshot is not null then
    snapshot := postbus._with_own_xid(snapshot);
  end if;
end
$$;

-- Cuts a tick, due or not. Null when another session is just cutting one.
-- lo is read before own is assigned, and publish takes its xid before its id: so an event whose xid is larger than own
-- has an id larger than lo. floor(b) is lo of the newest tick whose own is below xmax(b). Where the cutter has an xid
-- already, or much has come since the last tick, own is a later xid that has finished: then this tick's own lo will do.
create or replace function postbus._tick(p_stream int, p_seq regclass, p_era int)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_lo bigint := coalesce(pg_sequence_last_value(p_seq), 0);
  v_own xid8;
  v_floor bigint;
  v_start bigint;
  v record;
begin
  if pg_current_xact_id_if_assigned() is not null
      or v_lo > 1000 + (select t.lo from postbus.tick t where t.stream_id = p_stream order by t.id desc limit 1) then
    v_own := postbus._later_xid();
  end if;
  v := postbus._cut(p_stream, p_seq);
  if v.id is null then
    return null;
  end if;
  select t.lo, t.start into strict v_floor, v_start from postbus.tick t
  where t.stream_id = p_stream and t.era = p_era and t.own < pg_snapshot_xmax(v.snapshot)
  order by t.id desc limit 1;
  if v_own < pg_snapshot_xmax(v.snapshot) then
    v_floor := v_lo;
  end if;
  insert into postbus.tick (stream_id, id, at, era, snapshot, lo, own, floor, hi, start)
  values (p_stream, v.id, postbus.now_(), p_era, v.snapshot, v_lo, coalesce(v_own, pg_current_xact_id()), v_floor, v.hi, v_start);
  return v.id;
end
$$;

-- The first tick of a stream or of an era: nothing of the era is before it.
create or replace function postbus._first_tick(p_stream int, p_seq regclass, p_era int)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_lo bigint := coalesce(pg_sequence_last_value(p_seq), 0);
  v record;
begin
  v := postbus._cut(p_stream, p_seq);
  if v.id is null then
    raise exception using errcode = 'PB003', message = format('stream %s is being ticked by another session', p_stream),
      hint = 'Try again.';
  end if;
  insert into postbus.tick (stream_id, id, at, era, snapshot, lo, own, floor, hi, start)
  values (p_stream, v.id, postbus.now_(), p_era, v.snapshot, v_lo, '1'::xid8, v_lo, v.hi, v_lo);
  return v.id;
end
$$;

-- Is there anything that the newest tick does not cover? Read-only.
create or replace function postbus._due(p_ring int, p_tick postbus.tick)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  v boolean;
begin
  -- Nothing completed since: no need to look at the log.
  if pg_snapshot_xmax(pg_current_snapshot()) = pg_snapshot_xmax(p_tick.snapshot)
      and pg_snapshot_xmin(p_tick.snapshot) = pg_snapshot_xmax(p_tick.snapshot) then
    return false;
  end if;
  execute format('select postbus._due_%s_%s($1)', p_tick.stream_id, p_ring) into v using p_tick;
  return v;
end
$$;

-- Cuts a tick where one is due and returns the newest one. Consumers do this by themselves; it is here for readers
-- outside the database and for tests.
create or replace function postbus.tick(stream text)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v_t postbus.tick;
begin
  perform postbus._need_read_committed('tick');
  v_s := postbus._stream(tick.stream);
  select t.* into strict v_t from postbus.tick t where t.stream_id = v_s.id order by t.id desc limit 1;
  if postbus._due(v_s.ring, v_t) then
    return coalesce(postbus._tick(v_s.id, v_s.id_seq, v_s.era), v_t.id);
  end if;
  return v_t.id;
end
$$;
