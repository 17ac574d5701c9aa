-- Dead letters: messages that had their attempts. They belong to the group or queue that gave them up, and go back to it
-- alone.

-- The id of a queue, or null where the name is a stream's. PB001 if it is neither.
create or replace function postbus._queue_or_stream(p_name text, p_group text)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_id int;
begin
  select q.id into v_id from postbus.queue q where q.name = p_name;
  if not found and not exists (select from postbus.stream s where s.name = p_name) then
    raise exception using errcode = 'PB001', message = format('stream or queue %L does not exist', p_name),
      hint = 'List them: select * from postbus.list_streams(), select * from postbus.list_queues().';
  end if;
  if v_id is not null and p_group is not null then
    raise exception using errcode = 'PB003', message = format('%L is a queue: it has no groups', p_name);
  end if;
  return v_id;
end
$$;

create or replace function postbus.dead_letters(name text, "group" text default null, max int default 100, after bigint default 0)
returns table (
  id bigint, group_name text, event_id bigint, type text, key text, payload text, blob bytea, headers jsonb,
  created_at timestamptz, attempt int, reason text, died_at timestamptz
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_queue int := postbus._queue_or_stream(dead_letters.name, dead_letters."group");
  v_s postbus.stream;
begin
  if v_queue is not null then
    return query
    select d.id, null::text, d.event_id, d.type, d.key, d.payload, d.blob, d.headers, d.at, d.attempt, d.reason, d.died_at
    from postbus.dead_letter d where d.queue_id = v_queue and d.id > dead_letters.after order by d.id limit dead_letters.max;
    return;
  end if;
  v_s := postbus._stream(dead_letters.name);
  if dead_letters."group" is not null then
    perform postbus._group(v_s, dead_letters."group");
  end if;
  return query
  select d.id, g.name, d.event_id, d.type, d.key, d.payload, d.blob, d.headers, d.at, d.attempt, d.reason, d.died_at
  from postbus.dead_letter d join postbus."group" g on g.id = d.group_id
  where g.stream_id = v_s.id and (dead_letters."group" is null or g.name = dead_letters."group") and d.id > dead_letters.after
  order by d.id limit dead_letters.max;
end
$$;

-- Puts dead letters back into their queue, with the ids they had. The claim goes on from where it was: old receipts stay
-- old.
create or replace function postbus._redrive_queue(p_queue int, p_ids bigint[])
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_q postbus.queue;
  v_ids bigint[];
  v_n int;
begin
  select q.* into strict v_q from postbus.queue q where q.id = p_queue;
  -- What another session is just redriving is not ours.
  v_ids := array(select x.id from postbus.dead_letter x where x.queue_id = p_queue and (p_ids is null or x.id = any (p_ids)) for update skip locked);
  if v_q.unlogged then
    with d as (
      delete from postbus.dead_letter x where x.id = any (v_ids) returning x.*)
    insert into postbus.queued_unlogged (id, due, created_at, queue_id, claim, priority, type, key, payload, blob, headers, state, reason)
    select d.event_id, postbus.now_(), d.at, p_queue, d.claim + 1, d.priority, d.type, d.key, d.payload, d.blob, d.headers, d.state, 'redriven' from d;
  else
    with d as (
      delete from postbus.dead_letter x where x.id = any (v_ids) returning x.*),
    w as (
      insert into postbus.key_wake (queue_id, key, due, freed)
      select distinct p_queue, d.key, postbus.now_(), false from d where v_q.keyed and d.key is not null)
    insert into postbus.queued (id, due, created_at, queue_id, claim, priority, keyed, type, key, payload, blob, headers, state, reason)
    select d.event_id, postbus.now_(), d.at, p_queue, d.claim + 1, d.priority, v_q.keyed and d.key is not null, d.type, d.key, d.payload, d.blob,
      d.headers, d.state, 'redriven' from d;
  end if;
  get diagnostics v_n = row_count;
  perform postbus._wake(v_q.notify, v_q.name, v_q.register, pg_sequence_last_value(v_q.register));
  return v_n;
end
$$;

-- Sends dead letters back to the group or queue that gave them up, with their attempts to begin again. ids null: all of them.
create or replace function postbus.redrive(name text, ids bigint[] default null, "group" text default null)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_queue int := postbus._queue_or_stream(redrive.name, redrive."group");
  v_s postbus.stream;
  v_g postbus."group";
  v_total int := 0;
  v_named int;
  v_n int;
begin
  if v_queue is not null then
    v_total := postbus._redrive_queue(v_queue, redrive.ids);
  else
    v_s := postbus._stream(redrive.name);
  end if;
  if redrive."group" is not null then
    perform postbus._group(v_s, redrive."group");
  end if;
  for v_g in
    select g.* from postbus."group" g where g.stream_id = v_s.id and (redrive."group" is null or g.name = redrive."group")
    order by g.id for share
  loop
    with d as (
      delete from postbus.dead_letter x where x.group_id = v_g.id and (redrive.ids is null or x.id = any (redrive.ids)) returning x.*),
    i as (
      insert into postbus.redelivery (slot_id, id, due, attempt, reason, at, type, key, payload, blob, headers)
      select v_g.slots[case when v_g.ordering = 'stream' then 1 else postbus._lane(d.key, d.event_id, v_g.lanes) + 1 end],
        d.event_id, postbus.now_(), 0, 'redriven', d.at, d.type, d.key, d.payload, d.blob, d.headers
      from d
      -- After a seek the same event may wait already.
      on conflict (slot_id, id) do nothing)
    select count(*) into v_n from d;
    v_total := v_total + v_n;
  end loop;
  v_named := (select count(distinct x) from unnest(redrive.ids) x);
  if redrive.ids is not null and v_total <> v_named then
    raise exception using errcode = 'PB001',
      message = format('%L has only %s of the %s dead letters named', redrive.name, v_total, v_named),
      hint = format('List them: select * from postbus.dead_letters(%L). Nothing was changed.', redrive.name);
  end if;
  return v_total;
end
$$;

create or replace function postbus.purge_dead_letters(name text, older_than interval default '30 days', "group" text default null)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_queue int := postbus._queue_or_stream(purge_dead_letters.name, purge_dead_letters."group");
  v_s postbus.stream;
  v_n int;
begin
  if v_queue is not null then
    delete from postbus.dead_letter d where d.id in (
      select x.id from postbus.dead_letter x where x.queue_id = v_queue and x.died_at <= postbus.now_() - purge_dead_letters.older_than
      for update skip locked);
    get diagnostics v_n = row_count;
    return v_n;
  end if;
  v_s := postbus._stream(purge_dead_letters.name);
  if purge_dead_letters."group" is not null then
    perform postbus._group(v_s, purge_dead_letters."group");
  end if;
  delete from postbus.dead_letter d using postbus."group" g
  where g.id = d.group_id and g.stream_id = v_s.id
    and (purge_dead_letters."group" is null or g.name = purge_dead_letters."group")
    and d.died_at <= postbus.now_() - purge_dead_letters.older_than;
  get diagnostics v_n = row_count;
  return v_n;
end
$$;
