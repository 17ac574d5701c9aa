-- Looking: what is where, for people and dashboards.

-- Groups with how far behind they are. pending is exact up to a thousand events a lane, beyond that an estimate from ids;
-- lag is the age of the oldest position that has something to read.
create or replace function postbus.list_groups()
returns table (
  stream text, "group" text, ordering text, lanes int, pending bigint, lag interval, in_flight bigint, waiting bigint,
  dead_letters bigint, expired bigint, max_attempts int, paused boolean, position_tick bigint, lost boolean, created_at timestamptz
)
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
  v_g postbus."group";
begin
  for v_g in select g.* from postbus."group" g order by g.stream_name, g.name loop
    stream := v_g.stream_name;
    "group" := v_g.name;
    ordering := v_g.ordering;
    lanes := cardinality(v_g.slots);
    max_attempts := v_g.max_attempts;
    paused := v_g.paused;
    created_at := v_g.created_at;
    select b.pending, b.lag, b.base, b.lost into pending, lag, position_tick, lost from postbus._behind(v_g) b;
    select coalesce(sum(coalesce(cardinality(l.ids), l.count)), 0) into in_flight from postbus.lease l where l.slot_id = any (v_g.slots);
    select count(*) into waiting from postbus.redelivery r where r.slot_id = any (v_g.slots) and r.token is null;
    select count(*) into dead_letters from postbus.dead_letter d where d.group_id = v_g.id;
    select v_g.expired + coalesce(sum(x.expired), 0) into expired from (
      select p.expired from postbus.progress p where p.slot_id = any (v_g.slots)
      union all select l.expired from postbus.slot l where l.id = any (v_g.slots)) x;
    return next;
  end loop;
end
$$;

-- How far behind one group is.
create or replace function postbus._behind(p_g postbus."group", out pending bigint, out lag interval, out base bigint, out lost boolean)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_s postbus.stream;
  v_p postbus.progress;
  v_b postbus.tick;
  v_u postbus.tick;
  v_all boolean;
  v_lane smallint;
  v_n bigint;
begin
  pending := 0;
  lag := interval '0';
  lost := false;
  select t.* into strict v_u from postbus.tick t where t.stream_id = p_g.stream_id order by t.id desc limit 1;
  for v_slot in 0 .. cardinality(p_g.slots) - 1 loop
    select p.* into v_p from postbus.progress p where p.slot_id = p_g.slots[v_slot + 1] order by p.n desc limit 1;
    base := least(base, v_p.base);
    select t.* into v_b from postbus.tick t where t.stream_id = p_g.stream_id and t.id = v_p.base;
    select s.* into strict v_s from postbus.stream s where s.id = p_g.stream_id;
    if v_b.id is null or v_b.id < v_s.floor_tick then
      lost := true;
      continue;
    end if;
    continue when v_b.id >= v_u.id;
    if v_b.era = v_u.era then
      v_all := p_g.ordering = 'stream' or p_g.mixed_xid is not null and v_b.era <= p_g.mixed_era
        and pg_snapshot_xmin(v_b.snapshot) <= p_g.mixed_xid;
      v_lane := case when p_g.ordering <> 'stream' then v_slot end;
      v_n := postbus._count(v_s.ring, v_s.max_lanes, v_b, v_u, v_p.last_id, v_all, v_lane, case when v_all and v_lane is not null then p_g.lanes end, 1001);
    else
      v_n := 1001;
    end if;
    if v_n > 1000 then
      v_n := greatest(v_n, (v_u.hi - greatest(v_p.last_id, v_b.hi)) / cardinality(p_g.slots));
    end if;
    pending := pending + v_n;
    if v_n > 0 then
      lag := greatest(lag, postbus.now_() - v_b.at);
    end if;
  end loop;
end
$$;

-- Messages that are out with a worker right now. For a queue, batch is the receipt of one message.
create or replace function postbus.in_flight(name text default null)
returns table (stream text, "group" text, batch text, messages int, worker text, taken_at timestamptz, expires_at timestamptz)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  select * from (
    select g.stream_name, g.name, 's' || l.token, coalesce(cardinality(l.ids), l.count), l.worker, l.at, l.expires_at
    from postbus.lease l join postbus."group" g on g.id = l.group_id
    where in_flight.name is null or g.stream_name = in_flight.name
    order by l.token) s
  union all
  select * from (
    select q.name, null, postbus._receipt(postbus._prefix(q.*), m.id, m.claim, m.tid), 1, nullif(m.worker, ''), null::timestamptz, m.due
    from postbus.queue q join (
      select m.queue_id, m.id, m.claim, m.worker, m.due, m.ctid as tid from postbus.queued m where m.worker is not null
      union all select m.queue_id, m.id, m.claim, m.worker, m.due, m.ctid from postbus.queued_unlogged m where m.worker is not null) m on m.queue_id = q.id
    where (in_flight.name is null or q.name = in_flight.name) and m.due > postbus.now_()
    order by m.due, m.id) q
$$;
