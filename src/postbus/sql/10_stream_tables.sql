-- Tables of the stream engine. What is written per message or per batch is only ever inserted and deleted, never
-- updated in place, and every hot lookup goes to the newest end of an index or to an exact key: an old snapshot that
-- keeps dead versions alive then costs nothing (docs/adr/0002-positions.md).

create sequence if not exists postbus.stream_id as int;
create sequence if not exists postbus.leaf_no as int;
create sequence if not exists postbus.tick_id;
create sequence if not exists postbus.group_id as int;
create sequence if not exists postbus.slot_id as int;
create sequence if not exists postbus.lease_token;

create table if not exists postbus.stream (
  id int primary key,
  name text not null unique,
  leaf int not null,                  -- where producers write
  young xid8,                         -- set while transactions may be open that do not know this leaf yet
  ring int not null,                  -- version of the set of leaves; names the generated readers
  era int not null default 1,         -- rises when the stream finds itself restored into another cluster
  stamp xid,                          -- the xid that last wrote this row; another xmin means a restore
  id_seq regclass not null,           -- event ids
  register regclass not null,         -- lane count and time of the last NOTIFY, which no old snapshot can hide
  lanes smallint not null,            -- the lane count asked for; the register has the one in force
  max_lanes smallint not null,        -- the largest lane count there has been
  change_id int not null default 0,   -- the newest lane change
  floor_tick bigint not null,         -- positions below are lost: their events are truncated
  segments smallint not null,
  retain interval not null,
  max_retain interval,
  rotate_every interval not null,
  event_ttl interval,
  dedupe_window interval not null,
  notify boolean not null,
  paused boolean not null default false,
  rotated_at timestamptz not null,
  created_at timestamptz not null,
  bound boolean not null default false  -- queues are bound to it
);

-- The log: one leaf table per segment. A leaf belongs to one stream at a time and goes back to a pool when the stream
-- is dropped; stream_id in the row tells a straggler's event from the new owner's.
create table if not exists postbus.log (
  id bigint not null,
  txid xid8 not null,
  at timestamptz not null,
  leaf int not null,
  stream_id int not null,
  lane smallint not null,
  type text not null,
  key text,
  payload text,
  blob bytea,
  headers jsonb
) partition by list (leaf);

create table if not exists postbus.segment (
  leaf int primary key,
  stream_id int,                      -- null: in the pool
  era int,
  place smallint,                     -- its turn in the ring
  dirty boolean not null default false,  -- in the pool, and still to be truncated
  attached xid8,                      -- an xid from after it was attached; null: attached lately
  opened_at timestamptz
);
create index if not exists segment_stream on postbus.segment (stream_id, place);

-- How far maintain() has deleted ticks: under an old snapshot what it deleted stays in the index, and need not be
-- walked again.
create table if not exists postbus.upkeep (
  stream_id int primary key,
  pruned_tick bigint not null
);

-- What drop_stream leaves for maintain(): dropping a sequence waits for every open producer.
create table if not exists postbus.trash (
  name text primary key
);

create table if not exists postbus.tick (
  stream_id int not null,
  id bigint not null,
  at timestamptz not null,
  era int not null,
  snapshot pg_snapshot not null,
  lo bigint not null,                 -- the id sequence before own was assigned
  own xid8 not null,                  -- an xid of the cutter, assigned after lo was read
  floor bigint not null,              -- a fresh event (txid >= xmax of the snapshot) has a larger id
  hi bigint not null,                 -- no event that is visible here has a larger id
  start bigint not null,              -- ids up to here belong to earlier eras
  total bigint,                       -- events up to here, counted by maintain()
  primary key (stream_id, id)
);

-- Partial, so that no lookup by id can choose it: without statistics it would look as good as the primary key.
create index if not exists tick_counted on postbus.tick (stream_id, at) where total is not null;

-- Only for _later_xid: rows are inserted and rolled back, never read.
create table if not exists postbus.xid_probe (x boolean);

create table if not exists postbus.lane_change (
  stream_id int not null,
  id int not null,
  tick bigint not null,               -- every event with the new mapping comes after this tick
  xid xid8,                           -- every event with the old mapping has a smaller txid; null: not in force yet
  era int not null,
  lanes smallint not null,
  announced xid8 not null,            -- the transaction that announced it
  at timestamptz not null,
  primary key (stream_id, id)
);

create table if not exists postbus."group" (
  id int primary key,
  stream_id int not null,
  stream_name text not null,          -- here too: consume finds the group by both names at once
  name text not null,
  ordering text not null check (ordering in ('stream', 'key', 'none')),
  slots int[] not null,               -- one per lane, or one in all for ordering stream
  lanes smallint not null,            -- lane count this group reads by
  change_id int not null,             -- the lane change it has passed
  mixed_xid xid8,                     -- up to this xid the stored lane may be another mapping's
  mixed_era int not null default 0,
  max_attempts int not null,
  lease interval not null,
  backoff interval not null,
  max_backoff interval not null,
  paused boolean not null default false,
  expired bigint not null default 0,  -- events skipped by event_ttl in slots that are gone
  created_at timestamptz not null,
  unique (stream_name, name)
);

-- What one lease at a time is taken on (any number for ordering none). Whoever works on a slot holds the advisory
-- transaction lock (1886351993, slot id): unlike a row lock it writes nothing.
create table if not exists postbus.slot (
  id int primary key,
  group_id int not null,
  stream_id int not null,
  lane smallint,                      -- null: every lane
  pruned bigint not null default 0,   -- maintain() has deleted the progress below this n
  expired bigint not null default 0   -- events skipped by event_ttl in what it deleted
);
create index if not exists slot_group on postbus.slot (group_id);

-- Where each slot reads next; the newest row (largest n) wins. Everything up to base is taken, and of the window
-- (base, upper] everything with id <= last_id.
create table if not exists postbus.progress (
  slot_id int not null,
  n bigint not null,
  base bigint not null,
  upper bigint,
  last_id bigint not null,
  token bigint not null,              -- no open lease of this slot is older; for stream and key: the last lease
  next_expiry timestamptz not null,   -- no open lease expires earlier
  change_id int not null,             -- the lane change the group had passed when this was written
  expired int not null default 0,
  at timestamptz not null,
  primary key (slot_id, n)
);

create table if not exists postbus.lease (
  token bigint primary key,
  slot_id int not null,
  group_id int not null,
  stream_id int not null,
  base bigint,                        -- the window it was read from; null: redelivered messages
  upper bigint,
  after_id bigint,                    -- what it covers of the window: ids in (after_id, to_id]
  to_id bigint,
  lane smallint,                      -- how the page was read: a stored lane, a computed one of lanes, or every lane
  lanes smallint,
  ids bigint[] check (cardinality(ids) > 0),  -- what is unfinished; null: all of it
  count int not null,
  expires_at timestamptz not null,
  worker text,
  at timestamptz not null
);
create index if not exists lease_slot on postbus.lease (slot_id, token);

-- Messages that wait: for another try, behind one that waits (due = infinity), or out on a lease (token is set).
create table if not exists postbus.redelivery (
  slot_id int not null,
  id bigint not null,
  due timestamptz not null,
  token bigint,
  attempt int not null,               -- deliveries so far
  alone boolean not null default false,  -- its worker died: the last try is made without company
  reason text,
  at timestamptz not null,
  type text not null,
  key text,
  payload text,
  blob bytea,
  headers jsonb,
  primary key (slot_id, id)
);
create index if not exists redelivery_due on postbus.redelivery (slot_id, due) where token is null;
create index if not exists redelivery_token on postbus.redelivery (token) where token is not null;
create index if not exists redelivery_key on postbus.redelivery (slot_id, key, id) where key is not null;

create table if not exists postbus.scheduled (
  stream_id int not null,
  id bigint not null,
  due timestamptz not null,
  type text not null,
  key text,
  payload text,
  blob bytea,
  headers jsonb,
  created_at timestamptz not null,
  primary key (stream_id, id)
);
create index if not exists scheduled_due on postbus.scheduled (stream_id, due, id);

create table if not exists postbus.dedupe (
  stream_id int not null,
  dedupe_key text not null,
  id bigint not null,
  expires_at timestamptz not null,
  primary key (stream_id, dedupe_key)
);
create index if not exists dedupe_expiry on postbus.dedupe (expires_at);

-- Of a group, or of a queue.
create table if not exists postbus.dead_letter (
  id bigint generated by default as identity primary key,
  stream_id int,
  group_id int,
  event_id bigint not null,
  attempt int not null,
  reason text,
  died_at timestamptz not null,
  at timestamptz not null,
  type text not null,
  key text,
  payload text,
  blob bytea,
  headers jsonb,
  queue_id int,
  priority smallint,
  claim int,
  state jsonb
);
create index if not exists dead_letter_group on postbus.dead_letter (group_id, id);

-- Small tables with a fast turnover: vacuum them by count, not by share of a size they do not have.
do $$
declare
  v_table text;
begin
  foreach v_table in array array['tick', 'progress', 'lease', 'redelivery', 'scheduled', 'dedupe', 'xid_probe'] loop
    execute format('alter table postbus.%I set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
      autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000, autovacuum_vacuum_cost_delay = 0)', v_table);
  end loop;
end
$$;

do $$
begin
  if to_regtype('postbus.message') is null then
    create type postbus.message as (
      id bigint,
      type text,
      key text,
      payload text,
      blob bytea,
      headers jsonb,
      created_at timestamptz,
      attempt int,
      receipt text,                   -- finishes this message
      batch text                      -- finishes all that came with it
    );
  end if;
end
$$;
