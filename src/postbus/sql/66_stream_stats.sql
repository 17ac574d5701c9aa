-- Looking often, at streams and groups. What a group has to read is found by reading as its workers do, up to a limit; the
-- window ends now, not at the newest tick, so that it does not matter whether anybody cuts ticks.

-- The events of a window: how many, up to p_max, beyond that estimated from ids (p_share: out of so many lanes, of which this
-- is one), and when the first of them was published.
create or replace function postbus._window(p_s postbus.stream, p_b postbus.tick, p_u postbus.tick, p_last bigint, p_all boolean, p_lane int, p_lanes smallint,
  p_max int, p_share int, out n bigint, out first_at timestamptz, out estimated boolean)
language plpgsql
as $$
declare
  v_first postbus.message[];
begin
  n := 0;
  estimated := false;
  if p_b.era = p_u.era then
    execute format('select postbus._page_%s_%s($1, $2, $3, null, $4, $5, $6, $7, 1, 0)', p_s.id, p_s.ring) into v_first
    using p_b, p_u, p_last, p_all, p_lane::smallint, p_lanes, p_s.max_lanes;
    if cardinality(v_first) = 0 then
      return;
    end if;
    first_at := v_first[1].created_at;
    n := postbus._count(p_s.ring, p_s.max_lanes, p_b, p_u, p_last, p_all, p_lane::smallint, p_lanes, p_max + 1);
    if n <= p_max then
      return;
    end if;
  else
    first_at := p_b.at;
  end if;
  estimated := true;
  n := greatest(n, (p_u.hi - greatest(p_last, p_b.hi)) / p_share);
end
$$;

-- How far behind a group is, and who works on it. Of more than 32 lanes, up to 32 are looked at.
--   first_at: when the oldest event was published that nobody took; overdue: messages on leases that ran out, the first at overdue_at;
--   due_at: since when the first message that waits for another try could have had it.
create or replace function postbus._backlog(p_g postbus."group", p_now timestamptz, p_max int,
  out pending bigint, out first_at timestamptz, out in_flight bigint, out overdue bigint, out overdue_at timestamptz, out waiting bigint,
  out due_at timestamptz, out active_at timestamptz, out lost boolean, out estimated boolean)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_slots int := cardinality(p_g.slots);
  v_step int := (v_slots + 31) / 32;
  v_newest postbus.tick;
  v_b postbus.tick;
  v_now postbus.tick;                 -- never stored: everything that is visible now
  v_u postbus.tick;                   -- up to where the slots read: v_now, or a lane change
  v_s postbus.stream;
  v_p postbus.progress;
  v_quiet boolean;
  v_all boolean;
  v record;
begin
  pending := 0;
  in_flight := 0;
  overdue := 0;
  waiting := 0;
  lost := false;
  estimated := v_step > 1;
  select t.* into v_newest from postbus.tick t where t.stream_id = p_g.stream_id order by t.id desc limit 1;
  select s.* into v_s from postbus.stream s where s.id = p_g.stream_id;
  if not found or v_newest.id is null then
    return;                           -- just dropped
  end if;
  v_quiet := not postbus._due(v_s.ring, v_newest);
  -- The ids after the snapshot, as in _cut.
  v_now := v_newest;
  v_now.snapshot := pg_current_snapshot();
  v_now.hi := coalesce(pg_sequence_last_value(v_s.id_seq), 0);
  v_u := v_now;
  if p_g.ordering <> 'stream' and p_g.change_id <> v_s.change_id then
    select t.* into v_u from postbus.tick t where t.stream_id = p_g.stream_id and t.id = postbus._changeover(p_g.stream_id, p_g.id);
    if not found then
      v_u := v_now;
    end if;
  end if;
  for v_slot in 0 .. v_slots - 1 by v_step loop
    select p.* into v_p from postbus.progress p where p.slot_id = p_g.slots[v_slot + 1] order by p.n desc limit 1;
    active_at := greatest(active_at, v_p.at);
    continue when v_quiet and v_p.base = v_newest.id;
    select t.* into v_b from postbus.tick t where t.stream_id = p_g.stream_id and t.id = v_p.base;
    -- The stream after the ticks, as in consume.
    select s.* into v_s from postbus.stream s where s.id = p_g.stream_id;
    exit when not found;
    if v_b.id is null or v_b.id < v_s.floor_tick then
      lost := true;
      continue;
    end if;
    v_all := p_g.ordering = 'stream' or p_g.mixed_xid is not null and v_b.era <= p_g.mixed_era
      and pg_snapshot_xmin(v_b.snapshot) <= p_g.mixed_xid;
    -- Where the stored lane does not decide, every lane is read up to the limit.
    v := postbus._window(v_s, v_b, v_u, v_p.last_id, v_all, case when p_g.ordering <> 'stream' then v_slot end,
      case when v_all and p_g.ordering <> 'stream' then p_g.lanes end,
      greatest(20, p_max / least(32, case when v_all then v_s.max_lanes else v_slots end)), v_slots);
    pending := pending + v.n;
    first_at := least(first_at, v.first_at);
    estimated := estimated or v.estimated;
  end loop;
  pending := pending * v_slots / ((v_slots + v_step - 1) / v_step);
  if v_u.id < v_now.id or v_u.snapshot::text <> v_now.snapshot::text then
    -- Beyond a lane change: of every lane.
    v := postbus._window(v_s, v_u, v_now, 0, true, null, null, greatest(20, p_max / least(32, v_s.max_lanes)), 1);
    pending := pending + v.n;
    first_at := least(first_at, v.first_at);
    estimated := estimated or v.estimated;
  end if;
  select coalesce(sum(l.n) filter (where l.expires_at > p_now), 0), coalesce(sum(l.n) filter (where l.expires_at <= p_now), 0),
    min(l.expires_at) filter (where l.expires_at <= p_now), greatest(active_at, max(l.at))
  into in_flight, overdue, overdue_at, active_at
  from unnest(p_g.slots) x (slot)
  cross join lateral (select p.token from postbus.progress p where p.slot_id = x.slot order by p.n desc limit 1) p
  -- No open lease is older than that one: behind it are those that are gone.
  cross join lateral (
    select coalesce(cardinality(y.ids), y.count) as n, y.expires_at, y.at from postbus.lease y
    where y.slot_id = x.slot and y.token >= p.token order by y.slot_id, y.token limit 1000) l;
  select count(*), min(r.due) into waiting, due_at
  from (select y.due from postbus.redelivery y where y.slot_id = any (p_g.slots) and y.token is null limit 10 * p_max) r;
  estimated := estimated or waiting >= 10 * p_max;
end
$$;

-- Groups with how far behind they are. pending is exact up to count_to events.
create or replace function postbus.group_stats(count_to int default 1000)
returns table (
  stream text, "group" text, pending bigint, lag_seconds float8, in_flight bigint, overdue bigint, waiting bigint, dead_letters bigint,
  expired bigint, estimated boolean, paused boolean, lost boolean, active_at timestamptz
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := postbus.now_();
  v_g postbus."group";
  v record;
begin
  if group_stats.count_to is null or group_stats.count_to < 1 then
    raise exception using errcode = 'PB003', message = 'group_stats: count_to must be at least 1';
  end if;
  for v_g in select g.* from postbus."group" g order by g.stream_name, g.name loop
    v := postbus._backlog(v_g, v_now, group_stats.count_to);
    stream := v_g.stream_name;
    "group" := v_g.name;
    pending := v.pending;
    lag_seconds := coalesce(greatest(0, date_part('epoch', v_now - v.first_at)), 0);
    in_flight := v.in_flight;
    overdue := v.overdue;
    waiting := v.waiting;
    dead_letters := (postbus._dead(null, v_g.id, v_now)).dead;
    -- What upkeep has added up, and the newest positions that it has not come to.
    select v_g.expired + coalesce(sum(l.expired + p.expired), 0) into expired
    from postbus.slot l cross join lateral (
      select coalesce(sum(y.expired), 0) as expired from (
        select q.expired from postbus.progress q where q.slot_id = l.id and q.n >= l.pruned order by q.slot_id desc, q.n desc limit 1000) y) p
    where l.id = any (v_g.slots);
    estimated := v.estimated;
    paused := v_g.paused or (select s.paused from postbus.stream s where s.id = v_g.stream_id);
    lost := v.lost;
    active_at := v.active_at;
    return next;
  end loop;
end
$$;

-- Streams with what was published. sent only grows: ids that were drawn, those of rolled back transactions too.
create or replace function postbus.stream_stats()
returns table (
  stream text, sent bigint, events bigint, per_second float8, groups int, lanes int, scheduled bigint, size_bytes bigint, segments int,
  segments_used int, last_tick_at timestamptz, counted_at timestamptz, paused boolean
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := postbus.now_();
  v_s postbus.stream;
  v_before postbus.tick;
begin
  for v_s in select s.* from postbus.stream s order by s.name loop
    stream := v_s.name;
    sent := coalesce(pg_sequence_last_value(v_s.id_seq), 0);
    select t.total, t.at into events, counted_at from postbus.tick t
    where t.stream_id = v_s.id and t.total is not null order by t.id desc limit 1;
    -- Since the last counted tick that is a minute old or more.
    select t.* into v_before from postbus.tick t
    where t.stream_id = v_s.id and t.total is not null and t.at <= v_now - interval '1 minute' order by t.at desc limit 1;
    per_second := (events - v_before.total) / date_part('epoch', v_now - v_before.at);
    select count(*) into groups from postbus."group" g where g.stream_name = v_s.name;
    lanes := v_s.lanes;
    select count(*) into scheduled from (
      select from postbus.scheduled d where d.stream_id = v_s.id order by d.stream_id, d.due, d.id limit 10000) x;
    select sum(pg_total_relation_size(to_regclass(format('postbus.log_%s', g.leaf)))), count(*), count(*) filter (where not postbus._leaf_empty(g.leaf))
    into size_bytes, segments, segments_used from postbus.segment g where g.stream_id = v_s.id;
    select t.at into last_tick_at from postbus.tick t where t.stream_id = v_s.id order by t.id desc limit 1;
    paused := v_s.paused;
    return next;
  end loop;
end
$$;
