-- Tables of the queue engine. A lease is a due time in the future: a claim moves `due` ahead, an expired lease is simply
-- due again. All queues share these tables: every statement is static, a queue needs no DDL but one sequence, and each
-- index starts with the queue, so that what one queue holds lies outside the range another one reads
-- (docs/adr/0009-queues.md).

create sequence if not exists postbus.message_id;
create sequence if not exists postbus.mark_n;

create table if not exists postbus.queue (
  id int primary key,                 -- from stream_id: streams and queues are one name space
  name text not null unique,
  register regclass not null,         -- time of the next NOTIFY, priorities in use, marks in use: see 53_send
  head regclass not null,             -- where claims begin to read, in ms; 0: at the old end. See 55_marks
  plain boolean not null,             -- a message is an INSERT and nothing else
  lease interval not null,
  max_attempts int not null,
  backoff interval not null,
  max_backoff interval not null,
  archive boolean not null,           -- on_ack
  archive_retain interval not null,
  priorities boolean not null,
  ageing interval,                    -- null: strict
  max_size int,
  keep_expired boolean not null,      -- expired messages become dead letters
  dedupe_window interval not null,
  notify boolean not null,
  unlogged boolean not null,
  paused boolean not null default false,
  keyed boolean not null default false,  -- some key policy is set
  concurrency int,                    -- the default key policy; null: no limit
  rate float8,
  burst int,
  key_max_size int,
  weight int not null default 1,
  created_at timestamptz not null
);

create table if not exists postbus.queued (
  id bigint not null,
  due timestamptz not null,           -- when it may be delivered; out with a worker: when its lease ends
  created_at timestamptz,             -- null: at the due time; set by the first claim
  expires_at timestamptz,
  queue_id int not null,
  claim int not null default 0,       -- rises with every claim and every return, never falls: the fence of receipts
  attempt int not null default 0,     -- deliveries so far
  priority smallint not null default 0,
  keyed boolean not null default false,  -- it is served through its key
  held boolean not null default false,   -- it takes one of its key's places
  tracked boolean not null default false,  -- found by id: its place in the table is not what its receipt says
  type text not null,
  key text,
  payload text,
  blob bytea,
  headers jsonb,
  state jsonb,                        -- what one attempt leaves for the next
  reason text,                        -- why it came back
  worker text                         -- who has it ('' without a name); null: nobody
);
create unlogged table if not exists postbus.queued_unlogged (like postbus.queued including defaults);

-- A receipt says where in the table its message is, so most messages need no index by id, neither when they come nor when
-- they are claimed (docs/adr/0009-queues.md).
create unique index if not exists queued_id on postbus.queued (id) where tracked;
-- A row is in one of the next two. The claim reads the first from the oldest due time on, the second key by key.
create index if not exists queued_due on postbus.queued (queue_id, priority, due, id) where not keyed;
create index if not exists queued_key on postbus.queued (queue_id, key, held, priority, due, id) where keyed;
create index if not exists queued_expiry on postbus.queued (queue_id, expires_at) where expires_at is not null;
create unique index if not exists queued_unlogged_id on postbus.queued_unlogged (id) where tracked;
create index if not exists queued_unlogged_due on postbus.queued_unlogged (queue_id, priority, due, id) where not keyed;
create index if not exists queued_unlogged_key on postbus.queued_unlogged (queue_id, key, held, priority, due, id) where keyed;
create index if not exists queued_unlogged_expiry on postbus.queued_unlogged (queue_id, expires_at) where expires_at is not null;

-- Low-water marks: where claims may begin to read while an old snapshot keeps dead entries alive. The newest row of a
-- priority wins.
create table if not exists postbus.mark (
  queue_id int not null,
  level smallint not null,
  n bigint not null,
  due timestamptz not null,
  scan_at timestamptz not null,       -- when the whole range is to be read again
  primary key (queue_id, level, n)
);

-- Overrides of the default key policy.
create table if not exists postbus.key_policy (
  queue_id int not null,
  key text not null,
  concurrency int,
  rate float8,
  burst int,
  key_max_size int,
  weight int not null default 1,
  primary key (queue_id, key)
);

-- One row per key that has messages. Only claims and upkeep touch it, and only a row they could lock at once.
create table if not exists postbus.key_state (
  queue_id int not null,
  key text not null,
  ready_at timestamptz not null,      -- nothing can be delivered before; the order in which keys are served
  blocked_until timestamptz not null, -- the part of it that no new message can bring forward
  tat timestamptz not null,           -- rate: the time up to which deliveries are paid for
  primary key (queue_id, key)
);
create index if not exists key_state_ready on postbus.key_state (queue_id, ready_at, key);

-- What producers and finishers leave instead of touching key_state: something about this key has changed.
create table if not exists postbus.key_wake (
  id bigint generated always as identity,
  queue_id int not null,
  key text not null,
  due timestamptz not null,           -- from when on it matters
  freed boolean not null              -- a place of the key is free again
);
create index if not exists key_wake_queue on postbus.key_wake (queue_id, id);

-- Counts that many sessions add to; upkeep adds the rows up.
create table if not exists postbus.tally (
  queue_id int not null,
  kind text not null,
  n bigint not null
);
create index if not exists tally_queue on postbus.tally (queue_id, kind);

do $$
declare
  v_table text;
begin
  foreach v_table in array array['queued', 'queued_unlogged'] loop
    execute format('alter table postbus.%I set (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
      autovacuum_analyze_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0)', v_table);
  end loop;
  foreach v_table in array array['mark', 'key_state', 'key_wake', 'tally'] loop
    execute format('alter table postbus.%I set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
      autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000, autovacuum_vacuum_cost_delay = 0)', v_table);
  end loop;
end
$$;

-- Installations from before there were queues. Asked first: altering a table waits for everybody.
do $$
begin
  if not exists (select from pg_attribute a where a.attrelid = 'postbus.stream'::regclass and a.attname = 'bound') then
    alter table postbus.stream add column bound boolean not null default false;
  end if;
  if not exists (select from pg_attribute a where a.attrelid = 'postbus.dead_letter'::regclass and a.attname = 'queue_id') then
    alter table postbus.dead_letter add column queue_id int, add column priority smallint, add column claim int, add column state jsonb;
    alter table postbus.dead_letter alter column stream_id drop not null;
    alter table postbus.dead_letter alter column group_id drop not null;
  end if;
end
$$;
create index if not exists dead_letter_queue on postbus.dead_letter (queue_id, id) where queue_id is not null;

do $$
begin
  if to_regtype('postbus.work') is null then
    create type postbus.work as (
      id bigint,
      type text,
      key text,
      payload text,
      blob bytea,
      headers jsonb,
      created_at timestamptz,
      attempt int,
      receipt text,
      priority smallint,
      state jsonb
    );
  end if;
  if to_regtype('postbus.waiting') is null then
    create type postbus.waiting as (
      id bigint,
      state text,                     -- ready, delayed or in_flight
      type text,
      key text,
      payload text,
      blob bytea,
      headers jsonb,
      priority int,
      created_at timestamptz,
      due timestamptz,
      expires_at timestamptz,
      attempt int,
      worker text,
      reason text,
      saved jsonb                     -- the state that the last attempt left
    );
  end if;
  if to_regtype('postbus.finished') is null then
    create type postbus.finished as (
      id bigint,
      type text,
      key text,
      payload text,
      blob bytea,
      headers jsonb,
      priority int,
      created_at timestamptz,
      finished_at timestamptz,
      expires_at timestamptz,
      attempt int,
      worker text,
      saved jsonb
    );
  end if;
end
$$;
