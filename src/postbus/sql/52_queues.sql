-- Queues: create, alter, drop, purge, list.

-- The row of a queue by name, or PB001.
create or replace function postbus._queue(p_name text)
returns postbus.queue
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_q postbus.queue;
begin
  select q.* into v_q from postbus.queue q where q.name = p_name;
  if not found then
    raise exception using errcode = 'PB001', message = format('queue %L does not exist', p_name),
      hint = case when exists (select from postbus.stream s where s.name = p_name)
        then format('%L is a stream: publish and consume instead.', p_name)
        else format('Create it: select postbus.create_queue(%L).', p_name) end;
  end if;
  return v_q;
end
$$;

create or replace function postbus._queue_options()
returns text[]
language sql
immutable
as $$
  select array['lease', 'max_attempts', 'backoff', 'max_backoff', 'on_ack', 'archive_retain', 'priorities', 'ageing', 'max_size',
    'keep_expired', 'dedupe_window', 'notify', 'unlogged_unsafe']
$$;

-- The options on top of what p_q has. One function for create and alter, so that they cannot differ.
create or replace function postbus._with_queue_options(p_q postbus.queue, p_options jsonb)
returns postbus.queue
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_q postbus.queue := p_q;
begin
  perform postbus._check_options('queue', p_options, postbus._queue_options());
  v_q.lease := postbus._interval_option(p_options, 'lease', v_q.lease);
  v_q.max_attempts := postbus._int_option(p_options, 'max_attempts', v_q.max_attempts, 1, 1000000);
  v_q.backoff := postbus._interval_option(p_options, 'backoff', v_q.backoff);
  v_q.max_backoff := postbus._interval_option(p_options, 'max_backoff', v_q.max_backoff);
  v_q.archive_retain := postbus._interval_option(p_options, 'archive_retain', v_q.archive_retain);
  v_q.ageing := postbus._interval_option(p_options, 'ageing', v_q.ageing);
  v_q.dedupe_window := postbus._interval_option(p_options, 'dedupe_window', v_q.dedupe_window);
  v_q.priorities := postbus._bool_option(p_options, 'priorities', v_q.priorities);
  v_q.keep_expired := postbus._bool_option(p_options, 'keep_expired', v_q.keep_expired);
  v_q.notify := postbus._bool_option(p_options, 'notify', v_q.notify);
  v_q.unlogged := postbus._bool_option(p_options, 'unlogged_unsafe', v_q.unlogged);
  v_q.max_size := case when p_options -> 'max_size' = 'null' then null
    else postbus._int_option(p_options, 'max_size', v_q.max_size, 1, 2000000000) end;
  if p_options ? 'on_ack' then
    if p_options ->> 'on_ack' is null or p_options ->> 'on_ack' not in ('delete', 'archive') then
      raise exception using errcode = 'PB003', message = format('option on_ack must be "delete" or "archive", not %s', p_options -> 'on_ack');
    end if;
    v_q.archive := p_options ->> 'on_ack' = 'archive';
  end if;
  if v_q.lease is null or v_q.lease = interval '0' or v_q.backoff is null or v_q.max_backoff is null
      or v_q.archive_retain is null or v_q.dedupe_window is null then
    raise exception using errcode = 'PB003',
      message = 'lease must be longer than zero; backoff, max_backoff, archive_retain and dedupe_window must not be null';
  end if;
  return v_q;
end
$$;

-- What is no plain INSERT goes the long way in _send_other.
create or replace function postbus._refresh_plain(p_queue int)
returns void
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  update postbus.queue q set plain = not q.keyed and q.max_size is null and not q.unlogged where q.id = p_queue
$$;

-- Options: lease (30 s), max_attempts (5), backoff (1 s, doubled each time), max_backoff (1 hour), on_ack ("delete" or
-- "archive"), archive_retain (7 days), priorities (true), ageing (1 minute a level; null: strict), max_size (none),
-- keep_expired (false: expired messages are only counted), dedupe_window (1 hour), notify (true), unlogged_unsafe (false:
-- true loses every message of the queue in a crash, and is fixed at creation).
create or replace function postbus.create_queue(name text, options jsonb default '{}')
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_q postbus.queue;
begin
  perform postbus._check_name('queue', create_queue.name);
  v_q.name := create_queue.name;
  v_q.lease := interval '30 seconds';
  v_q.max_attempts := 5;
  v_q.backoff := interval '1 second';
  v_q.max_backoff := interval '1 hour';
  v_q.archive := false;
  v_q.archive_retain := interval '7 days';
  v_q.priorities := true;
  v_q.ageing := interval '1 minute';
  v_q.keep_expired := false;
  v_q.dedupe_window := interval '1 hour';
  v_q.notify := true;
  v_q.unlogged := false;
  v_q := postbus._with_queue_options(v_q, create_queue.options);
  v_q.paused := false;
  v_q.keyed := false;
  v_q.weight := 1;
  v_q.plain := false;
  v_q.created_at := postbus.now_();
  perform postbus._claim_name(v_q.name);
  v_q.id := nextval('postbus.stream_id');
  execute format('create sequence postbus.register_%s minvalue 0', v_q.id);
  v_q.register := format('postbus.register_%s', v_q.id)::regclass;
  execute format('create sequence postbus.head_%s minvalue 0', v_q.id);
  v_q.head := format('postbus.head_%s', v_q.id)::regclass;
  perform setval(v_q.register, 1), setval(v_q.head, 0);
  insert into postbus.queue select v_q.*;
  perform postbus._refresh_plain(v_q.id);
  if v_q.archive then
    perform postbus._make_archive_days();
  end if;
end
$$;

create or replace function postbus.alter_queue(name text, options jsonb)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_q postbus.queue := postbus._queue(alter_queue.name);
  v_was boolean;
begin
  select q.* into strict v_q from postbus.queue q where q.id = v_q.id for no key update;
  v_was := v_q.unlogged;
  v_q := postbus._with_queue_options(v_q, alter_queue.options);
  if v_q.unlogged <> v_was then
    raise exception using errcode = 'PB003', message = format('queue %L: unlogged_unsafe is fixed when the queue is created', v_q.name),
      hint = 'Create another queue and move the messages.';
  end if;
  update postbus.queue q set lease = v_q.lease, max_attempts = v_q.max_attempts, backoff = v_q.backoff, max_backoff = v_q.max_backoff,
    archive = v_q.archive, archive_retain = v_q.archive_retain, priorities = v_q.priorities, ageing = v_q.ageing,
    max_size = v_q.max_size, keep_expired = v_q.keep_expired, dedupe_window = v_q.dedupe_window, notify = v_q.notify
  where q.id = v_q.id;
  perform postbus._refresh_plain(v_q.id);
  if v_q.archive then
    perform postbus._make_archive_days();
  end if;
end
$$;

-- Deletes the messages of a queue that nobody is just working on with a row lock. Returns how many.
create or replace function postbus._delete_messages(p_queue int)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_n bigint;
begin
  with c as materialized (select m.ctid as tid from postbus.queued m where m.queue_id = p_queue for update skip locked)
  delete from postbus.queued m using c where m.ctid = c.tid;
  get diagnostics v_n = row_count;
  insert into postbus.key_wake (queue_id, key, due, freed)
  select s.queue_id, s.key, postbus.now_(), true from postbus.key_state s where s.queue_id = p_queue;
  return v_n;
end
$$;

-- Removes every message, also those out with workers (their receipts are lost); dead letters and the archive stay.
create or replace function postbus.purge_queue(name text)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_q postbus.queue := postbus._queue(purge_queue.name);
begin
  if v_q.unlogged then
    return postbus._delete_messages_unlogged(v_q.id);
  end if;
  return postbus._delete_messages(v_q.id);
end
$$;

create or replace function postbus.drop_queue(name text, force boolean default false)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_q postbus.queue := postbus._queue(drop_queue.name);
begin
  perform from postbus.queue q where q.id = v_q.id for update;
  if not found then
    -- Somebody else dropped it while we waited.
    v_q := postbus._queue(drop_queue.name);
  end if;
  if not drop_queue.force and (exists (select from postbus.queued m where m.queue_id = v_q.id)
      or exists (select from postbus.queued_unlogged m where m.queue_id = v_q.id)) then
    raise exception using errcode = 'PB003', message = format('queue %L still holds messages', v_q.name),
      hint = 'Drain or purge it first, or pass force => true.';
  end if;
  delete from postbus.queue q where q.id = v_q.id;
  delete from postbus.queued m where m.queue_id = v_q.id;
  delete from postbus.queued_unlogged m where m.queue_id = v_q.id;
  delete from postbus.key_policy k where k.queue_id = v_q.id;
  delete from postbus.key_state k where k.queue_id = v_q.id;
  delete from postbus.key_wake k where k.queue_id = v_q.id;
  delete from postbus.mark k where k.queue_id = v_q.id;
  delete from postbus.tally t where t.queue_id = v_q.id;
  delete from postbus.dedupe d where d.stream_id = v_q.id;
  delete from postbus.binding b where b.queue_id = v_q.id;
  delete from postbus.dead_letter d where d.queue_id = v_q.id;
  insert into postbus.trash (name) values (format('postbus.register_%s', v_q.id)), (format('postbus.head_%s', v_q.id));
end
$$;

-- Messages of a queue by state. Counted up to p_max each.
create or replace function postbus._sizes(p_queue int, p_now timestamptz, p_max int,
  out ready bigint, out delayed bigint, out in_flight bigint, out oldest timestamptz)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  select count(*) filter (where m.due <= p_now), count(*) filter (where m.due > p_now and m.worker is null),
    count(*) filter (where m.due > p_now and m.worker is not null), min(coalesce(m.created_at, m.due)) filter (where m.due <= p_now)
  into ready, delayed, in_flight, oldest
  from (select m.due, m.worker, m.created_at from postbus.queued m where m.queue_id = p_queue limit p_max) m;
end
$$;

-- Queues with their sizes. Sizes are exact for queues of up to count_to messages; beyond that only so many are looked at.
create or replace function postbus.list_queues(count_to int default 100000)
returns table (
  name text, ready bigint, delayed bigint, in_flight bigint, dead_letters bigint, expired bigint, oldest_age interval,
  lease interval, max_attempts int, backoff interval, max_backoff interval, on_ack text, archive_retain interval,
  priorities boolean, ageing interval, max_size int, keep_expired boolean, dedupe_window interval, notify boolean,
  unlogged_unsafe boolean, key_policies bigint, paused boolean, created_at timestamptz
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_q postbus.queue;
  v_size record;
begin
  for v_q in select q.* from postbus.queue q order by q.name loop
    if v_q.unlogged then
      v_size := postbus._sizes_unlogged(v_q.id, postbus.now_(), count_to);
    else
      v_size := postbus._sizes(v_q.id, postbus.now_(), count_to);
    end if;
    return query select v_q.name, v_size.ready, v_size.delayed, v_size.in_flight,
      (select count(*) from postbus.dead_letter d where d.queue_id = v_q.id),
      (select coalesce(sum(t.n), 0)::bigint from postbus.tally t where t.queue_id = v_q.id and t.kind = 'expired'),
      postbus.now_() - v_size.oldest,
      v_q.lease, v_q.max_attempts, v_q.backoff, v_q.max_backoff, case when v_q.archive then 'archive' else 'delete' end,
      v_q.archive_retain, v_q.priorities, v_q.ageing, v_q.max_size, v_q.keep_expired, v_q.dedupe_window, v_q.notify, v_q.unlogged,
      (select count(*) from postbus.key_policy k where k.queue_id = v_q.id) + v_q.keyed::int, v_q.paused, v_q.created_at;
  end loop;
end
$$;
