-- Windows by columns: what read_window returns, for readers that want columns anyway (Arrow). Rows cost both sides more to
-- wrap and unwrap than to read: a value here is one byte string for thousands of events.

-- The events of one part, by id, in chunks of so many ids: one row each. Numbers are 4 or 8 bytes each, the highest first;
-- a time is microseconds since 2000; texts and bytes are strung together, UTF-8, with their lengths apart.
--   columns: only these of the events; the id always.
--   *_lengths: 4 bytes an event, -1 is null.  *_places: 12 bytes for each that is not null: its event's id, its length.
--   lane: null where the stream has one only.  types, keys, wait: as for read_window.
create or replace function postbus.read_columns(
  stream text,
  part text,
  columns text[] default '{lane,type,key,payload,blob,headers,at}',
  types text[] default null,
  keys text[] default null,
  chunk int default 4096,
  wait interval default '30 seconds'
)
returns table (
  events int,
  tick bigint,
  id bytea,
  lane bytea,
  type bytea,
  type_lengths bytea,
  key bytea,
  key_lengths bytea,
  payload bytea,
  payload_lengths bytea,
  blob bytea,
  blob_places bytea,
  headers bytea,
  headers_places bytea,
  at bytea
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set work_mem = '32MB'
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v jsonb;
  v_base postbus.tick;
  v_upper postbus.tick;
  v_until timestamptz := clock_timestamp() + read_columns.wait;
  v_wrong text := (select c from unnest(read_columns.columns) c where c <> all ('{id,tick,lane,type,key,payload,blob,headers,at}') limit 1);
  v_inner text;
  v_outer text;
  v_filter text := ' and e.id > c.lo and e.id <= c.lo + $10'
    || case when read_columns.types is not null then ' and e.type = any ($8)' else '' end
    || case when read_columns.keys is not null then ' and e.key = any ($9)' else '' end;
  a record;
begin
  perform postbus._need_read_committed('read_columns');
  if v_wrong is not null or read_columns.columns is null or (read_columns.chunk between 1 and 1000000) is not true then
    raise exception using errcode = 'PB003',
      message = case when v_wrong is not null then format('read_columns: events have no column %L', v_wrong)
        else 'read_columns needs columns, and a chunk of 1 to 1000000 ids' end;
  end if;
  v_s := postbus._stream(read_columns.stream);
  v := postbus._parse('part', v_s.name, read_columns.part, '{tick,upper,after,upto}', '{snapshot,upper_snapshot}');
  v_upper := postbus._known_tick(v_s, (v ->> 'upper')::bigint, v ->> 'upper_snapshot', v_until);
  v_base := postbus._known_tick(v_s, (v ->> 'tick')::bigint, v ->> 'snapshot', v_until);
  a := postbus._arms(v_s.id, v_base, v_upper, (v ->> 'after')::bigint, (v ->> 'upto')::bigint);
  select 'e.id, ' || string_agg(k.inside, ', '), string_agg(k.outside, ', ') into v_inner, v_outer
  from postbus._column_sql(read_columns.columns, a.lanes) k;
  return query execute format('select f.* from generate_series(least($2, case when cardinality($6) > 0 then $7 end), $3 - 1, $10) c (lo)
      cross join lateral (select count(*)::int as events, %s::bigint, string_agg(int8send(x.id), null), %s from (%s) x) f where f.events > 0',
    v_upper.id, v_outer, postbus._part_sql(v_s.id, a.leaves, a.lanes, cardinality(a.late) > 0, v_inner, v_filter))
  using a.xmax, a.fresh_after, a.hi, v_upper.snapshot, pg_snapshot_xmin(v_upper.snapshot), a.late, a.late_after, read_columns.types,
    read_columns.keys, read_columns.chunk::bigint;
  -- TRUNCATE is not MVCC: what we read counts only if the floor has not passed us meanwhile.
  perform postbus._known_tick(s, v_base.id, v ->> 'snapshot') from postbus.stream s where s.id = v_s.id;
  if not found then
    raise exception using errcode = 'PB001', message = format('stream %L does not exist', v_s.name);
  end if;
end
$$;

-- What read_columns selects of an event, and what it makes of a chunk. Where the database has another encoding, texts are
-- converted one by one: their lengths change. A delimiter of null is none; an empty one would be appended each time.
create or replace function postbus._column_sql(p_columns text[], p_lanes smallint)
returns table (inside text, outside text)
language sql
stable
as $$
  select
    case when not c.wanted then 'null::bytea'
      when c.kind = 'number' or c.name = 'blob' then 'e.' || c.name
      else format(case when c.utf8 then 'e.%s::text' else 'convert_to(e.%s::text, ''UTF8'')' end, c.name) end || ' as ' || c.name,
    case when not c.wanted then case when c.kind = 'number' then 'null::bytea' else 'null::bytea, null::bytea' end
      when c.name = 'lane' then 'string_agg(int4send(x.lane), null)'
      when c.name = 'at' then 'string_agg(timestamptz_send(x.at), null)'
      else format(case when c.utf8 and c.name <> 'blob' then 'convert_to(string_agg(x.%1$s, null), ''UTF8''), ' else 'string_agg(x.%1$s, null), ' end
        || case when c.kind = 'dense' then 'string_agg(int4send(coalesce(octet_length(x.%1$s), -1)), null)'
          else 'string_agg(int8send(x.id) || int4send(octet_length(x.%1$s)), null) filter (where x.%1$s is not null)' end, c.name) end
  from (
    select k.*, k.name = any (p_columns) and (k.name <> 'lane' or p_lanes > 1) as wanted, getdatabaseencoding() = 'UTF8' as utf8
    from (values (1, 'lane', 'number'), (2, 'type', 'dense'), (3, 'key', 'dense'), (4, 'payload', 'dense'), (5, 'blob', 'sparse'),
      (6, 'headers', 'sparse'), (7, 'at', 'number')) k (place, name, kind)) c
  order by c.place
$$;
