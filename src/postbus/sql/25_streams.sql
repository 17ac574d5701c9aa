-- Streams: create, alter, drop, list; lane changes; eras.

-- The row of a stream by name, or PB001. Opens a new era first where the stream was restored into another cluster.
create or replace function postbus._stream(p_name text)
returns postbus.stream
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_s postbus.stream;
  v_home boolean;
begin
  select s.xmin = s.stamp into v_home from postbus.stream s where s.name = p_name;
  if not found then
    raise exception using errcode = 'PB001', message = format('stream %L does not exist', p_name),
      hint = format('Create it: select postbus.create_stream(%L).', p_name);
  end if;
  if v_home is not true then
    perform postbus._open_era(s.id) from postbus.stream s where s.name = p_name;
  end if;
  select s.* into strict v_s from postbus.stream s where s.name = p_name;
  return v_s;
end
$$;

-- Every write of a stream row ends with this, in the same subtransaction: the old version's xmin is then our own.
create or replace function postbus._stamp(p_stream int)
returns void
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  update postbus.stream s set stamp = s.xmin where s.id = p_stream
$$;

-- Streams and queues are one name space. Two creators of one name: the second waits here, and then finds it.
create or replace function postbus._claim_name(p_name text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pg_advisory_xact_lock(1886351989, hashtext(p_name));
  if exists (select from postbus.stream s where s.name = p_name) then
    raise exception using errcode = 'PB002', message = format('stream %L already exists', p_name),
      hint = 'Change it with postbus.alter_stream, or choose another name.';
  end if;
  if exists (select from postbus.queue q where q.name = p_name) then
    raise exception using errcode = 'PB002', message = format('queue %L already exists', p_name),
      hint = 'Change it with postbus.alter_queue, or choose another name.';
  end if;
end
$$;

create or replace function postbus._stream_options()
returns text[]
language sql
immutable
as $$
  select array['lanes', 'segments', 'retain', 'max_retain', 'rotate_every', 'event_ttl', 'dedupe_window', 'notify']
$$;

create or replace function postbus._check_stream(p_s postbus.stream)
returns void
language plpgsql
immutable
as $$
begin
  if p_s.retain is null or p_s.rotate_every is null or p_s.dedupe_window is null then
    raise exception using errcode = 'PB003', message = 'retain, rotate_every and dedupe_window must not be null';
  end if;
  if p_s.max_retain < p_s.retain then
    raise exception using errcode = 'PB003',
      message = format('max_retain (%s) is shorter than retain (%s)', p_s.max_retain, p_s.retain),
      hint = 'max_retain bounds what an abandoned group may hold back; retain is kept for everybody.';
  end if;
  if p_s.rotate_every = interval '0' then
    raise exception using errcode = 'PB003', message = 'rotate_every must be longer than zero';
  end if;
end
$$;

-- Options: lanes (1), segments (3), retain (1 day: consumed events stay for replay), max_retain (7 days: what a group
-- that stopped reading can hold back; null: for ever), rotate_every (half of retain, at least a minute),
-- event_ttl (none), dedupe_window (1 hour), notify (true).
create or replace function postbus.create_stream(name text, options jsonb default '{}')
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v_lanes int;
  v_seq text;
begin
  perform postbus._check_name('stream', create_stream.name);
  perform postbus._check_options('stream', create_stream.options, postbus._stream_options());
  v_lanes := postbus._int_option(create_stream.options, 'lanes', 1, 1, 1024);
  v_s.id := nextval('postbus.stream_id');
  v_s.name := create_stream.name;
  v_s.ring := 1;
  v_s.era := 1;
  v_s.lanes := v_lanes;
  v_s.max_lanes := v_lanes;
  v_s.change_id := 0;
  v_s.segments := postbus._int_option(create_stream.options, 'segments', 3, 2, 64);
  v_s.retain := postbus._interval_option(create_stream.options, 'retain', interval '1 day');
  v_s.max_retain := postbus._interval_option(create_stream.options, 'max_retain', greatest(v_s.retain, interval '7 days'));
  v_s.rotate_every := postbus._interval_option(create_stream.options, 'rotate_every', greatest(v_s.retain / 2, interval '1 minute'));
  v_s.event_ttl := postbus._interval_option(create_stream.options, 'event_ttl', null);
  v_s.dedupe_window := postbus._interval_option(create_stream.options, 'dedupe_window', interval '1 hour');
  v_s.notify := postbus._bool_option(create_stream.options, 'notify', true);
  v_s.paused := false;
  v_s.bound := false;
  v_s.floor_tick := 0;
  v_s.created_at := postbus.now_();
  v_s.rotated_at := v_s.created_at;
  perform postbus._check_stream(v_s);

  perform postbus._claim_name(create_stream.name);
  foreach v_seq in array array['id', 'register'] loop
    execute format('create sequence postbus.%s_%s minvalue 0', v_seq, v_s.id);
  end loop;
  v_s.id_seq := format('postbus.id_%s', v_s.id)::regclass;
  v_s.register := format('postbus.register_%s', v_s.id)::regclass;
  perform setval(v_s.id_seq, 0), setval(v_s.register, v_lanes);
  v_s.leaf := postbus._new_leaf(v_s.id, 1, 1);
  v_s.young := postbus._never();
  for i in 2 .. v_s.segments loop
    perform postbus._new_leaf(v_s.id, 1, i);
  end loop;
  v_s.floor_tick := postbus._first_tick(v_s.id, v_s.id_seq, 1);
  insert into postbus.stream select v_s.*;
  perform postbus._stamp(v_s.id);
  update postbus.tick t set total = 0 where t.stream_id = v_s.id;
  perform postbus._make_readers(v_s.id);
end
$$;

create or replace function postbus.alter_stream(name text, options jsonb)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v_lanes int;
  v_now int;
begin
  perform postbus._check_options('stream', alter_stream.options, postbus._stream_options());
  v_s := postbus._stream(alter_stream.name);
  select s.* into strict v_s from postbus.stream s where s.id = v_s.id for update;
  v_s.segments := postbus._int_option(alter_stream.options, 'segments', v_s.segments, 2, 64);
  v_s.retain := postbus._interval_option(alter_stream.options, 'retain', v_s.retain);
  v_s.max_retain := postbus._interval_option(alter_stream.options, 'max_retain', v_s.max_retain);
  v_s.rotate_every := postbus._interval_option(alter_stream.options, 'rotate_every', v_s.rotate_every);
  v_s.event_ttl := postbus._interval_option(alter_stream.options, 'event_ttl', v_s.event_ttl);
  v_s.dedupe_window := postbus._interval_option(alter_stream.options, 'dedupe_window', v_s.dedupe_window);
  v_s.notify := postbus._bool_option(alter_stream.options, 'notify', v_s.notify);
  perform postbus._check_stream(v_s);
  update postbus.stream s set segments = v_s.segments, retain = v_s.retain, max_retain = v_s.max_retain,
    rotate_every = v_s.rotate_every, event_ttl = v_s.event_ttl, dedupe_window = v_s.dedupe_window, notify = v_s.notify
  where s.id = v_s.id;
  perform postbus._stamp(v_s.id);
  v_now := (select count(*) from postbus.segment g where g.stream_id = v_s.id);
  if v_s.segments > v_now then
    perform postbus._grow_ring(v_s.id, v_s.segments - v_now);
  end if;
  v_lanes := postbus._int_option(alter_stream.options, 'lanes', v_s.lanes, 1, 1024);
  if v_lanes <> v_s.lanes then
    perform postbus._change_lanes(v_s.id, v_lanes);
  end if;
end
$$;

-- Adds leaves behind the last one. Readers of the new ring exist before any producer can write into it.
create or replace function postbus._grow_ring(p_stream int, p_count int)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_place int;
begin
  select max(g.place) into strict v_place from postbus.segment g where g.stream_id = p_stream;
  for i in 1 .. p_count loop
    perform postbus._new_leaf(p_stream, (select s.era from postbus.stream s where s.id = p_stream), v_place + i);
  end loop;
  update postbus.stream s set ring = ring + 1 where s.id = p_stream;
  perform postbus._stamp(p_stream);
  perform postbus._make_readers(p_stream);
end
$$;

-- The lane is stored in the row, so a change touches only new rows. It has two steps, because the register that
-- producers read is not transactional: here the change is announced, with a tick that all events of the new mapping come
-- after; once that is committed, _settle_lanes puts it in force. Groups finish everything up to the announcement before
-- they go past it (_pass_lane_change), so order per key survives.
create or replace function postbus._change_lanes(p_stream int, p_lanes int)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_s postbus.stream;
  v_tick bigint;
begin
  perform postbus._need_read_committed('changing the lane count');
  select s.* into strict v_s from postbus.stream s where s.id = p_stream;
  if exists (select from postbus.lane_change c where c.stream_id = p_stream and c.id = v_s.change_id and c.era = v_s.era
      and (c.xid is null or c.xid >= pg_snapshot_xmin(pg_current_snapshot()))) then
    raise exception using errcode = 'PB003', message = format('the last lane change of stream %L is still settling', v_s.name),
      hint = 'It is put in force by maintain() or a consumer, and has settled when the transactions open then have ended.';
  end if;
  v_tick := postbus._tick(p_stream, v_s.id_seq, v_s.era);
  if v_tick is null then
    raise exception using errcode = 'PB003', message = format('stream %L is being ticked by another session', v_s.name), hint = 'Try again.';
  end if;
  insert into postbus.lane_change (stream_id, id, tick, era, lanes, announced, at)
  values (p_stream, v_s.change_id + 1, v_tick, v_s.era, p_lanes, pg_current_xact_id(), postbus.now_());
  update postbus.stream s set change_id = s.change_id + 1, lanes = p_lanes, max_lanes = greatest(s.max_lanes, p_lanes) where s.id = p_stream;
  perform postbus._stamp(p_stream);
end
$$;

-- Puts an announced lane change in force. A producer that still used the old count took its xid before the register was
-- set, so it is below the xid taken after. If this transaction rolls back, the next one does the same again.
create or replace function postbus._settle_lanes(p_stream int)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_s postbus.stream;
  v_change postbus.lane_change;
begin
  if not exists (select from postbus.lane_change c where c.stream_id = p_stream and c.xid is null) then
    return false;
  end if;
  select s.* into v_s from postbus.stream s where s.id = p_stream for no key update skip locked;
  if not found then
    return false;
  end if;
  select c.* into v_change from postbus.lane_change c where c.stream_id = p_stream and c.id = v_s.change_id;
  -- One that this very transaction announced is not committed: consumers do not know of it yet.
  if v_change.id is null or v_change.xid is not null or v_change.announced = pg_current_xact_id_if_assigned() then
    return false;
  end if;
  perform postbus._set_register(v_s.register, v_change.lanes);
  v_change.xid := postbus._later_xid();
  update postbus.lane_change c set xid = v_change.xid where c.stream_id = p_stream and c.id = v_change.id;
  update postbus."group" g set mixed_xid = v_change.xid
  where g.stream_id = p_stream and g.change_id = v_change.id and g.mixed_xid = postbus._never();
  return true;
end
$$;

-- Sets the lane count or the time of the last NOTIFY, leaving the other half as it is. Both writers go through the same
-- short section; who only notifies does not wait for it.
create or replace function postbus._set_register(p_register regclass, p_lanes int)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v bigint;
begin
  begin
    if p_lanes is not null then
      perform pg_advisory_xact_lock(1886351992, p_register::oid::bigint::bit(32)::int);
    elsif not pg_try_advisory_xact_lock(1886351992, p_register::oid::bigint::bit(32)::int) then
      raise sqlstate 'PB000';
    end if;
    v := pg_sequence_last_value(p_register);
    perform setval(p_register, case when p_lanes is not null then (v & ~4095::bigint) | p_lanes
      else (((date_part('epoch', clock_timestamp()) * 100)::bigint + 1) << 12) | (v & 4095) end);
    raise sqlstate 'PB000';
  exception when sqlstate 'PB000' then
    null;
  end;
end
$$;

-- A stream restored from a dump meets a cluster whose xids start again: new events would count as seen long ago. The
-- stream row tells (its xmin is not the one it recorded); everything restored is closed off by a tick that sees all of
-- it, and a new era begins with a fresh leaf. Windows never span eras.
create or replace function postbus._open_era(p_stream int)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_s postbus.stream;
  v_home boolean;
  v_t postbus.tick;
  v_max xid8;
  v_leaf_max xid8;
  v_hi bigint;
  v_leaf int;
begin
  select s.xmin = s.stamp into v_home from postbus.stream s where s.id = p_stream for update;
  if v_home is not false then
    return;
  end if;
  select s.* into strict v_s from postbus.stream s where s.id = p_stream;
  select t.* into strict v_t from postbus.tick t where t.stream_id = p_stream order by t.id desc limit 1;
  v_max := pg_snapshot_xmax(v_t.snapshot);
  for v_leaf in select g.leaf from postbus.segment g where g.stream_id = p_stream loop
    execute format('select e.txid from postbus.log_%s e order by e.txid desc limit 1', v_leaf) into v_leaf_max;
    v_max := greatest(v_max, v_leaf_max);
  end loop;
  v_max := (v_max::text::bigint + 1)::text::xid8;
  v_hi := coalesce(pg_sequence_last_value(v_s.id_seq), 0);
  insert into postbus.tick (stream_id, id, at, era, snapshot, lo, own, floor, hi, start)
  values (p_stream, nextval('postbus.tick_id'), postbus.now_(), v_s.era, format('%1$s:%1$s:', v_max)::pg_snapshot,
    v_hi, v_max, v_hi, v_hi, v_t.start);
  update postbus.stream s set era = s.era + 1 where s.id = p_stream;
  perform postbus._stamp(p_stream);
  perform postbus._grow_ring(p_stream, 1);
  update postbus.stream s
  set young = postbus._never(), leaf = (select g.leaf from postbus.segment g where g.stream_id = p_stream order by g.place desc limit 1)
  where s.id = p_stream;
  perform postbus._stamp(p_stream);
  perform postbus._first_tick(p_stream, v_s.id_seq, v_s.era + 1);
end
$$;

create or replace function postbus.drop_stream(name text, force boolean default false)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v_group text;
  v_seq text;
begin
  select s.* into v_s from postbus.stream s where s.name = drop_stream.name for update;
  if not found then
    raise exception using errcode = 'PB001', message = format('stream %L does not exist', drop_stream.name);
  end if;
  for v_group in select g.name from postbus."group" g where g.stream_id = v_s.id loop
    if not drop_stream.force then
      raise exception using errcode = 'PB003', message = format('stream %L has groups (%s)', drop_stream.name, v_group),
        hint = 'Drop its groups first, or pass force => true.';
    end if;
    perform postbus.drop_group(v_s.name, v_group);
  end loop;
  perform postbus._release_captures(v_s.id);
  delete from postbus.stream s where s.id = v_s.id;
  delete from postbus.tick t where t.stream_id = v_s.id;
  delete from postbus.held_tick h where h.stream_id = v_s.id;
  delete from postbus.upkeep u where u.stream_id = v_s.id;
  delete from postbus.lane_change c where c.stream_id = v_s.id;
  delete from postbus.scheduled d where d.stream_id = v_s.id;
  delete from postbus.dedupe d where d.stream_id = v_s.id;
  delete from postbus.binding b where b.stream_id = v_s.id;
  -- The leaves go to the pool and are emptied by maintain(): truncating here would wait for every open producer.
  update postbus.segment g set stream_id = null, dirty = true where g.stream_id = v_s.id;
  foreach v_seq in array array['id', 'register'] loop
    insert into postbus.trash (name) values (format('postbus.%s_%s', v_seq, v_s.id));
  end loop;
  perform postbus._drop_readers(v_s.id, v_s.ring);
end
$$;

create or replace function postbus.list_streams()
returns table (
  name text, lanes int, groups bigint, events bigint, size_bytes bigint, segments int, retain interval, max_retain interval,
  rotate_every interval, event_ttl interval, dedupe_window interval, notify boolean, paused boolean, last_tick bigint,
  last_tick_at timestamptz, dead_letters bigint, scheduled bigint, created_at timestamptz
)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  select s.name, s.lanes::int,
    (select count(*) from postbus."group" g where g.stream_id = s.id),
    (select t.total from postbus.tick t where t.stream_id = s.id and t.total is not null order by t.id desc limit 1),
    (select sum(pg_total_relation_size(format('postbus.log_%s', l.leaf)::regclass))::bigint from postbus.segment l where l.stream_id = s.id),
    s.segments, s.retain, s.max_retain, s.rotate_every, s.event_ttl, s.dedupe_window, s.notify, s.paused,
    n.id, n.at,
    (select count(*) from postbus.dead_letter d where d.stream_id = s.id),
    (select count(*) from postbus.scheduled d where d.stream_id = s.id),
    s.created_at
  from postbus.stream s,
    lateral (select t.id, t.at from postbus.tick t where t.stream_id = s.id order by t.id desc limit 1) n
  order by s.name
$$;
