-- Pipelines: programs outside the database that move data in runs (archive, mirror, replay, report), and the record of
-- each run: rows, bytes, seconds, from where to where. They tell it themselves; nothing here moves data.
--
-- A pipeline has one run at a time. The session that began the run holds an advisory lock until it ends the run or is
-- gone: a run whose session is gone was abandoned, and the next one may begin.
-- Lock order: the pipeline row comes before all others.

create sequence if not exists postbus.pipeline_id as int;

create table if not exists postbus.pipeline (
  id int primary key default nextval('postbus.pipeline_id'),
  name text not null unique,
  kind text not null,
  streams text[],                     -- null: those that have its group
  "group" text,                       -- whose position shows how far it is
  rows bigint not null default 0,     -- of all runs, also of those that were pruned
  bytes bigint not null default 0,
  runs bigint not null default 0,
  failures bigint not null default 0,
  since jsonb,                        -- the offsets that were reported last
  until jsonb,
  error text,                         -- the last one
  error_at timestamptz,
  created_at timestamptz not null
);

create table if not exists postbus.pipeline_run (
  id bigint primary key generated always as identity,
  pipeline_id int not null references postbus.pipeline on delete cascade,
  state text not null,                -- running, done, failed, abandoned
  options jsonb not null,
  rows bigint not null default 0,
  bytes bigint not null default 0,
  total bigint,                       -- rows that there are to do, as far as that is known
  since jsonb,
  until jsonb,
  error text,
  started_at timestamptz not null,
  seen_at timestamptz not null,       -- the last that was heard of it
  ended_at timestamptz
);
create index if not exists pipeline_run_pipeline on postbus.pipeline_run (pipeline_id, id);

-- The session that holds a pipeline. Null: none.
create or replace function postbus._pipeline_session(p_pipeline int)
returns int
language sql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
  select l.pid from pg_locks l
  where l.locktype = 'advisory' and l.database = (select d.oid from pg_database d where d.datname = current_database())
    and l.classid = 1886351997::oid and l.objid = p_pipeline::oid and l.objsubid = 2 and l.granted
  limit 1
$$;

-- What is to be said of a run: one that runs without a session does not run.
create or replace function postbus._run_state(p_r postbus.pipeline_run)
returns text
language sql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
  select case when p_r.state = 'running' and postbus._pipeline_session(p_r.pipeline_id) is null then 'abandoned' else p_r.state end
$$;

create or replace function postbus._run_seconds(p_r postbus.pipeline_run)
returns float8
language sql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
  select greatest(0, date_part('epoch', coalesce(p_r.ended_at,
    case when postbus._run_state(p_r) = 'running' then postbus.now_() else p_r.seen_at end) - p_r.started_at))
$$;

-- Begins a run, and makes the pipeline if it is new. The calling session holds the pipeline until end_run or its own end.
--   streams, group: what it reads, for lag. options: what it was asked to do, for people to look at.
create or replace function postbus.begin_run(
  pipeline text,
  kind text,
  options jsonb default '{}',
  streams text[] default null,
  "group" text default null
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_p postbus.pipeline;
  v_last postbus.pipeline_run;
  v_pid int;
  v_now timestamptz := postbus.now_();
  v_run bigint;
begin
  perform postbus._need_read_committed('begin_run');
  perform postbus._check_name('pipeline', begin_run.pipeline);
  perform postbus._check_name('kind', begin_run.kind);
  if jsonb_typeof(begin_run.options) is distinct from 'object' then
    raise exception using errcode = 'PB003', message = format('options of pipeline %L must be a JSON object', begin_run.pipeline);
  end if;
  -- It locks the row also where it changes nothing.
  insert into postbus.pipeline as p (name, kind, created_at) values (begin_run.pipeline, begin_run.kind, v_now)
  on conflict (name) do update set name = p.name returning p.* into strict v_p;
  if v_p.kind <> begin_run.kind then
    raise exception using errcode = 'PB002', message = format('pipeline %L is of kind %s, not %s', v_p.name, v_p.kind, begin_run.kind),
      hint = format('Use another name, or drop it: select postbus.drop_pipeline(%L).', v_p.name);
  end if;
  select r.* into v_last from postbus.pipeline_run r where r.pipeline_id = v_p.id order by r.id desc limit 1;
  v_pid := postbus._pipeline_session(v_p.id);
  -- What this session holds without a run is left from a transaction that was rolled back.
  if v_pid <> pg_backend_pid() or v_pid = pg_backend_pid() and v_last.state = 'running'
      or v_pid is null and not pg_try_advisory_lock(1886351997, v_p.id) then
    raise exception using errcode = 'PB002',
      message = format('pipeline %L is running already', v_p.name)
        || coalesce(': run ' || v_last.id || ', begun ' || postbus._span(v_now - v_last.started_at) || ' ago', ''),
      hint = 'Wait until it has ended, or end it' || coalesce(' (its session: select pg_terminate_backend(' || v_pid || '))', '') || '.';
  end if;
  update postbus.pipeline_run r set state = 'abandoned', ended_at = r.seen_at where r.pipeline_id = v_p.id and r.state = 'running';
  insert into postbus.pipeline_run (pipeline_id, state, options, started_at, seen_at)
  values (v_p.id, 'running', begin_run.options, v_now, v_now) returning id into strict v_run;
  update postbus.pipeline p set streams = begin_run.streams, "group" = begin_run."group", runs = p.runs + 1,
    failures = p.failures + case when v_last.state = 'running' then 1 else 0 end
  where p.id = v_p.id;
  return v_run;
end
$$;

-- A run that has not ended, with its pipeline locked and held by this session.
create or replace function postbus._open_run(p_run bigint)
returns postbus.pipeline_run
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_r postbus.pipeline_run;
  v_name text;
begin
  select p.name into v_name from postbus.pipeline p
  where p.id = (select r.pipeline_id from postbus.pipeline_run r where r.id = p_run) for update;
  select r.* into v_r from postbus.pipeline_run r where r.id = p_run;
  if not found then
    raise exception using errcode = 'PB001', message = format('run %s does not exist', coalesce(p_run::text, 'null')),
      hint = 'See postbus.list_runs(). Its pipeline may have been dropped.';
  end if;
  if v_r.state <> 'running' then
    raise exception using errcode = 'PB004', message = format('run %s of pipeline %L is over: %s', p_run, v_name, v_r.state),
      hint = 'Where it lost its session, another run may have taken its place.';
  end if;
  -- A runner that has lost its session comes with another one. Where the server has not noticed yet, it holds on a later call.
  if postbus._pipeline_session(v_r.pipeline_id) is null then
    perform pg_try_advisory_lock(1886351997, v_r.pipeline_id);
  end if;
  return v_r;
end
$$;

-- How far a run is. All figures are of the whole run so far; a call can be repeated.
--   since, until: where it began and where it is, per stream for example. Null leaves them as they are, as total does.
create or replace function postbus.report_run(run bigint, rows bigint, bytes bigint, since jsonb default null, until jsonb default null, total bigint default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_r postbus.pipeline_run := postbus._open_run(report_run.run);
begin
  if report_run.rows is null or report_run.rows < 0 or report_run.bytes is null or report_run.bytes < 0 then
    raise exception using errcode = 'PB003', message = format('run %s needs rows and bytes of at least 0', report_run.run);
  end if;
  update postbus.pipeline_run r set rows = report_run.rows, bytes = report_run.bytes, since = coalesce(report_run.since, r.since),
    until = coalesce(report_run.until, r.until), total = coalesce(report_run.total, r.total), seen_at = postbus.now_()
  where r.id = v_r.id;
  update postbus.pipeline p set rows = p.rows + report_run.rows - v_r.rows, bytes = p.bytes + report_run.bytes - v_r.bytes,
    since = coalesce(report_run.since, p.since), until = coalesce(report_run.until, p.until)
  where p.id = v_r.pipeline_id;
end
$$;

-- Ends a run: done, or failed with an error. Ending it once more changes nothing.
create or replace function postbus.end_run(run bigint, error text default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_state text := case when end_run.error is null then 'done' else 'failed' end;
  v_r postbus.pipeline_run;
  v_now timestamptz := postbus.now_();
begin
  if v_state = (select r.state from postbus.pipeline_run r where r.id = end_run.run) then
    return;
  end if;
  v_r := postbus._open_run(end_run.run);
  update postbus.pipeline_run r set state = v_state, error = left(end_run.error, 4000), seen_at = v_now, ended_at = v_now where r.id = v_r.id;
  if end_run.error is not null then
    update postbus.pipeline p set failures = p.failures + 1, error = left(end_run.error, 4000), error_at = v_now where p.id = v_r.pipeline_id;
  end if;
  -- Whoever begins the next run waits for the row that we hold.
  if postbus._pipeline_session(v_r.pipeline_id) = pg_backend_pid() then
    perform pg_advisory_unlock(1886351997, v_r.pipeline_id);
  end if;
end
$$;

-- Runs, the newest first.
create or replace function postbus.list_runs(name text default null, max int default 100)
returns table (
  run bigint, pipeline text, kind text, state text, started_at timestamptz, ended_at timestamptz, seconds float8, rows bigint, bytes bigint,
  total bigint, since jsonb, until jsonb, options jsonb, error text
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  if list_runs.max is null or list_runs.max < 1 then
    raise exception using errcode = 'PB003', message = 'list_runs: max must be at least 1';
  end if;
  if list_runs.name is not null then
    perform postbus._pipeline(list_runs.name);
  end if;
  return query
  select r.id, p.name, p.kind, postbus._run_state(r.*), r.started_at, r.ended_at, postbus._run_seconds(r.*), r.rows, r.bytes, r.total,
    r.since, r.until, r.options, r.error
  from postbus.pipeline_run r join postbus.pipeline p on p.id = r.pipeline_id
  where list_runs.name is null or p.name = list_runs.name
  order by r.id desc limit list_runs.max;
end
$$;

create or replace function postbus._pipeline(p_name text)
returns postbus.pipeline
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_p postbus.pipeline;
begin
  select p.* into v_p from postbus.pipeline p where p.name = p_name;
  if not found then
    raise exception using errcode = 'PB001', message = format('pipeline %L does not exist', p_name),
      hint = 'See postbus.pipeline_stats().';
  end if;
  return v_p;
end
$$;

-- Pipelines with their last run, all their runs together, and how far behind they are. pending is exact up to count_to events
-- of a stream.
create or replace function postbus.pipeline_stats(count_to int default 1000)
returns table (
  pipeline text, kind text, state text, streams text[], "group" text, started_at timestamptz, ended_at timestamptz, seconds float8,
  rows bigint, bytes bigint, total bigint, total_rows bigint, total_bytes bigint, runs bigint, failures bigint, pending bigint,
  lag_seconds float8, estimated boolean, since jsonb, until jsonb, error text, error_at timestamptz
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := postbus.now_();
  v_p postbus.pipeline;
  v_r postbus.pipeline_run;
begin
  if pipeline_stats.count_to is null or pipeline_stats.count_to < 1 then
    raise exception using errcode = 'PB003', message = 'pipeline_stats: count_to must be at least 1';
  end if;
  for v_p in select p.* from postbus.pipeline p order by p.name loop
    select r.* into v_r from postbus.pipeline_run r where r.pipeline_id = v_p.id order by r.id desc limit 1;
    pipeline := v_p.name;
    kind := v_p.kind;
    state := postbus._run_state(v_r);
    streams := v_p.streams;
    "group" := v_p."group";
    started_at := v_r.started_at;
    ended_at := v_r.ended_at;
    seconds := postbus._run_seconds(v_r);
    rows := v_r.rows;
    bytes := v_r.bytes;
    total := v_r.total;
    total_rows := v_p.rows;
    total_bytes := v_p.bytes;
    runs := v_p.runs;
    failures := v_p.failures;
    error := v_p.error;
    error_at := v_p.error_at;
    since := v_p.since;
    until := v_p.until;
    select sum(b.pending), coalesce(greatest(0, date_part('epoch', v_now - min(b.first_at))), 0), bool_or(b.estimated)
    into pending, lag_seconds, estimated
    from postbus."group" g cross join lateral postbus._backlog(g.*, v_now, pipeline_stats.count_to) b
    where g.name = v_p."group" and (v_p.streams is null or g.stream_name = any (v_p.streams));
    if pending is null then
      lag_seconds := null;
    end if;
    return next;
  end loop;
end
$$;

-- Forgets a pipeline and its runs, and drops its group: retention no longer waits for it. What it wrote stays.
create or replace function postbus.drop_pipeline(name text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_p postbus.pipeline := postbus._pipeline(drop_pipeline.name);
  v_pid int;
  v_stream text;
begin
  perform from postbus.pipeline p where p.id = v_p.id for update;
  v_pid := postbus._pipeline_session(v_p.id);
  if v_pid is not null and exists (select from postbus.pipeline_run r where r.pipeline_id = v_p.id and r.state = 'running') then
    raise exception using errcode = 'PB003', message = format('pipeline %L is running', v_p.name),
      hint = format('Wait until it has ended, or end it (its session: select pg_terminate_backend(%s)).', v_pid);
  end if;
  for v_stream in
    select g.stream_name from postbus."group" g
    where g.name = v_p."group" and (v_p.streams is null or g.stream_name = any (v_p.streams)) order by g.stream_id
  loop
    perform postbus.drop_group(v_stream, v_p."group");
  end loop;
  delete from postbus.pipeline p where p.id = v_p.id;
end
$$;

-- Of each pipeline the last run stays, and of the others a thousand, for 90 days.
create or replace function postbus._prune_runs()
returns bigint
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  with gone as (
    delete from postbus.pipeline_run r using (
      select p.id, l.id as last, coalesce(o.id, 0) as oldest from postbus.pipeline p
      cross join lateral (select y.id from postbus.pipeline_run y where y.pipeline_id = p.id order by y.id desc limit 1) l
      left join lateral (select y.id from postbus.pipeline_run y where y.pipeline_id = p.id order by y.id desc offset 1000 limit 1) o on true) k
    where r.pipeline_id = k.id and r.id < k.last and (r.id <= k.oldest or r.ended_at < postbus.now_() - interval '90 days')
    returning 1)
  select count(*) from gone
$$;
