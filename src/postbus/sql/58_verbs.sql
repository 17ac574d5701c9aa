-- ack, nack, release, extend, dead_letter: one set of verbs for receipts of streams and of queues, one or many.

-- Receipts by where they came from. What is none of them is left to the streams, which refuse it.
create or replace function postbus._sorted(p_receipts text[], out streams text[], out logged text[], out unlogged text[])
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $$
begin
  if p_receipts is null then
    raise exception using errcode = 'PB003', message = 'receipts must not be null';
  end if;
  select coalesce(array_agg(r.receipt) filter (where r.letter <> 'u'), '{}'), coalesce(array_agg(r.receipt) filter (where r.letter = 'u'), '{}')
  into logged, unlogged from postbus._parsed(p_receipts) r;
  streams := array(select r from unnest(p_receipts) r where (r = any (logged) or r = any (unlogged)) is not true);
end
$$;

-- Finishes messages. Returns how many; PB004 if any receipt is no longer valid, and then nothing was changed.
create or replace function postbus.ack(receipts text[])
returns int
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
  v_shape text := translate(array_to_string(receipts, ','), '0123456789', '');
  v_done text[];
  v_queues int[];
  v record;
begin
  -- Most receipts of queues need no more than this. (Their shape is checked without a regular expression, which costs as
  -- much as all the rest. All of one kind: rows are then locked in the same order as by the other verbs.)
  if v_shape = rtrim(repeat('q:::,', cardinality(receipts)), ',') then
    with d as (
      delete from postbus.queued m
      using (
        select r, substr(split_part(r, ':', 1), 2)::bigint as id, split_part(r, ':', 2)::int as claim,
          ('(' || split_part(r, ':', 3) || ',' || split_part(r, ':', 4) || ')')::tid as tid
        from unnest(receipts) r where r like 'q_%:_%:_%:_%' and length(r) <= 32 order by 2 offset 0) x
      where m.ctid = x.tid and m.id = x.id and m.claim = x.claim and not m.keyed returning x.r)
    select array_agg(d.r) into v_done from d;
    if cardinality(v_done) = cardinality(receipts) then
      return cardinality(v_done);
    end if;
  elsif v_shape = rtrim(repeat('k:::,', cardinality(receipts)), ',') then
    -- The same for messages that have a place to free, and no archive to go to.
    with d as (
      delete from postbus.queued m
      using (
        select r, substr(split_part(r, ':', 1), 2)::bigint as id, split_part(r, ':', 2)::int as claim,
          ('(' || split_part(r, ':', 3) || ',' || split_part(r, ':', 4) || ')')::tid as tid
        from unnest(receipts) r where r like 'k_%:_%:_%:_%' and length(r) <= 32 order by 2 offset 0) x
      where m.ctid = x.tid and m.id = x.id and m.claim = x.claim and m.keyed
        and (select not q.archive from postbus.queue q where q.id = m.queue_id) returning x.r, m.queue_id, m.key),
    w as (
      insert into postbus.key_wake (queue_id, key, due, freed) select distinct d.queue_id, d.key, postbus.now_(), true from d)
    select array_agg(d.r), array_agg(d.queue_id) into v_done, v_queues from d;
    if v_done is not null then
      perform postbus._wake(q.notify, q.name, q.register, pg_sequence_last_value(q.register)) from postbus.queue q where q.id = any (v_queues);
      if cardinality(v_done) = cardinality(receipts) then
        return cardinality(v_done);
      end if;
    end if;
  end if;
  v := postbus._sorted(case when v_done is null then receipts else array(select r from unnest(receipts) r where (r = any (v_done)) is not true) end);
  return coalesce(cardinality(v_done), 0) + postbus._ack_work(v.logged) + postbus._ack_work_unlogged(v.unlogged)
    + case when v.streams <> '{}' then postbus._stream_ack(v.streams) else 0 end;
end
$$;

create or replace function postbus.ack(receipt text)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_n int;
begin
  if translate(ack.receipt, '0123456789', '') = 'q:::' and ack.receipt like 'q_%:_%:_%:_%' and length(ack.receipt) <= 32 then
    delete from postbus.queued m
    where m.ctid = ('(' || split_part(ack.receipt, ':', 3) || ',' || split_part(ack.receipt, ':', 4) || ')')::tid
      and m.id = substr(split_part(ack.receipt, ':', 1), 2)::bigint and m.claim = split_part(ack.receipt, ':', 2)::int and not m.keyed;
    if found then
      return 1;
    end if;
  elsif translate(ack.receipt, '0123456789', '') = 'k:::' and ack.receipt like 'k_%:_%:_%:_%' and length(ack.receipt) <= 32 then
    with d as (
      delete from postbus.queued m
      where m.ctid = ('(' || split_part(ack.receipt, ':', 3) || ',' || split_part(ack.receipt, ':', 4) || ')')::tid
        and m.id = substr(split_part(ack.receipt, ':', 1), 2)::bigint and m.claim = split_part(ack.receipt, ':', 2)::int and m.keyed
        and (select not q.archive from postbus.queue q where q.id = m.queue_id) returning m.queue_id, m.key)
    insert into postbus.key_wake (queue_id, key, due, freed) select d.queue_id, d.key, postbus.now_(), true from d returning queue_id into v_n;
    if found then
      perform postbus._wake(q.notify, q.name, q.register, pg_sequence_last_value(q.register)) from postbus.queue q where q.id = v_n;
      return 1;
    end if;
  -- A whole batch from the log, which is most of them: the fence and the work are one DELETE.
  elsif ack.receipt ~ '^s\d{1,18}$' then
    delete from postbus.lease l where l.token = substr(ack.receipt, 2)::bigint and l.base is not null
    returning coalesce(cardinality(l.ids), l.count) into v_n;
    if found then
      return v_n;
    end if;
  end if;
  return postbus.ack(array[ack.receipt]);
end
$$;

-- Some messages of a batch of a stream, by id.
create or replace function postbus.ack(receipt text, ids bigint[])
returns int
language plpgsql
as $$
begin
  if receipt !~ '^s' then
    raise exception using errcode = 'PB003', message = format('%L is not a batch', receipt),
      hint = 'Only a batch of a stream has parts; finish the messages of a queue by their receipts.';
  end if;
  return postbus.ack(array(select split_part(receipt, ':', 1) || ':' || x from unnest(ids) x));
end
$$;

-- p_streams: the receipts of the same call that are a stream's.
create or replace function postbus._check_state(p_state jsonb, p_streams text[])
returns void
language plpgsql
immutable
as $$
begin
  if pg_column_size(p_state) > 65536 then
    raise exception using errcode = 'PB003', message = format('the state of a message must be small: %s bytes of at most 65536', pg_column_size(p_state)),
      hint = 'Keep large data in a table of your own, and its key in the state.';
  end if;
  if p_state is not null and p_streams <> '{}' then
    raise exception using errcode = 'PB003', message = 'messages of a stream have no state: it belongs to the event, not to one group',
      hint = 'Leave state out, or use a queue.';
  end if;
end
$$;

create or replace function postbus._give_back(p_receipts text[], p_delay interval, p_reason text, p_state jsonb, p_final boolean)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v record := postbus._sorted(p_receipts);
begin
  perform postbus._check_state(p_state, v.streams);
  return postbus._nack_work(v.logged, p_delay, p_reason, p_state, p_final)
    + postbus._nack_work_unlogged(v.unlogged, p_delay, p_reason, p_state, p_final)
    + case when v.streams <> '{}' then postbus._stream_nack(v.streams, p_delay, p_reason, p_final) else 0 end;
end
$$;

-- Gives messages back: they come again after delay (default: the backoff of their group or queue), or go to the dead
-- letters after max_attempts. state, for queues: what the next attempt finds.
create or replace function postbus.nack(receipts text[], delay interval default null, reason text default null, state jsonb default null)
returns int
language sql
as $$
  select postbus._give_back(receipts, case when delay is not null then greatest(delay, interval '0') end, coalesce(reason, 'nack'), state, false)
$$;

create or replace function postbus.nack(receipt text, delay interval default null, reason text default null, state jsonb default null)
returns int
language sql
as $$
  select postbus.nack(array[receipt], delay, reason, state)
$$;

-- Gives messages back that were taken but not begun: they are due at once, and the attempt does not count.
create or replace function postbus.release(receipts text[])
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v record := postbus._sorted(receipts);
begin
  return postbus._release_work(v.logged) + postbus._release_work_unlogged(v.unlogged)
    + case when v.streams <> '{}' then postbus._stream_release(v.streams) else 0 end;
end
$$;

create or replace function postbus.release(receipt text)
returns int
language sql
as $$
  select postbus.release(array[receipt])
$$;

-- Gives messages up at once.
create or replace function postbus.dead_letter(receipts text[], reason text default null)
returns int
language sql
as $$
  select postbus._give_back(receipts, null, coalesce(reason, 'given up'), null, true)
$$;

create or replace function postbus.dead_letter(receipt text, reason text default null)
returns int
language sql
as $$
  select postbus.dead_letter(array[receipt], reason)
$$;

-- A heartbeat: the lease runs for at least that long from now (default: the lease of the group or queue); it is never
-- shortened. Returns when the first of them ends. state, for queues: what the next attempt finds should this one die.
create or replace function postbus.extend(receipts text[], lease interval default null, state jsonb default null)
returns timestamptz
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v record := postbus._sorted(receipts);
begin
  if extend.lease <= interval '0' then
    raise exception using errcode = 'PB003', message = 'extend needs a lease longer than zero';
  end if;
  perform postbus._check_state(extend.state, v.streams);
  return least(postbus._extend_work(v.logged, extend.lease, extend.state),
    postbus._extend_work_unlogged(v.unlogged, extend.lease, extend.state),
    case when v.streams <> '{}' then postbus._stream_extend(v.streams, extend.lease) end);
end
$$;

create or replace function postbus.extend(receipt text, lease interval default null, state jsonb default null)
returns timestamptz
language sql
as $$
  select postbus.extend(array[receipt], lease, state)
$$;

-- The lease that messages come on when none is asked for: of a queue, or of a group of a stream.
create or replace function postbus.default_lease(name text, "group" text default null)
returns interval
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_lease interval;
begin
  if default_lease."group" is null then
    select q.lease into v_lease from postbus.queue q where q.name = default_lease.name;
  else
    select g.lease into v_lease from postbus."group" g where g.stream_name = default_lease.name and g.name = default_lease."group";
  end if;
  if found then
    return v_lease;
  elsif default_lease."group" is null then
    return (postbus._queue(default_lease.name)).lease;
  end if;
  return (postbus._group(postbus._stream(default_lease.name), default_lease."group")).lease;
end
$$;
