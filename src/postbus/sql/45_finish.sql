-- Finishing what was consumed from a stream. A receipt is s<token>:<id> for one message or s<token> for its batch. The
-- lease row itself is the fence: it is deleted or updated, so a late call finds nothing, and one from a stale snapshot
-- gets a serialization error. Plans are pinned to indexes: a table that was tiny when they were made may be full of dead
-- rows that an old snapshot holds.

-- Receipts as (token, ids): ids null means the whole batch. Anything that is not a receipt is refused.
create or replace function postbus._receipts(p_receipts text[])
returns table (token bigint, ids bigint[])
language plpgsql
immutable
as $$
declare
  v_bad text;
begin
  select coalesce(r, 'null') into v_bad from unnest(p_receipts) r where r is null or r !~ '^s\d{1,18}(:\d{1,18})?$' limit 1;
  if v_bad is not null then
    raise exception using errcode = 'PB003', message = format('%L is not a receipt', v_bad),
      hint = 'Pass the receipt or the batch of a message as consume or receive returned it.';
  end if;
  return query
  select x.token, case when bool_or(x.id = '') then null else array_agg(nullif(x.id, '')::bigint) end
  from (select split_part(substr(r, 2), ':', 1)::bigint as token, split_part(r, ':', 2) as id from unnest(p_receipts) r) x
  group by x.token order by x.token;
end
$$;

create or replace function postbus._lease_lost(p_token bigint, p_ids bigint[] default null)
returns void
language plpgsql
immutable
as $$
begin
  raise exception using errcode = 'PB004',
    message = format('lease s%s%s is lost', p_token, case when p_ids is null then '' else ' on message ' || array_to_string(p_ids, ', ') end),
    hint = 'It expired and went to another worker, or was finished before. Nothing was changed.';
end
$$;

-- The messages of a lease that are unfinished, whole. From the log for a first delivery, else from where they wait.
create or replace function postbus._lease_messages(p_l postbus.lease)
returns table (id bigint, attempt int, at timestamptz, type text, key text, payload text, blob bytea, headers jsonb)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v_b postbus.tick;
  v_u postbus.tick;
begin
  if p_l.base is null then
    return query
    select r.id, r.attempt, r.at, r.type, r.key, r.payload, r.blob, r.headers from postbus.redelivery r where r.token = p_l.token;
    return;
  end if;
  select t.* into v_u from postbus.tick t where t.stream_id = p_l.stream_id and t.id = p_l.upper;
  select t.* into v_b from postbus.tick t where t.stream_id = p_l.stream_id and t.id = p_l.base;
  -- The ring after the ticks, as in consume.
  select s.* into v_s from postbus.stream s where s.id = p_l.stream_id;
  if v_b.id is null or v_u.id is null or p_l.base < v_s.floor_tick then
    raise exception using errcode = 'PB005', message = format('the window of lease s%s is no longer kept', p_l.token),
      hint = 'The group fell behind max_retain; seek to earliest.';
  end if;
  return query execute format('select f.id, 1, f.created_at, f.type, f.key, f.payload, f.blob, f.headers
    from unnest(postbus._page_%s_%s($1, $2, $3, $4, $5, $6, $7, $8, null, null)) f where $9 is null or f.id = any ($9)', p_l.stream_id, v_s.ring)
  using v_b, v_u, p_l.after_id, p_l.to_id, p_l.lane is null or p_l.lanes is not null, p_l.lane, p_l.lanes, v_s.max_lanes, p_l.ids;
end
$$;

-- Locks a lease and says which of its messages a call is about. ids null: all that are unfinished.
create or replace function postbus._hold(p_token bigint, p_ids bigint[], out lease postbus.lease, out ids bigint[], out rest bigint[])
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_open bigint[];
begin
  select l.* into lease from postbus.lease l where l.token = p_token for update;
  if not found then
    perform postbus._lease_lost(p_token);
  end if;
  v_open := coalesce(lease.ids, array(select m.id from postbus._lease_messages(lease) m));
  ids := coalesce(p_ids, v_open);
  if not ids <@ v_open then
    perform postbus._lease_lost(p_token, array(select x from unnest(ids) x where x <> all (v_open)));
  end if;
  rest := array(select x from unnest(v_open) x where x <> all (ids));
end
$$;

-- What is left of a lease after some of it was finished.
create or replace function postbus._shrink(p_token bigint, p_rest bigint[])
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  if cardinality(p_rest) = 0 then
    delete from postbus.lease l where l.token = p_token;
  else
    update postbus.lease l set ids = p_rest where l.token = p_token;
  end if;
end
$$;

-- Messages that were parked behind one that is finished now. Some at a time: if the next one fails too, few move back.
create or replace function postbus._release(p_slot int, p_ordering text, p_keys text[], p_now timestamptz)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_key text;
begin
  if p_ordering = 'stream' then
    if not exists (select from postbus.redelivery r where r.slot_id = p_slot and (r.token is not null or r.due < 'infinity')) then
      update postbus.redelivery r set due = p_now
      where r.slot_id = p_slot and r.id in (select x.id from postbus.redelivery x where x.slot_id = p_slot order by x.id limit 100);
    end if;
  elsif p_ordering = 'key' then
    for v_key in select distinct k from unnest(p_keys) k where k is not null order by k loop
      if not exists (select from postbus.redelivery r where r.slot_id = p_slot and r.key = v_key and (r.token is not null or r.due < 'infinity')) then
        update postbus.redelivery r set due = p_now
        where r.slot_id = p_slot and r.id in (
          select x.id from postbus.redelivery x where x.slot_id = p_slot and x.key = v_key order by x.id limit 100);
      end if;
    end loop;
  end if;
end
$$;

create or replace function postbus._ack(p_token bigint, p_ids bigint[])
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v record;
  v_keys text[];
  v_gone postbus.lease;
begin
  if p_ids is null then
    delete from postbus.lease l where l.token = p_token returning l.* into v_gone;
    if not found then
      perform postbus._lease_lost(p_token);
    end if;
    if v_gone.base is not null then
      return coalesce(cardinality(v_gone.ids), v_gone.count);
    end if;
    with d as (delete from postbus.redelivery r where r.token = p_token returning r.key)
    select array_agg(d.key) into v_keys from d;
    perform postbus._release(v_gone.slot_id, g.ordering, v_keys, postbus.now_()) from postbus."group" g where g.id = v_gone.group_id;
    return coalesce(cardinality(v_keys), 0);
  end if;
  v := postbus._hold(p_token, p_ids);
  perform postbus._shrink(p_token, v.rest);
  if (v.lease).base is null then
    with d as (delete from postbus.redelivery r where r.token = p_token and r.id = any (p_ids) returning r.key)
    select array_agg(d.key) into v_keys from d;
    perform postbus._release((v.lease).slot_id, g.ordering, v_keys, postbus.now_()) from postbus."group" g where g.id = (v.lease).group_id;
  end if;
  return cardinality(p_ids);
end
$$;

create or replace function postbus._stream_ack(p_receipts text[])
returns int
language sql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
  select coalesce(sum(postbus._ack(r.token, r.ids)), 0)::int from postbus._receipts(p_receipts) r
$$;

-- How long to wait after a number of attempts: doubled each time up to the group's bound, spread by a quarter both ways.
create or replace function postbus._backoff(p_backoff interval, p_max interval, p_attempt int)
returns interval
language sql
volatile
as $$
  select least(p_backoff * power(2, least(p_attempt - 1, 40)), p_max) * (0.75 + random() / 2)
$$;

-- Messages of a lease that failed go to wait for another try, or to the dead letters when they had enough. Where order
-- matters, the later messages of the same key (ordering stream: all later ones) go back too and wait behind.
--   p_delay null: the group's backoff; p_final: to the dead letters at once; p_alone: the worker died.
create or replace function postbus._fail(
  p_lease postbus.lease,
  p_ids bigint[],
  p_rest bigint[],
  p_delay interval,
  p_reason text,
  p_final boolean,
  p_alone boolean
)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_g postbus."group";
  v_now timestamptz := postbus.now_();
  v_m record;
  v_behind boolean;
  v_held text[] := '{}';              -- keys with a message that waits, in ordering key
  v_blocked boolean := false;         -- the same for ordering stream
  v_freed text[] := '{}';
  v_back bigint[] := '{}';
begin
  select g.* into strict v_g from postbus."group" g where g.id = p_lease.group_id;
  for v_m in select m.* from postbus._lease_messages(p_lease) m order by m.id loop
    v_behind := case v_g.ordering when 'stream' then v_blocked when 'key' then v_m.key = any (v_held) else false end;
    if v_m.id = any (p_ids) then
      if p_final or v_m.attempt >= v_g.max_attempts then
        insert into postbus.dead_letter (stream_id, group_id, event_id, attempt, reason, died_at, at, type, key, payload, blob, headers)
        values (v_g.stream_id, v_g.id, v_m.id, v_m.attempt, p_reason, v_now, v_m.at, v_m.type, v_m.key, v_m.payload, v_m.blob, v_m.headers);
        delete from postbus.redelivery r where r.slot_id = p_lease.slot_id and r.id = v_m.id;
        v_freed := v_freed || v_m.key;
        continue;
      end if;
      insert into postbus.redelivery as r (slot_id, id, due, attempt, alone, reason, at, type, key, payload, blob, headers)
      values (p_lease.slot_id, v_m.id,
        -- What a dead worker had comes back before everything else that waits.
        case when p_alone then '-infinity' when v_behind then 'infinity'
          else v_now + coalesce(p_delay, postbus._backoff(v_g.backoff, v_g.max_backoff, v_m.attempt)) end,
        v_m.attempt, p_alone, p_reason, v_m.at, v_m.type, v_m.key, v_m.payload, v_m.blob, v_m.headers)
      on conflict (slot_id, id) do update set due = excluded.due, token = null, alone = excluded.alone, reason = excluded.reason;
      v_blocked := true;
      if v_m.key is not null then
        v_held := v_held || v_m.key;
      end if;
    elsif v_behind and v_m.id = any (p_rest) then
      insert into postbus.redelivery as r (slot_id, id, due, attempt, reason, at, type, key, payload, blob, headers)
      values (p_lease.slot_id, v_m.id, 'infinity', v_m.attempt - 1, 'behind an earlier message that failed',
        v_m.at, v_m.type, v_m.key, v_m.payload, v_m.blob, v_m.headers)
      on conflict (slot_id, id) do update set due = 'infinity', token = null, attempt = r.attempt - 1;
      v_back := v_back || v_m.id;
    end if;
  end loop;
  -- What waited already, later than a message that now waits longer, waits behind it.
  if not p_alone and v_g.ordering <> 'none' and (v_blocked or cardinality(v_held) > 0) then
    update postbus.redelivery r set due = 'infinity'
    where r.slot_id = p_lease.slot_id and r.token is null and r.due < 'infinity' and r.id <> all (p_ids)
      and (v_g.ordering = 'stream' or r.key = any (v_held))
      and r.id > (select min(x) from unnest(p_ids) x);
  end if;
  if cardinality(v_freed) > 0 then
    perform postbus._release(p_lease.slot_id, v_g.ordering, v_freed, v_now);
  end if;
  return v_back;
end
$$;

create or replace function postbus._nack(p_token bigint, p_ids bigint[], p_delay interval, p_reason text, p_final boolean)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v record := postbus._hold(p_token, p_ids);
  v_back bigint[];
begin
  v_back := postbus._fail(v.lease, v.ids, v.rest, p_delay, p_reason, p_final, false);
  perform postbus._shrink(p_token, array(select x from unnest(v.rest) x where x <> all (v_back)));
  return cardinality(v.ids);
end
$$;

create or replace function postbus._stream_nack(p_receipts text[], p_delay interval, p_reason text, p_final boolean)
returns int
language sql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
  select coalesce(sum(postbus._nack(r.token, r.ids, p_delay, p_reason, p_final)), 0)::int from postbus._receipts(p_receipts) r
$$;

-- Messages that were not begun go to wait, due now, and the delivery does not count. Where order matters, the later ones of
-- the lease that share it go with them. All of them are due: they come in the order of their ids.
create or replace function postbus._stream_release(p_receipts text[])
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_token bigint;
  v_ids bigint[];
  v record;
  v_g postbus."group";
  v_back bigint[];
  v_n int := 0;
begin
  for v_token, v_ids in select r.token, r.ids from postbus._receipts(p_receipts) r loop
    v := postbus._hold(v_token, v_ids);
    select g.* into strict v_g from postbus."group" g where g.id = (v.lease).group_id;
    with m as (
      select x.*, x.id = any (v.ids) as named,
        min(x.id) filter (where x.id = any (v.ids)) over (partition by case when v_g.ordering = 'key' then x.key end) as first
      from postbus._lease_messages(v.lease) x),
    i as (
      insert into postbus.redelivery as r (slot_id, id, due, attempt, at, type, key, payload, blob, headers)
      select (v.lease).slot_id, m.id, postbus.now_(), m.attempt - 1, m.at, m.type, m.key, m.payload, m.blob, m.headers from m
      where m.named or (v_g.ordering = 'stream' or v_g.ordering = 'key' and m.key is not null) and m.id = any (v.rest) and m.id > m.first
      on conflict (slot_id, id) do update set due = excluded.due, token = null, attempt = excluded.attempt
      returning r.id)
    select array_agg(i.id) into v_back from i;
    perform postbus._shrink(v_token, array(select x from unnest(v.rest) x where x <> all (v_back)));
    perform postbus._wake(s.notify, s.name, s.register, pg_sequence_last_value(s.register)) from postbus.stream s where s.id = v_g.stream_id;
    v_n := v_n + cardinality(v.ids);
  end loop;
  return v_n;
end
$$;

create or replace function postbus._stream_extend(p_receipts text[], p_lease interval)
returns timestamptz
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_token bigint;
  v_until timestamptz;
  v_least timestamptz;
begin
  for v_token in select r.token from postbus._receipts(p_receipts) r loop
    update postbus.lease l set expires_at = greatest(l.expires_at, postbus.now_() + coalesce(p_lease, g.lease))
    from postbus."group" g
    where l.token = v_token and g.id = l.group_id
    returning l.expires_at into v_until;
    if not found then
      perform postbus._lease_lost(v_token);
    end if;
    v_least := least(v_least, v_until);
  end loop;
  return v_least;
end
$$;

-- Takes expired leases of a slot back, under the slot's lock. One whose owner is just finishing it is left alone.
create or replace function postbus._reclaim(p_p postbus.progress, p_now timestamptz)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_lease postbus.lease;
  v_ids bigint[];
begin
  for v_lease in
    select l.* from postbus.lease l where l.slot_id = p_p.slot_id and l.token >= p_p.token and l.expires_at <= p_now
    order by l.slot_id, l.token for update skip locked
  loop
    v_ids := coalesce(v_lease.ids, array(select m.id from postbus._lease_messages(v_lease) m));
    perform postbus._fail(v_lease, v_ids, '{}', interval '0', 'lease expired', false, true);
    delete from postbus.lease l where l.token = v_lease.token;
  end loop;
  insert into postbus.progress (slot_id, n, base, upper, last_id, token, next_expiry, change_id, at)
  select p_p.slot_id, p_p.n + 1, p_p.base, p_p.upper, p_p.last_id,
    coalesce(min(l.token), pg_sequence_last_value('postbus.lease_token'), 0), coalesce(min(l.expires_at), 'infinity'), p_p.change_id, p_p.at
  from postbus.lease l where l.slot_id = p_p.slot_id and l.token >= p_p.token;
end
$$;

-- Redeliveries that are due, on a new lease. A message whose worker died has its last try alone: a poison message then
-- takes no neighbours with it.
create or replace function postbus._take_redelivery(
  p_g postbus."group",
  p_p postbus.progress,
  p_max int,
  p_until timestamptz,
  p_worker text,
  p_now timestamptz
)
returns setof postbus.message
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_token bigint := nextval('postbus.lease_token');
  v_ids bigint[] := '{}';
  v_r record;
begin
  for v_r in
    select r.id, r.alone and r.attempt + 1 >= p_g.max_attempts as alone from postbus.redelivery r
    where r.slot_id = p_p.slot_id and r.token is null and r.due <= p_now
    order by case when p_g.ordering = 'none' then r.due end, r.id limit p_max
  loop
    exit when v_r.alone and cardinality(v_ids) > 0;
    v_ids := v_ids || v_r.id;
    exit when v_r.alone;
  end loop;
  if cardinality(v_ids) = 0 then
    return;
  end if;
  insert into postbus.lease (token, slot_id, group_id, stream_id, count, expires_at, worker, at)
  values (v_token, p_p.slot_id, p_g.id, p_g.stream_id, cardinality(v_ids), p_until, p_worker, p_now);
  insert into postbus.progress (slot_id, n, base, upper, last_id, token, next_expiry, change_id, at)
  values (p_p.slot_id, p_p.n + 1, p_p.base, p_p.upper, p_p.last_id,
    case when p_g.ordering = 'none' then p_p.token else v_token end, least(p_p.next_expiry, p_until), p_p.change_id, p_now);
  return query
  with u as (
    update postbus.redelivery r set token = v_token, attempt = r.attempt + 1
    where r.slot_id = p_p.slot_id and r.id = any (v_ids) returning r.*)
  select u.id, u.type, u.key, u.payload, u.blob, u.headers, u.at, u.attempt, format('s%s:%s', v_token, u.id), 's' || v_token
  from u order by u.id;
end
$$;
