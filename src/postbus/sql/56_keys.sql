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

-- The policy of a key: its own, or the default one of its queue. Inlined into its callers, which are pinned.
create or replace function postbus._policy(p_q postbus.queue, p_key text)
returns table (concurrency int, rate float8, burst int, max_size int, weight int)
language sql
stable
as $$
  select case when p.key is null then (p_q).concurrency else p.concurrency end,
    case when p.key is null then (p_q).rate else p.rate end,
    case when p.key is null then (p_q).burst else p.burst end,
    case when p.key is null then (p_q).key_max_size else p.key_max_size end,
    case when p.key is null then (p_q).weight else p.weight end
  from (values (true)) as always left join postbus.key_policy p on p.queue_id = (p_q).id and p.key = p_key
$$;
