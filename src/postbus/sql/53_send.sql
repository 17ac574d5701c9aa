-- Sending: an INSERT in the caller's transaction.
--
-- The register of a queue is that of a stream (time of the next NOTIFY << 12 | 12 bits) with other bits: bit p says that
-- priority p has been used (bit 0 always is), bit 10 that marks are in use. Bits are set before the message that needs
-- them is visible, and no old snapshot can hide them.

-- The time a message is due at when nothing else is said: that of its transaction, so that messages of one transaction
-- are equal in it and ordered by id, whatever the clock does.
create or replace function postbus._tx_now()
returns timestamptz
language sql
stable
begin atomic
  select coalesce(nullif(current_setting('postbus.fake_now', true), '')::timestamptz, transaction_timestamp());
end;

-- Sets or clears bits of a queue's register.
create or replace function postbus._set_bits(p_register regclass, p_set int, p_clear int)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v bigint;
begin
  begin
    perform pg_advisory_xact_lock(1886351992, p_register::oid::bigint::bit(32)::int);
    v := pg_sequence_last_value(p_register);
    perform setval(p_register, (v | p_set) & ~p_clear::bigint);
    -- Ends the block and with it the lock; setval stays.
    raise sqlstate 'PB000';
  exception when sqlstate 'PB000' then
    null;
  end;
end
$$;

-- The core of send: one statement and no SET, as in _publish. For a queue that is not plain it finds no row and returns
-- null. created_at is left null until the first claim: it is the due time.
create or replace function postbus._send(p_queue text, p_payload text, p_blob bytea, p_type text, p_key text, p_headers jsonb)
returns bigint
language plpgsql
security definer
as $$
declare
  v_id bigint;
begin
  insert into postbus.queued (id, due, queue_id, type, key, payload, blob, headers)
  select pg_catalog.nextval('postbus.message_id'), postbus._tx_now(), q.id, p_type, p_key, p_payload, p_blob, p_headers
  from postbus.queue q
  where q.name operator(pg_catalog.=) p_queue and q.plain
    and postbus._wake(q.notify, q.name, q.register, pg_catalog.pg_sequence_last_value(q.register))
  returning id into v_id;
  return v_id;
end
$$;

-- Refuses what would make a queue or a key larger than it may be. Messages of other open transactions are not seen, so
-- the bound can be passed by what is being sent at the same moment.
create or replace function postbus._check_room(p_q postbus.queue, p_keys text[], p_n int)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
  v_setting text := format('postbus.room_%s', p_q.id);  -- <max_size>:<last id there is room for>, as this session knows it
  v_room text := current_setting(v_setting, true);
  v_last bigint;
  v_size bigint;
  v_key record;
begin
  -- Ids are drawn for every message of the database: up to last + room there cannot be more than room new ones.
  v_last := coalesce(pg_sequence_last_value('postbus.message_id'), 0);
  if p_q.max_size is not null and (split_part(v_room, ':', 1) = p_q.max_size::text and v_last + p_n <= split_part(v_room, ':', 2)::bigint) is not true then
    select count(*) into v_size from (select from postbus.queued m where m.queue_id = p_q.id limit p_q.max_size) x;
    if v_size + p_n > p_q.max_size then
      raise exception using errcode = 'PB006', message = format('queue %L is full: %s of %s messages', p_q.name, v_size, p_q.max_size),
        hint = 'Try again when workers have caught up, or raise max_size with postbus.alter_queue.';
    end if;
    perform set_config(v_setting, format('%s:%s', p_q.max_size, v_last + p_q.max_size - v_size), false);
  end if;
  if p_q.keyed then
    for v_key in
      select k.key, k.n, l.max_size
      from (select x as key, count(*) as n from unnest(p_keys) x where x is not null group by x) k cross join lateral postbus._policy(p_q, k.key) l
    loop
      continue when v_key.max_size is null;
      select count(*) into v_size
      from (select from postbus.queued m where m.queue_id = p_q.id and m.key = v_key.key and m.keyed limit v_key.max_size) x;
      if v_size + v_key.n > v_key.max_size then
        raise exception using errcode = 'PB006',
          message = format('key %L of queue %L is full: %s of %s messages', v_key.key, p_q.name, v_size, v_key.max_size),
          hint = 'Try again when workers have caught up, or raise max_size with postbus.set_key_policy.';
      end if;
    end loop;
  end if;
end
$$;

-- Inserts messages, ids in the order of the arrays.
create or replace function postbus._insert_messages(
  p_q postbus.queue,
  p_payloads text[],
  p_blobs bytea[],
  p_types text[],
  p_keys text[],
  p_headers jsonb[],
  p_priority int,
  p_due timestamptz,
  p_expires_at timestamptz
)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_n int := coalesce(cardinality(p_payloads), cardinality(p_blobs));
  v_now timestamptz := postbus.now_();
  v_ids bigint[];
begin
  if p_q.max_size is not null or p_q.keyed then
    perform postbus._check_room(p_q, p_keys, v_n);
  end if;
  v_ids := array(select nextval('postbus.message_id') from generate_series(1, v_n));
  insert into postbus.queued (id, due, created_at, expires_at, queue_id, priority, keyed, tracked, type, key, payload, blob, headers)
  select e.id, p_due, case when p_due > v_now then v_now end, p_expires_at, p_q.id, p_priority, p_q.keyed and e.key is not null, p_due > v_now, coalesce(e.type, 'default'), e.key,
    e.payload, e.blob, e.headers
  from unnest(v_ids, p_payloads, p_blobs, p_types, p_keys, p_headers) as e (id, payload, blob, type, key, headers);
  if p_q.keyed then
    insert into postbus.key_wake (queue_id, key, due, freed)
    select distinct p_q.id, k, p_due, false from unnest(p_keys) k where k is not null;
  end if;
  return v_ids;
end
$$;

-- Every send that is not plain: with options, in batches, to queues with bounds or policies, and the wrong ones.
create or replace function postbus._send_other(
  p_queue text,
  p_payloads text[],
  p_blobs bytea[],
  p_types text[],
  p_keys text[],
  p_headers jsonb[],
  p_priority int,
  p_delay interval,
  p_deliver_at timestamptz,
  p_ttl interval,
  p_dedupe_key text
)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_q postbus.queue := postbus._queue(p_queue);
  v_n int := coalesce(cardinality(p_payloads), cardinality(p_blobs));
  v_due timestamptz := postbus._tx_now();
  v_first bigint;
  v_register bigint;
  v_ids bigint[];
begin
  perform postbus._check_send(v_q, p_payloads, p_blobs, p_types, p_keys, p_headers, p_priority, p_delay, p_deliver_at, p_ttl);
  if v_n = 0 then
    return '{}';
  end if;
  if p_dedupe_key is not null then
    v_first := postbus._dedupe(v_q.id, v_q.dedupe_window, p_dedupe_key);
    if v_first is not null then
      return array[v_first];
    end if;
  end if;
  if p_delay is not null or p_deliver_at > v_due then
    v_due := coalesce(p_deliver_at, v_due + greatest(p_delay, interval '0'));
  end if;
  v_register := pg_sequence_last_value(v_q.register);
  if v_register & (1 << p_priority) = 0 then
    perform postbus._set_bits(v_q.register, 1 << p_priority, 0);
  end if;
  if v_q.unlogged then
    v_ids := postbus._insert_messages_unlogged(v_q, p_payloads, p_blobs, p_types, p_keys, p_headers, p_priority, v_due, v_due + p_ttl);
  else
    v_ids := postbus._insert_messages(v_q, p_payloads, p_blobs, p_types, p_keys, p_headers, p_priority, v_due, v_due + p_ttl);
  end if;
  if p_dedupe_key is not null then
    update postbus.dedupe d set id = v_ids[1] where d.stream_id = v_q.id and d.dedupe_key = p_dedupe_key;
  end if;
  perform postbus._wake(v_q.notify, v_q.name, v_q.register, v_register);
  return v_ids;
end
$$;

create or replace function postbus._check_send(
  p_q postbus.queue,
  p_payloads text[],
  p_blobs bytea[],
  p_types text[],
  p_keys text[],
  p_headers jsonb[],
  p_priority int,
  p_delay interval,
  p_deliver_at timestamptz,
  p_ttl interval
)
returns void
language plpgsql
immutable
as $$
declare
  v_n int := coalesce(cardinality(p_payloads), cardinality(p_blobs));
  v_wrong text;
begin
  v_wrong := case
    when v_n is null then 'needs a payload'
    when array_position(p_payloads, null) is not null or array_position(p_blobs, null) is not null then 'needs a payload, not null'
    when array_position(p_types, null) is not null then 'needs a type, not null'
    when coalesce(cardinality(p_types), v_n) <> v_n or coalesce(cardinality(p_keys), v_n) <> v_n
      or coalesce(cardinality(p_headers), v_n) <> v_n
      then format('has arrays that differ in length: %s payloads; types, keys and headers are null or have as many elements', v_n)
    when p_priority is null or p_priority not between 0 and 9 then format('needs a priority from 0 to 9 (most urgent), not %s', coalesce(p_priority::text, 'null'))
    when p_priority <> 0 and not p_q.priorities then 'cannot have a priority: the queue was made with priorities false'
    when p_delay is not null and p_deliver_at is not null then 'takes delay or deliver_at, not both'
    when p_delay > interval '1000 years' or p_deliver_at = 'infinity' then 'cannot be delayed that long'
    when p_ttl <= interval '0' then 'needs a ttl longer than zero'
  end;
  if v_wrong is not null then
    raise exception using errcode = 'PB003', message = format('send to queue %L %s', p_q.name, v_wrong);
  end if;
end
$$;

-- send is text, jsonb or bytea; a plain string literal is text and is stored as it is. The wrappers are inlined: with options
-- left out the planner has decided before the call that it is a plain one.
create or replace function postbus.send(
  queue text,
  payload text,
  type text default 'default',
  key text default null,
  headers jsonb default null,
  priority int default 0,
  delay interval default null,
  deliver_at timestamptz default null,
  ttl interval default null,
  dedupe_key text default null
)
returns bigint
language sql
as $$
  select coalesce(
    case when payload is not null and type is not null and priority = 0 and delay is null and deliver_at is null and ttl is null and dedupe_key is null
      then postbus._send(queue, payload, null, type, key, headers) end,
    (postbus._send_other(queue, array[payload], null, array[type], array[key], array[headers], priority, delay, deliver_at, ttl, dedupe_key))[1])
$$;

create or replace function postbus.send(
  queue text,
  payload jsonb,
  type text default 'default',
  key text default null,
  headers jsonb default null,
  priority int default 0,
  delay interval default null,
  deliver_at timestamptz default null,
  ttl interval default null,
  dedupe_key text default null
)
returns bigint
language sql
as $$
  select coalesce(
    case when payload is not null and type is not null and priority = 0 and delay is null and deliver_at is null and ttl is null and dedupe_key is null
      then postbus._send(queue, payload::text, null, type, key, headers) end,
    (postbus._send_other(queue, array[payload::text], null, array[type], array[key], array[headers], priority, delay, deliver_at, ttl, dedupe_key))[1])
$$;

create or replace function postbus.send(
  queue text,
  payload bytea,
  type text default 'default',
  key text default null,
  headers jsonb default null,
  priority int default 0,
  delay interval default null,
  deliver_at timestamptz default null,
  ttl interval default null,
  dedupe_key text default null
)
returns bigint
language sql
as $$
  select coalesce(
    case when payload is not null and type is not null and priority = 0 and delay is null and deliver_at is null and ttl is null and dedupe_key is null
      then postbus._send(queue, null, payload, type, key, headers) end,
    (postbus._send_other(queue, null, array[payload], array[type], array[key], array[headers], priority, delay, deliver_at, ttl, dedupe_key))[1])
$$;

create or replace function postbus.send_batch(
  queue text,
  payloads text[],
  types text[] default null,
  keys text[] default null,
  headers jsonb[] default null,
  priority int default 0,
  delay interval default null,
  deliver_at timestamptz default null,
  ttl interval default null
)
returns bigint[]
language sql
as $$
  select postbus._send_other(queue, payloads, null, types, keys, headers, priority, delay, deliver_at, ttl, null)
$$;

create or replace function postbus.send_batch(
  queue text,
  payloads jsonb[],
  types text[] default null,
  keys text[] default null,
  headers jsonb[] default null,
  priority int default 0,
  delay interval default null,
  deliver_at timestamptz default null,
  ttl interval default null
)
returns bigint[]
language sql
as $$
  select postbus._send_other(queue, payloads::text[], null, types, keys, headers, priority, delay, deliver_at, ttl, null)
$$;

create or replace function postbus.send_batch(
  queue text,
  payloads bytea[],
  types text[] default null,
  keys text[] default null,
  headers jsonb[] default null,
  priority int default 0,
  delay interval default null,
  deliver_at timestamptz default null,
  ttl interval default null
)
returns bigint[]
language sql
as $$
  select postbus._send_other(queue, null, payloads, types, keys, headers, priority, delay, deliver_at, ttl, null)
$$;
