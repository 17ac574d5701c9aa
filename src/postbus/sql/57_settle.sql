-- Finishing what was received from a queue. The claim in a receipt rises whenever a message is handed out or given back,
-- so an old receipt finds nothing. A message is looked for where its receipt says it is; one that was moved by a heartbeat
-- is tracked, and found by its id. Rows are locked in the order of their ids, everywhere.

-- Receipts of queues as what they say, each once and in the order of their ids. Anything else is not among them. (Without a
-- regular expression: with captures that takes longer than all the rest.)
create or replace function postbus._parsed(p_receipts text[])
returns table (receipt text, letter text, id bigint, claim int, tid tid)
language sql
immutable
set search_path = pg_catalog, pg_temp
as $$
  select x.r, left(x.r, 1), x.p[1]::bigint, x.p[2]::int, ('(' || x.p[3] || ',' || x.p[4] || ')')::tid
  from (
    select distinct r, string_to_array(substr(r, 2), ':') as p from unnest(p_receipts) r
    where translate(r, '0123456789', '') in ('q:::', 'k:::', 'u:::') and r like '__%:_%:_%:_%' offset 0) x
  where length(x.p[1]) <= 18 and length(x.p[2]) <= 9 and length(x.p[3]) <= 9 and length(x.p[4]) <= 4
  order by 3
$$;

create or replace function postbus._receipts_lost(p_lost text[])
returns void
language plpgsql
immutable
as $$
begin
  raise exception using errcode = 'PB004', message = format('lease lost: receipt %s', array_to_string(p_lost, ', ')),
    hint = 'It expired and went to another worker, or was finished before. Nothing was changed.';
end
$$;

-- Locks the messages that receipts stand for. All of them, or PB004.
create or replace function postbus._locked(p_receipts text[])
returns table (tid tid, m postbus.queued)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  v_found text[] := '{}';
  v record;
begin
  for v in
    select q.ctid as tid, q as m, r.receipt from postbus._parsed(p_receipts) r join postbus.queued q on q.ctid = r.tid
    where q.id = r.id and q.claim = r.claim order by q.id for update of q
  loop
    v_found := v_found || v.receipt;
    tid := v.tid;
    m := v.m;
    return next;
  end loop;
  if cardinality(v_found) < cardinality(p_receipts) then
    for v in
      select q.ctid as tid, q as m, r.receipt from postbus._parsed(p_receipts) r join postbus.queued q on q.id = r.id and q.tracked
      where q.claim = r.claim and r.receipt <> all (v_found) order by q.id for update of q
    loop
      v_found := v_found || v.receipt;
      tid := v.tid;
      m := v.m;
      return next;
    end loop;
    if exists (select from unnest(p_receipts) r where r <> all (v_found)) then
      perform postbus._receipts_lost(array(select r from unnest(p_receipts) r where r <> all (v_found)));
    end if;
  end if;
end
$$;

create or replace function postbus._ack_work(p_receipts text[])
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_tids tid[];
  v_rows postbus.queued[];
begin
  if cardinality(p_receipts) = 0 then
    return 0;
  end if;
  select array_agg(l.tid), array_agg(l.m) into v_tids, v_rows from postbus._locked(p_receipts) l;
  delete from postbus.queued m using unnest(v_tids) t (tid) where m.ctid = t.tid;
  perform postbus._archive(v_rows);
  perform postbus._free_places(v_rows);
  return cardinality(v_rows);
end
$$;

-- Tells the keys of messages that are out of their places.
create or replace function postbus._free_places(p_rows postbus.queued[])
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into postbus.key_wake (queue_id, key, due, freed)
  select distinct m.queue_id, m.key, postbus.now_(), true from unnest(p_rows) m where m.keyed;
  if found then
    perform postbus._wake(q.notify, q.name, q.register, pg_sequence_last_value(q.register))
    from postbus.queue q where q.id in (select m.queue_id from unnest(p_rows) m where m.keyed);
  end if;
end
$$;

-- Gives messages back, or up. p_final: to the dead letters at once.
create or replace function postbus._nack_work(p_receipts text[], p_delay interval, p_reason text, p_state jsonb, p_final boolean)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_tids tid[];
  v_rows postbus.queued[];
  v_m postbus.queued;
  v_q postbus.queue;
  v_only boolean;
begin
  if cardinality(p_receipts) = 0 then
    return 0;
  end if;
  select array_agg(l.tid), array_agg(l.m) into v_tids, v_rows from postbus._locked(p_receipts) l;
  for i in 1 .. cardinality(v_rows) loop
    v_m := v_rows[i];
    if v_q.id is distinct from v_m.queue_id then
      select q.* into strict v_q from postbus.queue q where q.id = v_m.queue_id;
    end if;
    v_m.state := coalesce(p_state, v_m.state);
    if p_final or v_m.attempt >= v_q.max_attempts then
      delete from postbus.queued m where m.ctid = v_tids[i];
      perform postbus._lay_out(v_q, v_m, v_m.attempt, p_reason, false);
    else
      -- In its key's only place it stays: what comes after it waits.
      v_only := v_m.keyed and (select l.concurrency from postbus._policy(v_q, v_m.key) l) is not distinct from 1;
      update postbus.queued m set claim = m.claim + 1, worker = null, reason = p_reason, state = v_m.state, held = v_only, tracked = true,
        due = postbus.now_() + coalesce(p_delay, postbus._backoff(v_q.backoff, v_q.max_backoff, m.attempt))
      where m.ctid = v_tids[i];
    end if;
  end loop;
  perform postbus._free_places(v_rows);
  perform postbus._wake(q.notify, q.name, q.register, pg_sequence_last_value(q.register))
  from postbus.queue q where q.id in (select m.queue_id from unnest(v_rows) m where not m.keyed);
  return cardinality(v_rows);
end
$$;

-- Messages that were taken but not begun are as if they had not been: the attempt is not counted, and they are in front of
-- those that came after them. In a key that is as if the lease had ended.
create or replace function postbus._release_work(p_receipts text[])
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_tids tid[];
  v_rows postbus.queued[];
  v_now timestamptz := postbus.now_();
begin
  if cardinality(p_receipts) = 0 then
    return 0;
  end if;
  select array_agg(l.tid), array_agg(l.m) into v_tids, v_rows from postbus._locked(p_receipts) l;
  update postbus.queued m set claim = m.claim + 1, attempt = m.attempt - 1, worker = null, held = m.keyed, tracked = false,
    -- Not behind where claims begin to read: there it would be found late.
    due = case when pg_sequence_last_value(q.register) & 1024 <> 0 then v_now
      else least(v_now, greatest(m.created_at, postbus._head_time(pg_sequence_last_value(q.head)))) end
  from unnest(v_tids) t (tid), postbus.queue q where m.ctid = t.tid and q.id = m.queue_id;
  perform postbus._free_places(v_rows);
  perform postbus._wake(q.notify, q.name, q.register, pg_sequence_last_value(q.register))
  from postbus.queue q where q.id in (select m.queue_id from unnest(v_rows) m where not m.keyed);
  return cardinality(v_rows);
end
$$;

-- A heartbeat. state, where given, is what the next attempt finds should this one die.
create or replace function postbus._extend_work(p_receipts text[], p_lease interval, p_state jsonb)
returns timestamptz
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_tids tid[];
  v_least timestamptz;
begin
  if cardinality(p_receipts) = 0 then
    return null;
  end if;
  v_tids := array(select l.tid from postbus._locked(p_receipts) l);
  with u as (
    update postbus.queued m set due = greatest(m.due, postbus.now_() + coalesce(p_lease, q.lease)), state = coalesce(p_state, m.state), tracked = true
    from unnest(v_tids) t (tid), postbus.queue q where m.ctid = t.tid and q.id = m.queue_id returning m.due)
  select min(u.due) into v_least from u;
  return v_least;
end
$$;

-- Takes messages out that nobody has: not handed out yet, or their lease has ended. Returns the ids of those it took. One
-- that somebody is just claiming or finishing is his. Those that wait for a time or another try are found by their ids;
-- for the others the queue is looked through.
create or replace function postbus._cancel(p_queue int, p_ids bigint[])
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_now timestamptz := postbus.now_();
  v_tids tid[];
  v_rows postbus.queued[];
begin
  v_tids := array(select m.ctid from postbus.queued m where m.id = any (p_ids) and m.tracked and m.queue_id = p_queue);
  if cardinality(v_tids) < cardinality(p_ids) then
    v_tids := v_tids || array(select m.ctid from postbus.queued m where m.queue_id = p_queue and not m.keyed and not m.tracked and m.id = any (p_ids))
      || array(select m.ctid from postbus.queued m where m.queue_id = p_queue and m.keyed and not m.tracked and m.id = any (p_ids));
  end if;
  select array_agg(x.tid order by (x.m).id), array_agg(x.m order by (x.m).id) into v_tids, v_rows from (
    select m.ctid as tid, m from unnest(v_tids) t (tid) join postbus.queued m on m.ctid = t.tid
    where m.id = any (p_ids) and (m.worker is null or m.due <= v_now) order by m.id for update of m skip locked) x;
  delete from postbus.queued m using unnest(v_tids) t (tid) where m.ctid = t.tid;
  perform postbus._free_places(v_rows);
  return array(select r.id from unnest(v_rows) r);
end
$$;

create or replace function postbus.cancel(queue text, ids bigint[])
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_q postbus.queue := postbus._queue(cancel.queue);
begin
  if v_q.unlogged then
    return postbus._cancel_unlogged(v_q.id, cancel.ids);
  end if;
  return postbus._cancel(v_q.id, cancel.ids);
end
$$;

-- True: it was waiting and is gone. False: it is out with a worker, or there is no such message any more.
create or replace function postbus.cancel(queue text, id bigint)
returns boolean
language sql
as $$
  select cardinality(postbus.cancel(queue, array[id])) = 1
$$;

-- Looks without taking. state: ready, delayed (not yet due, or waiting for another try), in_flight, or null for all.
create or replace function postbus._peek(p_queue int, p_state text, p_max int, p_id bigint, p_key text, p_now timestamptz)
returns setof postbus.waiting
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
  select m.id, case when m.due <= p_now then 'ready' when m.worker is null then 'delayed' else 'in_flight' end,
    m.type, m.key, m.payload, m.blob, m.headers, m.priority::int, coalesce(m.created_at, m.due), m.due, m.expires_at, m.attempt, nullif(m.worker, ''), m.reason, m.state
  from postbus.queued m
  where m.queue_id = p_queue and (p_id is null or m.id = p_id) and (p_key is null or m.key = p_key)
    and case p_state when 'ready' then m.due <= p_now when 'delayed' then m.due > p_now and m.worker is null
      when 'in_flight' then m.due > p_now and m.worker is not null else true end
  order by m.due, m.id limit p_max;
end
$$;

create or replace function postbus.peek(queue text, state text default null, max int default 10, id bigint default null, key text default null)
returns setof postbus.waiting
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_q postbus.queue := postbus._queue(peek.queue);
begin
  if peek.state not in ('ready', 'delayed', 'in_flight') then
    raise exception using errcode = 'PB003', message = format('peek into queue %L: unknown state %L', v_q.name, peek.state),
      hint = 'States are ready, delayed and in_flight; dead letters are in postbus.dead_letters, finished ones in postbus.archived.';
  end if;
  if v_q.unlogged then
    return query select p.* from postbus._peek_unlogged(v_q.id, peek.state, peek.max, peek.id, peek.key, postbus.now_()) p;
  else
    return query select p.* from postbus._peek(v_q.id, peek.state, peek.max, peek.id, peek.key, postbus.now_()) p;
  end if;
end
$$;
