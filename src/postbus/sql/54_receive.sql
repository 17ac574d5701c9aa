-- Receiving: a claim reads the due index from its old end and moves what it takes ahead, to the end of its lease. What is
-- delayed or out with workers lies beyond now and costs nothing. The plans are pinned: with stale statistics the planner
-- has chosen a sort of the whole queue.

-- A receipt is <letter><id>:<claim>:<block>:<item>. The letter says how it is finished: q by a DELETE alone, k with an
-- archive or a key, u unlogged. The last two are where in the table the message is.
create or replace function postbus._prefix(p_q postbus.queue)
returns text
language sql
immutable
begin atomic
  select case when (p_q).unlogged then 'u' when (p_q).archive or (p_q).keyed then 'k' else 'q' end;
end;

create or replace function postbus._receipt(p_prefix text, p_id bigint, p_claim int, p_tid tid)
returns text
language sql
stable
begin atomic
  select p_prefix || p_id || ':' || p_claim || ':' || translate(p_tid::text, ',()', ':');
end;

create or replace function postbus._check_receive(p_what text, p_queue text, p_max int, p_lease interval)
returns void
language plpgsql
stable
as $$
begin
  perform postbus._need_read_committed(p_what);
  if p_max is null or p_max not between 1 and 10000 then
    raise exception using errcode = 'PB003', message = format('%s from queue %L: max must be from 1 to 10000, not %s', p_what, p_queue, coalesce(p_max::text, 'null'));
  end if;
  if p_lease <= interval '0' or p_lease > interval '1000 years' then
    raise exception using errcode = 'PB003', message = format('%s from queue %L needs a lease longer than zero', p_what, p_queue);
  end if;
end
$$;

-- Takes a message that is due, but must not be delivered, out of the queue: it had its attempts (its worker died in the
-- last one), or it is too old. False: somebody else has it, and may yet keep it.
create or replace function postbus._buried(p_queue int, p_tid tid, p_id bigint, p_now timestamptz)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_m postbus.queued;
begin
  select m.* into v_m from postbus.queued m where m.ctid = p_tid and m.id = p_id for update skip locked;
  if not found then
    return false;
  end if;
  delete from postbus.queued m where m.ctid = p_tid;
  perform postbus._lay_out(q.*, v_m, v_m.attempt,
    case when v_m.expires_at <= p_now then 'expired' else coalesce(v_m.reason, 'lease expired') end, v_m.expires_at <= p_now)
  from postbus.queue q where q.id = p_queue;
  if v_m.keyed then
    insert into postbus.key_wake (queue_id, key, due, freed) values (p_queue, v_m.key, postbus.now_(), true);
  end if;
  return true;
end
$$;

-- The same for rows that a claim comes across, among its conditions, so that the others pay nothing for it. Always false.
create or replace function postbus._bury(p_queue int, p_tid tid, p_id bigint, p_now timestamptz)
returns boolean
language plpgsql
as $$
begin
  perform postbus._buried(p_queue, p_tid, p_id, p_now);
  return false;
end
$$;

-- What becomes of a message that is given up: it is counted or a dead letter. Its key is the caller's affair.
create or replace function postbus._lay_out(p_q postbus.queue, p_m postbus.queued, p_attempt int, p_reason text, p_expired boolean)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if p_expired then
    insert into postbus.tally (queue_id, kind, n) values (p_q.id, 'expired', 1);
  end if;
  if p_q.keep_expired or p_expired is not true then
    insert into postbus.dead_letter (queue_id, event_id, attempt, reason, died_at, at, type, key, payload, blob, headers, priority, claim, state)
    values (p_q.id, p_m.id, p_attempt, p_reason, postbus.now_(), coalesce(p_m.created_at, p_m.due), p_m.type, p_m.key, p_m.payload, p_m.blob, p_m.headers,
      p_m.priority, p_m.claim, p_m.state);
  end if;
end
$$;

-- Hands out up to max messages that are due, for the length of the lease (default: the queue's). The case that most queues
-- are in is here whole, in two statements: one priority, no key policy. The rows come back in the order of the
-- index: a nested loop is the only plan that is left to the planner.
create or replace function postbus.receive(
  queue text,
  max int default 1,
  lease interval default null,
  worker text default null,
  type text default null
)
returns setof postbus.work
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := postbus.now_();
  v_queue int;
  v_keyed boolean;
  v_register regclass;
  v_most int;
  v_prefix text;
  v_until timestamptz;
  v_head bigint;
  v_from timestamptz := '-infinity';
  v_any boolean := random() < 0.05;
  v_n int;
begin
  select q.id, q.keyed, q.register, q.max_attempts, case when q.archive then 'k' else 'q' end, v_now + coalesce(receive.lease, q.lease),
    case when not q.keyed then pg_sequence_last_value(q.head) end
  into v_queue, v_keyed, v_register, v_most, v_prefix, v_until, v_head
  from postbus.queue q
  where q.name = receive.queue and not q.paused and not q.unlogged and (q.keyed or pg_sequence_last_value(q.register) & 4095 = 1)
    and receive.max between 1 and 10000 and (receive.lease is null or receive.lease between interval '1 microsecond' and interval '1000 years')
    and current_setting('transaction_isolation') = 'read committed';
  if not found then
    return query select r.* from postbus._receive_other(receive.queue, receive.max, receive.lease, coalesce(receive.worker, ''), receive.type, v_now) r;
    return;
  elsif v_keyed then
    return query select r.* from postbus._receive_keyed(v_queue, v_register, receive.max, v_until, coalesce(receive.worker, ''), receive.type, v_now) r;
    return;
  end if;
  if v_head > 0 then
    v_from := postbus._begin_at(v_queue, v_head);
  end if;
  return query
  update postbus.queued m set due = v_until, attempt = m.attempt + 1, claim = m.claim + 1, created_at = coalesce(m.created_at, m.due), tracked = false, worker = coalesce(receive.worker, '')
  from (
    select x.ctid as tid from postbus.queued x
    where x.queue_id = v_queue and x.priority = 0::smallint and x.due >= v_from and x.due <= v_now and not x.keyed
      -- One that others have touched since we began to look would be locked in its new version before it is seen that it is
      -- theirs, and their ack would wait for us. (Now and then it is looked at all the same: a multixact is no xid.)
      and (x.xmax = 0 or v_any or age(x.xmax) > (select age(pg_snapshot_xmax(pg_current_snapshot())::xid))
        and x.xmax <> all (array(select r::xid from pg_snapshot_xip(pg_current_snapshot()) r)))
      and (receive.type is null or x.type = receive.type)
      and (x.attempt < v_most and (x.expires_at is null or x.expires_at > v_now) or postbus._bury(v_queue, x.ctid, x.id, v_now))
    order by x.queue_id, x.priority, x.due, x.id limit receive.max for update skip locked) c
  where m.ctid = c.tid
  returning m.id, m.type, m.key, m.payload, m.blob, m.headers, m.created_at, m.attempt,
    postbus._receipt(v_prefix, m.id, m.claim, m.ctid), m.priority, m.state;
  get diagnostics v_n = row_count;
  if v_head > 0 and v_n = 0 and v_from > '-infinity' and postbus._scan_took(v_queue) < 0.005 then
    -- Nothing is only said after a look at everything.
    return query
    select r.* from postbus.queue q, postbus._claim_range(q.*, 0, '-infinity', v_now, receive.max, v_until, coalesce(receive.worker, ''), receive.type, v_now) r
    where q.id = v_queue;
  end if;
  if v_head > 0 and v_from = '-infinity' or random() < (case when v_head > 0 then 0.2 else 0.02 end) or clock_timestamp() > v_now + interval '1 ms' then
    perform postbus._note_walk(v_queue, v_head, v_from, v_now);
  end if;
end
$$;

-- Everything that receive has not done itself, and what is wrong with it. With receive's rights and settings.
create or replace function postbus._receive_other(p_queue text, p_max int, p_lease interval, p_worker text, p_type text, p_now timestamptz)
returns setof postbus.work
language plpgsql
as $$
declare
  v_q postbus.queue;
  v_until timestamptz;
begin
  select q.* into v_q from postbus.queue q where q.name = p_queue;
  if not found then
    v_q := postbus._queue(p_queue);
  end if;
  if p_max between 1 and 10000 is not true or p_lease is not null or current_setting('transaction_isolation') <> 'read committed' then
    perform postbus._check_receive('receive', p_queue, p_max, p_lease);
  end if;
  if v_q.paused then
    return;
  end if;
  v_until := p_now + coalesce(p_lease, v_q.lease);
  if v_q.unlogged then
    return query select r.* from postbus._receive_levels_unlogged(v_q, p_max, v_until, p_worker, p_type, p_now) r;
  else
    return query select r.* from postbus._receive_levels(v_q, p_max, v_until, p_worker, p_type, p_now) r;
  end if;
end
$$;

-- The first due time in a range of one priority, and how many index entries and pages had to be read for it.
create or replace function postbus._first_due(p_queue int, p_level int, p_from timestamptz, p_to timestamptz,
  out first timestamptz, out walked bigint, out pages bigint)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
  walked := pg_stat_get_xact_tuples_returned('postbus.queued_due'::regclass);
  pages := pg_stat_get_xact_blocks_fetched('postbus.queued_due'::regclass);
  select m.due into first from postbus.queued m
  where m.queue_id = p_queue and m.priority = p_level::smallint and m.due >= p_from and m.due <= p_to and not m.keyed
  order by m.queue_id, m.priority, m.due, m.id limit 1;
  walked := pg_stat_get_xact_tuples_returned('postbus.queued_due'::regclass) - walked;
  pages := pg_stat_get_xact_blocks_fetched('postbus.queued_due'::regclass) - pages;
end
$$;

-- Claims from one range of one priority.
create or replace function postbus._claim_range(p_q postbus.queue, p_level int, p_from timestamptz, p_to timestamptz, p_max int,
  p_until timestamptz, p_worker text, p_type text, p_now timestamptz)
returns setof postbus.work
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_prefix text := postbus._prefix(p_q);
begin
  return query
  update postbus.queued m set due = p_until, attempt = m.attempt + 1, claim = m.claim + 1, created_at = coalesce(m.created_at, m.due), tracked = false, worker = p_worker
  from (
    select x.ctid as tid from postbus.queued x
    where x.queue_id = p_q.id and x.priority = p_level::smallint and x.due >= p_from and x.due <= p_to and not x.keyed
      and (p_type is null or x.type = p_type) and (x.key is null or not p_q.keyed)
      and (x.attempt < p_q.max_attempts and (x.expires_at is null or x.expires_at > p_now) or postbus._bury(p_q.id, x.ctid, x.id, p_now))
    order by x.queue_id, x.priority, x.due, x.id limit p_max for update skip locked) c
  where m.ctid = c.tid
  returning m.id, m.type, m.key, m.payload, m.blob, m.headers, m.created_at, m.attempt,
    postbus._receipt(v_prefix, m.id, m.claim, m.ctid), m.priority, m.state;
end
$$;

-- Several priorities, or marks. A message of priority p counts as if it had been due p times the queue's ageing earlier:
-- the rank due - p * ageing says who comes first, and it never changes while they wait. Each priority is a range of its
-- own; the range whose first message has the least rank is served up to the rank of the runner-up, then they compare again.
create or replace function postbus._receive_levels(p_q postbus.queue, p_max int, p_until timestamptz, p_worker text, p_type text, p_now timestamptz)
returns setof postbus.work
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_bits int := pg_sequence_last_value(p_q.register) & 4095;
  v_levels int[] := array(select i from generate_series(9, 0, -1) i where v_bits & (1 << i) <> 0);
  v_from timestamptz[];
  v_first timestamptz[];
  v_probe record;
  v_left int := p_max;
  v_best int;
  v_bound timestamptz;
  v_n int;
begin
  for i in 1 .. cardinality(v_levels) loop
    v_from[i] := case when v_bits & 1024 = 0 then '-infinity' else postbus._mark(p_q, v_levels[i], p_now) end;
    v_probe := postbus._first_due(p_q.id, v_levels[i], v_from[i], p_now);
    v_first[i] := v_probe.first;
    if v_probe.walked > (case when v_bits & 1024 = 0 then 5000 else 300 end) or v_bits & 1024 <> 0 and v_from[i] = '-infinity' then
      perform postbus._set_mark(p_q, v_levels[i], coalesce(v_probe.first, p_now), v_from[i], v_probe.walked, p_now);
    end if;
  end loop;
  loop
    v_best := null;
    for i in 1 .. cardinality(v_levels) loop
      if v_first[i] is not null and (v_best is null or postbus._rank(v_first[i], v_levels[i], p_q.ageing)
          < postbus._rank(v_first[v_best], v_levels[v_best], p_q.ageing)) then
        v_best := i;
      end if;
    end loop;
    exit when v_best is null;
    v_bound := p_now;
    for i in 1 .. cardinality(v_levels) loop
      if i <> v_best and v_first[i] is not null and p_q.ageing is not null then
        -- Of equal rank the more urgent one goes first.
        v_bound := least(v_bound, v_first[i] + p_q.ageing * (v_levels[v_best] - v_levels[i])
          - case when i < v_best then interval '1 microsecond' else interval '0' end);
      end if;
    end loop;
    return query
    select r.* from postbus._claim_range(p_q, v_levels[v_best], v_from[v_best], v_bound, v_left, p_until, p_worker, p_type, p_now) r;
    get diagnostics v_n = row_count;
    v_left := v_left - v_n;
    exit when v_left = 0;
    -- What is left in the range up to the bound is not for us now.
    v_from[v_best] := v_bound + interval '1 microsecond';
    v_probe := postbus._first_due(p_q.id, v_levels[v_best], v_from[v_best], p_now);
    v_first[v_best] := v_probe.first;
  end loop;
end
$$;

create or replace function postbus._rank(p_due timestamptz, p_level int, p_ageing interval)
returns timestamptz
language sql
stable
begin atomic
  -- Strict priorities are an ageing longer than any wait.
  select p_due - p_level * coalesce(p_ageing, interval '400 years');
end;

-- At most once: what is popped is finished. A crash of the caller loses it.
create or replace function postbus.pop(queue text, max int default 1, type text default null)
returns setof postbus.work
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_taken postbus.work[];
begin
  perform postbus._check_receive('pop', pop.queue, pop.max, null);
  v_taken := array(select r from postbus.receive(pop.queue, pop.max, null, null, pop.type) r);
  perform postbus.ack(array(select (w).receipt from unnest(v_taken) w));
  return query select w.* from unnest(v_taken) w;
end
$$;

-- When the next message of a queue is due, as far as is known now; null: nothing waits. Also says when a lease ends.
create or replace function postbus.next_due(queue text)
returns timestamptz
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_q postbus.queue := postbus._queue(next_due.queue);
  v_bits int := pg_sequence_last_value(v_q.register) & 4095;
  v_due timestamptz;
begin
  if v_q.unlogged then
    v_due := postbus._next_due_unlogged(v_q, v_bits);
  else
    v_due := postbus._next_due(v_q, v_bits);
  end if;
  if v_q.keyed then
    v_due := least(v_due, (select k.ready_at from postbus.key_state k where k.queue_id = v_q.id and k.ready_at < 'infinity'
        order by k.queue_id, k.ready_at limit 1),
      -- The oldest wakes will do: there is something to look at.
      (select min(w.due) from (select x.due from postbus.key_wake x where x.queue_id = v_q.id order by x.queue_id, x.id limit 100) w));
  end if;
  return v_due;
end
$$;

create or replace function postbus._next_due(p_q postbus.queue, p_bits int)
returns timestamptz
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_due timestamptz;
begin
  for v_level in 0 .. 9 loop
    continue when p_bits & (1 << v_level) = 0;
    v_due := least(v_due, (postbus._first_due(p_q.id, v_level,
      case when p_bits & 1024 = 0 then '-infinity' else postbus._mark(p_q, v_level, postbus.now_()) end, 'infinity')).first);
  end loop;
  return v_due;
end
$$;
