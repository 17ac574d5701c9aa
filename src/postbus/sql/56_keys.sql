-- Key policies: at most so many of a key at once, so many a second, so many waiting, and turns by weight. Everything per
-- key is one mechanism: key_state says when a key can next be served, and the oldest such time is served first. A key
-- without a free place waits until its first lease ends, a key over its rate until the next token: like messages, blocked
-- keys lie beyond now and cost nothing. Only claims write key_state, and only rows they can lock at once; producers and
-- finishers leave a wake row instead, so nobody waits for anybody (docs/adr/0011-keys.md).

-- Sets the policy of one key, or of all keys without one of their own (key null). Null means no limit. rate is messages a
-- second, burst how many of them may come at once (default: those of one second).
create or replace function postbus.set_key_policy(
  queue text,
  key text default null,
  concurrency int default null,
  rate float8 default null,
  burst int default null,
  max_size int default null,
  weight int default 1
)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_q postbus.queue := postbus._queue(set_key_policy.queue);
  v_wrong text;
  v_burst int;
begin
  v_wrong := case
    when set_key_policy.concurrency < 1 then 'concurrency must be at least 1'
    when set_key_policy.rate <= 0 or set_key_policy.rate > 1000000 or set_key_policy.rate = 'NaN' then 'rate must be above 0 and at most 1000000 a second'
    when set_key_policy.burst < 1 then 'burst must be at least 1'
    when set_key_policy.burst is not null and set_key_policy.rate is null then 'burst goes with a rate'
    when set_key_policy.max_size < 1 then 'max_size must be at least 1'
    when set_key_policy.weight is null or set_key_policy.weight not between 1 and 1000 then 'weight must be from 1 to 1000'
  end;
  if v_wrong is not null then
    raise exception using errcode = 'PB003', message = format('key policy of queue %L: %s', set_key_policy.queue, v_wrong);
  end if;
  if v_q.unlogged then
    raise exception using errcode = 'PB003', message = format('queue %L is unlogged: it cannot have key policies', set_key_policy.queue);
  end if;
  v_burst := case when set_key_policy.rate is not null then coalesce(set_key_policy.burst, greatest(1, ceil(set_key_policy.rate))::int) end;
  perform from postbus.queue q where q.id = v_q.id for no key update;
  if set_key_policy.key is null then
    update postbus.queue q set keyed = true, concurrency = set_key_policy.concurrency, rate = set_key_policy.rate, burst = v_burst,
      key_max_size = set_key_policy.max_size, weight = set_key_policy.weight
    where q.id = v_q.id;
  else
    update postbus.queue q set keyed = true where q.id = v_q.id;
    insert into postbus.key_policy as p (queue_id, key, concurrency, rate, burst, key_max_size, weight)
    values (v_q.id, set_key_policy.key, set_key_policy.concurrency, set_key_policy.rate, v_burst, set_key_policy.max_size, set_key_policy.weight)
    on conflict (queue_id, key) do update set concurrency = excluded.concurrency, rate = excluded.rate, burst = excluded.burst,
      key_max_size = excluded.key_max_size, weight = excluded.weight;
  end if;
  perform postbus._refresh_plain(v_q.id);
  perform postbus._after_policy(v_q.id, set_key_policy.key);
end
$$;

-- Takes the policy of a key away (key null: the default one); the queue goes on serving its keys in turns.
create or replace function postbus.unset_key_policy(queue text, key text default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_q postbus.queue := postbus._queue(unset_key_policy.queue);
begin
  perform from postbus.queue q where q.id = v_q.id for no key update;
  if unset_key_policy.key is null then
    update postbus.queue q set concurrency = null, rate = null, burst = null, key_max_size = null, weight = 1 where q.id = v_q.id;
  else
    delete from postbus.key_policy p where p.queue_id = v_q.id and p.key = unset_key_policy.key;
    if not found then
      raise exception using errcode = 'PB001', message = format('key %L of queue %L has no policy of its own', unset_key_policy.key, v_q.name),
        hint = format('List them: select * from postbus.list_key_policies(%L).', v_q.name);
    end if;
  end if;
  perform postbus._after_policy(v_q.id, unset_key_policy.key);
end
$$;

create or replace function postbus.list_key_policies(name text default null)
returns table (queue text, key text, concurrency int, rate float8, burst int, max_size int, weight int)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  select * from (
    select q.name, null::text as key, q.concurrency, q.rate, q.burst, q.key_max_size, q.weight from postbus.queue q where q.keyed
    union all
    select q.name, p.key, p.concurrency, p.rate, p.burst, p.key_max_size, p.weight from postbus.key_policy p join postbus.queue q on q.id = p.queue_id) x
  where list_key_policies.name is null or x.name = list_key_policies.name
  order by 1, 2 nulls first
$$;

-- A changed policy takes effect at once: every key it is about is looked at again. (The due time says that it is one.)
create or replace function postbus._after_policy(p_queue int, p_key text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform postbus._adopt_keys(p_queue, 1000000);
  insert into postbus.key_wake (queue_id, key, due, freed)
  select k.queue_id, k.key, '-infinity', true from postbus.key_state k
  where k.queue_id = p_queue and case when p_key is not null then k.key = p_key
    else not exists (select from postbus.key_policy p where p.queue_id = p_queue and p.key = k.key) end;
end
$$;

-- Messages that were sent before the queue had key policies, or by a transaction that had not seen them yet, come under
-- them. Until then they are not delivered.
create or replace function postbus._adopt_keys(p_queue int, p_max int)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_n int;
begin
  with c as materialized (
    select m.ctid as tid from postbus.queued m where m.queue_id = p_queue and not m.keyed and m.key is not null limit p_max for update skip locked),
  u as (
    update postbus.queued m set keyed = true, held = m.worker is not null, tracked = true from c where m.ctid = c.tid returning m.key, m.due),
  w as (
    insert into postbus.key_wake (queue_id, key, due, freed) select p_queue, u.key, min(u.due), false from u group by u.key)
  select count(*) into v_n from u;
  return v_n;
end
$$;

-- The functions from here on are called by receive and upkeep alone, and run with their rights and settings: setting them
-- again for each would cost as much as what they do.

-- Wakes into key_state, for the first p_keys keys among the oldest p_window wakes from p_from on. Few keys at a time: the
-- claim holds their rows until its transaction ends. Keys that somebody else has locked keep their wakes for later. Returns
-- how many keys it got; null: there were no wakes.
create or replace function postbus._fold_wakes(p_queue int, p_from bigint, p_keys int, p_window int, p_now timestamptz)
returns int
language plpgsql
as $$
declare
  v_keys text[];
  v_mine text[];
begin
  v_keys := array(
    select w.key from (
      select x.key, x.id from postbus.key_wake x where x.queue_id = p_queue and x.id >= p_from order by x.queue_id, x.id limit p_window) w
    group by w.key order by min(w.id) limit p_keys);
  if cardinality(v_keys) = 0 then
    return null;
  end if;
  v_mine := array(
    select s.key from postbus.key_state s where s.queue_id = p_queue and s.key = any (v_keys) order by s.key for update skip locked);
  if cardinality(v_mine) < cardinality(v_keys) then
    v_mine := v_mine || postbus._new_keys(p_queue, v_keys);
  end if;
  -- A statement of its own: what it sees was committed before the rows were locked.
  with c as materialized (
    select x.tid from (
      select y.ctid as tid, y.key from postbus.key_wake y where y.queue_id = p_queue and y.id >= p_from order by y.queue_id, y.id limit p_window) x
    where x.key = any (v_mine)),
  d as (
    delete from postbus.key_wake x using c where x.ctid = c.tid returning x.key, x.due, x.freed),
  g as (
    select d.key, min(d.due) as due, bool_or(d.freed) as freed from d group by d.key)
  update postbus.key_state s set
    ready_at = case when g.freed then least(s.ready_at, p_now) else greatest(s.blocked_until, least(s.ready_at, g.due)) end,
    blocked_until = case when g.freed then '-infinity' else s.blocked_until end,
    -- A new policy: what was paid for under the old one is forgotten.
    tat = case when g.due = '-infinity' then least(s.tat, p_now) else s.tat end
  from g where s.queue_id = p_queue and s.key = g.key;
  return cardinality(v_mine);
end
$$;

-- Makes the rows of keys that have none yet. Two sessions with the same new key: one makes the row, the other comes back to
-- it. Nobody waits on the unique index.
create or replace function postbus._new_keys(p_queue int, p_keys text[])
returns text[]
language plpgsql
as $$
declare
  v_there text[] := array(select s.key from postbus.key_state s where s.queue_id = p_queue and s.key = any (p_keys));
  v_new text[];
begin
  with i as (
    insert into postbus.key_state (queue_id, key, ready_at, blocked_until, tat)
    select p_queue, k, 'infinity', '-infinity', '-infinity' from unnest(p_keys) k
    where case when k <> all (v_there) then pg_try_advisory_xact_lock(hashtextextended(k, p_queue)) else false end
    on conflict (queue_id, key) do nothing returning key)
  select array_agg(i.key) into v_new from i;
  return coalesce(v_new, '{}');
end
$$;

-- Serves keys: least recently ready first, each up to its share of what is wanted, its free places and its rate.
create or replace function postbus._receive_keys(p_q postbus.queue, p_max int, p_until timestamptz, p_worker text, p_type text,
  p_now timestamptz)
returns setof postbus.work
language plpgsql
as $$
declare
  v_width int := least(p_max, 64);    -- keys a turn
  v_left int := p_max;
  v_bits int;
  v_levels smallint[];
  v_keys text[];
  v_idle text[] := '{}';              -- keys that had nothing for us
  v_tids tid[];
  v_owners text[];
  v_n int;
  v_folded int;
  v_hint text[] := string_to_array(nullif(current_setting('postbus.keys_' || p_q.id, true), ''), ':');
  v_whole boolean := v_hint is null or v_hint[1]::float8 < date_part('epoch', clock_timestamp());
  v_first_wake bigint := case when v_whole then 0 else v_hint[3]::bigint end;
  v_first_ready timestamptz := case when v_whole then '-infinity' else to_timestamp(v_hint[4]::float8) end;
begin
  if random() < 0.02 then
    perform postbus._adopt_keys(p_q.id, 1000);
  end if;
  loop
    v_folded := postbus._fold_wakes(p_q.id, v_first_wake, v_width, 4 * v_width + 64, p_now);
    if v_folded = 0 then
      -- The first wakes may all be for keys that others have locked.
      v_folded := postbus._fold_wakes(p_q.id, v_first_wake, 64, 10000, p_now);
    end if;
    -- After the wakes: what they told of may be of a new priority, or under a new policy.
    if v_folded > 0 then
      select q.* into p_q from postbus.queue q where q.id = p_q.id;
      exit when not found;
    end if;
    v_bits := pg_sequence_last_value(p_q.register) & 1023;
    v_levels := case when v_bits = 1 then '{0}' else array(select i::smallint from generate_series(9, 0, -1) i where v_bits & (1 << i) <> 0) end;
    v_keys := array(
      select k.key from postbus.key_state k
      where k.queue_id = p_q.id and k.ready_at >= v_first_ready and k.ready_at <= p_now and k.key <> all (v_idle)
      order by k.queue_id, k.ready_at, k.key limit v_width for update skip locked);
    if cardinality(v_keys) = 0 and coalesce(v_folded, 0) = 0 then
      -- Nothing is only said after a look at everything, unless that is known to take long.
      exit when v_whole or v_left < p_max or v_hint[2]::float8 > 0.005;
      v_whole := true;
      v_first_wake := 0;
      v_first_ready := '-infinity';
      continue;
    end if;
    -- Under the locks, with a new snapshot: who ended meanwhile is seen. The clock stays that of the call, for rates too: one
    -- that was overtaken is late, and gets less.
    select array_agg(x.tid order by x.round, x.turn, x.n), array_agg(x.key order by x.round, x.turn, x.n) into v_tids, v_owners
    from postbus._pick(p_q, v_keys, (v_left + cardinality(v_keys) - 1) / greatest(1, cardinality(v_keys)), v_levels, p_type, p_now) x;
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
    perform postbus._park(p_q, v_keys, v_owners, v_levels, p_now);
    exit when v_left = 0;
    v_idle := v_idle || array(select k from unnest(v_keys) k where (k = any (v_owners)) is not true);
    v_width := least(64, 4 * v_width);
  end loop;
  if v_whole then
    perform postbus._note_keys(p_q.id, p_now);
  end if;
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
  v_took float8;
begin
  select w.id into v_wake from postbus.key_wake w where w.queue_id = p_queue order by w.queue_id, w.id limit 1;
  select k.ready_at into v_ready from postbus.key_state k where k.queue_id = p_queue and k.ready_at <= p_now order by k.queue_id, k.ready_at, k.key limit 1;
  v_took := date_part('epoch', clock_timestamp() - v_began);
  perform set_config('postbus.keys_' || p_queue, concat_ws(':', date_part('epoch', clock_timestamp()) + greatest(0.05, 20 * v_took), v_took,
    coalesce(v_wake, pg_sequence_last_value('postbus.key_wake_id_seq'), 0), date_part('epoch', coalesce(v_ready, p_now) - interval '10 ms')), false);
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
      cross join lateral postbus._limits(p_q, u.key, p_now) l
      cross join lateral (
        select count(*) filter (where m.due > p_now) as running,
          count(*) filter (where m.due <= p_now and m.attempt < p_q.max_attempts and (m.expires_at is null or m.expires_at > p_now)) as over
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
create or replace function postbus._limits(p_q postbus.queue, p_key text, p_now timestamptz)
returns table (weight int, places int, tokens int, rate float8, burst int, tat timestamptz)
language sql
stable
as $$
  select x.weight, coalesce(x.concurrency, 2000000000),
    case when x.rate is null then 2000000000
      else greatest(0, floor(x.burst - extract(epoch from (greatest(x.tat, p_now) - p_now))::float8 * x.rate + 1e-6))::int end,
    x.rate, x.burst, x.tat
  from (
    select case when p.key is null then (p_q).weight else p.weight end as weight,
      case when p.key is null then (p_q).concurrency else p.concurrency end as concurrency,
      case when p.key is null then (p_q).rate else p.rate end as rate,
      case when p.key is null then (p_q).burst else p.burst end as burst, s.tat
    from postbus.key_state s left join postbus.key_policy p on p.queue_id = s.queue_id and p.key = s.key
    where s.queue_id = (p_q).id and s.key = p_key) x
$$;

-- After a turn: when each key can next be served. p_owners has the key of every message that was delivered.
create or replace function postbus._park(p_q postbus.queue, p_keys text[], p_owners text[], p_levels smallint[], p_now timestamptz)
returns void
language plpgsql
as $$
begin
  update postbus.key_state s set tat = y.tat,
    blocked_until = case when y.full_until is null then y.rate_at else greatest(y.rate_at, y.full_until) end,
    ready_at = case
      when y.full_until is not null then greatest(y.rate_at, y.full_until)
      when y.next is null then 'infinity'
      -- Served: to the end of the line. Not reached: it stays where it was.
      else greatest(y.next, y.rate_at, case when y.served > 0 then p_now else s.ready_at end) end
  from (
    select x.key, x.served, x.tat, case when x.running >= x.places then x.first_end end as full_until, least(x.first_end, x.first_due) as next,
      case when x.rate is null then '-infinity' else x.tat - make_interval(secs => (x.burst - 1) / x.rate) end as rate_at
    from (
      select u.key, o.served, l.places, l.rate, l.burst, h.running, h.first_end, d.first_due,
        case when l.rate is null or o.served = 0 then l.tat else greatest(l.tat, p_now) + make_interval(secs => o.served / l.rate) end as tat
      from unnest(p_keys) as u (key)
      cross join lateral postbus._limits(p_q, u.key, p_now) l
      cross join lateral (select count(*) as served from unnest(p_owners) w where w = u.key) o
      cross join lateral (
        select count(*) filter (where m.due > p_now) as running, min(m.due) as first_end from postbus.queued m
        where m.queue_id = p_q.id and m.key = u.key and m.keyed and m.held) h
      cross join lateral (
        select min(e.due) as first_due from unnest(p_levels) as v (level) cross join lateral (
          select m.due from postbus.queued m
          where m.queue_id = p_q.id and m.key = u.key and m.keyed and not m.held and m.priority = v.level
          order by m.queue_id, m.key, m.held, m.priority, m.due, m.id limit 1) e) d) x) y
  where s.queue_id = p_q.id and s.key = y.key;
end
$$;
