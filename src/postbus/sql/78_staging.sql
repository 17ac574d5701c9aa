-- Staging: how a writer with many tasks (Spark) publishes a batch once, whatever is killed and repeated.
--
-- Tasks stage chunks under the name of their attempt, each in a transaction of its own. One transaction then publishes
-- them and records (query, batch): either all of it has happened or none, and a batch that comes again is recognised.
-- What no commit ever names is swept by maintain(). A chunk is one row of arrays, which is what publishing takes.

-- Unlogged: a crash of the server empties it, and the commit then finds events missing and refuses.
create unlogged table if not exists postbus.staged (
  attempt text not null,
  chunk int not null,
  events int not null,
  at timestamptz not null,
  payloads text[],
  blobs bytea[],
  types text[],
  keys text[],
  headers jsonb[],
  primary key (attempt, chunk)
);

create table if not exists postbus.committed_batch (
  query text primary key,
  batch bigint not null,              -- the last one
  events bigint not null,             -- of all of them
  at timestamptz not null
);

do $$
declare
  v_column text;
begin
  -- To compress what is read once, a moment later, is a waste.
  foreach v_column in array array['payloads', 'blobs', 'types', 'keys', 'headers'] loop
    if exists (select from pg_attribute a where a.attrelid = 'postbus.staged'::regclass and a.attname = v_column and a.attstorage <> 'e') then
      execute format('alter table postbus.staged alter column %I set storage external', v_column);
    end if;
  end loop;
end
$$;

-- Stages a chunk of events: payloads or blobs, and types, keys and headers of the same length or null. The same chunk of
-- the same attempt counts once, so a call whose answer was lost can be repeated.
create or replace function postbus.stage(
  attempt text,
  chunk int,
  payloads text[] default null,
  blobs bytea[] default null,
  types text[] default null,
  keys text[] default null,
  headers jsonb[] default null
)
returns int
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_n int := coalesce(cardinality(stage.payloads), cardinality(stage.blobs));
begin
  if stage.attempt is null or stage.chunk is null or num_nonnulls(stage.payloads, stage.blobs) <> 1
      or coalesce(cardinality(stage.types), v_n) <> v_n or coalesce(cardinality(stage.keys), v_n) <> v_n
      or coalesce(cardinality(stage.headers), v_n) <> v_n then
    raise exception using errcode = 'PB003', message = 'stage needs an attempt, a chunk, payloads or blobs, and arrays of one length';
  end if;
  -- Here, where tasks work side by side, and not in the commit, which is one.
  if array_position(stage.payloads, null) is not null or array_position(stage.blobs, null) is not null or array_position(stage.types, null) is not null then
    raise exception using errcode = 'PB003', message = 'stage: a payload or type is null';
  end if;
  insert into postbus.staged (attempt, chunk, events, at, payloads, blobs, types, keys, headers)
  values (stage.attempt, stage.chunk, v_n, postbus.now_(), stage.payloads, stage.blobs, stage.types, stage.keys, stage.headers)
  on conflict (attempt, chunk) do nothing;
  return v_n;
end
$$;

-- Publishes what attempts have staged, in this order, and returns how many events that are: publish_batch for arrays that
-- are in a table, without collecting anything. This is the part of a sink that one process does alone. Null for a stream
-- that queues are bound to: somebody must route.
create or replace function postbus._publish_staged(p_stream text, p_attempts text[])
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_s postbus.stream := postbus._stream(p_stream);
  v_now timestamptz := postbus.now_();
  v_txid xid8;
  v_register bigint;
  v_lanes int;
  v_n bigint;
begin
  if v_s.bound then
    return null;
  end if;
  if v_s.young is not null then
    execute format('lock table only postbus.log_%s in row exclusive mode', v_s.leaf);
  end if;
  -- As in publish: the xid, then the register, then the ids.
  v_txid := pg_current_xact_id();
  v_register := pg_sequence_last_value(v_s.register);
  v_lanes := v_register & 4095;
  insert into postbus.log (id, txid, at, leaf, stream_id, lane, type, key, payload, blob, headers)
  select nextval(v_s.id_seq), v_txid, v_now, v_s.leaf, v_s.id, postbus._lane(e.key, floor(random() * v_lanes)::int, v_lanes),
    coalesce(e.type, 'default'), e.key, e.payload, e.blob, e.headers
  from (
    -- Side by side in a select list they are expanded row by row; in FROM they would be collected first.
    select unnest(c.payloads) as payload, unnest(c.blobs) as blob, unnest(c.types) as type, unnest(c.keys) as key, unnest(c.headers) as headers
    from (
      select s.* from unnest(p_attempts) with ordinality a (name, place) join postbus.staged s on s.attempt = a.name
      order by a.place, s.chunk) c
    offset 0) e;
  get diagnostics v_n = row_count;
  perform postbus._wake(v_s.notify, v_s.name, v_s.register, v_register);
  return v_n;
end
$$;

-- Publishes what attempts have staged to a stream, or sends it to a queue, once per query and batch. Batches of a query
-- have rising numbers. Returns false where this one, or a later one, is committed already.
--   events: how many were staged in all: fewer are an error.
create or replace function postbus.commit_staged(
  query text,
  batch bigint,
  attempts text[],
  events bigint,
  stream text default null,
  queue text default null,
  priority int default 0,
  delay interval default null,
  ttl interval default null
)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_last bigint;
  v_n bigint;
  v postbus.staged;
begin
  if commit_staged.query is null or commit_staged.batch is null or num_nonnulls(commit_staged.stream, commit_staged.queue) <> 1 then
    raise exception using errcode = 'PB003', message = 'commit_staged needs a query, a batch, and a stream or a queue';
  end if;
  insert into postbus.committed_batch (query, batch, events, at) values (commit_staged.query, -1, 0, postbus.now_())
  on conflict (query) do nothing;
  -- Two drivers of one query, one of which is thought dead: the second waits here.
  select c.batch into strict v_last from postbus.committed_batch c where c.query = commit_staged.query for update;
  if v_last >= commit_staged.batch then
    delete from postbus.staged s where s.attempt = any (commit_staged.attempts);
    return false;
  end if;
  if commit_staged.stream is not null then
    v_n := postbus._publish_staged(commit_staged.stream, commit_staged.attempts);
  end if;
  if v_n is null then
    v_n := 0;
    for v in
      select s.* from unnest(commit_staged.attempts) with ordinality a (name, place) join postbus.staged s on s.attempt = a.name
      order by a.place, s.chunk
    loop
      if commit_staged.stream is not null then
        perform postbus._publish_batch(commit_staged.stream, v.payloads, v.blobs, v.types, v.keys, v.headers);
      else
        perform postbus._send_other(commit_staged.queue, v.payloads, v.blobs, v.types, v.keys, v.headers, commit_staged.priority,
          commit_staged.delay, null, commit_staged.ttl, null);
      end if;
      v_n := v_n + v.events;
    end loop;
  end if;
  if v_n <> commit_staged.events then
    raise exception using errcode = 'PB001',
      message = format('batch %s of %L staged %s events, and %s are there', commit_staged.batch, commit_staged.query, commit_staged.events, v_n),
      hint = 'The server was restarted, or they were swept after a day. Nothing was published: run the batch again.';
  end if;
  delete from postbus.staged s where s.attempt = any (commit_staged.attempts);
  update postbus.committed_batch c set batch = commit_staged.batch, events = c.events + v_n, at = postbus.now_()
  where c.query = commit_staged.query;
  return true;
end
$$;

-- Forgets what attempts have staged. Returns how many events that were.
create or replace function postbus.discard_staged(attempts text[])
returns bigint
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  with gone as (delete from postbus.staged s where s.attempt = any (discard_staged.attempts) returning s.events)
  select coalesce(sum(g.events), 0) from gone g
$$;

-- What was staged more than a day ago: nobody will commit it.
create or replace function postbus._sweep_staged()
returns bigint
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
  with gone as (
    delete from postbus.staged s where (s.attempt, s.chunk) in (
      select o.attempt, o.chunk from postbus.staged o where o.at < postbus.now_() - interval '1 day' limit 1000 for update skip locked)
    returning 1)
  select count(*) from gone
$$;
