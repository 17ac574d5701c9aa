-- Dead letters: messages that had their attempts. They belong to the group that gave them up, and go back to it alone.

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
  v_s postbus.stream := postbus._stream(dead_letters.name);
begin
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

-- Sends dead letters back to the group that gave them up, with their attempts to begin again. ids null: all of them.
create or replace function postbus.redrive(name text, ids bigint[] default null, "group" text default null)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_s postbus.stream := postbus._stream(redrive.name);
  v_g postbus."group";
  v_total int := 0;
  v_named int;
  v_n int;
begin
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
      message = format('stream %L has only %s of the %s dead letters named', redrive.name, v_total, v_named),
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
  v_s postbus.stream := postbus._stream(purge_dead_letters.name);
  v_n int;
begin
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
