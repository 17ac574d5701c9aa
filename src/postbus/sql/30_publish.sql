-- Publishing: a plain INSERT into the log. Producers never wait for each other and never touch a shared row.

-- The register of a stream is (time from which the next NOTIFY may be sent, in 1/100 s) << 12 | lane count.

-- The lane of a new event. Without a key any lane will do. Expressions are set up anew in every transaction, so what
-- most streams do not need is kept behind a function call.
create or replace function postbus._lane_of_many(p_key text, p_lanes int)
returns smallint
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  return postbus._lane(p_key, floor(random() * p_lanes)::int, p_lanes);
end
$$;

create or replace function postbus._lane_now(p_key text, p_register bigint)
returns smallint
language sql
volatile
begin atomic
  select case when p_register & 4095 = 1 then 0::smallint else postbus._lane_of_many(p_key, (p_register & 4095)::int) end;
end;

-- Wakes listeners, at most once in 10 ms a stream: commits with a NOTIFY run one at a time. The register is not
-- transactional: a wake-up that is rolled back is made good by the listener's own poll. PREPARE TRANSACTION refuses
-- transactions with a NOTIFY: producers that use it set postbus.notify to off.
create or replace function postbus._notify(p_name text, p_register regclass)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if coalesce(current_setting('postbus.notify', true), '') <> 'off' then
    perform postbus._set_register(p_register, null);
    perform pg_notify('postbus.' || p_name, '');
  end if;
  return true;
end
$$;

-- Notifies when it is time. Always true, so that it can stand in a WHERE.
create or replace function postbus._wake(p_notify boolean, p_name text, p_register regclass, p_value bigint)
returns boolean
language sql
volatile
begin atomic
  select case when p_notify and p_value::float8 < date_part('epoch', clock_timestamp()) * 409600
    then postbus._notify(p_name, p_register) else true end;
end;

-- The core of publish: one statement, and no SET, whose cost would show. So it pins by naming: its operators are
-- qualified, and the functions that are inlined into it have parsed bodies. The fenced subquery fixes the order: the
-- xid, then the register (lane changes rest on that), then the id (floors rest on that). For a stream that is not
-- plain it finds no row and returns null.
create or replace function postbus._publish(p_stream text, p_payload text, p_blob bytea, p_type text, p_key text, p_headers jsonb)
returns bigint
language plpgsql
security definer
as $$
declare
  v_id bigint;
begin
  insert into postbus.log (id, txid, at, leaf, stream_id, lane, type, key, payload, blob, headers)
  select pg_catalog.nextval(x.id_seq), x.txid, postbus.now_(), x.leaf, x.id, postbus._lane_now(p_key, x.value),
    p_type, p_key, p_payload, p_blob, p_headers
  from (
    select s.id, s.name, s.leaf, s.id_seq, s.notify, s.register, pg_catalog.pg_current_xact_id() as txid,
      case when pg_catalog.pg_current_xact_id() is not null then pg_catalog.pg_sequence_last_value(s.register) end as value
    from postbus.stream s
    where s.name operator(pg_catalog.=) p_stream and s.xmin operator(pg_catalog.=) s.stamp and s.young is null and not s.bound
    offset 0) x
  where postbus._wake(x.notify, x.name, x.register, x.value)
  returning id into v_id;
  return v_id;
end
$$;

-- publish with a delivery time or a dedupe key, into a stream that is new or was just restored, or wrong.
create or replace function postbus._publish_other(
  p_stream text,
  p_payload text,
  p_blob bytea,
  p_type text,
  p_key text,
  p_headers jsonb,
  p_deliver_at timestamptz,
  p_dedupe_key text
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_s postbus.stream := postbus._stream(p_stream);
  v_id bigint;
  v_first bigint;
begin
  if num_nonnulls(p_payload, p_blob) <> 1 or p_type is null then
    raise exception using errcode = 'PB003', message = format('publish to stream %L needs a payload and a type', p_stream);
  end if;
  if p_dedupe_key is not null then
    v_first := postbus._dedupe(v_s.id, v_s.dedupe_window, p_dedupe_key);
    if v_first is not null then
      return v_first;
    end if;
  end if;
  if p_deliver_at > postbus.now_() then
    v_id := nextval(v_s.id_seq);
    insert into postbus.scheduled (stream_id, id, due, type, key, payload, blob, headers, created_at)
    values (v_s.id, v_id, p_deliver_at, p_type, p_key, p_payload, p_blob, p_headers, postbus.now_());
  else
    v_id := (postbus._publish_batch(p_stream, case when p_blob is null then array[p_payload] end,
      case when p_blob is not null then array[p_blob] end, array[p_type], array[p_key], array[p_headers]))[1];
  end if;
  if p_dedupe_key is not null then
    update postbus.dedupe d set id = v_id where d.stream_id = v_s.id and d.dedupe_key = p_dedupe_key;
  end if;
  return v_id;
end
$$;

-- The id that a dedupe key already stands for, or null and the key is ours. Two producers with one key: the second waits
-- for the first to end. A key counts until its window ends, whatever became of the event or message.
create or replace function postbus._dedupe(p_object int, p_window interval, p_key text)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := postbus.now_();
  v_first bigint;
begin
  insert into postbus.dedupe as d (stream_id, dedupe_key, id, expires_at)
  values (p_object, p_key, 0, v_now + p_window)
  on conflict (stream_id, dedupe_key) do update set expires_at = excluded.expires_at
    where d.expires_at <= v_now;
  if found then
    return null;
  end if;
  select d.id into strict v_first from postbus.dedupe d where d.stream_id = p_object and d.dedupe_key = p_key;
  return v_first;
end
$$;

-- publish is text, jsonb or bytea; a plain string literal is text and is stored as it is. The wrappers are inlined: with
-- options left out the planner has decided before the call that it is a plain one.
create or replace function postbus.publish(
  stream text,
  payload text,
  type text default 'default',
  key text default null,
  headers jsonb default null,
  deliver_at timestamptz default null,
  dedupe_key text default null
)
returns bigint
language sql
as $$
  select coalesce(
    case when payload is not null and type is not null and deliver_at is null and dedupe_key is null
      then postbus._publish(stream, payload, null, type, key, headers) end,
    postbus._publish_other(stream, payload, null, type, key, headers, deliver_at, dedupe_key))
$$;

create or replace function postbus.publish(
  stream text,
  payload jsonb,
  type text default 'default',
  key text default null,
  headers jsonb default null,
  deliver_at timestamptz default null,
  dedupe_key text default null
)
returns bigint
language sql
as $$
  select coalesce(
    case when payload is not null and type is not null and deliver_at is null and dedupe_key is null
      then postbus._publish(stream, payload::text, null, type, key, headers) end,
    postbus._publish_other(stream, payload::text, null, type, key, headers, deliver_at, dedupe_key))
$$;

create or replace function postbus.publish(
  stream text,
  payload bytea,
  type text default 'default',
  key text default null,
  headers jsonb default null,
  deliver_at timestamptz default null,
  dedupe_key text default null
)
returns bigint
language sql
as $$
  select coalesce(
    case when payload is not null and type is not null and deliver_at is null and dedupe_key is null
      then postbus._publish(stream, null, payload, type, key, headers) end,
    postbus._publish_other(stream, null, payload, type, key, headers, deliver_at, dedupe_key))
$$;

-- The core of publish_batch: ids in the order of the arrays, then one INSERT ... SELECT.
create or replace function postbus._publish_batch(
  p_stream text,
  p_payloads text[],
  p_blobs bytea[],
  p_types text[],
  p_keys text[],
  p_headers jsonb[]
)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_s postbus.stream := postbus._stream(p_stream);
  v_n int := coalesce(cardinality(p_payloads), cardinality(p_blobs), 0);
  v_txid xid8;
  v_now timestamptz := postbus.now_();
  v_register bigint;
  v_lane smallint;
  v_ids bigint[];
begin
  if coalesce(cardinality(p_types), v_n) <> v_n or coalesce(cardinality(p_keys), v_n) <> v_n
      or coalesce(cardinality(p_headers), v_n) <> v_n then
    raise exception using errcode = 'PB003',
      message = format('publish_batch to stream %L: arrays differ in length', p_stream),
      hint = format('There are %s payloads; types, keys and headers are null or have as many elements.', v_n);
  end if;
  if p_blobs is null and array_position(p_payloads, null) is not null
      or p_payloads is null and array_position(p_blobs, null) is not null
      or array_position(p_types, null) is not null then
    raise exception using errcode = 'PB003', message = format('publish_batch to stream %L: a payload or type is null', p_stream);
  end if;
  if p_payloads is null and p_blobs is null then
    raise exception using errcode = 'PB003', message = format('publish_batch to stream %L needs an array of payloads', p_stream);
  end if;
  if v_n = 0 then
    return '{}';
  end if;
  if v_s.young is not null then
    execute format('lock table only postbus.log_%s in row exclusive mode', v_s.leaf);
  end if;
  v_txid := pg_current_xact_id();
  v_register := pg_sequence_last_value(v_s.register);
  v_lane := case when v_register & 4095 = 1 then 0 end;
  v_ids := array(select nextval(v_s.id_seq) from generate_series(1, v_n));
  if p_payloads is not null and p_types is null and p_keys is null and p_headers is null then
    insert into postbus.log (id, txid, at, leaf, stream_id, lane, type, payload)
    select e.id, v_txid, v_now, v_s.leaf, v_s.id, coalesce(v_lane, postbus._lane_now(null, v_register)), 'default', e.payload
    from unnest(v_ids, p_payloads) as e (id, payload);
  else
    insert into postbus.log (id, txid, at, leaf, stream_id, lane, type, key, payload, blob, headers)
    select e.id, v_txid, v_now, v_s.leaf, v_s.id, coalesce(v_lane, postbus._lane_now(e.key, v_register)), coalesce(e.type, 'default'),
      e.key, e.payload, e.blob, e.headers
    from unnest(v_ids, p_payloads, p_blobs, p_types, p_keys, p_headers) as e (id, payload, blob, type, key, headers);
  end if;
  if v_s.bound then
    perform postbus._route(v_s.id, p_payloads, p_blobs, p_types, p_keys, p_headers);
  end if;
  perform postbus._wake(v_s.notify, v_s.name, v_s.register, v_register);
  return v_ids;
end
$$;

create or replace function postbus.publish_batch(
  stream text,
  payloads text[],
  types text[] default null,
  keys text[] default null,
  headers jsonb[] default null
)
returns bigint[]
language sql
as $$
  select postbus._publish_batch(stream, payloads, null, types, keys, headers)
$$;

create or replace function postbus.publish_batch(
  stream text,
  payloads jsonb[],
  types text[] default null,
  keys text[] default null,
  headers jsonb[] default null
)
returns bigint[]
language sql
as $$
  select postbus._publish_batch(stream, payloads::text[], null, types, keys, headers)
$$;

create or replace function postbus.publish_batch(
  stream text,
  payloads bytea[],
  types text[] default null,
  keys text[] default null,
  headers jsonb[] default null
)
returns bigint[]
language sql
as $$
  select postbus._publish_batch(stream, null, payloads, types, keys, headers)
$$;

-- Moves scheduled events that are due into the log. They get their id and their place in order now: an id taken when
-- they were scheduled would lie below floors that have been cut since.
create or replace function postbus._move_scheduled(p_stream text, p_stream_id int, p_now timestamptz, p_max int)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_d postbus.scheduled;
  v_n int := 0;
begin
  for v_d in
    select d.* from postbus.scheduled d where d.stream_id = p_stream_id and d.due <= p_now
    order by d.stream_id, d.due, d.id limit p_max for update skip locked
  loop
    delete from postbus.scheduled d where d.stream_id = p_stream_id and d.id = v_d.id;
    perform postbus._publish_other(p_stream, v_d.payload, v_d.blob, v_d.type, v_d.key, v_d.headers, null, null);
    v_n := v_n + 1;
  end loop;
  return v_n;
end
$$;
