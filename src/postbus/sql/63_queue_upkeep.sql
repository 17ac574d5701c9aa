-- Upkeep of queues. Nothing here is needed for a message to be delivered: leases end by themselves, and claims do the rest.

-- Messages that are too old to be delivered and that no claim has come across.
create or replace function postbus._bury_expired(p_q postbus.queue, p_now timestamptz, p_max int)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_tid tid;
  v_id bigint;
  v_n bigint := 0;
begin
  for v_tid, v_id in
    select m.ctid, m.id from postbus.queued m
    where m.queue_id = p_q.id and m.expires_at <= p_now and (m.worker is null or m.due <= p_now)
    order by m.queue_id, m.expires_at limit p_max for update skip locked
  loop
    perform postbus._buried(p_q.id, v_tid, v_id, p_now);
    v_n := v_n + 1;
  end loop;
  return v_n;
end
$$;

-- Wakes that claims have not come to, for the first p_keys keys among the oldest p_window wakes. Keys that somebody else has
-- locked keep theirs. Returns how many keys it got.
create or replace function postbus._fold_old_wakes(p_queue int, p_keys int, p_window int, p_now timestamptz)
returns int
language plpgsql
as $$
declare
  v_keys text[];
  v_last bigint;
begin
  select array_agg(g.key), max(g.last) into v_keys, v_last from (
    select x.key, max(x.id) as last from (
      select y.key, y.id from postbus.key_wake y where y.queue_id = p_queue order by y.queue_id, y.id limit p_window) x
    group by x.key order by min(x.id) limit p_keys) g;
  perform postbus._make_keys(p_queue, array(
    select k from unnest(v_keys) k where (select true from postbus.key_state s where s.queue_id = p_queue and s.key = k) is null));
  v_keys := array(
    select s.key from postbus.key_state s where s.queue_id = p_queue and s.key = any (v_keys) for update skip locked);
  perform postbus._fold_wakes(p_queue, v_keys, 0, v_last, p_now);
  return cardinality(v_keys);
end
$$;

create or replace function postbus._maintain_queue(p_name text)
returns table (step text, done bigint)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  v_q postbus.queue;
  v_now timestamptz := postbus.now_();
  v_n bigint;
begin
  select q.* into v_q from postbus.queue q where q.name = p_name;
  if not found or not pg_try_advisory_xact_lock(1886351990, v_q.id) then
    return;
  end if;
  if v_q.unlogged then
    return query select 'expired', postbus._bury_expired_unlogged(v_q, v_now, 1000);
  else
    return query select 'expired', postbus._bury_expired(v_q, v_now, 1000);
  end if;
  with d as (
    delete from postbus.dedupe x where x.ctid = any (array(
      select y.ctid from postbus.dedupe y where y.stream_id = v_q.id and y.expires_at <= v_now - interval '1 minute' for update skip locked)) returning 1)
  select count(*) into v_n from d;
  return query select 'dedupe', v_n;
  with d as (
    delete from postbus.mark k where k.queue_id = v_q.id
      and k.n < (select max(x.n) from postbus.mark x where x.queue_id = k.queue_id and x.level = k.level) returning 1)
  select count(*) into v_n from d;
  return query select 'marks', v_n;
  if v_q.keyed then
    return query select 'adopted', postbus._adopt_keys(v_q.id, 10000)::bigint;
    return query select 'wakes', postbus._fold_old_wakes(v_q.id, 1000, 10000, v_now)::bigint;
    -- Keys without messages, once their rate has been paid for, also by the clock of a claim that began a while ago.
    with c as materialized (
      select s.key from postbus.key_state s where s.queue_id = v_q.id and s.ready_at = 'infinity' and s.tat <= v_now - interval '1 minute'
      limit 1000 for update skip locked),
    d as (delete from postbus.key_state s using c where s.queue_id = v_q.id and s.key = c.key returning 1)
    select count(*) into v_n from d;
    return query select 'keys', v_n;
  end if;
  -- Tallies are added up when there are many of them.
  if (select count(*) from (select from postbus.tally t where t.queue_id = v_q.id limit 100) x) = 100 then
    with d as (delete from postbus.tally t where t.queue_id = v_q.id returning t.kind, t.n)
    insert into postbus.tally (queue_id, kind, n) select v_q.id, d.kind, sum(d.n) from d group by d.kind;
  end if;
end
$$;
