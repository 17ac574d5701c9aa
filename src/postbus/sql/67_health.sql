-- Health: what is wrong, one row per finding, each with its remedy. `postbus status` and `postbus doctor` show it.

-- A time span for people: two units will do.
create or replace function postbus._span(p_span interval)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $$
  select case
    when s < 60 then round(s, 1)::text || ' s'
    when s < 3600 then concat_ws(' ', div(s, 60) || ' min', nullif(div(mod(s, 60), 1), 0) || ' s')
    when s < 86400 then concat_ws(' ', div(s, 3600) || ' h', nullif(div(mod(s, 3600), 60), 0) || ' min')
    else concat_ws(' ', div(s, 86400) || ' d', nullif(div(mod(s, 86400), 3600), 0) || ' h') end
  from (select greatest(0, extract(epoch from p_span))::numeric as s) x
$$;

-- Groups that have something to do and that nobody works on: nothing was taken for so long.
create or replace function postbus.stuck_groups(threshold interval default '1 hour')
returns table (stream text, "group" text, reason text, pending bigint, lag_seconds float8, waiting bigint, overdue bigint, active_at timestamptz)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_now timestamptz := postbus.now_();
  v_before timestamptz := v_now - stuck_groups.threshold;
begin
  return query
  select g.stream_name, g.name, r.reason, b.pending, coalesce(greatest(0, date_part('epoch', v_now - b.first_at)), 0), b.waiting, b.overdue, b.active_at
  from postbus."group" g join postbus.stream s on s.id = g.stream_id
  cross join lateral postbus._backlog(g.*, v_now, 1000) b
  cross join lateral (select case
    when b.lost then 'lost'
    when b.overdue_at <= v_before then 'lease ran out'
    when b.active_at > v_before then null
    when b.due_at <= v_before then 'redelivery'
    when b.first_at <= v_before then 'not read' end as reason) r
  where r.reason = 'lost' or r.reason is not null and not g.paused and not s.paused
  order by 1, 2;
end
$$;

-- Since when upkeep has been missing: what it would have done long ago is still to do. Null: no sign of that.
create or replace function postbus._upkeep_missing(p_now timestamptz)
returns interval
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_since timestamptz;
begin
  select min(x.at) into v_since from (
    -- The newest tick, and the first one that was not counted.
    select t.at from postbus.stream s
    cross join lateral (select y.at, y.total from postbus.tick y where y.stream_id = s.id order by y.id desc limit 1) t where t.total is null
    union all
    select t.at from postbus.stream s
    cross join lateral (select y.id from postbus.tick y where y.stream_id = s.id and y.total is not null order by y.id desc limit 1) c
    cross join lateral (select y.at from postbus.tick y where y.stream_id = s.id and y.id > c.id order by y.id limit 1) t
    where c.id >= s.floor_tick
    union all
    select d.due from postbus.stream s
    cross join lateral (select y.due from postbus.scheduled y where y.stream_id = s.id order by y.stream_id, y.due, y.id limit 1) d
    union all
    select m.expires_at from postbus.queue q
    cross join lateral (
      select y.expires_at from postbus.queued y
      where y.queue_id = q.id and y.expires_at <= p_now and (y.worker is null or y.due <= p_now) order by y.queue_id, y.expires_at limit 1) m) x;
  return case when v_since < p_now - interval '5 minutes' then p_now - v_since end;
end
$$;

-- Findings about streams, groups, queues and schedules.
create or replace function postbus._health_objects(p_now timestamptz, p_patience interval)
returns table (level text, object text, message text, remedy text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_size bigint;
  v record;
begin
  return query
  select v.level, v.object, v.message, v.remedy from postbus.stream s
  cross join lateral (
    select coalesce(sum(x.dead), 0) as dead, coalesce(sum(x.recent), 0) as recent
    from postbus."group" g cross join lateral postbus._dead(null, g.id, p_now) x where g.stream_name = s.name) d
  cross join lateral (values
    (s.paused, 'warn', 'stream ' || s.name, 'is paused', 'postbus resume ' || s.name),
    (d.dead > 0, 'warn', 'stream ' || s.name, postbus._dead_text(d.dead, d.recent), 'postbus dlq list ' || s.name)) v (bad, level, object, message, remedy)
  where v.bad order by s.name;
  return query
  select v.level, format('group %s of stream %s', g.name, g.stream_name), v.message, v.remedy
  from postbus."group" g
  left join postbus.stuck_groups(p_patience) r on r.stream = g.stream_name and r."group" = g.name and g.name not like 'tail:%'
  cross join lateral (values
    (r.reason = 'lost', 'fail', 'lost its position: it fell behind max_retain, and events it had not read are gone',
      format('postbus seek %s %s earliest', g.stream_name, g.name)),
    (g.paused, 'warn', 'is paused', format('postbus resume %s --group %s', g.stream_name, g.name)),
    (r.reason = 'lease ran out', 'warn', format('has %s messages on leases that ran out, and nobody takes them over', r.overdue), 'start its workers'),
    (r.reason = 'redelivery', 'warn', format('has %s messages that wait for another try, and nobody takes them', r.waiting), 'start its workers'),
    (r.reason = 'not read', 'warn', format('has taken nothing for %s, and about %s events wait', postbus._span(p_now - r.active_at), r.pending),
      format('start its workers; or, if nobody needs it: postbus groups drop %s %s', g.stream_name, g.name))) v (bad, level, message, remedy)
  where v.bad order by g.stream_name, g.name;
  for v in
    select q.*, x.ready, x.ready_seconds, x.in_flight as busy, d.dead, d.recent
    from postbus.queue q join postbus.queue_stats() x on x.queue = q.name cross join lateral postbus._dead(q.id, null, p_now) d order by q.name
  loop
    object := 'queue ' || v.name;
    level := 'warn';
    if v.paused then
      return query select level, object, 'is paused', 'postbus resume ' || v.name;
    elsif v.ready > 0 and v.busy = 0 and v.ready_seconds > date_part('epoch', p_patience)
        -- A key that is over its rate waits with good reason.
        and (not v.keyed or exists (select from postbus.key_state k where k.queue_id = v.id and k.ready_at <= p_now - p_patience)
          or exists (select from postbus.key_wake k where k.queue_id = v.id and k.due <= p_now - p_patience)) then
      return query select level, object, format('has %s messages that nobody receives, the first for %s', v.ready,
        postbus._span(make_interval(secs => v.ready_seconds))), 'start its workers';
    end if;
    if v.dead > 0 then
      return query select level, object, postbus._dead_text(v.dead, v.recent), 'postbus dlq list ' || v.name;
    end if;
    if v.max_size is not null then
      select count(*) into v_size from (
        select from postbus.queued m where m.queue_id = v.id union all select from postbus.queued_unlogged m where m.queue_id = v.id limit v.max_size) y;
      if v_size >= v.max_size then
        return query select level, object, format('is full: it has the %s messages that it may have, and refuses more', v.max_size),
          'start more workers, or raise max_size';
      end if;
    end if;
  end loop;
  return query
  select 'warn', 'schedule ' || s.name, v.message, v.remedy from postbus.schedule s cross join lateral (values
    (s.paused, 'is paused', 'postbus schedules resume ' || s.name),
    (not s.paused and s.next_at < p_now - interval '5 minutes', 'should have fired ' || postbus._span(p_now - s.next_at) || ' ago', 'postbus maintain --every 1'),
    (s.problem is not null, 'could not fire: ' || s.problem, 'postbus schedules')) v (bad, message, remedy)
  where v.bad order by s.name;
  return query
  select 'warn', 'pipeline ' || p.pipeline, case p.state when 'failed' then 'failed: ' || split_part(p.error, E'\n', 1)
    else 'was abandoned after ' || postbus._span(make_interval(secs => p.seconds)) || ': its process is gone' end, 'postbus pipeline runs ' || p.pipeline
  from postbus.pipeline_stats() p where p.state in ('failed', 'abandoned');
end
$$;

create or replace function postbus._dead_text(p_dead numeric, p_recent numeric)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $$
  select format('has %s dead letters', p_dead) || case when p_recent > 0 then format(', %s of them from the last hour', p_recent) else '' end
$$;

-- Findings about the server: what keeps dead rows alive. Sessions of others are seen as far as the owner of the schema may.
create or replace function postbus._health_server(p_patience interval)
returns table (level text, object text, message text, remedy text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
  select 'warn', format('transaction (pid %s)', a.pid),
    format('of %s has been open for %s%s: dead rows pile up, segments stay full', coalesce(nullif(a.application_name, ''), a.usename, '?'),
      postbus._span(clock_timestamp() - a.xact_start), case when a.state ~ '^idle in' then ' (' || a.state || ')' else '' end),
    format('end it, or: select pg_terminate_backend(%s)', a.pid)
  from pg_stat_activity a
  where a.datname = current_database() and a.pid <> pg_backend_pid() and a.backend_type = 'client backend'
    and a.xact_start < clock_timestamp() - p_patience order by a.xact_start limit 5;
  return query
  select 'warn', 'prepared transaction ' || p.gid,
    format('has been waiting for %s: what it published is not seen, and dead rows pile up', postbus._span(clock_timestamp() - p.prepared)),
    format('commit prepared %1$s, or rollback prepared %1$s', quote_literal(p.gid))
  from pg_prepared_xacts p
  where p.database = current_database() and p.prepared < clock_timestamp() - p_patience order by p.prepared limit 5;
  return query
  select 'warn', 'replication slot ' || r.slot_name, 'is not in use, and keeps dead rows and WAL for ever',
    format('start its reader, or: select pg_drop_replication_slot(%L)', r.slot_name)
  from pg_replication_slots r
  where not r.active and coalesce(r.database, current_database()) = current_database()
    and (r.xmin is not null or r.catalog_xmin is not null or r.restart_lsn is not null)
  order by r.slot_name limit 5;
end
$$;

-- Everything that is wrong; no rows: nothing. patience: how long a transaction may be open, or messages wait with nobody
-- working on them, before that is a finding.
create or replace function postbus.health(patience interval default '15 minutes')
returns table (level text, object text, message text, remedy text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_now timestamptz := postbus.now_();
  v_missing interval := postbus._upkeep_missing(v_now);
begin
  return query select o.* from postbus._health_objects(v_now, health.patience) o;
  if v_missing is not null then
    return query select case when v_missing > interval '1 hour' then 'fail' else 'warn' end, 'upkeep',
      format('has not been run for %s: nothing is rotated, truncated or delivered late', postbus._span(v_missing)), 'postbus maintain --every 1';
  end if;
  return query select s.* from postbus._health_server(health.patience) s;
  return query
  select 'warn', 'group ' || g.name, 'is left over from a tail that was killed', 'postbus maintain'
  from postbus."group" g
  where g.name like 'tail:%' and not exists (
    select from pg_locks l where l.locktype = 'advisory' and l.database = (select d.oid from pg_database d where d.datname = current_database())
      and l.classid = 1886351987::oid and l.objid = (hashtext(g.name)::bigint & 4294967295)::oid)
  order by g.name;
end
$$;
