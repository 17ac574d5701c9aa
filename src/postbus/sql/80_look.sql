-- Looking: what is where, for people and dashboards.

create or replace function postbus.list_groups()
returns table (
  stream text, "group" text, ordering text, lanes int, pending bigint, lag interval, in_flight bigint, waiting bigint,
  dead_letters bigint, expired bigint, max_attempts int, paused boolean, position_tick bigint, lost boolean, created_at timestamptz
)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  -- pending: events between the group's oldest position and the newest tick, by counted totals and id differences.
  select s.name, g.name, g.ordering, cardinality(g.slots),
    greatest(n.hi - greatest(coalesce(p.last_id, 0), b.hi), 0),
    case when n.id > p.base then postbus.now_() - b.at else interval '0' end,
    (select coalesce(sum(coalesce(cardinality(l.ids), l.count)), 0)::bigint from postbus.lease l where l.group_id = g.id),
    (select count(*) from postbus.redelivery r where r.slot_id = any (g.slots) and r.token is null),
    (select count(*) from postbus.dead_letter d where d.group_id = g.id),
    g.expired + coalesce((select sum(q.expired) from postbus.progress q where q.slot_id = any (g.slots)), 0)::bigint,
    g.max_attempts, g.paused, p.base, p.base < s.floor_tick, g.created_at
  from postbus."group" g join postbus.stream s on s.id = g.stream_id
  cross join lateral (
    select min(x.base) as base, min(x.last_id) as last_id from unnest(g.slots) y,
      lateral (select q.base, q.last_id from postbus.progress q where q.slot_id = y order by q.n desc limit 1) x) p
  cross join lateral (select t.* from postbus.tick t where t.stream_id = s.id order by t.id desc limit 1) n
  left join postbus.tick b on b.stream_id = s.id and b.id = p.base
  order by s.name, g.name
$$;

-- Messages that are out with a worker right now.
create or replace function postbus.in_flight(name text default null)
returns table (stream text, "group" text, batch text, messages int, worker text, taken_at timestamptz, expires_at timestamptz)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  select s.name, g.name, 's' || l.token, coalesce(cardinality(l.ids), l.count), l.worker, l.at, l.expires_at
  from postbus.lease l join postbus."group" g on g.id = l.group_id join postbus.stream s on s.id = g.stream_id
  where in_flight.name is null or s.name = in_flight.name
  order by l.token
$$;
