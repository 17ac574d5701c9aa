-- Upkeep. maintain() is safe from anywhere and as often as one likes: every step is its own subtransaction, works on
-- what nobody else holds, and one broken stream never stops the others.

-- The tick up to which nobody needs the log any more: the least base of every group's slots and open leases, and of
-- what retain keeps. A group further back than max_retain does not count: it gets "position lost" when it comes back.
create or replace function postbus._needed_tick(p_s postbus.stream)
returns postbus.tick
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := postbus.now_();
  v_kept postbus.tick;
  v_abandoned bigint := 0;
  v_least bigint;
  v_t postbus.tick;
begin
  select t.* into v_kept from postbus.tick t
  where t.stream_id = p_s.id and t.total is not null and t.at <= v_now - p_s.retain order by t.at desc limit 1;
  if not found then
    return null;
  end if;
  if p_s.max_retain is not null then
    select t.id into v_abandoned from postbus.tick t
    where t.stream_id = p_s.id and t.total is not null and t.at <= v_now - p_s.max_retain order by t.at desc limit 1;
  end if;
  select min(x.base) into v_least from (
    select p.base from postbus.slot l,
      lateral (select q.base from postbus.progress q where q.slot_id = l.id order by q.n desc limit 1) p
    where l.stream_id = p_s.id
    union all
    select l.base from postbus.lease l where l.stream_id = p_s.id and l.base is not null) x
  where x.base >= greatest(v_abandoned, p_s.floor_tick);
  select t.* into strict v_t from postbus.tick t where t.stream_id = p_s.id and t.id = least(v_least, v_kept.id);
  return v_t;
end
$$;

-- Empties one old leaf. The lock wait is short (readers queue behind it), the check is a statement of its own under the
-- lock and looks at the rows themselves, and the floor rises in the same transaction.
create or replace function postbus._clean_leaf(p_s postbus.stream, p_leaf int)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set enable_seqscan = off
set jit = off
as $$
declare
  v_needed postbus.tick;
  v_era int;
  v_blocked boolean;
  v_last xid8;
  v_floor bigint;
begin
  begin
    execute format('lock table only postbus.log_%s in access exclusive mode', p_leaf);
  exception when lock_not_available then
    return false;
  end;
  -- New statements, new snapshots: positions taken before the lock do not count.
  perform from postbus.stream s where s.id = p_s.id for no key update;
  v_needed := postbus._needed_tick(p_s);
  if v_needed.id is null then
    return false;
  end if;
  select g.era into strict v_era from postbus.segment g where g.leaf = p_leaf and g.stream_id = p_s.id;
  if v_era > v_needed.era then
    return false;
  end if;
  if v_era = v_needed.era then
    execute format('select exists (select from postbus.log_%1$s e where e.txid >= $1)
      or exists (select from unnest($2) x, lateral (select from postbus.log_%1$s e where e.txid = x limit 1) y)', p_leaf)
    into v_blocked using pg_snapshot_xmax(v_needed.snapshot), array(select pg_snapshot_xip(v_needed.snapshot));
    if v_blocked then
      return false;
    end if;
  end if;
  -- The floor rises to the first tick that has seen all of it, no further: what is younger can still be sought.
  execute format('select e.txid from postbus.log_%s e order by e.txid desc limit 1', p_leaf) into v_last;
  select t.id into v_floor from postbus.tick t
  where t.stream_id = p_s.id and t.id > p_s.floor_tick and t.id <= v_needed.id and t.era = v_era
    and pg_snapshot_xmin(t.snapshot) > v_last
  order by t.id limit 1;
  v_floor := coalesce(v_floor, v_needed.id);
  execute format('truncate table only postbus.log_%s', p_leaf);
  if v_floor > (select s.floor_tick from postbus.stream s where s.id = p_s.id) then
    update postbus.stream s set floor_tick = v_floor where s.id = p_s.id;
    perform postbus._stamp(p_s.id);
  end if;
  return true;
end
$$;

create or replace function postbus._leaf_empty(p_leaf int)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  -- By file size: rows of open transactions count too. A leaf that is not there holds nothing either.
  return coalesce(pg_relation_size(to_regclass(format('postbus.log_%s', p_leaf))), 0) = 0;
end
$$;

-- Moves the write pointer to the next empty leaf when the present one is old enough. Producers that read the old
-- pointer go on writing there; readers look at every leaf.
create or replace function postbus._rotate(p_s postbus.stream)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := postbus.now_();
  v_next int;
  v_s postbus.stream;
begin
  if p_s.rotated_at + p_s.rotate_every > v_now or postbus._leaf_empty(p_s.leaf) then
    return false;
  end if;
  select s.* into v_s from postbus.stream s where s.id = p_s.id for no key update skip locked;
  if not found or v_s.leaf <> p_s.leaf then
    return false;
  end if;
  select g.leaf into v_next from postbus.segment g,
    (select x.place from postbus.segment x where x.leaf = v_s.leaf) c
  where g.stream_id = v_s.id and g.leaf <> v_s.leaf and postbus._leaf_empty(g.leaf)
    and g.attached < pg_snapshot_xmin(pg_current_snapshot())
  order by g.place <= c.place, g.place limit 1;
  if not found then
    return false;
  end if;
  update postbus.segment g set opened_at = v_now, era = v_s.era where g.leaf = v_next;
  update postbus.stream s set leaf = v_next, rotated_at = v_now where s.id = v_s.id;
  perform postbus._stamp(v_s.id);
  return true;
end
$$;

-- A session that holds a lock on the log does not hear of leaves attached since. Producers of a young stream lock its
-- leaf by name, which makes them hear; when the transactions that were open then have ended, that is over.
create or replace function postbus._age_leaves(p_s postbus.stream)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_n int := 0;
begin
  if p_s.young is null and not exists (select from postbus.segment g where g.stream_id = p_s.id and g.attached is null) then
    return 0;
  end if;
  perform from postbus.stream s where s.id = p_s.id for no key update skip locked;
  if not found then
    return 0;
  end if;
  if exists (select from postbus.segment g where g.stream_id = p_s.id and g.attached is null) then
    update postbus.segment g set attached = l.xid from (select postbus._later_xid() as xid) l
    where g.stream_id = p_s.id and g.attached is null;
    v_n := 1;
  end if;
  if p_s.young = postbus._never() or p_s.young < pg_snapshot_xmin(pg_current_snapshot()) then
    update postbus.stream s set young = case when s.young = postbus._never() then postbus._later_xid() end where s.id = p_s.id;
    perform postbus._stamp(p_s.id);
    v_n := v_n + 1;
  end if;
  return v_n;
end
$$;

-- Counts events along the chain of ticks: the total at the newest tick of the last counted one's era. Also the points
-- that are kept when ticks are thinned out.
create or replace function postbus._count_events(p_s postbus.stream)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_a postbus.tick;
  v_b postbus.tick;
  v_n bigint;
begin
  select t.* into v_a from postbus.tick t where t.stream_id = p_s.id and t.total is not null order by t.id desc limit 1;
  if not found then
    return 0;
  end if;
  select t.* into strict v_b from postbus.tick t where t.stream_id = p_s.id and t.era = v_a.era order by t.id desc limit 1;
  if v_b.id = v_a.id then
    select t.* into v_b from postbus.tick t where t.stream_id = p_s.id and t.era > v_a.era order by t.id limit 1;
    if found then
      update postbus.tick t set total = v_a.total where t.stream_id = p_s.id and t.id = v_b.id;
    end if;
    return 0;
  end if;
  -- The ring after the ticks, as in consume.
  select s.* into strict p_s from postbus.stream s where s.id = p_s.id;
  v_n := postbus._count(p_s.ring, p_s.max_lanes, v_a, v_b, 0, true, null, null, null);
  -- What was truncated while it was counted would be missing.
  if (select s.floor_tick from postbus.stream s where s.id = p_s.id) > v_a.id then
    return 0;
  end if;
  update postbus.tick t set total = v_a.total + v_n where t.stream_id = p_s.id and t.id = v_b.id;
  return v_n;
end
$$;

-- Lanes with nothing to read would pin retention: move them up to the newest tick.
create or replace function postbus._advance_empty_lanes(p_s postbus.stream)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_g postbus."group";
  v_n int := 0;
  v_lane int;
  v_p postbus.progress;
  v_b postbus.tick;
  v_u postbus.tick;
  v_s postbus.stream;
  v_all boolean;
  v_count bigint;
begin
  for v_g in
    select g.* from postbus."group" g
    where g.stream_id = p_s.id and g.ordering <> 'stream' and cardinality(g.slots) > 1 and g.change_id = p_s.change_id
  loop
    for v_lane in 0 .. cardinality(v_g.slots) - 1 loop
      select p.* into v_p from postbus.progress p where p.slot_id = v_g.slots[v_lane + 1] order by p.n desc limit 1;
      continue when v_p.upper is not null;
      select t.* into strict v_u from postbus.tick t where t.stream_id = p_s.id order by t.id desc limit 1;
      select t.* into v_b from postbus.tick t where t.stream_id = p_s.id and t.id = v_p.base;
      continue when v_b.id is null or v_b.id = v_u.id or v_b.era <> v_u.era;
      select s.* into v_s from postbus.stream s where s.id = p_s.id;
      exit when not found or v_s.change_id <> v_g.change_id;
      v_all := v_g.mixed_xid is not null and v_b.era <= v_g.mixed_era and pg_snapshot_xmin(v_b.snapshot) <= v_g.mixed_xid;
      v_count := postbus._count(v_s.ring, v_s.max_lanes, v_b, v_u, 0, v_all, v_lane::smallint, case when v_all then v_g.lanes end, 1);
      continue when v_count > 0 or (select s.floor_tick from postbus.stream s where s.id = p_s.id) > v_b.id;
      continue when not pg_try_advisory_xact_lock(1886351993, v_p.slot_id);
      if v_p.n = (select p.n from postbus.progress p where p.slot_id = v_p.slot_id order by p.n desc limit 1) then
        insert into postbus.progress (slot_id, n, base, upper, last_id, token, next_expiry, change_id, at)
        values (v_p.slot_id, v_p.n + 1, v_u.id, null, 0, v_p.token, v_p.next_expiry, v_p.change_id, v_p.at);
        v_n := v_n + 1;
      end if;
    end loop;
  end loop;
  return v_n;
end
$$;

-- Deletes what the newest rows have replaced: positions, and ticks that nobody can need. Ticks above the least base in
-- use are never touched; below it the counted ones stay as points to seek to, as long as their events do.
create or replace function postbus._prune(p_s postbus.stream)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_slot postbus.slot;
  v_n bigint;
  v_expired bigint;
  v_done bigint := 0;
  v_least bigint;
  v_from bigint;
begin
  for v_slot in select l.* from postbus.slot l where l.stream_id = p_s.id order by l.id loop
    select p.n into v_n from postbus.progress p where p.slot_id = v_slot.id order by p.n desc limit 1;
    continue when v_n is null or v_n - v_slot.pruned < 2;
    perform from postbus.slot l where l.id = v_slot.id for no key update skip locked;
    continue when not found;
    with gone as (
      delete from postbus.progress p where p.slot_id = v_slot.id and p.n >= v_slot.pruned and p.n < v_n returning p.expired)
    select count(*), sum(g.expired) into v_from, v_expired from gone g;
    update postbus.slot l set pruned = v_n, expired = l.expired + coalesce(v_expired, 0) where l.id = v_slot.id;
    v_done := v_done + v_from;
  end loop;

  select u.pruned_tick into v_from from postbus.upkeep u where u.stream_id = p_s.id;
  select min(x.base) into v_least from (
    select p.base from postbus.slot l,
      lateral (select q.base from postbus.progress q where q.slot_id = l.id order by q.n desc limit 1) p
    where l.stream_id = p_s.id and p.base >= p_s.floor_tick
    union all select l.base from postbus.lease l where l.stream_id = p_s.id and l.base >= p_s.floor_tick
    union all select t.id from (
      select t.id from postbus.tick t where t.stream_id = p_s.id and t.total is not null order by t.id desc limit 1) t
    union all select min(c.tick) from postbus.lane_change c join postbus."group" g on g.stream_id = c.stream_id and c.id > g.change_id
      where c.stream_id = p_s.id and g.ordering <> 'stream') x;
  if v_least is null or v_least <= coalesce(v_from, 0) then
    return v_done;
  end if;
  -- Whoever is just placing a group holds the stream row.
  perform from postbus.stream s where s.id = p_s.id for no key update skip locked;
  if not found then
    return v_done;
  end if;
  delete from postbus.tick t
  where t.stream_id = p_s.id and t.id >= coalesce(v_from, 0) and t.id < v_least and t.id <> p_s.floor_tick and t.total is null
    and not exists (select from postbus.held_tick h where h.stream_id = t.stream_id and h.tick = t.id)
    and (t.era = p_s.era or exists (select from postbus.tick n where n.stream_id = t.stream_id and n.era = t.era and n.id > t.id));
  get diagnostics v_n = row_count;
  v_done := v_done + v_n;
  insert into postbus.upkeep as u (stream_id, pruned_tick) values (p_s.id, v_least)
  on conflict (stream_id) do update set pruned_tick = excluded.pruned_tick;
  -- Now and then: what the floor has passed, what was held once, and all but about a thousand points to seek to.
  if random() < 0.02 then
    delete from postbus.held_tick h where h.stream_id = p_s.id and h.tick < p_s.floor_tick;
    delete from postbus.tick t
    where t.stream_id = p_s.id and t.id < v_least and t.id <> p_s.floor_tick
      and not exists (select from postbus.held_tick h where h.stream_id = t.stream_id and h.tick = t.id)
      and (t.id < p_s.floor_tick or t.total is null or exists (
        select from postbus.tick n where n.stream_id = t.stream_id and n.total is not null and n.at > t.at - p_s.retain / 1000
          and n.at <= t.at and n.id < t.id and n.id > p_s.floor_tick))
      and (t.era = p_s.era or exists (select from postbus.tick n where n.stream_id = t.stream_id and n.era = t.era and n.id > t.id));
    get diagnostics v_n = row_count;
    v_done := v_done + v_n;
  end if;
  return v_done;
end
$$;

-- One step for one object, in a subtransaction of its own.
create or replace function postbus._maintain_stream(p_s postbus.stream)
returns table (step text, done bigint)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_t postbus.tick;
  v_leaf int;
begin
  step := 'scheduled';
  done := postbus._move_scheduled(p_s.name, p_s.id, postbus.now_(), 1000);
  return next;
  step := 'tick';
  select t.* into strict v_t from postbus.tick t where t.stream_id = p_s.id order by t.id desc limit 1;
  done := 0;
  if postbus._due(p_s.ring, v_t) and postbus._tick(p_s.id, p_s.id_seq, p_s.era) is not null then
    done := 1;
  end if;
  return next;
  step := 'lanes';
  done := postbus._settle_lanes(p_s.id)::int + postbus._advance_empty_lanes(p_s);
  return next;
  step := 'count';
  done := postbus._count_events(p_s);
  return next;
  step := 'dedupe';
  with d as (
    delete from postbus.dedupe x where x.ctid = any (array(
      select y.ctid from postbus.dedupe y where y.stream_id = p_s.id and y.expires_at <= postbus.now_() - interval '1 minute' for update skip locked)) returning 1)
  select count(*) into done from d;
  return next;
  step := 'prune';
  done := postbus._prune(p_s);
  return next;
  step := 'leaves';
  done := postbus._age_leaves(p_s);
  return next;
  step := 'rotate';
  done := postbus._rotate(p_s)::int;
  return next;
end
$$;

create or replace function postbus._empty_pool_leaf(p_leaf int)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
as $$
begin
  execute format('truncate table only postbus.log_%s', p_leaf);
  update postbus.segment g set dirty = false where g.leaf = p_leaf;
end
$$;

create or replace function postbus._drop_trash(p_name text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
as $$
begin
  execute format('drop sequence if exists %s', p_name);
  delete from postbus.trash t where t.name = p_name;
end
$$;

-- Truncates at most one leaf in a transaction: the lock lasts until its end.
create or replace function postbus._clean_one()
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v record;
  v_s postbus.stream;
  v_tries int := 0;
  v_dirty int;
begin
  for v_dirty in select g.leaf from postbus.segment g where g.stream_id is null and g.dirty order by random() loop
    begin
      perform postbus._empty_pool_leaf(v_dirty);
      return format('leaf %s for the pool', v_dirty);
    exception when lock_not_available then
      v_tries := v_tries + 1;
      exit when v_tries >= 3;
    end;
  end loop;
  for v in
    select s.id, g.leaf from postbus.stream s join postbus.segment g on g.stream_id = s.id
    where g.leaf <> s.leaf and not postbus._leaf_empty(g.leaf) order by random()
  loop
    exit when v_tries >= 3;
    select s.* into v_s from postbus.stream s where s.id = v.id;
    begin
      -- Ask before locking: most leaves are still needed.
      continue when v_s.id is null or not postbus._leaf_spent(v_s, v.leaf);
      v_tries := v_tries + 1;
      if postbus._clean_leaf(v_s, v.leaf) then
        return v_s.name;
      end if;
    exception
      when lock_not_available then
        null;
      when others then
        raise warning 'stream % leaf %: %', v_s.name, v.leaf, sqlerrm;
    end;
  end loop;
  return null;
end
$$;

create or replace function postbus._leaf_spent(p_s postbus.stream, p_leaf int)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
  v_needed postbus.tick := postbus._needed_tick(p_s);
  v boolean;
begin
  if v_needed.id is null then
    return false;
  end if;
  if (select g.era from postbus.segment g where g.leaf = p_leaf) < v_needed.era then
    return true;
  end if;
  execute format('select not exists (select from postbus.log_%s e where e.txid >= $1)', p_leaf)
  into v using pg_snapshot_xmax(v_needed.snapshot);
  return v;
end
$$;

-- Rotation, retention, counting, pruning, scheduled events for every stream; expiry, marks and keys for every queue; the
-- archive; schedules. Call it every second or so (`postbus maintain`
-- --every 1, pg_cron). Truncation locks a leaf until the transaction ends, so it is left out inside a transaction block, as
-- far as a function can tell (the transaction began with this statement and has no xid); clean says it outright.
-- Returns what it did and, in problem, what went wrong for which object.
create or replace function postbus.maintain(clean boolean default null)
returns table (object text, step text, done bigint, problem text)
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
  v_name text;
  -- Over the extended protocol the transaction begins with Parse and the statement with Execute.
  v_clean boolean := coalesce(maintain.clean,
    statement_timestamp() - transaction_timestamp() < interval '100 ms' and pg_current_xact_id_if_assigned() is null);
begin
  perform postbus._need_read_committed('maintain');
  for v_name in select s.name from postbus.stream s order by random() loop
    -- One maintainer per stream at a time; the lock ends with the transaction.
    begin
      v_s := postbus._stream(v_name);
      continue when not pg_try_advisory_xact_lock(1886351990, v_s.id);
      return query select v_name, m.step, m.done, null::text from postbus._maintain_stream(v_s) m where m.done > 0;
    exception when others then
      return query select v_name, 'failed', 0::bigint, sqlerrm;
    end;
  end loop;
  for v_name in select q.name from postbus.queue q order by random() loop
    begin
      return query select v_name, m.step, m.done, null::text from postbus._maintain_queue(v_name) m where m.done > 0;
    exception when others then
      return query select v_name, 'failed', 0::bigint, sqlerrm;
    end;
  end loop;
  begin
    return query select 'schedules', 'fired', f.n::bigint, null::text from postbus._fire_schedules(postbus.now_()) f (n) where f.n > 0;
  exception when others then
    return query select 'schedules', 'failed', 0::bigint, sqlerrm;
  end;
  begin
    return query select 'staged', 'swept', w.n, null::text from postbus._sweep_staged() w (n) where w.n > 0;
  exception when others then
    return query select 'staged', 'failed', 0::bigint, sqlerrm;
  end;
  begin
    return query select 'pipelines', 'runs', w.n, null::text from postbus._prune_runs() w (n) where w.n > 0;
  exception when others then
    return query select 'pipelines', 'failed', 0::bigint, sqlerrm;
  end;
  for v_name in select t.name from postbus.trash t loop
    begin
      perform postbus._drop_trash(v_name);
    exception when others then
      null;                           -- somebody still has it open; next time
    end;
  end loop;
  if v_clean then
    begin
      return query select 'captures', 'partitions', c.n::bigint, null::text from postbus._maintain_captures() c(n) where c.n > 0;
    exception when others then
      return query select 'captures', 'failed', 0::bigint, sqlerrm;
    end;
    begin
      return query select 'archive', 'days made', c.n::bigint, null::text from postbus._make_archive_days() c (n) where c.n > 0;
      return query select 'archive', d.name || ' dropped', 1::bigint, null::text from postbus._drop_archive_day() d (name) where d.name is not null;
    exception when others then
      return query select 'archive', 'failed', 0::bigint, sqlerrm;
    end;
    begin
      v_name := postbus._clean_one();
      if v_name is not null then
        return query select v_name, 'clean', 1::bigint, null::text;
      end if;
    exception when others then
      return query select 'segments', 'clean', 0::bigint, sqlerrm;
    end;
  end if;
end
$$;
