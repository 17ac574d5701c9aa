-- Consuming: look, then lock, then look again. An idle poll takes no lock, assigns no xid and writes nothing.
--
-- The body is long and flat on purpose, and measured: statements on one table each are cheaper than joins, and every
-- PL/pgSQL expression is set up anew in each transaction, so variables that are not needed stay null. What a look found
-- is used again under the lock when the slot has not moved in between (no larger n).

-- Takes the next messages of a group on a lease: redeliveries that are due first, then the log. Every message carries
-- the receipt that finishes it, and the batch that finishes all of them.
--   lease: how long until unfinished messages go to somebody else (default: the group's);
--   min_count, min_interval: return nothing until so many events wait, or so much time has passed since the last batch;
--   min_lag: leave the newest events alone until they are that old.
create or replace function postbus.consume(
  stream text,
  "group" text,
  max int default 100,
  lease interval default null,
  worker text default null,
  min_count int default null,
  min_interval interval default null,
  min_lag interval default null
)
returns setof postbus.message
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  v_g postbus."group";
  v_p postbus.progress;
  v_b postbus.tick;                   -- the window is (b, u]
  v_u postbus.tick;
  v_ring int;                         -- of the stream, as it is once the window is known
  v_max_lanes smallint;
  v_change int;
  v_floor bigint;
  v_paused boolean;
  v_ttl interval;
  v_now timestamptz := postbus.now_();
  v_until timestamptz;
  v_lag_at timestamptz;
  v_cap bigint;                       -- do not read past this tick: a lane change
  v_slot int;
  v_lane smallint;
  v_slots int;
  v_turn int := 0;
  v_last int;
  v_locked boolean;
  v_reclaimed boolean;
  v_looked_for_tick boolean;
  v_lease_until timestamptz;
  v_due timestamptz;
  v_all boolean;
  v_lanes smallint;
  v_rows postbus.message[];
  v_ids bigint[];
  v_to bigint;
  v_token bigint;
  v_expired int;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    perform postbus._need_read_committed('consume');
  end if;
  select g.* into v_g from postbus."group" g where g.stream_name = consume.stream and g.name = consume."group";
  if not found then
    v_g := postbus._group(postbus._stream(consume.stream), consume."group");
  end if;
  v_until := v_now + coalesce(consume.lease, v_g.lease);
  if consume.max is null or consume.max not between 1 and 100000 or v_until <= v_now then
    raise exception using errcode = 'PB003', message = format('consume from %L: max must be 1 to 100000 and lease longer than zero', consume.stream);
  end if;
  -- Scheduled events: always when there is nothing else (below), now and then when there is.
  if random() < 0.05 then
    perform postbus._move_scheduled(consume.stream, v_g.stream_id, v_now, 1000);
  end if;
  if consume.min_lag is not null then
    v_lag_at := v_now - consume.min_lag;
    perform postbus.tick(consume.stream);
    v_looked_for_tick := true;
  end if;
  v_slots := cardinality(v_g.slots);
  v_last := v_slots;
  if v_slots > 1 then
    v_turn := floor(random() * v_slots);
    v_last := v_turn + v_slots;
  end if;

  while v_turn < v_last loop
    v_slot := v_g.slots[v_turn % v_slots + 1];
    loop
      -- What a lease or a message that waits has to say.
      select p.* into v_p from postbus.progress p where p.slot_id = v_slot order by p.n desc limit 1;
      if v_p.change_id is distinct from v_g.change_id then
        return;                       -- the group was dropped, or its lanes have just changed: look again next time
      end if;
      if v_g.ordering = 'none' then
        v_lease_until := v_p.next_expiry;
      else
        -- The lease before what waits: whoever finds the lease gone also finds what its owner gave back.
        select l.expires_at into v_lease_until from postbus.lease l where l.token = v_p.token and l.slot_id = v_slot;
        exit when v_lease_until > v_now or found and v_reclaimed;      -- busy
      end if;
      select r.due into v_due from postbus.redelivery r where r.slot_id = v_slot and r.token is null order by r.due limit 1;
      if v_lease_until <= v_now and v_reclaimed is null or v_due <= v_now then
        if v_g.paused or (select s.paused from postbus.stream s where s.id = v_g.stream_id) then
          return;
        end if;
        if v_locked is null then
          exit when not pg_try_advisory_xact_lock(1886351993, v_slot);
          v_locked := true;
        elsif v_lease_until <= v_now and v_reclaimed is null then
          perform postbus._reclaim(v_p, v_now);
          v_reclaimed := true;
        else
          return query select * from postbus._take_redelivery(v_g, v_p, consume.max, v_until, consume.worker, v_now);
          return;
        end if;
        continue;
      end if;
      exit when v_due is not null and v_g.ordering = 'stream';         -- total order: nothing overtakes what waits

      -- The window: from the slot's position to the newest tick, or to the end of the one it is in.
      if v_p.upper is null then
        select t.* into v_u from postbus.tick t
        where t.stream_id = v_g.stream_id and (v_cap is null or t.id <= v_cap) and (v_lag_at is null or t.at <= v_lag_at)
        order by t.id desc limit 1;
      else
        select t.* into v_u from postbus.tick t where t.stream_id = v_g.stream_id and t.id = v_p.upper;
      end if;
      v_b := v_u;
      if v_p.base is distinct from v_u.id then
        select t.* into v_b from postbus.tick t where t.stream_id = v_g.stream_id and t.id = v_p.base;
      end if;
      -- The stream after the tick up to which we read: whoever sees an event in it sees its ring and its lane changes.
      select s.ring, s.max_lanes, s.change_id, s.floor_tick, s.paused, s.event_ttl into v_ring, v_max_lanes, v_change, v_floor, v_paused, v_ttl
      from postbus.stream s where s.id = v_g.stream_id and s.xmin = s.stamp;
      if not found then
        perform postbus._stream(consume.stream);
        continue;
      end if;
      if v_paused or v_g.paused then
        return;
      end if;
      if v_b.id is null or v_p.base < v_floor or (v_u.id is null and v_p.upper is not null) then
        perform postbus._position_lost(v_g.stream_name, v_g.name, v_p.base);
      end if;
      if v_change <> v_g.change_id and v_g.ordering <> 'stream' then
        if v_cap is null then
          perform postbus._settle_lanes(v_g.stream_id);
          v_cap := postbus._changeover(v_g.stream_id, v_g.id);
          continue;
        end if;
        if v_b.id >= v_cap then
          exit when v_locked;
          -- At a lane change: whoever finds the whole group here takes it over.
          if postbus._pass_lane_change(v_g.id) then
            return query select * from postbus.consume(consume.stream, consume."group", consume.max, consume.lease, consume.worker,
              consume.min_count, consume.min_interval, consume.min_lag);
            return;
          end if;
          exit;
        end if;
      end if;

      -- How to read it: by the stored lane, by a computed one, or every lane.
      v_lane := v_turn % v_slots;
      if v_g.ordering = 'stream' or v_g.mixed_xid is not null then
        v_all := v_max_lanes > 1 and (v_g.ordering = 'stream'
          or v_b.era <= v_g.mixed_era and pg_snapshot_xmin(v_b.snapshot) <= v_g.mixed_xid);
        v_lanes := case when v_all and v_g.ordering <> 'stream' then v_g.lanes end;
        v_lane := case when v_all and v_g.ordering = 'stream' then null else v_lane end;
      end if;
      if v_b.id < v_u.id and v_b.era <> v_u.era then
        v_u := postbus._inside_era(v_b);
      elsif v_u.id is null or v_b.id >= v_u.id
          or v_p.upper is null and v_cap is null
            and (v_slots > 1 or consume.min_count is not null or consume.min_interval is not null)
            and not postbus._worth(v_ring, v_max_lanes, v_p, v_b, v_u, v_all, v_lane, v_lanes, consume.min_count, consume.min_interval, v_now) then
        -- Nothing here up to the newest tick: is another one due?
        exit when v_looked_for_tick or v_cap is not null;
        v_looked_for_tick := true;
        exit when not postbus._due(v_ring, v_u);
        exit when (select postbus._tick(s.id, s.id_seq, s.era) from postbus.stream s where s.id = v_g.stream_id) is null;
        -- Slots that we had looked at before may have something now: go round once more.
        v_last := v_turn + v_slots;
        continue;
      end if;

      if v_locked is null then
        exit when not pg_try_advisory_xact_lock(1886351993, v_slot);
        v_locked := true;
        -- A slot that moved in between is looked at again; else what we found still holds.
        perform from postbus.progress p where p.slot_id = v_slot and p.n > v_p.n limit 1;
        continue when found;
      end if;
      v_token := nextval('postbus.lease_token');
      execute format('select postbus._page_%s_%s($1, $2, $3, null, $4, $5, $6, $7, $8, $9)', v_g.stream_id, v_ring) into v_rows
      using v_b, v_u, v_p.last_id, v_all, v_lane, v_lanes, v_max_lanes, consume.max, v_token;
      -- A full page ends at its last id; anything less has finished the window.
      v_to := v_rows[consume.max].id;
      if v_ttl is not null or v_due is not null and v_g.ordering = 'key' then
        select x.kept, x.ids, x.expired into v_rows, v_ids, v_expired
        from postbus._sift(v_rows, v_slot, v_g.ordering, v_now - v_ttl) x;
      end if;
      -- TRUNCATE is not MVCC: what we read counts only if the floor has not passed us meanwhile.
      insert into postbus.progress (slot_id, n, base, upper, last_id, token, next_expiry, change_id, expired, at)
      select v_slot, v_p.n + 1, case when v_to is null then v_u.id else v_p.base end, case when v_to is not null then v_u.id end, coalesce(v_to, 0),
        case when v_g.ordering = 'none' then v_p.token else v_token end, least(v_p.next_expiry, v_until), v_p.change_id, coalesce(v_expired, 0), v_now
      from postbus.stream s where s.id = v_g.stream_id and s.floor_tick <= v_p.base;
      if not found then
        perform postbus._position_lost(v_g.stream_name, v_g.name, v_p.base);
      end if;
      if cardinality(v_rows) > 0 then
        insert into postbus.lease (token, slot_id, group_id, stream_id, base, upper, after_id, to_id, lane, lanes, ids, count, expires_at, worker, at)
        values (v_token, v_slot, v_g.id, v_g.stream_id, v_p.base, v_u.id, v_p.last_id, coalesce(v_to, v_u.hi), v_lane, v_lanes, v_ids, cardinality(v_rows),
          v_until, consume.worker, v_now);
        return query select * from unnest(v_rows);
        return;
      end if;
      v_ids := null;
      v_expired := null;
    end loop;
    v_turn := v_turn + 1;
    v_locked := null;
    v_reclaimed := null;
  end loop;
  perform postbus._move_scheduled(consume.stream, v_g.stream_id, v_now, 1000);
end
$$;

create or replace function postbus._position_lost(p_stream text, p_group text, p_tick bigint)
returns void
language plpgsql
immutable
as $$
begin
  raise exception using errcode = 'PB005',
    message = format('group %L of stream %L lost its position: tick %s is no longer kept', p_group, p_stream, p_tick),
    hint = format('It fell behind max_retain. Go on from what is left: select postbus.seek(%L, %L, ''earliest'').', p_stream, p_group);
end
$$;

-- A page where some events are not handed out: expired ones are skipped and counted, and those of a key that has a
-- message waiting are parked behind it.
create or replace function postbus._sift(
  p_rows postbus.message[],
  p_slot int,
  p_ordering text,
  p_expired_at timestamptz,
  out kept postbus.message[],
  out ids bigint[],
  out expired int
)
language plpgsql
as $$
declare
  v_m postbus.message;
begin
  kept := '{}';
  ids := '{}';
  expired := 0;
  foreach v_m in array p_rows loop
    if v_m.created_at <= p_expired_at then
      expired := expired + 1;
    elsif p_ordering = 'key' and exists (select from postbus.redelivery r where r.slot_id = p_slot and r.key = v_m.key) then
      insert into postbus.redelivery (slot_id, id, due, attempt, reason, at, type, key, payload, blob, headers)
      values (p_slot, v_m.id, 'infinity', 0, 'behind an earlier message of its key', v_m.created_at, v_m.type, v_m.key,
        v_m.payload, v_m.blob, v_m.headers);
    else
      kept := kept || v_m;
      ids := ids || v_m.id;
    end if;
  end loop;
end
$$;

-- A window ends with its era: read up to the closing tick, then step over to the first tick of the next. That step is
-- an empty window by definition: hi below everything makes it so.
create or replace function postbus._inside_era(p_b postbus.tick)
returns postbus.tick
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_t postbus.tick;
begin
  select t.* into strict v_t from postbus.tick t
  where t.stream_id = p_b.stream_id and t.era = p_b.era and t.id >= p_b.id order by t.id desc limit 1;
  if v_t.id = p_b.id then
    select t.* into strict v_t from postbus.tick t
    where t.stream_id = p_b.stream_id and t.era > p_b.era order by t.id limit 1;
    v_t.hi := -1;
  end if;
  return v_t;
end
$$;

-- Is the window worth taking? Read-only: at least min_count events, or min_interval since the last batch; at least one.
create or replace function postbus._worth(
  p_ring int,
  p_max_lanes smallint,
  p_p postbus.progress,
  p_b postbus.tick,
  p_u postbus.tick,
  p_all boolean,
  p_lane smallint,
  p_lanes smallint,
  p_min_count int,
  p_min_interval interval,
  p_now timestamptz
)
returns boolean
language plpgsql
as $$
declare
  v_waited boolean := p_p.at + p_min_interval <= p_now;
  v_need int := case when v_waited then 1 else coalesce(p_min_count, 1) end;
begin
  if p_min_interval is not null and p_min_count is null and not v_waited then
    return false;
  end if;
  return postbus._count(p_ring, p_max_lanes, p_b, p_u, p_p.last_id, p_all, p_lane, p_lanes, v_need) >= v_need;
end
$$;

-- How many events a window has, up to p_max (null: all of them).
create or replace function postbus._count(
  p_ring int,
  p_max_lanes smallint,
  p_b postbus.tick,
  p_u postbus.tick,
  p_last bigint,
  p_all boolean,
  p_lane smallint,
  p_lanes smallint,
  p_max int
)
returns bigint
language plpgsql
as $$
declare
  v_n bigint;
begin
  execute format('select count(*) from postbus._ids_%s_%s($1, $2, $3, null, $4, $5, $6, $7, $8)', p_b.stream_id, p_ring) into v_n
  using p_b, p_u, p_last, p_all, p_lane, p_lanes, p_max_lanes, p_max;
  return v_n;
end
$$;
