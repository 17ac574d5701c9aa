-- Positions that leave the database: what a reader outside it (Spark) keeps as its offset.
--
-- A position is what progress holds, as one line of JSON whose text never varies: everything up to the base tick is
-- read, and of the window (base, upper] everything with id <= last_id. It carries the snapshots of its ticks and is
-- checked on use: after a restore, a tick of the same number can be another one, or none.
--   {"stream": "orders", "era": 1, "tick": 42, "snapshot": "750:760:752"}
--   ... and inside a window: "upper": 45, "upper_snapshot": "790:790:", "last_id": 1234
--
-- Upkeep thins ticks out. A reader that comes back with a position therefore has a name, its holder: the ticks of the
-- last hundred positions that it got are kept, until their events are truncated.

create table if not exists postbus.held_tick (
  stream_id int not null,
  tick bigint not null,
  holder text not null,
  n bigint not null,                  -- which were used last
  primary key (stream_id, tick, holder)
);
create index if not exists held_tick_holder on postbus.held_tick (stream_id, holder, n);
create sequence if not exists postbus.held_no;

create or replace function postbus._position_text(p_stream text, p_base postbus.tick, p_upper postbus.tick, p_last bigint)
returns text
language sql
immutable
as $$
  select format('{"stream": %s, "era": %s, "tick": %s, "snapshot": "%s"', to_json(p_stream), p_base.era, p_base.id, p_base.snapshot)
    || case when p_upper.id is null then '}'
      else format(', "upper": %s, "upper_snapshot": "%s", "last_id": %s}', p_upper.id, p_upper.snapshot, p_last) end
$$;

-- A tick that a position names, or PB005. On a replica it waits until the tick has come.
create or replace function postbus._known_tick(p_s postbus.stream, p_tick bigint, p_snapshot text, p_until timestamptz default null)
returns postbus.tick
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_t postbus.tick;
  v_why text;
begin
  loop
    select t.* into v_t from postbus.tick t where t.stream_id = p_s.id and t.id = p_tick;
    exit when found or not pg_is_in_recovery()
      or exists (select from postbus.tick t where t.stream_id = p_s.id and t.id > p_tick);
    if clock_timestamp() >= coalesce(p_until, '-infinity') then
      raise exception using errcode = 'object_not_in_prerequisite_state',
        message = format('this replica has not come to tick %s of stream %L yet', p_tick, p_s.name),
        hint = 'Wait longer, or read from the primary.';
    end if;
    perform pg_sleep(0.01);
  end loop;
  v_why := case
    when p_tick < p_s.floor_tick then 'its events are no longer kept'
    when v_t.id is null then 'that tick is no longer kept, or never was in this history of the database'
    when v_t.snapshot::text <> p_snapshot then 'that tick has another snapshot: the database was restored' end;
  if v_why is not null then
    raise exception using errcode = 'PB005', message = format('position at tick %s of stream %L is lost: %s', p_tick, p_s.name, v_why),
      hint = format('The oldest that can be read: select postbus.position(%L, ''earliest'').', p_s.name);
  end if;
  return v_t;
end
$$;

-- Reads the JSON of a position or part. What it must hold: p_numbers are whole numbers, p_texts are texts.
create or replace function postbus._parse(p_what text, p_stream text, p_text text, p_numbers text[], p_texts text[])
returns jsonb
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  v jsonb;
begin
  begin
    v := p_text::jsonb;
  exception when data_exception then
    v := null;
  end;
  if jsonb_typeof(v) is distinct from 'object'
      or exists (select from unnest(p_numbers) x where v ->> x is null or v ->> x !~ '^\d{1,18}$')
      or exists (select from unnest(p_texts || '{stream}') x where jsonb_typeof(v -> x) is distinct from 'string')
      or exists (select from jsonb_object_keys(v) k where k <> all (p_numbers || p_texts || '{stream,upper,upper_snapshot,last_id}')) then
    raise exception using errcode = 'PB003', message = format('not a %s of stream %L: %s', p_what, p_stream, coalesce(left(p_text, 200), 'null')),
      hint = 'Use what postbus.position, postbus.bound_window and postbus.plan_window return, unchanged.';
  end if;
  if v ->> 'stream' <> p_stream then
    raise exception using errcode = 'PB003', message = format('this %s belongs to stream %L, not to %L', p_what, v ->> 'stream', p_stream),
      hint = 'A checkpoint can be used with the stream that it was made with only.';
  end if;
  return v;
end
$$;

create or replace function postbus._read_position(
  p_s postbus.stream,
  p_position text,
  out base postbus.tick,
  out upper postbus.tick,
  out last_id bigint
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v jsonb := postbus._parse('position', p_s.name, p_position, '{era,tick}', '{snapshot}');
begin
  if v ? 'upper' or v ? 'upper_snapshot' or v ? 'last_id' then
    v := postbus._parse('position', p_s.name, p_position, '{era,tick,upper,last_id}', '{snapshot,upper_snapshot}');
    if (v ->> 'upper')::bigint <= (v ->> 'tick')::bigint then
      raise exception using errcode = 'PB003', message = format('not a position of stream %L: upper is not above tick', p_s.name);
    end if;
    upper := postbus._known_tick(p_s, (v ->> 'upper')::bigint, v ->> 'upper_snapshot');
  end if;
  base := postbus._known_tick(p_s, (v ->> 'tick')::bigint, v ->> 'snapshot');
  last_id := coalesce((v ->> 'last_id')::bigint, 0);
  if base.era <> (v ->> 'era')::bigint then
    raise exception using errcode = 'PB005', message = format('position at tick %s of stream %L is lost: it is of era %s, that tick of era %s',
      base.id, p_s.name, v ->> 'era', base.era), hint = format('The oldest that can be read: select postbus.position(%L, ''earliest'').', p_s.name);
  end if;
end
$$;

-- Whoever holds the stream row, shared, holds pruning off: ticks that are chosen under it can be held.
create or replace function postbus._lock_ticks(p_s postbus.stream)
returns postbus.stream
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_s postbus.stream;
begin
  if pg_is_in_recovery() then
    return p_s;
  end if;
  select s.* into v_s from postbus.stream s where s.id = p_s.id for share;
  if not found then
    raise exception using errcode = 'PB001', message = format('stream %L does not exist', p_s.name);
  end if;
  return v_s;
end
$$;

-- The ticks that a holder used last.
create or replace function postbus._held_last(p_stream int, p_holder text)
returns bigint[]
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  select array(select h.tick from postbus.held_tick h where h.stream_id = p_stream and h.holder = p_holder order by h.n desc limit 2)
$$;

-- Keeps ticks for a holder. Call it under _lock_ticks, or with ticks that the holder holds already.
create or replace function postbus._hold(p_s postbus.stream, p_holder text, p_ticks bigint[])
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
begin
  if p_holder is null or pg_is_in_recovery() then
    return;
  end if;
  if length(p_holder) not between 1 and 200 then
    raise exception using errcode = 'PB003', message = 'a holder has a name of 1 to 200 characters';
  end if;
  -- An idle reader asks for the same again and again: that writes nothing.
  if p_ticks <@ postbus._held_last(p_s.id, p_holder) then
    return;
  end if;
  insert into postbus.held_tick as h (stream_id, tick, holder, n)
  select p_s.id, x, p_holder, nextval('postbus.held_no') from unnest(p_ticks) x order by x
  on conflict (stream_id, tick, holder) do update set n = excluded.n;
  delete from postbus.held_tick h where h.stream_id = p_s.id and h.holder = p_holder and h.n <= (
    select o.n from postbus.held_tick o where o.stream_id = p_s.id and o.holder = p_holder order by o.n desc offset 200 limit 1);
end
$$;

-- A position that leaves must survive a crash: this transaction commits synchronously, and if the tick is another
-- session's, whose commit may not be on disk yet, ours flushes it too. An idle server has nothing to flush.
create or replace function postbus._make_durable()
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if pg_is_in_recovery() then
    return;                           -- what has come here was flushed before it was sent
  end if;
  if current_setting('synchronous_commit') = 'off' then
    perform set_config('synchronous_commit', 'on', true);
  end if;
  if pg_current_xact_id_if_assigned() is null and pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn() then
    perform postbus._later_xid();
  end if;
end
$$;

-- Is there anything that the newest tick does not cover? The look at the log is rolled back, which frees its locks: the
-- stream row comes before leaves in the order of locks.
create or replace function postbus._due_now(p_s postbus.stream)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_t postbus.tick;
  v_due boolean;
begin
  if pg_is_in_recovery() then
    return false;
  end if;
  select t.* into strict v_t from postbus.tick t where t.stream_id = p_s.id order by t.id desc limit 1;
  begin
    v_due := postbus._due((select s.ring from postbus.stream s where s.id = p_s.id), v_t);
    raise sqlstate 'PB000';
  exception when sqlstate 'PB000' then
    return v_due;
  end;
end
$$;

-- The newest tick, after cutting one where one is due. What committed before the call is in it.
create or replace function postbus._newest_tick(p_s postbus.stream)
returns postbus.tick
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_t postbus.tick;
begin
  for i in 1 .. 200 loop
    exit when not postbus._due_now(p_s);
    -- Null: somebody is just cutting one, perhaps without what we have to see.
    if postbus._tick(p_s.id, p_s.id_seq, p_s.era) is null then
      perform pg_sleep(0.001);
    end if;
  end loop;
  select t.* into strict v_t from postbus.tick t where t.stream_id = p_s.id order by t.id desc limit 1;
  return v_t;
end
$$;

-- The position of a stream at: earliest, latest or a timestamp (everything published then or later comes after it).
-- latest cuts a tick where one is due. Take it in a transaction of its own: it counts when that has committed.
create or replace function postbus.position(stream text, at text default 'latest', holder text default null)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v_base postbus.tick;
  v_found record;
  v_at timestamptz;
begin
  perform postbus._need_read_committed('position');
  v_s := postbus._stream("position".stream);
  if "position".holder is not null then
    -- An idle reader that has the newest tick already locks nothing.
    if "position".at = 'latest' then
      select t.* into strict v_base from postbus.tick t where t.stream_id = v_s.id order by t.id desc limit 1;
      if v_base.id = any (postbus._held_last(v_s.id, "position".holder)) and not postbus._due_now(v_s) then
        perform postbus._make_durable();
        return postbus._position_text(v_s.name, v_base, null, null);
      end if;
    end if;
    v_s := postbus._lock_ticks(v_s);
  end if;
  if "position".at = 'earliest' then
    select t.* into strict v_base from postbus.tick t where t.stream_id = v_s.id and t.id = v_s.floor_tick;
  elsif "position".at = 'latest' then
    v_base := postbus._newest_tick(v_s);
  else
    begin
      v_at := "position".at::timestamptz;
    exception when data_exception then
      v_at := null;
    end;
    if v_at is null then
      raise exception using errcode = 'PB003', message = format('cannot read position %L', "position".at),
        hint = 'Use earliest, latest or a timestamp such as 2026-01-31 12:00:00+00.';
    end if;
  end if;
  if v_at is null then
    select v_base as base, null::postbus.tick as upper, null::bigint as last_id into v_found;
  else
    v_found := postbus._position_at(v_s, v_at);
  end if;
  perform postbus._hold(v_s, "position".holder, array_remove(array[(v_found.base).id, (v_found.upper).id], null));
  perform postbus._make_durable();
  return postbus._position_text(v_s.name, v_found.base, v_found.upper, v_found.last_id);
end
$$;

-- From the newest tick that was cut before then: what it has seen is older. Of what came after, the events before the first
-- one that is young enough are skipped.
create or replace function postbus._position_at(
  p_s postbus.stream,
  p_at timestamptz,
  out base postbus.tick,
  out upper postbus.tick,
  out last_id bigint
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_newest postbus.tick := postbus._newest_tick(p_s);
  v_counted bigint;
  v record;
  v_first bigint;
begin
  select t.id into v_counted from postbus.tick t
  where t.stream_id = p_s.id and t.total is not null and t.at < p_at order by t.at desc limit 1;
  select t.* into strict base from postbus.tick t
  where t.stream_id = p_s.id and t.id >= coalesce(v_counted, p_s.floor_tick) and (t.at < p_at or t.id = coalesce(v_counted, p_s.floor_tick))
  order by t.id desc limit 1;
  if base.id < p_s.floor_tick then
    select t.* into strict base from postbus.tick t where t.stream_id = p_s.id and t.id = p_s.floor_tick;
  end if;
  for v in select p.* from postbus._pieces(p_s, base, null, 0, v_newest, null, 0) p loop
    v_first := postbus._first_since(p_s.id, v.base, v.upper, p_at);
    if v_first is not null then
      base := v.base;
      upper := v.upper;
      last_id := v_first - 1;
      return;
    end if;
  end loop;
  base := v_newest;
end
$$;

-- Checks a position and keeps it for a holder. Returns it as it would be returned today, to be stored.
create or replace function postbus.hold_position(stream text, "position" text, holder text)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v record;
begin
  perform postbus._need_read_committed('hold_position');
  v_s := postbus._lock_ticks(postbus._stream(hold_position.stream));
  select p.base, p.upper, p.last_id into v from postbus._read_position(v_s, hold_position."position") p;
  perform postbus._hold(v_s, hold_position.holder, array_remove(array[(v.base).id, (v.upper).id], null));
  perform postbus._make_durable();
  return postbus._position_text(v_s.name, v.base, v.upper, v.last_id);
end
$$;

-- Forgets what a holder holds. Returns how many ticks that were.
create or replace function postbus.release_positions(holder text)
returns bigint
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  with gone as (delete from postbus.held_tick h where h.holder = release_positions.holder returning 1)
  select count(*) from gone
$$;

-- Lets a group that is read outside the database follow its reader, so that retention waits for it and its lag shows.
-- It only ever moves forward: returns whether it did.
create or replace function postbus.follow_group(stream text, "group" text, "position" text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v_g postbus."group";
  v record;
  v_upper bigint;
  v_last bigint;
begin
  perform postbus._need_read_committed('follow_group');
  v_s := postbus._stream(follow_group.stream);
  select s.* into strict v_s from postbus.stream s where s.id = v_s.id for share;
  v_g := postbus._group(v_s, follow_group."group");
  perform from postbus."group" g where g.id = v_g.id for update;
  v_g := postbus._group(v_s, follow_group."group");
  perform pg_advisory_xact_lock(1886351993, x) from (select x from unnest(v_g.slots) x order by x) o;
  select p.base, p.upper, p.last_id into v from postbus._read_position(v_s, follow_group."position") p;
  if exists (select from postbus.lease l where l.slot_id = any (v_g.slots)) then
    raise exception using errcode = 'PB003', message = format('group %L of stream %L has workers of its own', v_g.name, v_s.name),
      hint = 'A group either consumes or follows: make another one for this reader.';
  end if;
  -- A group steps over an era at its end, not in the middle of a page.
  if (v.upper).era = (v.base).era then
    v_upper := (v.upper).id;
    v_last := v.last_id;
  end if;
  if not exists (
      select from unnest(v_g.slots) x, lateral (select p.* from postbus.progress p where p.slot_id = x order by p.n desc limit 1) p
      where (v.base).id > p.base or (v.base).id = p.base and v_upper >= coalesce(p.upper, 0) and v_last > p.last_id) then
    return false;
  end if;
  v_g := postbus._adopt_lanes(v_s, v_g);
  insert into postbus.progress (slot_id, n, base, upper, last_id, token, next_expiry, change_id, at)
  select x, coalesce(p.n, 0) + 1, case when b.behind then (v.base).id else p.base end, case when b.behind then v_upper else p.upper end,
    case when b.behind then coalesce(v_last, 0) else p.last_id end, coalesce(pg_sequence_last_value('postbus.lease_token'), 0),
    'infinity', v_g.change_id, postbus.now_()
  from unnest(v_g.slots) x
  left join lateral (select p.* from postbus.progress p where p.slot_id = x order by p.n desc limit 1) p on true
  cross join lateral (select p.n is null or (v.base).id > p.base or (v.base).id = p.base and v_upper >= coalesce(p.upper, 0) and v_last > p.last_id) b (behind)
  where coalesce(b.behind, false) or p.change_id <> v_g.change_id;
  return true;
end
$$;
