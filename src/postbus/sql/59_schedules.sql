-- Schedules: messages by the clock. A schedule names a cron expression, a time zone and a target; maintain() fires what
-- is due. The row of a schedule is what makes a slot fire once: whoever fires holds it, the message and the next slot are
-- written in one transaction, and others skip it. Schedule rows come before everything else in the lock order.

create table if not exists postbus.schedule (
  name text primary key,
  cron text not null,
  timezone text not null,
  target text not null,               -- a queue or a stream, looked up when a slot fires
  payload text not null,
  type text not null,
  key text,
  headers jsonb,
  missed text not null check (missed in ('once', 'all', 'skip')),
  paused boolean not null default false,
  next_at timestamptz not null,       -- the oldest slot that has not fired
  last_at timestamptz,                -- when it last fired
  problem text,                       -- why the last slot did not fire
  created_at timestamptz not null
);
create index if not exists schedule_next on postbus.schedule (next_at) where not paused;

-- What a target is: 'stream', 'queue', or an error.
create or replace function postbus._target_kind(p_name text)
returns text
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (select from postbus.stream s where s.name = p_name) then
    return 'stream';
  end if;
  if exists (select from postbus.queue q where q.name = p_name) then
    return 'queue';
  end if;
  raise exception using errcode = 'PB001', message = format('target %L is neither a queue nor a stream', p_name),
    hint = format('Create it first, with postbus.create_queue(%1$L) or postbus.create_stream(%1$L).', p_name);
end
$$;

-- Only names of zones. What else PostgreSQL takes for one is refused: abbreviations (CET) know no summer time, and in
-- UTC+2 the sign means the opposite of what people think. (To ask pg_timezone_names would read a file for each zone.)
create or replace function postbus._check_timezone(p_name text)
returns void
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if upper(p_name) in ('UTC', 'GMT') then
    return;
  end if;
  if p_name ~ '^([A-Za-z_/-]+|Etc/GMT[+-][0-9]{1,2})$'
      and not exists (select from pg_timezone_abbrevs a where a.abbrev = upper(p_name)) then
    begin
      perform now() at time zone p_name;
      return;
    exception when data_exception then
      null;
    end;
  end if;
  raise exception using errcode = 'PB003', message = format('unknown time zone %L', p_name),
    hint = 'Use a name from pg_timezone_names, such as Europe/Zurich or UTC; not an abbreviation, not an offset.';
end
$$;

-- Creates a schedule or changes it in place. One that keeps its times keeps its place as well: an application that
-- declares its schedules whenever it starts loses no slot that was missed while it was down.
create or replace function postbus._schedule(
  p_name text,
  p_cron text,
  p_target text,
  p_payload text,
  p_timezone text,
  p_type text,
  p_key text,
  p_headers jsonb,
  p_missed text
)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_masks bigint[];
  v_next timestamptz;
begin
  perform postbus._check_name('schedule', p_name);
  v_masks := postbus._cron_masks(p_cron);
  perform postbus._check_timezone(p_timezone);
  perform postbus._target_kind(p_target);
  if p_payload is null or p_type is null then
    raise exception using errcode = 'PB003', message = format('schedule %L needs a payload and a type', p_name),
      hint = 'Leave them out for the defaults, ''{}'' and ''default''.';
  end if;
  if jsonb_typeof(p_headers) <> 'object' then
    raise exception using errcode = 'PB003', message = format('headers of schedule %L must be a JSON object', p_name),
      hint = 'The names "schedule" and "slot" are added to them when it fires.';
  end if;
  if p_missed is null or p_missed not in ('once', 'all', 'skip') then
    raise exception using errcode = 'PB003', message = format('schedule %L: missed must not be %L', p_name, p_missed),
      hint = 'Use once (one message for all missed slots), all (one for each) or skip (none).';
  end if;
  v_next := postbus._cron_after(v_masks, p_timezone, postbus.now_());
  if v_next is null then
    raise exception using errcode = 'PB003', message = format('cron expression %L never fires', p_cron),
      hint = 'Its day (third field) does not occur in its months (fourth field).';
  end if;
  insert into postbus.schedule as s (name, cron, timezone, target, payload, type, key, headers, missed, next_at, created_at)
  values (p_name, p_cron, p_timezone, p_target, p_payload, p_type, p_key, p_headers, p_missed, v_next, postbus.now_())
  on conflict (name) do update set cron = excluded.cron, timezone = excluded.timezone, target = excluded.target,
    payload = excluded.payload, type = excluded.type, key = excluded.key, headers = excluded.headers,
    missed = excluded.missed, problem = null,
    next_at = case when s.cron = excluded.cron and s.timezone = excluded.timezone then s.next_at else excluded.next_at end;
end
$$;

create or replace function postbus.schedule(
  name text,
  cron text,
  target text,
  payload text default '{}',
  timezone text default 'UTC',
  type text default 'default',
  key text default null,
  headers jsonb default null,
  missed text default 'once'
)
returns void
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  select postbus._schedule(name, cron, target, payload, timezone, type, key, headers, missed)
$$;

-- Here the payload has no default: a call without one means the other.
create or replace function postbus.schedule(
  name text,
  cron text,
  target text,
  payload jsonb,
  timezone text default 'UTC',
  type text default 'default',
  key text default null,
  headers jsonb default null,
  missed text default 'once'
)
returns void
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  select postbus._schedule(name, cron, target, payload::text, timezone, type, key, headers, missed)
$$;

create or replace function postbus._no_schedule(p_name text)
returns void
language plpgsql
immutable
as $$
begin
  raise exception using errcode = 'PB001', message = format('schedule %L does not exist', p_name),
    hint = 'See postbus.list_schedules().';
end
$$;

create or replace function postbus.unschedule(name text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  delete from postbus.schedule s where s.name = unschedule.name;
  if not found then
    perform postbus._no_schedule(unschedule.name);
  end if;
end
$$;

create or replace function postbus.pause_schedule(name text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  update postbus.schedule s set paused = true where s.name = pause_schedule.name;
  if not found then
    perform postbus._no_schedule(pause_schedule.name);
  end if;
end
$$;

-- Goes on with the first slot from now on, whatever was missed. One that is not paused stays as it is.
create or replace function postbus.resume_schedule(name text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_s postbus.schedule;
begin
  select s.* into v_s from postbus.schedule s where s.name = resume_schedule.name for update;
  if not found then
    perform postbus._no_schedule(resume_schedule.name);
  end if;
  if v_s.paused then
    update postbus.schedule s set paused = false, next_at = postbus._cron_next(s.cron, s.timezone, postbus.now_())
    where s.name = v_s.name;
  end if;
end
$$;

-- Two names for one instant would be two slots to a consumer that compares them, so it is always UTC.
create or replace function postbus._send_slot(p_s postbus.schedule, p_slot timestamptz)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_headers jsonb := coalesce(p_s.headers, '{}') || jsonb_build_object('schedule', p_s.name,
    'slot', to_char(p_slot at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'));
begin
  if postbus._target_kind(p_s.target) = 'stream' then
    perform postbus.publish(p_s.target, p_s.payload, p_s.type, p_s.key, v_headers);
  else
    perform postbus.send(queue => p_s.target, payload => p_s.payload, type => p_s.type, key => p_s.key, headers => v_headers);
  end if;
end
$$;

-- Fires the due slots of one schedule, whose row the caller holds, and moves it on. Returns the number of messages.
create or replace function postbus._fire_schedule(p_s postbus.schedule, p_now timestamptz, p_max int)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_masks bigint[] := postbus._cron_masks(p_s.cron);
  v_slot timestamptz := p_s.next_at;
  v_n int := 0;
begin
  if p_s.missed = 'skip' and v_slot < p_now - interval '1 minute' then
    v_slot := postbus._cron_after(v_masks, p_s.timezone, p_now - interval '1 minute 1 microsecond');
  end if;
  while v_slot <= p_now and v_n < p_max loop
    perform postbus._send_slot(p_s, v_slot);
    v_n := v_n + 1;
    v_slot := postbus._cron_after(v_masks, p_s.timezone, case when p_s.missed = 'once' then p_now else v_slot end);
  end loop;
  update postbus.schedule s
  set next_at = v_slot, last_at = case when v_n > 0 then p_now else s.last_at end, problem = case when v_n = 0 then s.problem end
  where s.name = p_s.name;
  return v_n;
end
$$;

-- Moves a schedule that cannot fire past what is due. Where even its next slot cannot be told (the server no longer knows
-- the time zone), it is tried again in an hour.
create or replace function postbus._pass_slots(p_s postbus.schedule, p_now timestamptz, p_problem text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_next timestamptz;
begin
  begin
    v_next := postbus._cron_next(p_s.cron, p_s.timezone, p_now);
  exception when others then
    v_next := null;
  end;
  update postbus.schedule s set next_at = coalesce(v_next, p_now + interval '1 hour'), problem = p_problem where s.name = p_s.name;
end
$$;

-- Fires what is due at p_now, for maintain(). Returns the number of messages: at most about a thousand, since every
-- schedule gets at least one; what is left stays due.
create or replace function postbus._fire_schedules(p_now timestamptz)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_s postbus.schedule;
  v_n int := 0;
begin
  for v_s in
    select s.* from postbus.schedule s where s.next_at <= p_now and not s.paused
    order by s.next_at, s.name for update skip locked
  loop
    begin
      v_n := v_n + postbus._fire_schedule(v_s, p_now, greatest(1000 - v_n, 1));
    exception
      -- What passes by itself (a lock, a full queue) loses no slot: it stays due.
      when transaction_rollback or lock_not_available or insufficient_resources or sqlstate 'PB006' then
        update postbus.schedule s set problem = sqlerrm where s.name = v_s.name;
      when others then
        perform postbus._pass_slots(v_s, p_now, sqlerrm);
    end;
  end loop;
  return v_n;
end
$$;

create or replace function postbus.list_schedules()
returns table (
  name text, cron text, timezone text, target text, payload text, type text, key text, headers jsonb, missed text,
  paused boolean, next_at timestamptz, last_at timestamptz, problem text, created_at timestamptz
)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  select s.name, s.cron, s.timezone, s.target, s.payload, s.type, s.key, s.headers, s.missed, s.paused,
    case when not s.paused then s.next_at end, s.last_at, s.problem, s.created_at
  from postbus.schedule s order by s.name
$$;
