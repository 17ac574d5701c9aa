-- Looking often: figures that may be polled every second. What they cost is bounded, whatever the backlog is: they count up
-- to a limit along an index, and beyond it they estimate, from a bounded number of pages or from ids. docs/reference/look.md
-- says which figure is which.

-- The pages of a table to look at when all of them are too many: one out of each of p_max stretches, so that a backlog that
-- lies in one piece is met in proportion. Which one is fixed, so that figures do not jump, but not evenly spaced: messages
-- that come at a regular pace are no reason to miss them. weight: how many pages each stands for.
create or replace function postbus._pages(p_table regclass, p_max int)
returns table (first tid, next tid, weight float8)
language sql
stable
set search_path = pg_catalog, pg_temp
as $$
  select format('(%s,0)', p.b)::tid, format('(%s,0)', p.b + 1)::tid, s.n::float8 / s.taken
  from (
    select x.n, least(x.n, p_max)::int as taken from (
      select pg_relation_size(p_table) / current_setting('block_size')::bigint as n) x) s
  cross join lateral (
    select i * s.n / s.taken + (hashint4(i) & 1023) * (s.n / s.taken) / 1024 as b from generate_series(0, s.taken - 1) i) p
$$;

-- Messages of a queue by state, along the index from the side that claims come from: up to p_max of each priority that are
-- ready, and up to p_max that are not. more_...: there may be more.
create or replace function postbus._states(p_q postbus.queue, p_now timestamptz, p_max int,
  out ready bigint, out delayed bigint, out in_flight bigint, out oldest timestamptz, out first_due timestamptz,
  out more_ready boolean, out more_later boolean)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_bits int := pg_sequence_last_value(p_q.register) & 4095;
  v_head bigint := case when v_bits = 1 then pg_sequence_last_value(p_q.head) else 0 end;
  v_levels smallint[] := array(select i::smallint from generate_series(0, 9) i where v_bits & (1 << i) <> 0);
  v_from timestamptz[];
  v_k record;
begin
  -- Claims begin where the marks say (55_marks), and so do we: behind them are the entries of finished messages.
  v_from := array(
    select coalesce(
      case when v_head > 0 then postbus._head_time(v_head) end,
      case when v_bits & 1024 <> 0 then (
        select k.due from postbus.mark k where k.queue_id = p_q.id and k.level = l
        order by k.queue_id desc, k.level desc, k.n desc limit 1) end,
      '-infinity')
    from unnest(v_levels) with ordinality u (l, i) order by u.i);
  select coalesce(sum(r.n), 0), min(r.oldest), min(r.first_due), bool_or(r.n >= p_max),
    coalesce(sum(w.n - w.workers), 0), coalesce(sum(w.workers), 0), bool_or(w.n >= p_max)
  into ready, oldest, first_due, more_ready, delayed, in_flight, more_later
  from unnest(v_levels, v_from) l (level, begins)
  cross join lateral (
    select count(*) as n, min(coalesce(x.created_at, x.due)) as oldest, min(x.due) as first_due from (
      select m.created_at, m.due from postbus.queued m
      where m.queue_id = p_q.id and m.priority = l.level and m.due >= l.begins and m.due <= p_now and not m.keyed
      order by m.queue_id, m.priority, m.due, m.id limit p_max) x) r
  cross join lateral (
    select count(*) as n, count(x.worker) as workers from (
      select m.worker from postbus.queued m
      where m.queue_id = p_q.id and m.priority = l.level and m.due > p_now and not m.keyed
      order by m.queue_id, m.priority, m.due, m.id limit p_max) x) w;
  if p_q.keyed then
    -- By key: there is no index that has them by time.
    select count(*) as n, count(*) filter (where x.due <= p_now) as ready, count(*) filter (where x.due > p_now and x.worker is not null) as workers,
      min(coalesce(x.created_at, x.due)) filter (where x.due <= p_now) as oldest, min(x.due) filter (where x.due <= p_now) as first_due
    into v_k from (
      select m.due, m.created_at, m.worker from postbus.queued m where m.queue_id = p_q.id and m.keyed
      order by m.queue_id, m.key, m.held, m.priority, m.due, m.id limit p_max) x;
    ready := ready + v_k.ready;
    in_flight := in_flight + v_k.workers;
    delayed := delayed + v_k.n - v_k.ready - v_k.workers;
    oldest := least(oldest, v_k.oldest);
    first_due := least(first_due, v_k.first_due);
    more_ready := more_ready or v_k.n >= p_max;
    more_later := more_later or v_k.n >= p_max;
  end if;
end
$$;

-- Messages by queue and state, estimated from some pages of the table.
create or replace function postbus._sampled_states(p_now timestamptz)
returns table (queue_id int, ready float8, delayed float8, in_flight float8, oldest timestamptz)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
#variable_conflict use_column
begin
  return query
  select m.queue_id, coalesce(sum(p.weight) filter (where m.due <= p_now), 0), coalesce(sum(p.weight) filter (where m.due > p_now and m.worker is null), 0),
    coalesce(sum(p.weight) filter (where m.due > p_now and m.worker is not null), 0), min(coalesce(m.created_at, m.due)) filter (where m.due <= p_now)
  from postbus._pages('postbus.queued', 300) p
  cross join lateral (
    select x.queue_id, x.due, x.worker, x.created_at from postbus.queued x where x.ctid >= p.first and x.ctid < p.next offset 0) m
  group by m.queue_id;
end
$$;

-- The same for the table of unlogged queues, as in 64_unlogged.
do $$
declare
  v_name text;
begin
  foreach v_name in array array['_states', '_sampled_states'] loop
    execute regexp_replace(regexp_replace(
      pg_get_functiondef((select p.oid from pg_proc p where p.pronamespace = 'postbus'::regnamespace and p.proname = v_name)),
      '\mpostbus\.queued\M', 'postbus.queued_unlogged', 'g'), format('\mpostbus\.%s\M', v_name), format('postbus.%s_unlogged', v_name));
  end loop;
end
$$;

-- _states of a queue. Under an old snapshot it may have to walk over many finished messages: then what it found holds, in
-- this session, for twenty times as long as that took (about a microsecond an entry).
create or replace function postbus._recent_states(p_q postbus.queue, p_now timestamptz, p_max int)
returns jsonb
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_setting text := 'postbus.states_' || p_q.id;
  v_kept jsonb := nullif(current_setting(v_setting, true), '');
  v_clock float8 := date_part('epoch', clock_timestamp());
  v_walked bigint;
begin
  if (v_kept ->> 'until')::float8 > v_clock and (v_kept ->> 'max')::int = p_max then
    return v_kept;
  end if;
  v_walked := postbus._entries_walked();
  if p_q.unlogged then
    v_kept := to_jsonb(postbus._states_unlogged(p_q, p_now, p_max));
  else
    v_kept := to_jsonb(postbus._states(p_q, p_now, p_max));
  end if;
  v_walked := postbus._entries_walked() - v_walked;
  if v_walked > 20000 + 20 * p_max then
    perform set_config(v_setting, (v_kept || jsonb_build_object('until', v_clock + v_walked * 20e-6, 'max', p_max))::text, false);
  end if;
  return v_kept;
end
$$;

-- Index entries of messages that this transaction has walked over.
create or replace function postbus._entries_walked()
returns bigint
language sql
volatile
set search_path = pg_catalog, pg_temp
as $$
  select sum(pg_stat_get_xact_tuples_returned(i))::bigint
  from unnest('{postbus.queued_due, postbus.queued_key, postbus.queued_unlogged_due, postbus.queued_unlogged_key}'::regclass[]) i
$$;

-- Dead letters of a queue or of a group: counted up to ten thousand, beyond that estimated. recent: of the last hour, as far
-- as they are among the newest thousand.
create or replace function postbus._dead(p_queue int, p_group int, p_now timestamptz, out dead bigint, out recent bigint)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
  if p_queue is not null then
    select count(*) into dead from (
      select from postbus.dead_letter d where d.queue_id = p_queue order by d.queue_id, d.id limit 10000) x;
    select count(*) filter (where x.died_at > p_now - interval '1 hour') into recent from (
      select d.died_at from postbus.dead_letter d where d.queue_id = p_queue order by d.queue_id desc, d.id desc limit 1000) x;
  else
    select count(*) into dead from (
      select from postbus.dead_letter d where d.group_id = p_group order by d.group_id, d.id limit 10000) x;
    select count(*) filter (where x.died_at > p_now - interval '1 hour') into recent from (
      select d.died_at from postbus.dead_letter d where d.group_id = p_group order by d.group_id desc, d.id desc limit 1000) x;
  end if;
  if dead = 10000 then
    select greatest(dead, coalesce(sum(p.weight), 0)::bigint) into dead
    from postbus._pages('postbus.dead_letter', 300) p
    cross join lateral (
      select x.queue_id, x.group_id from postbus.dead_letter x where x.ctid >= p.first and x.ctid < p.next offset 0) d
    where case when p_queue is not null then d.queue_id = p_queue else d.group_id = p_group end;
  end if;
end
$$;

-- Queues with how much is in them. Sizes are exact up to count_to messages of a priority and state.
create or replace function postbus.queue_stats(count_to int default 1000)
returns table (
  queue text, depth bigint, ready bigint, delayed bigint, in_flight bigint, oldest_seconds float8, ready_seconds float8,
  dead_letters bigint, expired bigint, estimated boolean, paused boolean
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_now timestamptz := postbus.now_();
  v_q postbus.queue;
  v jsonb;
  v_sampled jsonb[] := array[null, null];  -- by queue id; of logged queues, and of unlogged ones
  v_s jsonb;
begin
  if queue_stats.count_to is null or queue_stats.count_to < 1 then
    raise exception using errcode = 'PB003', message = 'queue_stats: count_to must be at least 1';
  end if;
  for v_q in select q.* from postbus.queue q order by q.name loop
    v := postbus._recent_states(v_q, v_now, queue_stats.count_to);
    v_s := null;
    estimated := (v ->> 'more_ready')::boolean or (v ->> 'more_later')::boolean;
    if estimated then
      if v_sampled[v_q.unlogged::int + 1] is null then
        if v_q.unlogged then
          v_s := (select jsonb_object_agg(s.queue_id, to_jsonb(s)) from postbus._sampled_states_unlogged(v_now) s);
        else
          v_s := (select jsonb_object_agg(s.queue_id, to_jsonb(s)) from postbus._sampled_states(v_now) s);
        end if;
        v_sampled[v_q.unlogged::int + 1] := coalesce(v_s, '{}');
      end if;
      v_s := v_sampled[v_q.unlogged::int + 1] -> v_q.id::text;
    end if;
    queue := v_q.name;
    ready := greatest((v ->> 'ready')::bigint, case when (v ->> 'more_ready')::boolean then (v_s ->> 'ready')::float8 end);
    delayed := greatest((v ->> 'delayed')::bigint, case when (v ->> 'more_later')::boolean then (v_s ->> 'delayed')::float8 end);
    in_flight := greatest((v ->> 'in_flight')::bigint, case when (v ->> 'more_later')::boolean then (v_s ->> 'in_flight')::float8 end);
    depth := ready + delayed + in_flight;
    oldest_seconds := coalesce(date_part('epoch', v_now - least((v ->> 'oldest')::timestamptz, (v_s ->> 'oldest')::timestamptz)), 0);
    ready_seconds := coalesce(date_part('epoch', v_now - (v ->> 'first_due')::timestamptz), 0);
    dead_letters := (postbus._dead(v_q.id, null, v_now)).dead;
    select coalesce(sum(t.n), 0) into expired from postbus.tally t where t.queue_id = v_q.id and t.kind = 'expired';
    paused := v_q.paused;
    return next;
  end loop;
end
$$;
