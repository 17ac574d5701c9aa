-- capture, uncapture, list_captures and backfill. What the triggers publish is in 70_capture.sql.
--
-- backfill publishes the rows that are there already, as events of the type snapshot, while writers go on. A row is read
-- under a lock that only writers of that row conflict with (FOR SHARE), and its event gets its id under that lock: the
-- changes a row had before have smaller ids, those it gets afterwards larger ones, and each is in the same window as the
-- snapshot or the right side of it. So a consumer needs no rule but the usual one: upsert after, delete by key, in the
-- order of delivery. Nothing is recorded that would have to be compared later, and chunks are independent transactions.
--   * A chunk is a range of keys. Its end is found first, without locks: a row whose key is changed meanwhile cannot
--     pull the end along. A changed key has its own events.
--   * Rows that a writer holds are skipped and tried again by later calls, so a call never waits while it holds locks, and
--     writers cannot deadlock with it. Only when nothing else is left does it wait for one row, holding none.
--   * The price: a lock is a write to the row's page, and a writer of a row in the chunk waits until the chunk commits.
--   * A table without a key (or with an operator class outside pg_catalog) is read in one call under LOCK TABLE ... IN
--     SHARE MODE: writers wait for all of it.

create table if not exists postbus.backfill_state (
  capture_id int primary key,
  last_key jsonb,                     -- rows up to here are done, but for those in skipped
  skipped jsonb not null default '[]',
  ranged boolean not null default true,  -- there may be rows above last_key
  done bigint not null default 0,
  total bigint not null,              -- an estimate
  started_at timestamptz not null,
  updated_at timestamptz not null,
  finished_at timestamptz
);

-- Root and descendants. Each of them needs triggers: a statement fires those of the table it names.
create or replace function postbus._capture_members(p_relid oid)
returns table (member regclass, kind "char", root boolean)
language sql
stable
set search_path = pg_catalog, pg_temp
as $$
  with recursive m (oid) as (
    select p_relid union select i.inhrelid from m join pg_inherits i on i.inhparent = m.oid)
  select c.oid::regclass, c.relkind, c.oid = p_relid from m join pg_class c on c.oid = m.oid
$$;

-- What is to be created and dropped until every member has its triggers and nobody else does. The names sort before
-- others: a trigger of the user's that changes the table again comes after ours.
create or replace function postbus._capture_gaps(p_capture int default null)
returns table (capture int, ddl text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  with wanted as (
    select c.id, m.member, format('!postbus_%s_%s', c.id, k.name) as name,
      format('create trigger %I %s on %s %s for each statement execute function postbus.%I(%L)',
        format('!postbus_%s_%s', c.id, k.name), k.event, m.member, k.tables, k.function, c.id) as ddl
    from postbus.capture c cross join lateral postbus._capture_members(c.relid) m
    cross join (values
      ('insert', 'after insert', 'referencing new table as new_rows', '_capture_statement'),
      ('update', 'after update', 'referencing old table as old_rows new table as new_rows', '_capture_statement'),
      ('delete', 'after delete', 'referencing old table as old_rows', '_capture_statement'),
      ('truncating', 'before truncate', '', '_capture_truncate'),
      ('truncate', 'after truncate', '', '_capture_truncate')) k (name, event, tables, function)
    where m.kind in ('r', 'p') and (k.name <> 'truncating' or m.root or m.kind = 'r') and (k.name <> 'truncate' or m.root)),
  present as (
    select substring(t.tgname from '^!postbus_(\d+)_')::int as id, t.tgrelid::regclass as member, t.tgname
    from pg_trigger t
    where t.tgfoid in ('postbus._capture_statement()'::regprocedure, 'postbus._capture_truncate()'::regprocedure)
      and t.tgname ~ '^!postbus_\d+_')
  select w.id, w.ddl from wanted w
  where (p_capture is null or w.id = p_capture)
    and not exists (select from present p where p.member = w.member and p.tgname = w.name)
  union all
  select p.id, format('drop trigger %I on %s', p.tgname, p.member) from present p
  where (p.id = p_capture or p_capture is null and exists (select from postbus.capture c where c.id = p.id))
    and not exists (select from wanted w where w.member = p.member and w.name = p.tgname)
$$;

create or replace function postbus._sync_capture(p_capture int)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_ddl text;
  v_n int := 0;
begin
  for v_ddl in select g.ddl from postbus._capture_gaps(p_capture) g order by g.ddl loop
    execute v_ddl;
    v_n := v_n + 1;
  end loop;
  return v_n;
end
$$;

-- The capture, or every capture, of a table; PB001 where there is none, and the caller's right to have it.
create or replace function postbus._captures(p_table regclass, p_stream text)
returns setof postbus.capture
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform postbus._check_capture_right(p_table);
  return query select c.* from postbus.capture c
  where c.relid = p_table and (p_stream is null or c.stream_id = (select s.id from postbus.stream s where s.name = p_stream))
  order by c.id;
  if not found then
    raise exception using errcode = 'PB001',
      message = format('table %s is not captured', p_table) || coalesce(format(' to stream %L', p_stream), ''),
      hint = 'select * from postbus.list_captures() shows what is.';
  end if;
end
$$;

-- The engine's owner makes and drops the triggers, so it must own the table; and who asks must be allowed to do as much
-- by himself, or capture would be a way around the table's grants.
create or replace function postbus._check_capture_right(p_table regclass)
returns void
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user);
  v_owner name := (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = p_table);
begin
  if not (has_table_privilege(v_caller, p_table, 'trigger') and has_table_privilege(v_caller, p_table, 'select')) then
    raise exception using errcode = 'PB007', message = format('role %I may not capture table %s', v_caller, p_table),
      hint = format('It needs both: grant trigger, select on %s to %I.', p_table, v_caller);
  end if;
  if not pg_has_role(current_user, v_owner, 'usage') then
    raise exception using errcode = 'PB007', message = format('role %I, which owns postbus, does not own table %s', current_user, p_table),
      hint = format('Make it a member of the owner: grant %I to %I.', v_owner, current_user);
  end if;
end
$$;

-- Publishes every change of a table to a stream from now on, that of its partitions too. columns: only these are in
-- before and after; exclude: all but these. The key is always there. Waits until open writers of the table have ended.
create or replace function postbus.capture("table" regclass, stream text, columns text[] default null, exclude text[] default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v_class pg_class;
  v_listed text[] := coalesce(capture.columns, capture.exclude);
  v_nos smallint[];
  v_bad text;
  v_id int;
begin
  select c.* into v_class from pg_class c where c.oid = capture."table";
  v_bad := case
    when v_class.oid is null then 'there is no such table'
    when v_class.relnamespace in ('postbus'::regnamespace, 'pg_catalog'::regnamespace, 'information_schema'::regnamespace)
      then 'it belongs to the system'
    when v_class.relkind not in ('r', 'p') then 'only tables can be captured'
    when v_class.relpersistence = 't' then 'it is temporary'
    when exists (select from pg_inherits i where i.inhrelid = v_class.oid) then 'it is a part of another table: capture that one'
    when exists (select from postbus._capture_members(v_class.oid) m where m.kind not in ('r', 'p'))
      then 'it has foreign tables as parts' end;
  if v_bad is not null then
    raise exception using errcode = 'PB003', message = format('cannot capture %s', capture."table"), hint = format('Because %s.', v_bad);
  end if;
  perform postbus._check_capture_right(capture."table");
  if capture.columns is not null and capture.exclude is not null then
    raise exception using errcode = 'PB003', message = format('capture of %s: give columns or exclude, not both', capture."table");
  end if;
  select x into v_bad from unnest(v_listed) x where not exists (
    select from pg_attribute a where a.attrelid = v_class.oid and a.attname = x and a.attnum > 0 and not a.attisdropped);
  if found then
    raise exception using errcode = 'PB003', message = format('table %s has no column %s', capture."table", coalesce(quote_ident(v_bad), 'null')),
      hint = 'columns and exclude take names as they are stored, without quotes.';
  end if;
  if v_listed is not null then
    v_nos := array(select a.attnum from pg_attribute a where a.attrelid = v_class.oid and a.attname = any (v_listed) and a.attnum > 0);
  end if;
  v_s := postbus._stream(capture.stream);
  -- Holds drop_stream off.
  perform from postbus.stream s where s.id = v_s.id for key share;
  insert into postbus.capture (id, relid, stream_id, columns, exclude, nos, created_at)
  values (nextval('postbus.capture_id'), v_class.oid, v_s.id, capture.columns, capture.exclude, v_nos, postbus.now_())
  on conflict (relid, stream_id) do nothing returning id into v_id;
  if v_id is null then
    raise exception using errcode = 'PB002', message = format('table %s is already captured to stream %L', capture."table", capture.stream),
      hint = 'To change its columns, uncapture it and capture it again in one transaction.';
  end if;
  perform postbus._sync_capture(v_id);
  perform postbus._renew_capture(v_id);
end
$$;

create or replace function postbus._drop_capture(p_capture int)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  delete from postbus.capture c where c.id = p_capture;
  delete from postbus.backfill_state b where b.capture_id = p_capture;
  perform postbus._sync_capture(p_capture);
end
$$;

-- Ends the capture of a table to one stream, or to all of them. Triggers that a restore left without a capture go too.
create or replace function postbus.uncapture("table" regclass, stream text default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_left int[];
begin
  perform postbus._check_capture_right(uncapture."table");
  if uncapture.stream is null then
    v_left := array(select distinct substring(t.tgname from '^!postbus_(\d+)_')::int from pg_trigger t
      where t.tgrelid = uncapture."table" and t.tgname ~ '^!postbus_\d+_'
        and not exists (select from postbus.capture c where c.id = substring(t.tgname from '^!postbus_(\d+)_')::int));
    perform postbus._drop_capture(x) from unnest(v_left) x;
  end if;
  if coalesce(cardinality(v_left), 0) = 0 or exists (select from postbus.capture c where c.relid = uncapture."table") then
    perform postbus._drop_capture(c.id) from postbus._captures(uncapture."table", uncapture.stream) c;
  end if;
end
$$;

-- Called by drop_stream.
create or replace function postbus._release_captures(p_stream int)
returns void
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  select postbus._drop_capture(c.id) from postbus.capture c where c.stream_id = p_stream
$$;

-- Upkeep, called by maintain(): triggers for new partitions, none on detached ones, nothing for tables that are gone.
-- Returns how many things it changed. A table that is busy is left for the next time.
create or replace function postbus._maintain_captures()
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
as $$
declare
  v_id int;
  v_n int := 0;
begin
  for v_id in select c.id from postbus.capture c where not exists (select from pg_class t where t.oid = c.relid) loop
    perform postbus._drop_capture(v_id);
    v_n := v_n + 1;
  end loop;
  for v_id in
    select c.id from postbus.capture c where c.xmin is distinct from c.stamp
      or c.source is distinct from postbus._capture_source(c.relid, c.key_index)
      or c.key_index is distinct from (select k.index from postbus._key_columns(c.relid, null) k)
      or c.narrow is distinct from true and exists (select from pg_attribute a where a.attrelid = c.relid and a.attgenerated = 'v')
  loop
    perform postbus._renew_capture(v_id);
    v_n := v_n + 1;
  end loop;
  for v_id in select distinct g.capture from postbus._capture_gaps() g loop
    begin
      v_n := v_n + postbus._sync_capture(v_id);
      perform postbus._renew_capture(v_id);
    exception when lock_not_available then
      null;
    when others then
      raise warning 'capture %: %', v_id, sqlerrm;
    end;
  end loop;
  return v_n;
end
$$;

-- backfill_*: null where none was started; total is an estimate.
create or replace function postbus.list_captures()
returns table (
  "table" text, stream text, key text[], columns text[], exclude text[], partitions int, backfill_done bigint, backfill_total bigint,
  backfill_finished boolean, created_at timestamptz
)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  select c.relid::text, s.name, (select k.keys from postbus._key_columns(c.relid, c.key_index) k),
    case when c.columns is not null then n.names end, case when c.exclude is not null then n.names end,
    (select count(*)::int from postbus._capture_members(c.relid) m where not m.root),
    b.done, b.total, case when b.capture_id is not null then b.finished_at is not null end, c.created_at
  from postbus.capture c join postbus.stream s on s.id = c.stream_id
  left join postbus.backfill_state b on b.capture_id = c.id
  cross join lateral (select array(
    select a.attname::text from pg_attribute a where a.attrelid = c.relid and a.attnum > 0 and not a.attisdropped
      and case when c.xmin = c.stamp then a.attnum = any (c.nos) else a.attname = any (coalesce(c.columns, c.exclude)) end
    order by a.attnum) as names) n
  order by 1, 2
$$;

-- A comparison of table t's key with a stored one, as row comparison, which an index on the key serves.
create or replace function postbus._key_compare(p_keys text[], p_definition text, p_operator text, p_parameter text)
returns text
language sql
immutable
as $$
  select format('(%s) %s (%s)', string_agg(format('t.%I', x), ', '), p_operator,
    string_agg(format('(select k.%I from jsonb_to_record(%s) as k (%s))', x, p_parameter, p_definition), ', '))
  from unnest(p_keys) x
$$;

-- The statement for one chunk: publishes the rows of a source that nobody holds. Returns how many, and the keys of the
-- rest: held, or changed since the statement began. The next try finds out which.
create or replace function postbus._chunk_sql(p_source text, p_key text)
returns text
language sql
immutable
as $$
  select format('with
    span as materialized (select %2$s as k from %1$s),
    held as materialized (select to_jsonb(t.*) as j, %2$s as k from %1$s for share of t skip locked),
    sent as (%3$s returning 1)
    select (select count(*) from sent),
      coalesce((select jsonb_agg(s.k) from span s where not exists (select from held h where h.k = s.k)), ''[]'')',
    p_source, p_key,
    postbus._publish_sql('', 'select ''snapshot'' as op, h.j, null::jsonb as before, h.j as after from held h'))
$$;

-- Publishes the next chunk of a captured table's rows; call it until finished is true, each call in a transaction of its
-- own. It goes on where it was left, whoever calls. With rows = 0 and not finished, open transactions hold what is
-- missing: call again. stream: which capture, where the table has several; restart: from the beginning.
create or replace function postbus.backfill(
  "table" regclass,
  stream text default null,
  batch int default 5000,
  restart boolean default false
)
returns table (rows bigint, done bigint, total bigint, finished boolean)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set row_security = off
set enable_seqscan = off
set jit = off
set timezone = 'UTC'
set datestyle = 'ISO'
set intervalstyle = 'postgres'
set bytea_output = 'hex'
set extra_float_digits = 1
as $$
#variable_conflict use_column
declare
  v_ids int[] := array(select c.id from postbus._captures(backfill."table", backfill.stream) c);
  v_b postbus.backfill_state;
  v record;
  v_keys text[];
  v_index oid;
  v_definition text;
  v_key text;
  v_range text;
  v_end jsonb;
  v_n bigint;
  v_skipped jsonb := '[]';
  v_more jsonb;
begin
  perform postbus._need_read_committed('backfill');
  if cardinality(v_ids) > 1 then
    raise exception using errcode = 'PB003', message = format('table %s is captured to several streams', backfill."table"),
      hint = 'Say which: stream => ''...''.';
  end if;
  if backfill.batch is null or backfill.batch not between 1 and 1000000 then
    raise exception using errcode = 'PB003', message = format('backfill of %s: batch must be 1 to 1000000', backfill."table");
  end if;
  if backfill.restart then
    delete from postbus.backfill_state b where b.capture_id = v_ids[1];
  end if;
  insert into postbus.backfill_state (capture_id, total, started_at, updated_at)
  select v_ids[1], coalesce(sum(greatest(c.reltuples, 0)), 0), postbus.now_(), postbus.now_()
  from postbus._capture_members(backfill."table") m join pg_class c on c.oid = m.member and m.kind = 'r'
  on conflict (capture_id) do nothing;
  select b.* into strict v_b from postbus.backfill_state b where b.capture_id = v_ids[1] for update;
  rows := 0;
  if v_b.finished_at is null then
    select k.keys, k.index into v_keys, v_index from postbus.capture c, postbus._key_columns(c.relid, c.key_index) k where c.id = v_ids[1];
    if v_keys is null or exists (select from pg_index i, pg_opclass o
        where i.indexrelid = v_index and o.oid = any (i.indclass::oid[]) and o.opcnamespace <> 'pg_catalog'::regnamespace) then
      execute format('lock table %s in share mode', backfill."table");
      v := postbus._capture_context(v_ids[1], backfill."table");
      execute postbus._publish_sql('', format('select ''snapshot'' as op, t.j, null::jsonb as before, t.j as after
        from (select to_jsonb(t.*) as j from %s t offset 0) t', backfill."table"))
      using v.id_seq, v.txid, v.at, v.leaf, v.stream_id, v.lanes, v.key1, v.keys, v.head, v.tail, v.hide;
      get diagnostics rows = row_count;
      v_b.ranged := false;
    else
      v_definition := postbus._key_definition(backfill."table", v_keys);
      v_key := (select format('jsonb_build_object(%s)', string_agg(format('%L, t.%I', x, x), ', ')) from unnest(v_keys) x);
      v := postbus._capture_context(v_ids[1], backfill."table");
      for v_try in 1 .. 10 loop
        begin
          rows := 0;
          v_skipped := '[]';
          if v_b.skipped <> '[]' then
            v_range := format('jsonb_to_recordset($12) as k (%s) join %s t on %s', v_definition, backfill."table",
              (select string_agg(format('t.%1$I = k.%1$I', x), ' and ') from unnest(v_keys) x));
            if not v_b.ranged then
              execute format('select from %s for share of t', replace(v_range, '$12', '$1')) using jsonb_build_array(v_b.skipped -> 0);
            end if;
            execute postbus._chunk_sql(v_range, v_key) into rows, v_skipped
            using v.id_seq, v.txid, v.at, v.leaf, v.stream_id, v.lanes, v.key1, v.keys, v.head, v.tail, v.hide, v_b.skipped;
          end if;
          if v_b.ranged then
            v_range := format('%s t where %s', backfill."table",
              case when v_b.last_key is null then 'true' else postbus._key_compare(v_keys, v_definition, '>', '$12') end);
            execute format('select %s from %s order by %s offset %s limit 1', v_key, replace(v_range, '$12', '$1'),
              (select string_agg(format('t.%I', x), ', ') from unnest(v_keys) x), backfill.batch - 1)
            into v_end using v_b.last_key;
            if v_end is not null then
              v_range := v_range || ' and ' || postbus._key_compare(v_keys, v_definition, '<=', '$13');
            end if;
            execute postbus._chunk_sql(v_range, v_key) into v_n, v_more
            using v.id_seq, v.txid, v.at, v.leaf, v.stream_id, v.lanes, v.key1, v.keys, v.head, v.tail, v.hide, v_b.last_key, v_end;
            rows := rows + v_n;
            v_skipped := v_skipped || v_more;
          end if;
          exit;
        exception when serialization_failure then
          -- A row of the chunk has just moved to another partition.
          if v_try = 10 then
            raise;
          end if;
        end;
      end loop;
      v_b.last_key := v_end;
      v_b.ranged := v_end is not null;
    end if;
    v_b.done := v_b.done + rows;
    if not v_b.ranged and v_skipped = '[]' then
      v_b.finished_at := postbus.now_();
      v_b.total := v_b.done;
    end if;
    update postbus.backfill_state b set last_key = v_b.last_key, skipped = v_skipped, ranged = v_b.ranged, done = v_b.done,
      total = greatest(v_b.total, v_b.done), updated_at = postbus.now_(), finished_at = v_b.finished_at
    where b.capture_id = v_ids[1];
    if rows > 0 then
      perform postbus._wake(v.notify, v.stream, v.register, v.value);
    end if;
  end if;
  done := v_b.done;
  total := greatest(v_b.total, v_b.done);
  finished := v_b.finished_at is not null;
  return next;
end
$$;
