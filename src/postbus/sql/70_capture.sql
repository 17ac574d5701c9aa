-- Change capture: statement triggers with transition tables that publish what a statement did, one INSERT ... SELECT
-- each. capture, uncapture and backfill are in 75_backfill.sql; what a change looks like and how it is ordered is here.
--
-- An event has the type insert, update, delete, truncate or snapshot, the primary key as its key (one column: its text;
-- several: a JSON array) and the payload {op, schema, table, key, before, after, txid}. Without a primary key the
-- replica identity or another unique index over not-null columns serves; without that the key is null.
--
-- A consumer that upserts after and deletes by key, in the order of delivery, ends with the table:
--   * OLD and NEW are paired by position, never by key. A key change is a delete of the old key and an insert of the
--     new one, and a statement's deletes come before its inserts: a swap or a shift of keys comes out right.
--   * Where triggers change rows that their own statement changed too, the inner statement ends first and is published
--     first. The outer one then compares what it published with the table and publishes what differs once more. So the
--     last event of a key is right, whatever fires (AFTER ROW, BEFORE, on partitions); a row trigger that sorts first
--     would be wrong as soon as one row's trigger changes another row of the statement. Not seen: a function called by
--     the statement itself that changes rows this statement has changed already.
--   * DML on a partitioned table fires the root's triggers, DML on a partition the partition's: both have them.
--   * TRUNCATE is one event per lane, with lane and lanes in the payload; of a part of the table only (a partition, a
--     table of an inheritance tree) it is a delete of each row.
-- Nothing is captured under session_replication_role = replica, nor when partitions are attached, detached or dropped.
-- A json column must hold what jsonb can hold (no \u0000). Virtual generated columns are left out: they are not stored.

create sequence if not exists postbus.capture_id as int;

create table if not exists postbus.capture (
  id int primary key,
  relid regclass not null,
  stream_id int not null,
  columns text[],                     -- only these
  "exclude" text[],                   -- or all but these
  nos smallint[],                     -- the same by number, which a rename does not change
  stamp xid,                          -- another xmin means a restore, after which only the names hold
  created_at timestamptz not null,
  -- What the catalogs say, kept because asking them costs more than the rest of an event. It holds as long as source,
  -- the names it was derived from, is what the catalogs give; maintain() renews it.
  source text,
  key_index oid,
  keys text[],
  lax boolean,                        -- two rows may share a key for a while: a deferrable constraint
  head text,
  narrow boolean,                     -- there are columns to leave out
  unique (relid, stream_id)
);

-- The columns that tell rows apart. The index that serves is kept while it is there, whatever is added.
create or replace function postbus._key_columns(p_relid oid, p_index oid, out index oid, out keys text[], out lax boolean)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  select i.indexrelid, array(
      select a.attname::text from unnest(i.indkey::int2[]) with ordinality k (no, n)
      join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.no
      where k.n <= i.indnkeyatts order by k.n),
    not i.indimmediate
  into index, keys, lax
  from pg_index i
  where i.indrelid = p_relid and i.indisunique and i.indisvalid and i.indpred is null and i.indexprs is null
    and (i.indisprimary or not exists (
      select from pg_attribute a
      where a.attrelid = i.indrelid and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1]) and not a.attnotnull))
  order by i.indexrelid = p_index desc nulls last, i.indisprimary desc, i.indisreplident desc, i.indimmediate desc, i.indexrelid
  limit 1;
end
$$;

-- The names that a capture's facts rest on: table, schema and key columns. Both functions are quick: no query.
create or replace function postbus._capture_source(p_relid regclass, p_index oid)
returns text
language sql
stable
as $$
  select p_relid::text || coalesce(' ' || pg_get_indexdef(p_index), '')
$$;

-- Brings a capture row up to date with the catalogs, and its column numbers after a restore. The stamp is set in the
-- same subtransaction, see _stamp.
create or replace function postbus._renew_capture(p_capture int)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  update postbus.capture c set key_index = k.index, keys = k.keys, lax = k.lax, source = postbus._capture_source(c.relid, k.index),
    head = format(',"schema":%s,"table":%s,"key":', to_json(n.nspname), to_json(t.relname)),
    nos = case when coalesce(c.columns, c.exclude) is null then null when c.xmin = c.stamp then c.nos else array(
      select a.attnum from pg_attribute a
      where a.attrelid = c.relid and a.attname = any (coalesce(c.columns, c.exclude)) and a.attnum > 0) end,
    narrow = coalesce(c.columns, c.exclude) is not null
      or exists (select from pg_attribute a where a.attrelid = c.relid and a.attgenerated = 'v')
      or t.relkind = 'r' and exists (select from pg_inherits i where i.inhparent = c.relid)
  from pg_class t join pg_namespace n on n.oid = t.relnamespace
  left join lateral postbus._key_columns(t.oid, null) k on true
  where c.id = p_capture and t.oid = c.relid;
  update postbus.capture c set stamp = c.xmin where c.id = p_capture;
end
$$;

-- What every event of a statement shares. The xid is taken here, before any id; the register after it (see publish).
-- The triggers do the plain case by themselves.
create or replace function postbus._capture_context(
  p_capture int,
  p_member oid,
  out relid regclass,
  out stream_id int,
  out stream text,
  out leaf int,
  out id_seq regclass,
  out register regclass,
  out value bigint,
  out notify boolean,
  out txid xid8,
  out at timestamptz,
  out lanes int,
  out keys text[],
  out key1 text,                      -- the key column where it is one
  out lax boolean,
  out hide text[],                    -- columns that before and after leave out
  out head text,
  out tail text,
  out plain boolean,
  out route_after bigint              -- queues are bound to the stream: they get what has larger ids
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_c record;
  v_s record;
begin
  select c.*, c.xmin = c.stamp as home, c.source = postbus._capture_source(c.relid, c.key_index) as fresh into v_c
  from postbus.capture c where c.id = p_capture;
  for i in 1 .. 2 loop
    select s.*, s.xmin = s.stamp as home into v_s from postbus.stream s where s.id = v_c.stream_id;
    exit when v_s.home is not false;
    perform postbus._stream(v_s.name);
  end loop;
  if v_s.name is null then
    if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
      raise exception using errcode = '40001',
        message = format('the capture of table %s began after this transaction', p_member::regclass), hint = 'Try again.';
    end if;
    raise exception using errcode = 'PB001', message = format('table %s has triggers of a capture that is gone', p_member::regclass),
      hint = format('Remove them: select postbus.uncapture(%L).', p_member::regclass);
  end if;
  if v_c.fresh is not true then
    select k.keys, k.lax into v_c.keys, v_c.lax from postbus._key_columns(v_c.relid, v_c.key_index) k;
    select format(',"schema":%s,"table":%s,"key":', to_json(n.nspname), to_json(t.relname)) into v_c.head
    from pg_class t join pg_namespace n on n.oid = t.relnamespace where t.oid = v_c.relid;
  end if;
  relid := v_c.relid;
  stream_id := v_c.stream_id;
  stream := v_s.name;
  leaf := v_s.leaf;
  id_seq := v_s.id_seq;
  register := v_s.register;
  notify := v_s.notify;
  if v_s.young is not null then
    execute format('lock table only postbus.log_%s in row exclusive mode', v_s.leaf);
  end if;
  at := postbus.now_();
  txid := pg_current_xact_id();
  value := pg_sequence_last_value(register);
  lanes := value & 4095;
  keys := v_c.keys;
  key1 := case when cardinality(v_c.keys) = 1 then v_c.keys[1] end;
  lax := v_c.lax;
  head := v_c.head;
  tail := format(',"txid":"%s"}', txid);
  -- Listed columns go by their number in the root. A table of an inheritance tree shows the root's columns only.
  hide := array(
    select m.attname::text
    from pg_attribute m left join pg_attribute r on r.attrelid = v_c.relid and r.attname = m.attname and not r.attisdropped
    where m.attrelid = p_member and m.attnum > 0 and not m.attisdropped
      and (m.attgenerated = 'v' or r.attname is null
        or v_c.columns is not null and not (case when v_c.home then r.attnum = any (v_c.nos) else r.attname = any (v_c.columns) end)
        or v_c.exclude is not null and case when v_c.home then r.attnum = any (v_c.nos) else r.attname = any (v_c.exclude) end));
  plain := true;
  route_after := case when v_s.bound then pg_sequence_last_value(id_seq) end;
end
$$;

create or replace function postbus._composite_key(p_row jsonb, p_keys text[])
returns text
language plpgsql
immutable
as $$
declare
  v_key text;
  v text := '';
begin
  if p_keys is null then
    return null;
  end if;
  foreach v_key in array p_keys loop
    v := v || case when v = '' then '[' else ', ' end || (p_row -> v_key)::text;
  end loop;
  return v || ']';
end
$$;

create or replace function postbus._key_object(p_row jsonb, p_keys text[])
returns text
language plpgsql
immutable
as $$
declare
  v_key text;
  v text := '';
begin
  if p_keys is null then
    return 'null';
  end if;
  foreach v_key in array p_keys loop
    v := v || case when v = '' then '{' else ', ' end || to_json(v_key) || ': ' || (p_row -> v_key)::text;
  end loop;
  return v || '}';
end
$$;

-- These three are inlined.
create or replace function postbus._event_key(p_row jsonb, p_key1 text, p_keys text[])
returns text
language sql
immutable
as $$
  select case when p_key1 is not null then p_row ->> p_key1 else postbus._composite_key(p_row, p_keys) end
$$;

create or replace function postbus._event_keys(p_row jsonb, p_key1 text, p_keys text[])
returns text
language sql
stable
as $$
  select case when p_key1 is not null then '{' || to_json(p_key1) || ': ' || (p_row -> p_key1)::text || '}'
    else postbus._key_object(p_row, p_keys) end
$$;

create or replace function postbus._change(p_op text, p_head text, p_keys text, p_before jsonb, p_after jsonb, p_tail text)
returns text
language sql
immutable
as $$
  select '{"op":"' || p_op || '"' || p_head || p_keys || ',"before":' || coalesce(p_before::text, 'null')
    || ',"after":' || coalesce(p_after::text, 'null') || p_tail
$$;

-- For rows that only dynamic SQL can name: publishes what a query for (op, j, before, after) gives, in its order, where
-- j has the key columns. Parameters: $1 id_seq, $2 txid, $3 at, $4 leaf, $5 stream_id, $6 lanes, $7 key1, $8 keys,
-- $9 head, $10 tail, $11 hide.
create or replace function postbus._publish_sql(p_with text, p_query text)
returns text
language sql
immutable
as $$
  select p_with || 'insert into postbus.log (id, txid, at, leaf, stream_id, lane, type, key, payload)
    select e.id, $2, $3, $4, $5, postbus._lane(e.key, e.id, $6), e.op, e.key,
      postbus._change(e.op, $9, postbus._event_keys(e.j, $7, $8), e.before - $11, e.after - $11, $10)
    from (select nextval($1) as id, x.op, postbus._event_key(x.j, $7, $8) as key, x.j, x.before, x.after
      from (' || p_query || ') x) e'
$$;

-- The key columns of a table as a list to define a record by: types and collations are the columns' own.
create or replace function postbus._key_definition(p_relid oid, p_keys text[])
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $$
  select string_agg(format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod))
      || case when c.oid is null then '' else format(' collate %I.%I', n.nspname, c.collname) end, ', ' order by k.n)
  from unnest(p_keys) with ordinality k (name, n)
  join pg_attribute a on a.attrelid = p_relid and a.attname = k.name
  left join pg_collation c on c.oid = a.attcollation
  left join pg_namespace n on n.oid = c.collnamespace
$$;

-- Publishes what the table holds now for the keys of a statement, where that is not what the statement published.
create or replace function postbus._correction_sql(p_relid regclass, p_keys text[], p_op text)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $$
  select postbus._publish_sql(format('with
    touched as (%s),
    last as materialized (
      select distinct on (y.key) y.side, y.j from (select postbus._composite_key(t.j, $8) as key, t.* from touched t) y
      order by y.key, y.side desc, y.n desc),
    present as (
      select l.j, case when l.side = 1 then l.j end as said, c.j as now
      from last l cross join lateral jsonb_to_record(l.j) as k (%s)
      left join lateral (select to_jsonb(t.*) as j from %s t where %s offset 0) c on true) ',
    concat_ws(' union all ',
      case when p_op <> 'DELETE' then 'select 1 as side, row_number() over () as n, to_jsonb(t.*) as j from new_rows t' end,
      case when p_op <> 'INSERT' then 'select 0 as side, row_number() over () as n, to_jsonb(t.*) as j from old_rows t' end),
    postbus._key_definition(p_relid, p_keys), p_relid,
    (select string_agg(format('t.%1$I = k.%1$I', x), ' and ') from unnest(p_keys) x)),
    'select case when p.now is null then ''delete'' when p.said is null then ''insert'' else ''update'' end as op,
      coalesce(p.now, p.j) as j, p.said as before, p.now as after
    from present p where p.said - $11 is distinct from p.now - $11')
$$;

-- The trigger of insert, update and delete. Plans are kept for statements of any size, and one made for a single row must
-- do for a million: the pairing is a full join because that is never a nested loop. The settings make the text of a value
-- the same whoever writes it.
create or replace function postbus._capture_statement()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set jit = off
set timezone = 'UTC'
set datestyle = 'ISO'
set intervalstyle = 'postgres'
set bytea_output = 'hex'
set extra_float_digits = 1
as $$
declare
  v record;
  v_any boolean;
  v_sign int;
  v_moved boolean := false;
  v_flag text := 'postbus.depth_' || tg_argv[0];
  v_depth text := current_setting(v_flag, true);
begin
  if tg_op = 'INSERT' then
    v_any := exists (select from new_rows);
  else
    v_any := exists (select from old_rows);
  end if;
  if not v_any then
    return null;
  end if;
  select x.relid, x.stream_id, x.name as stream, x.leaf, x.id_seq, x.register, x.value, x.notify, x.txid, postbus.now_() as at,
    (x.value & 4095)::int as lanes, x.keys, case when cardinality(x.keys) = 1 then x.keys[1] end as key1, x.lax,
    '{}'::text[] as hide, x.head, ',"txid":"' || x.txid::text || '"}' as tail, x.plain, null::bigint as route_after
  into v
  from (
    select c.relid, c.stream_id, s.name, s.leaf, s.id_seq, s.register, s.notify, c.keys, c.lax, c.head, pg_current_xact_id() as txid,
      case when pg_current_xact_id() is not null then pg_sequence_last_value(s.register) end as value,
      s.xmin = s.stamp and s.young is null and not s.bound and not c.narrow and c.source = postbus._capture_source(c.relid, c.key_index) as plain
    from postbus.capture c join postbus.stream s on s.id = c.stream_id
    where c.id = tg_argv[0]::int
    offset 0) x;
  if v.plain is not true then
    v := postbus._capture_context(tg_argv[0]::int, tg_relid);
  end if;

  if tg_op = 'INSERT' then
    insert into postbus.log (id, txid, at, leaf, stream_id, lane, type, key, payload)
    select e.id, v.txid, v.at, v.leaf, v.stream_id, postbus._lane(e.key, e.id, v.lanes), 'insert', e.key,
      postbus._change('insert', v.head, postbus._event_keys(e.j, v.key1, v.keys), null, e.j - v.hide, v.tail)
    from (select nextval(v.id_seq) as id, postbus._event_key(x.j, v.key1, v.keys) as key, x.j
      from (select to_jsonb(n.*) as j from new_rows n offset 0) x) e;
  elsif tg_op = 'DELETE' then
    insert into postbus.log (id, txid, at, leaf, stream_id, lane, type, key, payload)
    select e.id, v.txid, v.at, v.leaf, v.stream_id, postbus._lane(e.key, e.id, v.lanes), 'delete', e.key,
      postbus._change('delete', v.head, postbus._event_keys(e.j, v.key1, v.keys), e.j - v.hide, null, v.tail)
    from (select nextval(v.id_seq) as id, postbus._event_key(x.j, v.key1, v.keys) as key, x.j
      from (select to_jsonb(o.*) as j from old_rows o offset 0) x) e;
  else
    -- A row moved to a partition whose trigger then refuses it has an OLD without a NEW: no pairs then, each on its own.
    v_sign := case when (select count(*) from old_rows) = (select count(*) from new_rows) then 1 else -1 end;
    with pair as materialized (
      select coalesce(o.n, n.n) as n, o.j as before, n.j as after,
        postbus._event_key(o.j, v.key1, v.keys) as old_key, postbus._event_key(n.j, v.key1, v.keys) as new_key
      from (select row_number() over () as n, to_jsonb(o.*) as j from old_rows o) o
      full join (select v_sign * row_number() over () as n, to_jsonb(n.*) as j from new_rows n) n on n.n = o.n),
    change as (
      select 'delete' as op, p.old_key as key, p.before as j, p.before, null::jsonb as after
      from pair p where p.before is not null and (p.after is null or p.old_key is distinct from p.new_key)
      union all
      select * from (
        select case when p.before is null or p.old_key is distinct from p.new_key then 'insert' else 'update' end,
          p.new_key, p.after, case when p.old_key is not distinct from p.new_key then p.before end, p.after
        from pair p where p.after is not null order by p.n) u),
    sent as (
      insert into postbus.log (id, txid, at, leaf, stream_id, lane, type, key, payload)
      select e.id, v.txid, v.at, v.leaf, v.stream_id, postbus._lane(e.key, e.id, v.lanes), e.op, e.key,
        postbus._change(e.op, v.head, postbus._event_keys(e.j, v.key1, v.keys), e.before - v.hide, e.after - v.hide, v.tail)
      from (select nextval(v.id_seq) as id, c.* from change c) e
      returning type)
    select coalesce(bool_or(s.type <> 'update'), false) into v_moved from sent s;
  end if;

  -- Was a statement inside this one captured before it? Deeper triggers than ours leave their depth behind. Moved keys
  -- are looked at too: a cascade may have moved a row twice.
  if v.keys is not null and (v_moved or v.lax or coalesce(nullif(v_depth, ''), '0')::int > pg_trigger_depth()) then
    execute postbus._correction_sql(v.relid, v.keys, tg_op)
    using v.id_seq, v.txid, v.at, v.leaf, v.stream_id, v.lanes, v.key1, v.keys, v.head, v.tail, v.hide;
  end if;
  if pg_trigger_depth() > 1 or v_depth <> '' then
    perform set_config(v_flag, pg_trigger_depth()::text, true);
  end if;
  if v.route_after is not null then
    perform postbus._route_log(v.stream_id, v.leaf, v.txid, v.route_after);
  end if;
  perform postbus._wake(v.notify, v.stream, v.register, v.value);
  return null;
end
$$;

-- The trigger of truncate. The rows of a part of the table are read before they go; a part that goes with its root is
-- left to the root's event.
create or replace function postbus._capture_truncate()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set row_security = off
set timezone = 'UTC'
set datestyle = 'ISO'
set intervalstyle = 'postgres'
set bytea_output = 'hex'
set extra_float_digits = 1
as $$
declare
  v record := postbus._capture_context(tg_argv[0]::int, tg_relid);
  v_flag text := 'postbus.truncate_' || tg_argv[0];
  v_root boolean := v.relid = tg_relid;
  v_kind "char" := (select c.relkind from pg_class c where c.oid = tg_relid);
  v_tree boolean := v_kind = 'r' and (not v_root or exists (select from pg_inherits i where i.inhparent = tg_relid));
begin
  if tg_when = 'BEFORE' then
    if v_kind = 'p' then
      perform set_config(v_flag, 'on', true);
    elsif v_tree and coalesce(current_setting(v_flag, true), '') <> 'on' then
      -- An older snapshot would not see all the rows that go.
      perform postbus._need_read_committed(format('TRUNCATE of %s, a part of the captured table %s,', tg_relid::regclass, v.relid));
      execute postbus._publish_sql('', format(
        'select ''delete'' as op, t.j, t.j as before, null::jsonb as after from (select to_jsonb(t.*) as j from only %s t offset 0) t', tg_relid::regclass))
      using v.id_seq, v.txid, v.at, v.leaf, v.stream_id, v.lanes, v.key1, v.keys, v.head, v.tail, v.hide;
      if v.route_after is not null then
        perform postbus._route_log(v.stream_id, v.leaf, v.txid, v.route_after);
      end if;
    end if;
    return null;
  end if;
  perform set_config(v_flag, '', true);
  if not v_tree then
    insert into postbus.log (id, txid, at, leaf, stream_id, lane, type, payload)
    select nextval(v.id_seq), v.txid, v.at, v.leaf, v.stream_id, l, 'truncate',
      postbus._change('truncate', v.head, 'null', null, null, format(',"lane":%s,"lanes":%s', l, v.lanes) || v.tail)
    from generate_series(0, v.lanes - 1) l;
  end if;
  if v.route_after is not null then
    perform postbus._route_log(v.stream_id, v.leaf, v.txid, v.route_after);
  end if;
  perform postbus._wake(v.notify, v.stream, v.register, v.value);
  return null;
end
$$;
