-- Topics: one publish reaches many queues. A queue is bound to a stream (it gets the events whose type fits the pattern)
-- or to topics (it gets what send_topic sends to a topic that fits). Words are separated by dots; * stands for one word,
-- # for any number of them. What is sent goes into the queues in the sender's transaction.

create table if not exists postbus.binding (
  queue_id int not null,
  stream_id int,
  pattern text not null,
  regex text not null
);
create unique index if not exists binding_queue on postbus.binding (queue_id, coalesce(stream_id, 0), pattern);
create index if not exists binding_stream on postbus.binding (stream_id);

create or replace function postbus._pattern_regex(p_pattern text)
returns text
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_word text;
  v_regex text := '';
begin
  if p_pattern is null or p_pattern !~ '^[^.]+(\.[^.]+)*$' or p_pattern ~ '[^.][#*]|[#*][^.]' then
    raise exception using errcode = 'PB003', message = format('bad pattern %L', p_pattern),
      hint = 'Words are separated by dots; * stands for one whole word, # for any number of words: orders.*, #.failed.';
  end if;
  -- Every word brings its own dot in front; the topic is matched with a dot in front of it.
  foreach v_word in array string_to_array(p_pattern, '.') loop
    v_regex := v_regex || case v_word when '#' then '(\.[^.]*)*' when '*' then '\.[^.]+'
      else '\.' || regexp_replace(v_word, '([][\\^$.|?*+(){}])', '\\\1', 'g') end;
  end loop;
  return '^' || v_regex || '$';
end
$$;

create or replace function postbus.bind(queue text, pattern text default '#', stream text default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_q postbus.queue := postbus._queue(bind.queue);
  v_regex text := postbus._pattern_regex(bind.pattern);
  v_stream int;
begin
  perform from postbus.queue q where q.id = v_q.id for no key update;
  if bind.stream is not null then
    v_stream := (postbus._stream(bind.stream)).id;
    perform from postbus.stream s where s.id = v_stream for no key update;
  end if;
  insert into postbus.binding (queue_id, stream_id, pattern, regex) values (v_q.id, v_stream, bind.pattern, v_regex)
  on conflict (queue_id, coalesce(stream_id, 0), pattern) do nothing;
  if v_stream is not null then
    update postbus.stream s set bound = true where s.id = v_stream and not s.bound;
    perform postbus._stamp(v_stream);
  end if;
end
$$;

create or replace function postbus.unbind(queue text, pattern text default '#', stream text default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_q postbus.queue := postbus._queue(unbind.queue);
  v_stream int;
begin
  perform from postbus.queue q where q.id = v_q.id for no key update;
  if unbind.stream is not null then
    v_stream := (postbus._stream(unbind.stream)).id;
    perform from postbus.stream s where s.id = v_stream for no key update;
  end if;
  delete from postbus.binding b where b.queue_id = v_q.id and b.stream_id is not distinct from v_stream and b.pattern = unbind.pattern;
  if not found then
    raise exception using errcode = 'PB001', message = format('queue %L is not bound to %s %L', v_q.name,
        coalesce('stream ' || unbind.stream || ' with pattern', 'topic'), unbind.pattern),
      hint = 'List them: select * from postbus.list_bindings().';
  end if;
  if v_stream is not null then
    update postbus.stream s set bound = exists (select from postbus.binding b where b.stream_id = s.id) where s.id = v_stream;
    perform postbus._stamp(v_stream);
  end if;
end
$$;

create or replace function postbus.list_bindings()
returns table (queue text, stream text, pattern text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  select q.name, s.name, b.pattern from postbus.binding b join postbus.queue q on q.id = b.queue_id left join postbus.stream s on s.id = b.stream_id
  order by q.name, s.name nulls first, b.pattern
$$;

-- The queues a topic reaches, each once. p_stream null: the bindings to topics.
create or replace function postbus._bound(p_stream int, p_topic text)
returns setof text
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  return query
  select distinct q.name from postbus.binding b join postbus.queue q on q.id = b.queue_id
  where b.stream_id is not distinct from p_stream and '.' || p_topic ~ b.regex order by q.name;
end
$$;

-- Copies events of a stream into the queues bound to it.
create or replace function postbus._route(p_stream int, p_payloads text[], p_blobs bytea[], p_types text[], p_keys text[], p_headers jsonb[])
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v record;
begin
  for v in
    select b.queue, array_agg(e.payload order by e.n) as payloads, array_agg(e.blob order by e.n) as blobs, array_agg(e.type order by e.n) as types,
      array_agg(e.key order by e.n) as keys, array_agg(e.headers order by e.n) as headers
    from (
      select coalesce(x.type, 'default') as type, x.payload, x.blob, x.key, x.headers, x.n
      from unnest(p_payloads, p_blobs, p_types, p_keys, p_headers) with ordinality as x (payload, blob, type, key, headers, n)) e
    cross join lateral postbus._bound(p_stream, e.type) b (queue)
    group by b.queue order by b.queue
  loop
    perform postbus._send_other(v.queue, case when p_payloads is not null then v.payloads end, case when p_payloads is null then v.blobs end,
      v.types, v.keys, v.headers, 0, null, null, null, null);
  end loop;
end
$$;

-- The same for what this transaction has just captured: everything of its with a larger id.
create or replace function postbus._route_log(p_stream int, p_leaf int, p_txid xid8, p_after bigint)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
  v record;
begin
  select array_agg(e.payload order by e.id) as payloads, array_agg(e.type order by e.id) as types, array_agg(e.key order by e.id) as keys into v
  from postbus.log e where e.leaf = p_leaf and e.txid = p_txid and e.stream_id = p_stream and e.id > p_after;
  if v.payloads is not null then
    perform postbus._route(p_stream, v.payloads, null, v.types, v.keys, null);
  end if;
end
$$;

create or replace function postbus._send_topic(p_topic text, p_payload text, p_blob bytea, p_key text, p_headers jsonb, p_priority int, p_delay interval)
returns table (queue text, id bigint)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  if p_topic is null or p_topic !~ '^[^.#*]+(\.[^.#*]+)*$' then
    raise exception using errcode = 'PB003', message = format('bad topic %L', p_topic), hint = 'Words separated by dots, such as orders.created.';
  end if;
  for queue in select b from postbus._bound(null, p_topic) b loop
    id := (postbus._send_other(queue, case when p_blob is null then array[p_payload] end, case when p_blob is not null then array[p_blob] end,
      array[p_topic], array[p_key], array[p_headers], p_priority, p_delay, null, null, null))[1];
    return next;
  end loop;
end
$$;

-- Sends one message into every queue that is bound to the topic; it is the message's type there. No queue is bound: no
-- row, and no error.
create or replace function postbus.send_topic(topic text, payload text, key text default null, headers jsonb default null,
  priority int default 0, delay interval default null)
returns table (queue text, id bigint)
language sql
as $$
  select * from postbus._send_topic(topic, payload, null, key, headers, priority, delay)
$$;

create or replace function postbus.send_topic(topic text, payload jsonb, key text default null, headers jsonb default null,
  priority int default 0, delay interval default null)
returns table (queue text, id bigint)
language sql
as $$
  select * from postbus._send_topic(topic, payload::text, null, key, headers, priority, delay)
$$;

create or replace function postbus.send_topic(topic text, payload bytea, key text default null, headers jsonb default null,
  priority int default 0, delay interval default null)
returns table (queue text, id bigint)
language sql
as $$
  select * from postbus._send_topic(topic, null, payload, key, headers, priority, delay)
$$;
