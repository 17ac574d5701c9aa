-- The archive: what was finished in queues with on_ack = archive. Partitioned by the day a row is to go, which is fixed
-- when it comes in: whatever the queues' retentions are, old rows go by dropping a whole day.

create table if not exists postbus.archive (
  queue_id int not null,
  id bigint not null,
  finished_at timestamptz not null,
  expires_at timestamptz not null,
  created_at timestamptz not null,
  attempt int not null,
  priority smallint not null,
  type text not null,
  key text,
  payload text,
  blob bytea,
  headers jsonb,
  state jsonb,
  worker text
) partition by range (expires_at);
-- Catches what comes before upkeep has made its day.
create table if not exists postbus.archive_rest partition of postbus.archive default;
create index if not exists archive_id on postbus.archive (queue_id, id);
create index if not exists archive_time on postbus.archive (queue_id, finished_at);
create index if not exists archive_key on postbus.archive (queue_id, key, finished_at);

create or replace function postbus._archive(p_rows postbus.queued[])
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into postbus.archive (queue_id, id, finished_at, expires_at, created_at, attempt, priority, type, key, payload, blob, headers, state, worker)
  select m.queue_id, m.id, postbus.now_(), postbus.now_() + q.archive_retain, m.created_at, m.attempt, m.priority, m.type, m.key, m.payload,
    m.blob, m.headers, m.state, nullif(m.worker, '')
  from unnest(p_rows) m join postbus.queue q on q.id = m.queue_id where q.archive;
end
$$;

-- Finished messages, newest first: by id, by key, by when they were finished.
create or replace function postbus.archived(
  queue text,
  id bigint default null,
  key text default null,
  since timestamptz default null,
  until timestamptz default null,
  max int default 100
)
returns setof postbus.finished
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_q postbus.queue := postbus._queue(archived.queue);
begin
  return query
  select a.id, a.type, a.key, a.payload, a.blob, a.headers, a.priority::int, a.created_at, a.finished_at, a.expires_at, a.attempt, a.worker, a.state
  from postbus.archive a
  where a.queue_id = v_q.id and a.expires_at > postbus.now_()
    and (archived.id is null or a.id = archived.id) and (archived.key is null or a.key = archived.key)
    and (archived.since is null or a.finished_at >= archived.since) and (archived.until is null or a.finished_at < archived.until)
  order by a.finished_at desc, a.id desc limit archived.max;
end
$$;

-- Makes the days that rows of today and the next two days will go into, and moves in what had to go into the rest. A day
-- that cannot be made now (somebody writes into the rest) is made next time.
create or replace function postbus._make_archive_days()
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set timezone = 'UTC'
as $$
declare
  v_day date;
  v_name text;
  v_n int := 0;
begin
  for v_day in
    select distinct (date_trunc('day', postbus.now_() + q.archive_retain))::date + i
    from postbus.queue q, generate_series(0, 2) i where q.archive
  loop
    v_name := format('archive_%s', to_char(v_day, 'YYYYMMDD'));
    continue when to_regclass('postbus.' || v_name) is not null or not pg_try_advisory_xact_lock(1886351995, v_day - date '2000-01-01');
    begin
      lock table postbus.archive_rest in access exclusive mode;
      execute format('create table postbus.%I (like postbus.archive including defaults)', v_name);
      execute format('with d as (delete from postbus.archive_rest where expires_at >= %L and expires_at < %L returning *)
        insert into postbus.%I select d.* from d', v_day::timestamptz, (v_day + 1)::timestamptz, v_name);
      execute format('alter table postbus.archive attach partition postbus.%I for values from (%L) to (%L)', v_name,
        v_day::timestamptz, (v_day + 1)::timestamptz);
      v_n := v_n + 1;
    exception when lock_not_available or duplicate_table or unique_violation then
      null;
    end;
  end loop;
  return v_n;
end
$$;

-- Drops the first day that is over, and deletes what is over of the rest. One day in a transaction: the lock lasts until its
-- end.
create or replace function postbus._drop_archive_day()
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
as $$
declare
  v_name text;
begin
  delete from postbus.archive_rest a where a.expires_at <= postbus.now_();
  select c.relname into v_name from pg_class c join pg_inherits i on i.inhrelid = c.oid
  where i.inhparent = 'postbus.archive'::regclass and c.relname ~ '^archive_\d{8}$'
    and to_date(right(c.relname, 8), 'YYYYMMDD') < (postbus.now_() at time zone 'UTC')::date
  order by c.relname limit 1;
  if v_name is null then
    return null;
  end if;
  begin
    -- Frees the space at the price of one lock on this table; dropping it locks the archive, and may have to wait.
    execute format('truncate table postbus.%I', v_name);
    execute format('drop table postbus.%I', v_name);
    return v_name;
  exception when lock_not_available then
    return null;
  end;
end
$$;
