-- Groups: named readers of a stream. A slot is what one lease at a time can be taken on: one per lane for the orderings
-- key and none, one in all for stream.

create or replace function postbus._group(p_stream postbus.stream, p_name text)
returns postbus."group"
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_g postbus."group";
begin
  select g.* into v_g from postbus."group" g where g.stream_id = p_stream.id and g.name = p_name;
  if not found then
    raise exception using errcode = 'PB001', message = format('stream %L has no group %L', p_stream.name, p_name),
      hint = format('Create it: select postbus.create_group(%L, %L).', p_stream.name, p_name);
  end if;
  return v_g;
end
$$;

create or replace function postbus._new_slots(p_group int, p_stream int, p_from int, p_to int)
returns int[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_slots int[] := '{}';
begin
  for i in p_from .. p_to loop
    v_slots := v_slots || nextval('postbus.slot_id')::int;
    insert into postbus.slot (id, group_id, stream_id, lane)
    values (v_slots[cardinality(v_slots)], p_group, p_stream, nullif(i, -1));
  end loop;
  return v_slots;
end
$$;

-- The slots of a group for another lane count: those it has, as far as they go, and new ones.
create or replace function postbus._slots_for(p_g postbus."group", p_lanes int)
returns int[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_slots int[] := p_g.slots[1:p_lanes];
begin
  return v_slots || postbus._new_slots(p_g.id, p_g.stream_id, cardinality(v_slots), p_lanes - 1);
end
$$;

-- Removes the slots of a group that it no longer has. Returns how many expired events they had counted.
create or replace function postbus._drop_slots(p_had int[], p_have int[])
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_slots bigint;
  v_progress bigint;
begin
  -- The slot rows first: maintain() locks them before it deletes progress.
  with l as (delete from postbus.slot l where l.id = any (p_had) and l.id <> all (p_have) returning l.expired)
  select coalesce(sum(l.expired), 0) into v_slots from l;
  with p as (delete from postbus.progress p where p.slot_id = any (p_had) and p.slot_id <> all (p_have) returning p.expired)
  select coalesce(sum(p.expired), 0) into v_progress from p;
  return v_slots + v_progress;
end
$$;

create or replace function postbus._check_group(p_g postbus."group")
returns void
language plpgsql
immutable
as $$
begin
  if p_g.lease is null or p_g.lease = interval '0' or p_g.backoff is null or p_g.max_backoff is null then
    raise exception using errcode = 'PB003', message = 'lease must be longer than zero, backoff and max_backoff must not be null';
  end if;
end
$$;

-- Options: ordering (key: order per key, one worker a lane; stream: total order, one worker; none: no order, any number
-- of workers), start (latest, earliest, or any position that seek takes), max_attempts (10), lease (30 s), backoff
-- (1 s, doubled with each attempt) up to max_backoff (5 minutes).
create or replace function postbus.create_group(stream text, "group" text, options jsonb default '{}')
returns void
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
  v_g postbus."group";
  v_change postbus.lane_change;
begin
  perform postbus._need_read_committed('create_group');
  perform postbus._check_name('group', create_group."group");
  perform postbus._check_options('group', create_group.options,
    array['ordering', 'start', 'max_attempts', 'lease', 'backoff', 'max_backoff']);
  v_s := postbus._stream(create_group.stream);
  -- The stream row, shared, holds lane changes and pruning off until the group has its place.
  select s.* into strict v_s from postbus.stream s where s.id = v_s.id for share;
  v_g.id := nextval('postbus.group_id');
  v_g.stream_id := v_s.id;
  v_g.stream_name := v_s.name;
  v_g.name := create_group."group";
  v_g.ordering := coalesce(create_group.options ->> 'ordering', 'key');
  if v_g.ordering not in ('stream', 'key', 'none') then
    raise exception using errcode = 'PB003', message = format('unknown ordering %L', v_g.ordering),
      hint = 'Use "key" (order per key), "stream" (total order) or "none" (any number of workers).';
  end if;
  v_g.max_attempts := postbus._int_option(create_group.options, 'max_attempts', 10, 1, 1000000);
  v_g.lease := postbus._interval_option(create_group.options, 'lease', interval '30 seconds');
  v_g.backoff := postbus._interval_option(create_group.options, 'backoff', interval '1 second');
  v_g.max_backoff := postbus._interval_option(create_group.options, 'max_backoff', interval '5 minutes');
  perform postbus._check_group(v_g);
  v_g.paused := false;
  v_g.expired := 0;
  v_g.created_at := postbus.now_();
  v_g.lanes := v_s.lanes;
  v_g.change_id := v_s.change_id;
  select c.* into v_change from postbus.lane_change c where c.stream_id = v_s.id and c.id = v_s.change_id;
  v_g.mixed_xid := case when v_s.change_id > 0 then coalesce(v_change.xid, postbus._never()) end;
  v_g.mixed_era := coalesce(v_change.era, 0);
  v_g.slots := case when v_g.ordering = 'stream' then postbus._new_slots(v_g.id, v_s.id, -1, -1)
    else postbus._new_slots(v_g.id, v_s.id, 0, v_g.lanes - 1) end;
  insert into postbus."group" select v_g.* on conflict (stream_name, name) do nothing;
  if not found then
    raise exception using errcode = 'PB002', message = format('stream %L already has a group %L', v_s.name, v_g.name),
      hint = 'Move it with postbus.seek, or drop it first.';
  end if;
  perform postbus._place(v_s, v_g, coalesce(create_group.options ->> 'start', 'latest'));
end
$$;

create or replace function postbus.alter_group(stream text, "group" text, options jsonb)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_g postbus."group";
begin
  perform postbus._check_options('group', alter_group.options, array['max_attempts', 'lease', 'backoff', 'max_backoff']);
  v_g := postbus._group(postbus._stream(alter_group.stream), alter_group."group");
  select g.* into strict v_g from postbus."group" g where g.id = v_g.id for update;
  v_g.max_attempts := postbus._int_option(alter_group.options, 'max_attempts', v_g.max_attempts, 1, 1000000);
  v_g.lease := postbus._interval_option(alter_group.options, 'lease', v_g.lease);
  v_g.backoff := postbus._interval_option(alter_group.options, 'backoff', v_g.backoff);
  v_g.max_backoff := postbus._interval_option(alter_group.options, 'max_backoff', v_g.max_backoff);
  perform postbus._check_group(v_g);
  update postbus."group" g set max_attempts = v_g.max_attempts, lease = v_g.lease, backoff = v_g.backoff, max_backoff = v_g.max_backoff
  where g.id = v_g.id;
end
$$;

create or replace function postbus.drop_group(stream text, "group" text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_g postbus."group";
begin
  v_g := postbus._group(postbus._stream(drop_group.stream), drop_group."group");
  perform from postbus."group" g where g.id = v_g.id for update;
  perform pg_advisory_xact_lock(1886351993, x) from (select x from unnest(v_g.slots) x order by x) o;
  perform postbus._drop_slots(v_g.slots, '{}');
  delete from postbus.lease l where l.slot_id = any (v_g.slots);
  delete from postbus.redelivery r where r.slot_id = any (v_g.slots);
  delete from postbus.dead_letter d where d.group_id = v_g.id;
  delete from postbus."group" g where g.id = v_g.id;
end
$$;

-- Puts every slot of a group at a position. What is out on lease or waits for another try is forgotten: it will be read
-- again, or was skipped on purpose. Positions: earliest, latest, tick:N, id:N, time:TIMESTAMP or a bare timestamp.
create or replace function postbus._place(p_s postbus.stream, p_g postbus."group", p_position text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := postbus.now_();
  v_newest postbus.tick;
  v_base bigint;
  v_upper bigint;
  v_last bigint := 0;
  v_at timestamptz;
begin
  select t.* into strict v_newest from postbus.tick t where t.stream_id = p_s.id order by t.id desc limit 1;
  if p_position <> 'earliest' and p_position !~ '^tick:' and postbus._due(p_s.ring, v_newest) then
    v_base := postbus._tick(p_s.id, p_s.id_seq, p_s.era);
    select t.* into strict v_newest from postbus.tick t where t.stream_id = p_s.id and t.id = coalesce(v_base, v_newest.id);
  end if;
  if p_position = 'earliest' then
    v_base := p_s.floor_tick;
  elsif p_position = 'latest' then
    v_base := v_newest.id;
  elsif p_position ~ '^tick:\d{1,18}$' then
    v_base := substr(p_position, 6)::bigint;
    if v_base < p_s.floor_tick then
      raise exception using errcode = 'PB005', message = format('tick %s of stream %L is no longer kept', v_base, p_s.name),
        hint = format('The oldest is %s; seek to earliest.', p_s.floor_tick);
    end if;
    if not exists (select from postbus.tick t where t.stream_id = p_s.id and t.id = v_base) then
      raise exception using errcode = 'PB003', message = format('stream %L has no tick %s', p_s.name, v_base),
        hint = 'Ticks are numbers across all streams, and old ones are thinned out.';
    end if;
  elsif p_position ~ '^id:\d{1,18}$' then
    v_last := substr(p_position, 4)::bigint - 1;
  else
    begin
      v_at := regexp_replace(p_position, '^time:', '')::timestamptz;
    exception when data_exception then
      raise exception using errcode = 'PB003', message = format('cannot read position %L', p_position),
        hint = 'Use earliest, latest, tick:123, id:456 or a timestamp such as 2026-01-31 12:00:00+00.';
    end;
    v_last := postbus._id_before(p_s, v_at);
  end if;
  if v_base is null or v_last > 0 then
    -- By id: from a tick that has seen nothing above it, skipping up to it inside the window. Nothing that commits
    -- later is skipped, whatever its id.
    v_base := coalesce((select t.id from postbus.tick t where t.stream_id = p_s.id and t.id >= p_s.floor_tick and t.era = p_s.era
      and t.hi <= v_last order by t.id desc limit 1), p_s.floor_tick);
    if v_base <> v_newest.id and v_last > 0 then
      v_upper := v_newest.id;
      if (select t.era from postbus.tick t where t.stream_id = p_s.id and t.id = v_base) <> v_newest.era then
        select max(t.id) into strict v_upper from postbus.tick t
        where t.stream_id = p_s.id and t.era = (select b.era from postbus.tick b where b.stream_id = p_s.id and b.id = v_base);
      end if;
    else
      v_last := 0;
    end if;
  end if;
  delete from postbus.lease l where l.slot_id = any (p_g.slots);
  delete from postbus.redelivery r where r.slot_id = any (p_g.slots);
  insert into postbus.progress (slot_id, n, base, upper, last_id, token, next_expiry, change_id, at)
  select x, coalesce((select p.n from postbus.progress p where p.slot_id = x order by p.n desc limit 1), 0) + 1,
    v_base, v_upper, v_last, coalesce(pg_sequence_last_value('postbus.lease_token'), 0), 'infinity', p_g.change_id, v_now
  from unnest(p_g.slots) x;
end
$$;

-- The largest id below every event published at p_at or later, as far as the log still holds them.
create or replace function postbus._id_before(p_s postbus.stream, p_at timestamptz)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_leaf int;
  v_id bigint;
  v_least bigint;
begin
  for v_leaf in select g.leaf from postbus.segment g where g.stream_id = p_s.id loop
    execute format('select min(e.id) from postbus.log_%s e where e.stream_id = $1 and e.at >= $2', v_leaf)
    into v_id using p_s.id, p_at;
    v_least := least(v_least, v_id);
  end loop;
  return coalesce(v_least - 1, pg_sequence_last_value(p_s.id_seq), 0);
end
$$;

create or replace function postbus.seek(stream text, "group" text, "position" text)
returns void
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
  v_g postbus."group";
begin
  perform postbus._need_read_committed('seek');
  v_s := postbus._stream(seek.stream);
  select s.* into strict v_s from postbus.stream s where s.id = v_s.id for share;
  v_g := postbus._group(v_s, seek."group");
  perform from postbus."group" g where g.id = v_g.id for update;
  v_g := postbus._group(v_s, seek."group");
  perform pg_advisory_xact_lock(1886351993, x) from (select x from unnest(v_g.slots) x order by x) o;
  perform postbus._place(v_s, postbus._adopt_lanes(v_s, v_g), seek."position");
end
$$;

create or replace function postbus.seek(stream text, "group" text, "position" timestamptz)
returns void
language sql
as $$
  select postbus.seek(stream, "group", 'time:' || "position"::text)
$$;

-- The tick at which a group changes over: where the change was announced, or further, where one of its slots already was
-- when it had not heard of it. No event of the new mapping is before it.
create or replace function postbus._changeover(p_stream int, p_group int)
returns bigint
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  select greatest(
    (select c.tick from postbus.lane_change c where c.stream_id = p_stream and c.id > g.change_id order by c.id limit 1),
    (select max(coalesce(p.upper, p.base)) from unnest(g.slots) x,
      lateral (select q.upper, q.base from postbus.progress q where q.slot_id = x order by q.n desc limit 1) p))
  from postbus."group" g where g.id = p_group
$$;

-- A group goes past a lane change when all its slots have come to that tick and nothing is out on lease. What waits for
-- another try moves to the slot that its key has now.
create or replace function postbus._pass_lane_change(p_group int)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_g postbus."group";
  v_change postbus.lane_change;
  v_slots int[];
  v_tick bigint;
begin
  select g.* into v_g from postbus."group" g where g.id = p_group for update skip locked;
  if not found then
    return false;
  end if;
  select c.* into v_change from postbus.lane_change c
  where c.stream_id = v_g.stream_id and c.id > v_g.change_id order by c.id limit 1;
  if not found then
    return true;
  end if;
  if v_change.xid is null then
    return false;
  end if;
  if not (select bool_and(pg_try_advisory_xact_lock(1886351993, x)) from unnest(v_g.slots) x) then
    return false;
  end if;
  v_tick := postbus._changeover(v_g.stream_id, p_group);
  if exists (select from unnest(v_g.slots) x, lateral (select p.* from postbus.progress p where p.slot_id = x order by p.n desc limit 1) p
      where p.base < v_tick or p.upper is not null
        or exists (select from postbus.lease l where l.slot_id = x and l.token >= p.token)) then
    return false;
  end if;
  v_slots := postbus._slots_for(v_g, v_change.lanes);
  insert into postbus.progress (slot_id, n, base, upper, last_id, token, next_expiry, change_id, at)
  select x, coalesce((select p.n from postbus.progress p where p.slot_id = x order by p.n desc limit 1), 0) + 1,
    v_tick, null, 0, coalesce(pg_sequence_last_value('postbus.lease_token'), 0), 'infinity', v_change.id, postbus.now_()
  from unnest(v_slots) x;
  update postbus.redelivery r set slot_id = v_slots[postbus._lane(r.key, r.id, v_change.lanes) + 1]
  where r.slot_id = any (v_g.slots);
  update postbus."group" g set slots = v_slots, lanes = v_change.lanes, change_id = v_change.id, mixed_xid = v_change.xid,
    mixed_era = v_change.era, expired = g.expired + postbus._drop_slots(v_g.slots, v_slots)
  where g.id = p_group;
  return true;
end
$$;

-- A group that is put at a new position reads by the present lane count from there on, whatever changes it had ahead.
create or replace function postbus._adopt_lanes(p_s postbus.stream, p_g postbus."group")
returns postbus."group"
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_change postbus.lane_change;
  v_slots int[];
begin
  if p_g.ordering = 'stream' or p_g.change_id = p_s.change_id then
    return p_g;
  end if;
  select c.* into strict v_change from postbus.lane_change c where c.stream_id = p_s.id and c.id = p_s.change_id;
  v_slots := postbus._slots_for(p_g, v_change.lanes);
  delete from postbus.lease l where l.slot_id = any (p_g.slots) and l.slot_id <> all (v_slots);
  delete from postbus.redelivery r where r.slot_id = any (p_g.slots) and r.slot_id <> all (v_slots);
  update postbus."group" g set slots = v_slots, lanes = v_change.lanes, change_id = v_change.id,
    mixed_xid = coalesce(v_change.xid, postbus._never()), mixed_era = v_change.era,
    expired = g.expired + postbus._drop_slots(p_g.slots, v_slots)
  where g.id = p_g.id
  returning g.* into strict p_g;
  return p_g;
end
$$;

create or replace function postbus.pause(name text, "group" text default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform postbus._set_paused(pause.name, pause."group", true);
end
$$;

create or replace function postbus.resume(name text, "group" text default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform postbus._set_paused(resume.name, resume."group", false);
end
$$;

-- A paused stream, group or queue hands out nothing new; publishing, sending, acks and leases go on.
create or replace function postbus._set_paused(p_stream text, p_group text, p_paused boolean)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_queue int := postbus._queue_or_stream(p_stream, p_group);
  v_s postbus.stream;
  v_g postbus."group";
begin
  if v_queue is not null then
    update postbus.queue q set paused = p_paused where q.id = v_queue;
    return;
  end if;
  v_s := postbus._stream(p_stream);
  if p_group is null then
    update postbus.stream s set paused = p_paused where s.id = v_s.id;
    perform postbus._stamp(v_s.id);
  else
    v_g := postbus._group(v_s, p_group);
    update postbus."group" g set paused = p_paused where g.id = v_g.id;
  end if;
end
$$;
