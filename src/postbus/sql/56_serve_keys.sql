-- Serving keys. The functions here are called by receive and upkeep alone, and run with their rights and settings: setting
-- them again for each would cost as much as what they do. For the same reason the usual claim is three statements, on few
-- tables each: take the keys that were woken, clear their wakes, claim their messages (docs/adr/0011-keys.md).

-- Serves keys, each up to its share of what is wanted, its free places and its rate. Those that were woken are served at once
-- while, as far as this session knows, no others are ready; else the one that has been ready for longest comes first.
-- Messages without a key are served too: which of them come first is left to chance, so that neither starves the other.
create or replace function postbus._receive_keyed(p_queue int, p_register regclass, p_max int, p_until timestamptz, p_worker text, p_type text,
  p_now timestamptz)
returns setof postbus.work
language plpgsql
as $$
declare
  v_width int := least(p_max, 64);    -- keys a turn
  v_window int := 2 * v_width + 16;   -- wakes
  v_left int := p_max;
  v_hint float8[] := nullif(current_setting('postbus.keys_' || p_queue, true), '')::float8[];
  v_whole boolean := (v_hint[1] > date_part('epoch', clock_timestamp())) is not true;
  v_first_wake bigint := case when v_whole then 0 else v_hint[3] end;
  v_first_ready timestamptz := case when v_whole then '-infinity' else to_timestamp(v_hint[4]) end;
  v_look boolean := v_whole or v_hint[5] = 1;  -- some keys may be ready
  v_free boolean;                     -- messages without a key have yet to be looked for
  v_fifo boolean;                     -- all keys have one place, and no other limit
  v_most int;
  v_from bigint;                      -- wakes of the keys that we have taken are from here
  v_last bigint;                      -- ... to here
  v_new text[];
  v_keys text[];
  v_rest text[];
  v_kept boolean;                     -- what key_state says of these keys will do if they are full after this turn
  v_turns int;
  v_bits int;
  v_levels smallint[];
  v_idle text[] := '{}';              -- keys that have nothing more for us
  v_tids tid[];
  v_owners text[];
  v_all boolean;                      -- every key was served
  v_n int;
begin
  if v_whole and random() < 0.1 then
    perform postbus._adopt_keys(p_queue, 1000);
  end if;
  loop
    if v_look then
      v_new := array(
        select g.key from (
          select x.key from (
            select y.key, y.id from postbus.key_wake y where y.queue_id = p_queue and y.id >= v_first_wake order by y.queue_id, y.id limit v_window) x
          group by x.key order by min(x.id) limit v_width) g
        where (select true from postbus.key_state k where k.queue_id = p_queue and k.key = g.key) is null);
      if v_new <> '{}' then
        perform postbus._make_keys(p_queue, v_new);
      end if;
    end if;
    -- Takes the keys that the first wakes are for. Few at a time, since they are held until the transaction ends, and not those
    -- that somebody else has locked. The policy is that of the wakes, or a newer one.
    select t.keys, t.rest, t.kept, t.first, t.last, q.max_attempts,
      q.concurrency is not distinct from 1 and q.rate is null and not exists (select from postbus.key_policy p where p.queue_id = p_queue)
    into v_keys, v_rest, v_kept, v_from, v_last, v_most, v_fifo
    from postbus.queue q cross join (
      select array_agg(k.key) filter (where k.served) as keys, array_agg(k.key) filter (where not k.served) as rest, bool_and(k.kept) filter (where k.served) as kept,
        min(k.first) as first, max(k.last) as last
      from (
        select g.key, g.first, g.last, s.ready_at > p_now and s.ready_at <= p_until and s.blocked_until <= p_until as kept,
          not v_look and g.due > '-infinity' and (g.freed or s.blocked_until <= p_now and least(s.ready_at, g.due) <= p_now) as served
        from (
          select x.key, min(x.due) as due, bool_or(x.freed) as freed, min(x.id) as first, max(x.id) as last from (
            select y.key, y.due, y.freed, y.id from postbus.key_wake y where y.queue_id = p_queue and y.id >= v_first_wake order by y.queue_id, y.id limit v_window) x
          group by x.key order by first limit least(v_width, v_left)) g
        -- (Locked by itself: in a join every row of g would be made a record, in case it is needed again.)
        cross join lateral (
          select x.ready_at, x.blocked_until from postbus.key_state x where x.queue_id = p_queue and x.key = g.key for update skip locked) s) k) t
    where q.id = p_queue;
    exit when not found;
    -- After the wakes: what they told of may be of a new priority.
    v_bits := pg_sequence_last_value(p_register) & 4095;
    if v_free is null then
      v_free := true;
      if (v_hint[6] = 0 and v_bits = 1) is not true and random() < 0.5 then
        return query
        select r.* from postbus.queue q, postbus._receive_levels(q.*, v_left, p_until, p_worker, p_type, p_now) r where q.id = p_queue;
        get diagnostics v_n = row_count;
        v_left := v_left - v_n;
        exit when v_left = 0;
        v_free := false;
        v_keys := v_keys[1:v_left];
      end if;
    end if;
    if v_rest is not null then
      v_first_ready := least(v_first_ready, postbus._fold_wakes(p_queue, v_rest, v_from, v_last, p_now));
    end if;
    if v_keys is not null then
      -- From here on they are looked at with a new snapshot, so that what these wakes tell, and those since, is seen.
      delete from postbus.key_wake w where w.queue_id = p_queue and w.id between v_from and v_last and w.key = any (v_keys) and w.due > '-infinity';
    elsif v_look then
      v_keys := array(
        select k.key from postbus.key_state k
        where k.queue_id = p_queue and k.ready_at >= v_first_ready and k.ready_at <= p_now and k.key <> all (v_idle)
        order by k.queue_id, k.ready_at, k.key limit least(v_width, v_left) for update skip locked);
      v_kept := false;
      if v_keys = '{}' and v_rest is null then
        if v_window < 10000 and exists (select from postbus.key_wake w where w.queue_id = p_queue and w.id >= v_first_wake) then
          -- The first wakes are for keys that others have locked.
          v_width := 64;
          v_window := 10000;
          continue;
        end if;
        -- Nothing is only said after a look at everything, unless that is known to take long.
        exit when v_whole or v_left < p_max or v_hint[2] > 0.005;
        v_whole := true;
        v_first_wake := 0;
        v_first_ready := '-infinity';
        continue;
      end if;
    end if;
    v_turns := coalesce(cardinality(v_keys), 0);
    -- Under the locks, with a new snapshot: who ended meanwhile is seen. The clock stays that of the call, for rates too: one
    -- that was overtaken is late, and gets less.
    v_fifo := v_fifo and v_bits & 1023 = 1 and p_type is null;
    v_owners := null;
    v_n := 0;
    if v_fifo and v_turns > 0 then
      return query
      update postbus.queued m set due = p_until, attempt = m.attempt + 1, claim = m.claim + 1, created_at = coalesce(m.created_at, m.due), tracked = false, worker = p_worker, held = true
      from (
        -- Of a key with a message that is out, or waits for another try, nothing is to be had here. (Not a join: with wrong
        -- statistics that has read what all keys hold.)
        select u.key from unnest(v_keys) as u (key)
        where (select true from postbus.queued h where h.queue_id = p_queue and h.key = u.key and h.keyed and h.held limit 1) is null offset 0) k
      cross join lateral (
        select x.ctid as tid from postbus.queued x
        where x.queue_id = p_queue and x.key = k.key and x.keyed and not x.held and x.priority = 0::smallint and x.due <= p_now
          and (x.attempt < v_most and (x.expires_at is null or x.expires_at > p_now) or postbus._bury(p_queue, x.ctid, x.id, p_now))
        order by x.queue_id, x.key, x.held, x.priority, x.due, x.id limit 1 for update skip locked) c
      where m.ctid = c.tid
      returning m.id, m.type, m.key, m.payload, m.blob, m.headers, m.created_at, m.attempt,
        postbus._receipt('k', m.id, m.claim, m.ctid), m.priority, m.state;
      get diagnostics v_n = row_count;
      v_left := v_left - v_n;
    end if;
    v_all := v_n = v_turns;
    if v_turns > 0 and not (v_all and v_kept) then
      v_levels := array(select i::smallint from generate_series(9, 0, -1) i where v_bits & (1 << i) <> 0);
      if v_left > 0 and (not v_fifo or exists (select from unnest(v_keys) u (key)
          where (select true from postbus.queued m where m.queue_id = p_queue and m.key = u.key and m.keyed and m.held and m.due <= p_now limit 1))) then
        select array_agg(x.tid order by x.round, x.turn, x.n), array_agg(x.key order by x.round, x.turn, x.n) into v_tids, v_owners
        from postbus.queue q, postbus._pick(q.*, v_keys, (v_left + v_turns - 1) / v_turns, v_levels, p_type, p_now) x where q.id = p_queue;
        v_tids := v_tids[1:v_left];
        v_owners := v_owners[1:v_left];
        if v_tids is not null then
          return query
          update postbus.queued m set due = p_until, attempt = m.attempt + 1, claim = m.claim + 1, created_at = coalesce(m.created_at, m.due), tracked = false, worker = p_worker, held = true
          from unnest(v_tids) as c (tid) where m.ctid = c.tid
          returning m.id, m.type, m.key, m.payload, m.blob, m.headers, m.created_at, m.attempt,
            postbus._receipt('k', m.id, m.claim, m.ctid), m.priority, m.state;
          get diagnostics v_n = row_count;
          v_left := v_left - v_n;
        end if;
      end if;
      perform postbus._park(q.*, v_keys, v_owners, v_levels, p_now) from postbus.queue q where q.id = p_queue;
    end if;
    exit when v_left = 0;
    if not v_all then
      v_idle := v_idle || array(select k from unnest(v_keys) k where (k = any (v_owners)) is not true);
    end if;
    if v_look then
      v_width := least(64, 4 * v_width);
    end if;
    v_look := true;
    v_window := 4 * v_width + 64;
  end loop;
  if v_left > 0 and v_free then
    perform from postbus.queued m where m.queue_id = p_queue and m.priority = 0::smallint and m.due <= p_now and not m.keyed
    order by m.queue_id, m.priority, m.due, m.id limit 1;
    if found or v_bits <> 1 then
      return query
      select r.* from postbus.queue q, postbus._receive_levels(q.*, v_left, p_until, p_worker, p_type, p_now) r where q.id = p_queue;
    end if;
  end if;
  if v_whole or v_first_ready < to_timestamp(v_hint[4]) then
    perform postbus._note_keys(p_queue, p_now);
  elsif v_from > v_first_wake + 500 then
    v_hint[3] := v_from;
    perform set_config('postbus.keys_' || p_queue, v_hint::text, false);
  end if;
end
$$;

-- Wakes into key_state, for some keys that are locked by us. Returns from when on some of them are ready.
create or replace function postbus._fold_wakes(p_queue int, p_keys text[], p_first bigint, p_last bigint, p_now timestamptz)
returns timestamptz
language plpgsql
as $$
declare
  v_ready timestamptz;
begin
  with d as (
    delete from postbus.key_wake w where w.queue_id = p_queue and w.id between p_first and p_last and w.key = any (p_keys) returning w.key, w.due, w.freed),
  g as (
    select d.key, min(d.due) as due, bool_or(d.freed) as freed from d group by d.key),
  u as (
    update postbus.key_state s set
      ready_at = case when g.freed then least(s.ready_at, p_now) else greatest(s.blocked_until, least(s.ready_at, g.due)) end,
      blocked_until = case when g.freed then '-infinity' else s.blocked_until end,
      -- A new policy: what was paid for under the old one is forgotten.
      tat = case when g.due = '-infinity' then least(s.tat, p_now) else s.tat end
    from g where s.queue_id = p_queue and s.key = g.key
      and (g.freed or g.due < s.ready_at and s.blocked_until < s.ready_at)
    returning s.ready_at)
  select min(u.ready_at) into v_ready from u;
  return v_ready;
end
$$;

-- Makes the rows of keys that have none yet. Two sessions with the same new key: one makes the row, the other comes back to
-- it. Nobody waits on the unique index.
create or replace function postbus._make_keys(p_queue int, p_keys text[])
returns void
language plpgsql
as $$
begin
  insert into postbus.key_state (queue_id, key, ready_at, blocked_until, tat)
  select p_queue, k, 'infinity', '-infinity', '-infinity' from unnest(p_keys) k where pg_try_advisory_xact_lock(hashtextextended(k, p_queue))
  on conflict (queue_id, key) do nothing;
end
$$;

-- Remembers, for this session, where wakes and ready keys begin: behind it are the entries of those that are gone, until the
-- next vacuum. A hint as in 55_marks: everything is read again after 50 ms, or 20 times as long as that takes.
create or replace function postbus._note_keys(p_queue int, p_now timestamptz)
returns void
language plpgsql
as $$
declare
  v_began timestamptz := clock_timestamp();
  v_wake bigint;
  v_ready timestamptz;
  v_free boolean;
  v_took float8;
begin
  select w.id into v_wake from postbus.key_wake w where w.queue_id = p_queue order by w.queue_id, w.id limit 1;
  select k.ready_at into v_ready from postbus.key_state k where k.queue_id = p_queue and k.ready_at <= p_now order by k.queue_id, k.ready_at, k.key limit 1;
  perform from postbus.queued m where m.queue_id = p_queue and m.priority = 0::smallint and m.due <= p_now and not m.keyed
  order by m.queue_id, m.priority, m.due, m.id limit 1;
  v_free := found;
  v_took := date_part('epoch', clock_timestamp() - v_began);
  perform set_config('postbus.keys_' || p_queue, array[date_part('epoch', clock_timestamp()) + greatest(0.05, 20 * v_took), v_took,
    coalesce(v_wake, pg_sequence_last_value('postbus.key_wake_id_seq'), 0), date_part('epoch', coalesce(v_ready, p_now) - interval '10 ms'),
    (v_ready is not null)::int, v_free::int]::text, false);
end
$$;

-- What may be delivered of some keys that are locked by us. A message that came back or whose lease ended goes before
-- those that never went out, so that with one place a key is first in, first out; one that somebody is just finishing is
-- left to him, and keeps its place. With a type wanted, a key is served up to its first message of another type. round and
-- turn are the order between keys: a key of weight w has w messages in each round.
create or replace function postbus._pick(p_q postbus.queue, p_keys text[], p_share int, p_levels smallint[], p_type text, p_now timestamptz)
returns table (key text, tid tid, round bigint, turn bigint, n bigint)
language plpgsql
as $$
#variable_conflict use_column
begin
  return query
  select y.key, y.tid, y.round, y.turn, y.n from (
    select k.key, x.tid, (x.n - 1) / k.weight as round, k.turn, x.n,
      bool_and(p_type is null or x.type = p_type) over (partition by k.turn order by x.n) as wanted
    from (
      select u.key, u.turn, l.weight, h.over, greatest(0, least(p_share * l.weight, l.places - h.running, l.tokens)) as allowed
      from unnest(p_keys) with ordinality as u (key, turn)
      cross join lateral postbus._limits_now(p_q, u.key, p_now) l
      cross join lateral (
        select count(*) filter (where m.due > p_now) as running,
          -- (Also one that must not go out again, but somebody has in hand: he may be extending its lease.)
          count(*) filter (where m.due <= p_now and (m.attempt < p_q.max_attempts and (m.expires_at is null or m.expires_at > p_now)
            or not postbus._buried(p_q.id, m.ctid, m.id, p_now))) as over
        from postbus.queued m
        where m.queue_id = p_q.id and m.key = u.key and m.keyed and m.held) h) k
    cross join lateral (
      select z.tid, z.type, row_number() over () as n from (
        select a.* from (
          select m.ctid as tid, m.type from postbus.queued m
          where m.queue_id = p_q.id and m.key = k.key and m.keyed and m.held and m.due <= p_now
            and (m.attempt < p_q.max_attempts and (m.expires_at is null or m.expires_at > p_now) or postbus._bury(p_q.id, m.ctid, m.id, p_now))
          order by m.priority desc, m.due, m.id limit k.allowed for update skip locked) a
        union all
        select w.* from unnest(p_levels) as v (level) cross join lateral (
          select m.ctid as tid, m.type from postbus.queued m
          where m.queue_id = p_q.id and m.key = k.key and m.keyed and not m.held and m.priority = v.level and m.due <= p_now
            and (m.attempt < p_q.max_attempts and (m.expires_at is null or m.expires_at > p_now) or postbus._bury(p_q.id, m.ctid, m.id, p_now))
          order by m.queue_id, m.key, m.held, m.priority, m.due, m.id limit greatest(0, k.allowed - k.over) for update skip locked) w) z
      limit k.allowed) x) y
  where y.wanted;
end
$$;

-- The limits of a key now. tokens: how many its rate allows at this moment. Inlined into its callers, which are pinned.
create or replace function postbus._limits_now(p_q postbus.queue, p_key text, p_now timestamptz)
returns table (weight int, places int, tokens int, rate float8, burst int, ready_at timestamptz, tat timestamptz)
language sql
stable
as $$
  select l.weight, coalesce(l.concurrency, 2000000000),
    case when l.rate is null then 2000000000
      else greatest(0, floor(l.burst - extract(epoch from (greatest(s.tat, p_now) - p_now))::float8 * l.rate + 1e-6))::int end,
    l.rate, l.burst, s.ready_at, s.tat
  from postbus.key_state s cross join postbus._policy(p_q, p_key) l where s.queue_id = (p_q).id and s.key = p_key
$$;

-- After a turn: when each key can next be served. p_owners has the key of every message that was
-- delivered. A key whose row says that it waits, but not for long enough, is left alone: it will be looked at once more.
create or replace function postbus._park(p_q postbus.queue, p_keys text[], p_owners text[], p_levels smallint[], p_now timestamptz)
returns void
language plpgsql
as $$
begin
  update postbus.key_state s set tat = z.tat, blocked_until = z.blocked, ready_at = z.ready
  from (
    select y.key, y.tat, case when y.full_until is null then y.rate_at else greatest(y.rate_at, y.full_until) end as blocked,
      case
        when y.full_until is not null then greatest(y.rate_at, y.full_until)
        when y.next is null then 'infinity'
        -- Served: to the end of the line. Not reached: it stays where it was.
        else greatest(y.next, y.rate_at, case when y.served > 0 then p_now else y.was_ready end) end as ready
    from (
      select x.key, x.was_ready, x.served, x.tat, case when x.running >= x.places then x.first_end end as full_until, least(x.first_end, x.first_due) as next,
        case when x.rate is null then '-infinity' else x.tat - make_interval(secs => (x.burst - 1) / x.rate) end as rate_at
      from (
        select u.key, least(l.ready_at, p_now) as was_ready, o.served, l.places, l.rate, l.burst, h.running, h.first_end, d.first_due,
          case when l.rate is null or o.served = 0 then l.tat else greatest(l.tat, p_now) + make_interval(secs => o.served / l.rate) end as tat
        from unnest(p_keys) as u (key)
        cross join lateral postbus._limits_now(p_q, u.key, p_now) l
        cross join lateral (select count(*) as served from unnest(p_owners) w where w = u.key) o
        cross join lateral (
          select count(*) filter (where m.due > p_now) as running, min(m.due) as first_end from postbus.queued m
          where m.queue_id = p_q.id and m.key = u.key and m.keyed and m.held) h
        cross join lateral (
          select min(e.due) as first_due from unnest(p_levels) as v (level) cross join lateral (
            select m.due from postbus.queued m
            where m.queue_id = p_q.id and m.key = u.key and m.keyed and not m.held and m.priority = v.level
            order by m.queue_id, m.key, m.held, m.priority, m.due, m.id limit 1) e) d) x) y) z
  where s.queue_id = p_q.id and s.key = z.key
    and not (s.ready_at > p_now and s.ready_at <= z.ready and z.ready < 'infinity' and s.blocked_until <= z.blocked and s.tat = z.tat);
end
$$;
