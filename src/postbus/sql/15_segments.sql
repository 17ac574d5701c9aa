-- Segments: the leaf tables of the log, and the functions generated to read them.
--
-- Only INSERT names the parent table; everything that reads names leaves. So that reading is static SQL with cached
-- plans too, each stream owns three small generated functions over its leaves. Their names carry the version of the
-- ring: a session that still runs an older one can at worst miss what is new, never read it wrong, and consume looks
-- up the version after it has the tick up to which it reads.

-- Which lane an event belongs to, for a given lane count. Without a key it is spread by p_spread; where that is the lane
-- it is stored in, an event of the present mapping keeps its lane.
create or replace function postbus._lane(p_key text, p_spread bigint, p_lanes int)
returns smallint
language sql
immutable
parallel safe
begin atomic
  select case
    when p_lanes = 1 then 0
    when p_key is null then p_spread % p_lanes
    else ((hashtextextended(p_key, 0) % p_lanes) + p_lanes) % p_lanes
  end::smallint;
end;

-- An empty leaf: from the pool, else a new table. LIKE and ATTACH do not queue behind open producers as CREATE TABLE
-- ... PARTITION OF does.
create or replace function postbus._new_leaf(p_stream int, p_era int, p_place int)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_leaf int;
begin
  select s.leaf into v_leaf from postbus.segment s
  where s.stream_id is null and not s.dirty
  order by s.leaf limit 1 for update skip locked;
  if found then
    update postbus.segment s set stream_id = p_stream, era = p_era, place = p_place, opened_at = postbus.now_()
    where s.leaf = v_leaf;
    return v_leaf;
  end if;
  v_leaf := nextval('postbus.leaf_no');
  execute format('create table postbus.log_%1$s (like postbus.log, check (leaf = %1$s))', v_leaf);
  execute format('create index log_%1$s_txid on postbus.log_%1$s (txid, id)', v_leaf);
  execute format('create index log_%1$s_lane on postbus.log_%1$s (lane, id)', v_leaf);
  execute format('alter table postbus.log attach partition postbus.log_%1$s for values in (%1$s)', v_leaf);
  execute format('alter table postbus.log_%1$s drop constraint log_%1$s_leaf_check', v_leaf);
  insert into postbus.segment (leaf, stream_id, era, place, opened_at)
  values (v_leaf, p_stream, p_era, p_place, postbus.now_());
  return v_leaf;
end
$$;

-- All leaves of a stream as one row source. The conditions stand outside: the planner then turns it into index scans
-- merged by id, and stops when the page is full.
create or replace function postbus._leaves_sql(p_stream int, p_leaves int[], p_where text, p_tail text)
returns text
language sql
immutable
as $$
  select format('(%s) e where e.stream_id = %s and %s %s',
    string_agg(format('select l.* from postbus.log_%s l', l), ' union all '), p_stream, p_where, p_tail)
  from unnest(p_leaves) l
$$;

create or replace function postbus._message_sql()
returns text
language sql
immutable
as $$
  select 'row(e.id, e.type, e.key, e.payload, e.blob, e.headers, e.at, 1, v_batch || '':'' || e.id, v_batch)::postbus.message as message, e.id'
$$;

-- The page of a window: events that became visible in (base, upper], by id, at most p_max.
--   fresh: txid >= xmax(base), found by id above floor(base), which no fresh event is below;
--   late: the transactions in xip(base) that have finished by upper, one bounded probe each.
-- Each arm is a fenced subquery with its own limit: in one UNION the planner once read the whole log.
-- p_all: the stored lane does not decide (every lane, or a lane computed from another lane count).
-- The text uses p_max, p_upper, p_lane, p_lanes, p_max_lanes, v_hi, v_xmax, v_after, v_fresh, v_late.
create or replace function postbus._page_sql(p_stream int, p_leaves int[], p_columns text, p_late boolean, p_all boolean)
returns text
language plpgsql
immutable
as $$
declare
  v_of_lane text := ' and (p_lane is null or postbus._lane(e.key, e.lane, p_lanes) = p_lane)';
  -- Where late events fill the page, fresh ones beyond the last of them are not wanted: without that bound, the fresh
  -- arm would walk over the rows of a large late transaction at every page.
  v_is_fresh text := 'e.id > v_fresh and e.id <= ' || case when not p_late then 'v_hi' else
    '(select case when count(*) = p_max then max(late.id) else v_hi end from late)' end
    || ' and e.txid >= v_xmax and pg_visible_in_snapshot(e.txid, p_upper.snapshot)';
  v_fresh text;
begin
  if p_all then
    v_fresh := format('select f.* from generate_series(0, p_max_lanes - 1) g(l) cross join lateral (select %s from %s) f order by f.id limit p_max',
      p_columns, postbus._leaves_sql(p_stream, p_leaves, 'e.lane = g.l and ' || v_is_fresh || v_of_lane, 'order by e.id limit p_max'));
  else
    v_fresh := format('select %s from %s', p_columns,
      postbus._leaves_sql(p_stream, p_leaves, 'e.lane = p_lane and ' || v_is_fresh, 'order by e.id limit p_max'));
  end if;
  if not p_late then
    return v_fresh;
  end if;
  -- lane + 0: without statistics (lane, id) looks as good as (txid, id), and walks everything the lane has.
  return format('with late as materialized (
      select f.* from unnest(v_late) t(xid) cross join lateral (select %s from %s) f order by f.id limit p_max),
    fresh as materialized (%s)
    select * from fresh union all select * from late order by id limit p_max',
    p_columns,
    postbus._leaves_sql(p_stream, p_leaves, 'e.txid = t.xid and e.id > v_after and e.id <= v_hi'
      || case when p_all then v_of_lane else ' and e.lane + 0 = p_lane' end, 'order by e.txid, e.id limit p_max'),
    v_fresh);
end
$$;

-- (Re)creates the readers of one stream for its present ring.
--   _page: the messages of a page, in an array: the caller needs the last one; _ids: their ids only; _due: is a tick due?
create or replace function postbus._make_readers(p_stream int)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_leaves int[];
  v_ring int;
  v_any_leaf text;
  v_late_leaf text;
  v_arguments text := 'p_base postbus.tick, p_upper postbus.tick, p_last bigint, p_to bigint, p_all boolean, p_lane smallint,
  p_lanes smallint, p_max_lanes smallint, p_max int';
  v_declare text := '
  v_xmax xid8 := pg_snapshot_xmax(p_base.snapshot);
  v_after bigint := greatest(p_last, p_base.start);
  v_fresh bigint := greatest(p_last, p_base.floor);
  v_hi bigint := least(p_to, p_upper.hi);
  v_late xid8[];';
  v_begin text := '
  if pg_snapshot_xmin(p_base.snapshot) <> v_xmax then
    v_late := nullif(array(select x from pg_snapshot_xip(p_base.snapshot) x where pg_visible_in_snapshot(x, p_upper.snapshot)), ''{}'');
  end if;';
begin
  select s.ring into strict v_ring from postbus.stream s where s.id = p_stream;
  select array_agg(g.leaf order by g.place) into strict v_leaves from postbus.segment g where g.stream_id = p_stream;

  execute format($f$
create or replace function postbus._page_%1$s_%2$s(%3$s, p_token bigint)
returns postbus.message[] language plpgsql as $b$
declare%4$s
  v_batch text := 's' || p_token;
begin%5$s
  if p_all then
    return array(select x.message from (%6$s) x);
  elsif v_late is null then
    return array(select x.message from (%7$s) x);
  end if;
  return array(select x.message from (%8$s) x);
end $b$ $f$, p_stream, v_ring, v_arguments, v_declare, v_begin,
    postbus._page_sql(p_stream, v_leaves, postbus._message_sql(), true, true),
    postbus._page_sql(p_stream, v_leaves, postbus._message_sql(), false, false),
    postbus._page_sql(p_stream, v_leaves, postbus._message_sql(), true, false));

  execute format($f$
create or replace function postbus._ids_%1$s_%2$s(%3$s)
returns setof bigint language plpgsql as $b$
declare%4$s
begin%5$s
  if p_all then
    return query %6$s;
  else
    return query %7$s;
  end if;
end $b$ $f$, p_stream, v_ring, v_arguments, v_declare, v_begin,
    postbus._page_sql(p_stream, v_leaves, 'e.id', true, true), postbus._page_sql(p_stream, v_leaves, 'e.id', true, false));

  -- Is there a committed event, not my own, that this tick does not cover? Transactions in progress are jumped over:
  -- a large open one would otherwise be walked entry by entry at every poll.
  select string_agg(format('exists (select from postbus.log_%s e where e.txid > v_low and e.txid < v_high and e.id + 0 > p_tick.start and e.stream_id = %s)',
      l, p_stream), ' or '),
    string_agg(format('exists (select from unnest(v_done) t(xid), lateral (select from postbus.log_%s e where e.txid = t.xid and e.id + 0 > p_tick.start and e.stream_id = %s limit 1) x)',
      l, p_stream), ' or ')
  into v_any_leaf, v_late_leaf from unnest(v_leaves) l;
  execute format($f$
create or replace function postbus._due_%1$s_%2$s(p_tick postbus.tick) returns boolean language plpgsql as $b$
declare
  v_now pg_snapshot := pg_current_snapshot();
  v_me xid8 := pg_current_xact_id_if_assigned();
  v_low xid8;
  v_high xid8 := pg_snapshot_xmax(v_now);
  v_done xid8[];
begin
  if pg_snapshot_xmin(p_tick.snapshot) <> pg_snapshot_xmax(p_tick.snapshot) then
    v_done := array(select x from pg_snapshot_xip(p_tick.snapshot) x where pg_visible_in_snapshot(x, v_now) and x is distinct from v_me);
    if cardinality(v_done) > 0 and (%4$s) then
      return true;
    end if;
  end if;
  if v_high <= pg_snapshot_xmax(p_tick.snapshot) then
    return false;
  end if;
  v_low := (pg_snapshot_xmax(p_tick.snapshot)::text::bigint - 1)::text::xid8;
  if pg_snapshot_xmin(v_now) = v_high and (v_me is null or v_me <= v_low) then
    return %3$s;
  end if;
  for v_high in
    select x from pg_snapshot_xip(v_now) x where x > v_low
    union select v_me where v_me > v_low and v_me < v_high
    union select v_high order by 1
  loop
    if %3$s then
      return true;
    end if;
    v_low := v_high;
  end loop;
  return false;
end $b$ $f$, p_stream, v_ring, v_any_leaf, v_late_leaf);

  -- Readers of rings that are gone: sessions that hold one finish their call, nobody starts another.
  perform postbus._drop_readers(p_stream, v_ring - 2);
end
$$;

create or replace function postbus._drop_readers(p_stream int, p_up_to_ring int)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function regprocedure;
begin
  for v_function in
    select p.oid::regprocedure from pg_proc p
    where p.pronamespace = 'postbus'::regnamespace
      and p.proname ~ format('^_(page|ids|due)_%s_\d+$', p_stream)
      and substring(p.proname from '\d+$')::int <= p_up_to_ring
  loop
    execute format('drop function %s', v_function);
  end loop;
end
$$;
