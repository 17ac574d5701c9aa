-- The ground: schema, recorded version, clock, names and options.
--
-- Conventions of the whole engine:
--   * Public functions take the names of the API (stream, payload, key, ...); a name inside a body that could be a
--     column is written publish.key. Internal functions start with an underscore and take p_ parameters.
--   * Every function that touches a table is SECURITY DEFINER with a pinned search_path: callers need EXECUTE only.
--     (_publish, the hot path, pins by naming: docs/adr/0005-publish.md.)
--   * Small SQL functions that are inlined into others have a parsed body (BEGIN ATOMIC): what they mean is fixed when
--     they are created, whatever search_path they meet later.
--   * Lock order, for every function: stream row, group row, slots by id (advisory), slot rows, progress, lease rows by
--     token, waiting rows. Upkeep takes what it can get and waits for none of them.
--     Of queues: schedule row, queue row, stream row, messages by id. Claims take what they can get too.
--     Of pipelines: pipeline row, then as above.
--   * Errors are SQLSTATE class PB: 001 not found, 002 already exists, 003 bad argument, 004 lease lost,
--     005 position lost, 006 queue full, 007 access denied, 008 wrong version. PB000 is private: it ends a block.

do $$
begin
  if to_regnamespace('postbus') is null then
    create schema postbus;
  elsif not (select pg_has_role(n.nspowner, 'usage') from pg_namespace n where n.nspname = 'postbus') then
    -- Somebody else's schema could hold functions that would then run with our rights.
    raise exception using errcode = 'PB007', message = format('schema postbus belongs to another role than %s', current_user),
      hint = 'Install as its owner, or drop it first.';
  end if;
end
$$;
revoke all on schema postbus from public;

create table if not exists postbus.meta (
  singleton boolean primary key default true check (singleton),
  version text not null,
  installed_at timestamptz not null default clock_timestamp(),
  upgraded_at timestamptz not null default clock_timestamp()
);

create or replace function postbus.version()
returns text
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  select m.version from postbus.meta m
$$;

-- The one clock of the engine. Tests move it with the setting postbus.fake_now.
create or replace function postbus.now_()
returns timestamptz
language sql
volatile
begin atomic
  select coalesce(nullif(current_setting('postbus.fake_now', true), '')::timestamptz, clock_timestamp());
end;

-- Names go into NOTIFY channels (63 bytes), shells and URLs, so they are kept short and plain.
create or replace function postbus._check_name(p_kind text, p_name text)
returns void
language plpgsql
immutable
as $$
begin
  if p_name is null or p_name !~ '^[A-Za-z_][A-Za-z0-9_.:-]{0,54}$' then
    raise exception using errcode = 'PB003',
      message = format('bad %s name %L', p_kind, p_name),
      hint = 'Use 1 to 55 letters, digits, "_", ".", ":" or "-"; the first is a letter or "_".';
  end if;
end
$$;

-- An option object may hold known keys only: a misspelt option is an error, not a silent default.
create or replace function postbus._check_options(p_kind text, p_options jsonb, p_known text[])
returns void
language plpgsql
immutable
as $$
declare
  v_key text;
begin
  if jsonb_typeof(p_options) is distinct from 'object' then
    raise exception using errcode = 'PB003', message = format('%s options must be a JSON object', p_kind),
      hint = format('Known options: %s.', array_to_string(p_known, ', '));
  end if;
  select k into v_key from jsonb_object_keys(p_options) k where k <> all (p_known) limit 1;
  if v_key is not null then
    raise exception using errcode = 'PB003', message = format('unknown %s option %L', p_kind, v_key),
      hint = format('Known options: %s.', array_to_string(p_known, ', '));
  end if;
end
$$;

-- One option as an interval: a JSON number is seconds, a JSON string is what interval reads, null is null.
create or replace function postbus._interval_option(p_options jsonb, p_key text, p_default interval)
returns interval
language plpgsql
stable
as $$
declare
  v interval;
begin
  if not p_options ? p_key then
    return p_default;
  end if;
  if p_options -> p_key = 'null' then
    return null;
  end if;
  begin
    v := case jsonb_typeof(p_options -> p_key)
      when 'number' then make_interval(secs => (p_options ->> p_key)::float8)
      when 'string' then (p_options ->> p_key)::interval end;
  exception when data_exception then
    v := null;
  end;
  if v is null then
    raise exception using errcode = 'PB003',
      message = format('option %L is not an interval: %s', p_key, p_options ->> p_key),
      hint = 'Give a number of seconds, or a text such as "15 minutes" or "7 days".';
  end if;
  if v < interval '0' or v > interval '1000 years' then
    raise exception using errcode = 'PB003', message = format('option %L must be from 0 to 1000 years, not %s', p_key, p_options ->> p_key);
  end if;
  return v;
end
$$;

-- One option as a whole number inside a range.
create or replace function postbus._int_option(p_options jsonb, p_key text, p_default int, p_min int, p_max int)
returns int
language plpgsql
immutable
as $$
declare
  v int;
begin
  if not p_options ? p_key then
    return p_default;
  end if;
  begin
    v := (p_options ->> p_key)::int;
  exception when data_exception then
    v := null;
  end;
  if v is null or v < p_min or v > p_max then
    raise exception using errcode = 'PB003',
      message = format('option %L must be a whole number from %s to %s, not %s', p_key, p_min, p_max,
        coalesce(p_options ->> p_key, 'null'));
  end if;
  return v;
end
$$;

create or replace function postbus._bool_option(p_options jsonb, p_key text, p_default boolean)
returns boolean
language plpgsql
immutable
as $$
begin
  if not p_options ? p_key then
    return p_default;
  end if;
  if jsonb_typeof(p_options -> p_key) <> 'boolean' then
    raise exception using errcode = 'PB003', message = format('option %L must be true or false', p_key);
  end if;
  return (p_options ->> p_key)::boolean;
end
$$;

-- Cutting, consuming and cleaning rest on every statement seeing the newest commits. Under REPEATABLE READ a lock on a
-- row that nobody updates raises nothing, and an old snapshot would deliver again what was acknowledged.
create or replace function postbus._need_read_committed(p_what text)
returns void
language plpgsql
stable
as $$
begin
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception using errcode = 'PB003',
      message = format('%s needs READ COMMITTED, this transaction is %s', p_what,
        upper(current_setting('transaction_isolation'))),
      hint = 'Publishing works at every isolation level; consume in a READ COMMITTED transaction.';
  end if;
end
$$;
