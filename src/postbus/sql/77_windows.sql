-- Windows for readers outside the database: what lies between two positions, planned into parts that can be read in any
-- order, by anybody, again and again: a window is the same set of events for ever.
--
-- A window is a list of pieces (base, upper, after, upto): the events that upper has seen and base has not, with ids in
-- (after, upto]. As in consume (docs/adr/0001-ticks.md), a piece has two arms, each found by an index:
--   fresh: txid >= xmax(base), by id above floor(base);
--   late: the transactions in xip(base) that have finished by upper, one probe each.
-- A piece whose base is of an earlier era is all that its own era has up to upper.

-- The pieces between two positions. Cut where one of them has its upper or base tick, and at the ends of eras.
create or replace function postbus._pieces(
  p_s postbus.stream,
  p_base postbus.tick,
  p_upper postbus.tick,
  p_last bigint,
  p_to_base postbus.tick,
  p_to_upper postbus.tick,
  p_to_last bigint
)
returns table (base postbus.tick, upper postbus.tick, after bigint, upto bigint)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  v_cuts bigint[];
  v_from postbus.tick := p_base;
  v_to postbus.tick;
  v_end postbus.tick;
begin
  if p_base.id > p_to_base.id or p_base.id = p_to_base.id and p_last > p_to_last then
    raise exception using errcode = 'PB003', message = format('a window of stream %L ends before it begins', p_s.name),
      hint = format('It would go from tick %s to tick %s.', p_base.id, p_to_base.id);
  end if;
  v_cuts := array(select distinct x from unnest(array[p_upper.id, p_to_base.id, p_to_upper.id]) x
    where x > p_base.id and x <= coalesce(p_to_upper.id, p_to_base.id) order by 1);
  for i in 1 .. cardinality(v_cuts) loop
    select t.* into strict v_to from postbus.tick t where t.stream_id = p_s.id and t.id = v_cuts[i];
    after := case when v_to.id <= p_upper.id then p_last else 0 end;
    upto := case when v_from.id >= p_to_base.id then p_to_last else 9223372036854775807 end;
    while v_from.id < v_to.id loop
      v_end := v_to;
      if v_from.era < v_to.era then
        -- The last tick of an era is never pruned.
        select t.* into strict v_end from postbus.tick t
        where t.stream_id = p_s.id and t.era = v_from.era and t.id >= v_from.id order by t.id desc limit 1;
        if v_end.id = v_from.id then
          select t.* into strict v_end from postbus.tick t
          where t.stream_id = p_s.id and t.era > v_from.era and t.id <= v_to.id order by t.id limit 1;
          if v_end.era = v_to.era then
            v_end := v_to;
          else
            select t.* into strict v_end from postbus.tick t
            where t.stream_id = p_s.id and t.era = v_end.era and t.id >= v_end.id order by t.id desc limit 1;
          end if;
        end if;
      end if;
      base := v_from;
      upper := v_end;
      if after < upto then
        return next;
      end if;
      v_from := v_end;
    end loop;
  end loop;
end
$$;

create or replace function postbus._window(p_s postbus.stream, p_since text, p_until text)
returns table (base postbus.tick, upper postbus.tick, after bigint, upto bigint)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  select w.* from postbus._read_position(p_s, p_since) a, postbus._read_position(p_s, p_until) b,
    postbus._pieces(p_s, a.base, a.upper, a.last_id, b.base, b.upper, b.last_id) w
$$;

-- What the arms of a piece are searched by, and the stream's leaves and lanes. It is called when the upper tick is
-- known: whoever sees that sees the leaves of its events.
create or replace function postbus._arms(
  p_stream int,
  p_base postbus.tick,
  p_upper postbus.tick,
  p_after bigint,
  p_upto bigint,
  out leaves int[],
  out lanes smallint,
  out xmax xid8,
  out fresh_after bigint,
  out late xid8[],
  out late_after bigint,
  out hi bigint
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  leaves := array(select g.leaf from postbus.segment g where g.stream_id = p_stream order by g.place);
  select s.max_lanes into strict lanes from postbus.stream s where s.id = p_stream;
  hi := least(p_upto, p_upper.hi);
  if p_base.era < p_upper.era then
    xmax := '1'::xid8;
    late := '{}';
    fresh_after := greatest(p_after, p_upper.start);
    late_after := fresh_after;
  else
    xmax := pg_snapshot_xmax(p_base.snapshot);
    late := array(select x from pg_snapshot_xip(p_base.snapshot) x where pg_visible_in_snapshot(x, p_upper.snapshot));
    fresh_after := greatest(p_after, p_base.floor);
    late_after := greatest(p_after, p_base.start);
  end if;
end
$$;

-- The fresh arm as SQL: p_columns of its events, p_tail is done lane by lane.
-- $1 xmax, $2 fresh_after, $3 hi, $4 snapshot of upper, $5 xmin of that: most rows are below it, and need no search.
create or replace function postbus._fresh_sql(p_stream int, p_leaves int[], p_lanes smallint, p_columns text, p_filter text, p_tail text)
returns text
language sql
immutable
as $$
  select case when p_lanes = 1 then format('select %s from %s', p_columns, postbus._leaves_sql(p_stream, p_leaves, 'e.lane = 0 and ' || w, p_tail))
    else format('select f.* from generate_series(0, %s) g (l) cross join lateral (select %s from %s) f', p_lanes - 1, p_columns,
      postbus._leaves_sql(p_stream, p_leaves, 'e.lane = g.l and ' || w, p_tail)) end
  from (select 'e.id > $2 and e.id <= $3 and e.txid >= $1 and (e.txid < $5 or pg_visible_in_snapshot(e.txid, $4))' || p_filter) x (w)
$$;

-- The late arm: $3 hi, $6 late, $7 late_after. lane + 0 keeps the planner from the index that begins with it.
create or replace function postbus._late_sql(p_stream int, p_leaves int[], p_columns text, p_filter text, p_tail text)
returns text
language sql
immutable
as $$
  select format('select f.* from unnest($6) t (xid) cross join lateral (select %s from %s) f', p_columns,
    postbus._leaves_sql(p_stream, p_leaves, 'e.txid = t.xid and e.id > $7 and e.id <= $3 and e.lane + 0 >= 0' || p_filter, p_tail))
$$;

-- Both arms, by id. Without late transactions and lanes the index has that order.
create or replace function postbus._part_sql(p_stream int, p_leaves int[], p_lanes smallint, p_late boolean, p_columns text, p_filter text)
returns text
language sql
immutable
as $$
  select case
    when p_late then format('select * from (%s) x union all select * from (%s) y order by id',
      postbus._fresh_sql(p_stream, p_leaves, p_lanes, p_columns, p_filter, ''), postbus._late_sql(p_stream, p_leaves, p_columns, p_filter, ''))
    when p_lanes = 1 then postbus._fresh_sql(p_stream, p_leaves, p_lanes, p_columns, p_filter, 'order by e.id')
    else postbus._fresh_sql(p_stream, p_leaves, p_lanes, p_columns, p_filter, '') || ' order by f.id' end
$$;

-- Where the events of a piece are: the first fresh id; the range of late ids below it, and at most how many they are.
-- A few index probes; no count.
create or replace function postbus._edges(
  p_stream int,
  p_base postbus.tick,
  p_upper postbus.tick,
  p_after bigint,
  p_upto bigint,
  out fresh_first bigint,
  out late_first bigint,
  out late_last bigint,
  out late_most bigint
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  a record := postbus._arms(p_stream, p_base, p_upper, p_after, p_upto);
  v_upper pg_snapshot := p_upper.snapshot;
  v_xmin xid8 := pg_snapshot_xmin(p_upper.snapshot);
begin
  execute format('select min(x.id) from (%s) x', postbus._fresh_sql(p_stream, a.leaves, a.lanes, 'e.id', '', 'order by e.id limit 1'))
  into fresh_first using a.xmax, a.fresh_after, a.hi, v_upper, v_xmin;
  if cardinality(a.late) > 0 then
    -- Both ends of each transaction: what is between is at most what it has.
    execute format('select min(x.first), max(x.last), sum(x.last - x.first + 1) from (
        select lo.id as first, hi.id as last from unnest($6) y (xid)
        cross join lateral (%s) lo cross join lateral (%s) hi) x where num_nulls($1, $2, $4, $5) = 0',
      replace(postbus._late_sql(p_stream, a.leaves, 'e.id', '', 'order by e.txid, e.id limit 1'), 'unnest($6)', '(values (y.xid))'),
      replace(postbus._late_sql(p_stream, a.leaves, 'e.id', '', 'order by e.txid desc, e.id desc limit 1'), 'unnest($6)', '(values (y.xid))'))
    into late_first, late_last, late_most
    using a.xmax, a.fresh_after, least(a.hi, fresh_first - 1), v_upper, v_xmin, a.late, a.late_after;
    late_most := least(late_most, late_last - late_first + 1);
  end if;
end
$$;

-- The first id of a piece whose event was published at p_at or later.
create or replace function postbus._first_since(p_stream int, p_base postbus.tick, p_upper postbus.tick, p_at timestamptz)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  a record := postbus._arms(p_stream, p_base, p_upper, 0, 9223372036854775807);
  v_first bigint;
begin
  execute format('select min(x.id) from (select * from (%s) f union all select * from (%s) l) x',
    postbus._fresh_sql(p_stream, a.leaves, a.lanes, 'e.id', ' and e.at >= $8', 'order by e.id limit 1'),
    postbus._late_sql(p_stream, a.leaves, 'e.id', ' and e.at >= $8', 'order by e.txid, e.id limit 1'))
  into v_first using a.xmax, a.fresh_after, a.hi, p_upper.snapshot, pg_snapshot_xmin(p_upper.snapshot), a.late, a.late_after, p_at;
  return v_first;
end
$$;

-- The first p_max late ids of a piece, in order.
create or replace function postbus._late_ids(p_stream int, p_base postbus.tick, p_upper postbus.tick, p_after bigint, p_upto bigint, p_max bigint)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  a record := postbus._arms(p_stream, p_base, p_upper, p_after, p_upto);
  v bigint[];
begin
  execute format('select array(select x.id from (%s) x where num_nulls($1, $2, $4, $5) = 0 order by x.id limit $8)',
    postbus._late_sql(p_stream, a.leaves, 'e.id', '', 'order by e.txid, e.id limit $8'))
  into v using a.xmax, a.fresh_after, a.hi, p_upper.snapshot, pg_snapshot_xmin(p_upper.snapshot), a.late, a.late_after, p_max;
  return v;
end
$$;

-- Splits a window into parts for readers that work side by side: at least so many parts, if there are as many events, and
-- none with more than max_events. events is an estimate from ids, never less than what is there. Costs a few index probes,
-- whatever the window holds. (Late events below all others lie scattered: up to 100000 of them are divided by their ids,
-- more of them by the range of their ids, and then max_events is a rough guide.) A window without events has no parts.
create or replace function postbus.plan_window(stream text, since text, until text, parts int default 1, max_events bigint default null)
returns table (part text, events bigint)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v record;
  v_late bigint[];
  v_ranges jsonb := '[]';
  v_total numeric;
  v_n numeric;
  v_from bigint;
  v_to bigint;
begin
  perform postbus._need_read_committed('plan_window');
  if plan_window.parts is null or plan_window.parts not between 1 and 100000 or plan_window.max_events < 1 then
    raise exception using errcode = 'PB003', message = 'plan_window: parts must be 1 to 100000, and max_events at least 1';
  end if;
  v_s := postbus._stream(plan_window.stream);
  for v in
    select w.base, w.upper, w.after, least(w.upto, (w.upper).hi) as upto, e.*,
      format('{"stream": %s, "tick": %s, "snapshot": "%s", "upper": %s, "upper_snapshot": "%s"', to_json(v_s.name), (w.base).id,
        (w.base).snapshot, (w.upper).id, (w.upper).snapshot) as head
    from postbus._window(v_s, plan_window.since, plan_window.until) w, postbus._edges(v_s.id, w.base, w.upper, w.after, w.upto) e
  loop
    if v.late_first is not null then
      v_late := postbus._late_ids(v_s.id, v.base, v.upper, v.after, v.late_last, 100001);
      v_ranges := v_ranges || jsonb_build_object('head', v.head, 'after', v.late_first - 1, 'upto', v.late_last,
        'n', case when cardinality(v_late) <= 100000 then cardinality(v_late) else v.late_most end,
        'ids', case when cardinality(v_late) <= 100000 then v_late end);
    end if;
    if v.fresh_first is not null then
      v_ranges := v_ranges || jsonb_build_object('head', v.head, 'after', v.fresh_first - 1, 'upto', v.upto, 'n', v.upto - v.fresh_first + 1);
    end if;
  end loop;
  v_total := (select sum(r.n) from jsonb_to_recordset(v_ranges) r (n bigint));
  for v in select r.* from jsonb_to_recordset(v_ranges) r (head text, after bigint, upto bigint, n bigint, ids bigint[]) loop
    v_n := least(v.n, greatest(ceil(plan_window.parts * v.n / v_total), ceil(v.n::numeric / plan_window.max_events)));
    v_from := v.after;
    for i in 1 .. v_n loop
      v_to := case when v.ids is null then v.after + div((v.upto - v.after)::numeric * i, v_n) else v.ids[div(v.n * i, v_n)] end;
      part := format('%s, "after": %s, "upto": %s}', v.head, v_from, v_to);
      events := case when v.ids is null then least(v_to - v_from, v.n) else div(v.n * i, v_n) - div(v.n * (i - 1), v_n) end;
      return next;
      v_from := v_to;
    end loop;
  end loop;
end
$$;

-- The events of one part, by id. Works on a replica too, where it waits for the part's ticks to come.
--   types, keys: only events of these; wait: how long a replica waits.
create or replace function postbus.read_window(
  stream text,
  part text,
  types text[] default null,
  keys text[] default null,
  wait interval default '30 seconds'
)
returns table (id bigint, tick bigint, lane smallint, type text, key text, payload text, blob bytea, headers jsonb, at timestamptz)
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
  v_until timestamptz := clock_timestamp() + read_window.wait;
  v_columns text;
  v_filter text := case when read_window.types is not null then ' and e.type = any ($8)' else '' end
    || case when read_window.keys is not null then ' and e.key = any ($9)' else '' end;
  a record;
begin
  perform postbus._need_read_committed('read_window');
  v_s := postbus._stream(read_window.stream);
  v := postbus._parse('part', v_s.name, read_window.part, '{tick,upper,after,upto}', '{snapshot,upper_snapshot}');
  v_upper := postbus._known_tick(v_s, (v ->> 'upper')::bigint, v ->> 'upper_snapshot', v_until);
  v_base := postbus._known_tick(v_s, (v ->> 'tick')::bigint, v ->> 'snapshot', v_until);
  a := postbus._arms(v_s.id, v_base, v_upper, (v ->> 'after')::bigint, (v ->> 'upto')::bigint);
  v_columns := format('e.id, %s::bigint as tick, e.lane, e.type, e.key, e.payload, e.blob, e.headers, e.at', v_upper.id);
  return query execute postbus._part_sql(v_s.id, a.leaves, a.lanes, cardinality(a.late) > 0, v_columns, v_filter)
  using a.xmax, a.fresh_after, a.hi, v_upper.snapshot, pg_snapshot_xmin(v_upper.snapshot), a.late, a.late_after, read_window.types, read_window.keys;
  -- TRUNCATE is not MVCC: what we read counts only if the floor has not passed us meanwhile.
  perform postbus._known_tick(s, v_base.id, v ->> 'snapshot') from postbus.stream s where s.id = v_s.id;
  if not found then
    raise exception using errcode = 'PB001', message = format('stream %L does not exist', v_s.name);
  end if;
end
$$;

-- A position inside (since, until] that has about max_events events before it, never more, and at least one where there
-- are any. Costs a few index probes.
create or replace function postbus.bound_window(stream text, since text, until text, max_events bigint, holder text default null)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v record;
  e record;
  v_left bigint := bound_window.max_events;
  v_last bigint;
  v_late bigint[];
  v_here bigint;
begin
  perform postbus._need_read_committed('bound_window');
  if v_left is null or v_left < 1 then
    raise exception using errcode = 'PB003', message = 'bound_window: max_events must be at least 1';
  end if;
  v_s := postbus._stream(bound_window.stream);
  if bound_window.holder is not null then
    v_s := postbus._lock_ticks(v_s);
  end if;
  for v in
    select w.*, least(w.upto, (w.upper).hi) as top from postbus._window(v_s, bound_window.since, bound_window.until) w
  loop
    e := postbus._edges(v_s.id, v.base, v.upper, v.after, v.upto);
    v_here := coalesce(e.late_most, 0) + coalesce(v.top - e.fresh_first + 1, 0);
    if v_here <= v_left then
      v_left := v_left - v_here;
      continue;
    end if;
    if v_left = 0 then
      perform postbus._hold(v_s, bound_window.holder, array[(v.base).id]);
      perform postbus._make_durable();
      return postbus._position_text(v_s.name, v.base, null, null);
    end if;
    if e.late_most is null or e.late_most < v_left and e.fresh_first is not null then
      v_last := e.fresh_first - 1 + v_left - coalesce(e.late_most, 0);
    else
      v_late := postbus._late_ids(v_s.id, v.base, v.upper, v.after, least(v.top, e.fresh_first - 1), v_left);
      v_last := v_late[cardinality(v_late)];
    end if;
    perform postbus._hold(v_s, bound_window.holder, array[(v.base).id, (v.upper).id]);
    perform postbus._make_durable();
    return postbus._position_text(v_s.name, v.base, v.upper, v_last);
  end loop;
  if bound_window.holder is null then
    return bound_window.until;
  end if;
  return postbus.hold_position(bound_window.stream, bound_window.until, bound_window.holder);
end
$$;

-- How many events a window has; with max_events it stops counting there.
create or replace function postbus.count_window(stream text, since text, until text, max_events bigint default null)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_s postbus.stream;
  v record;
  a record;
  v_n bigint;
  v_total bigint := 0;
begin
  perform postbus._need_read_committed('count_window');
  v_s := postbus._stream(count_window.stream);
  for v in select w.* from postbus._window(v_s, count_window.since, count_window.until) w loop
    a := postbus._arms(v_s.id, v.base, v.upper, v.after, v.upto);
    execute format('select count(*) from (select * from (%s) x union all select * from (%s) y limit $8) z',
      postbus._fresh_sql(v_s.id, a.leaves, a.lanes, 'e.id', '', ''), postbus._late_sql(v_s.id, a.leaves, 'e.id', '', ''))
    into v_n using a.xmax, a.fresh_after, a.hi, (v.upper).snapshot, pg_snapshot_xmin((v.upper).snapshot), a.late, a.late_after,
      count_window.max_events - v_total;
    perform postbus._known_tick(s, (v.base).id, (v.base).snapshot::text) from postbus.stream s where s.id = v_s.id;
    v_total := v_total + v_n;
    exit when v_total >= count_window.max_events;
  end loop;
  return v_total;
end
$$;
