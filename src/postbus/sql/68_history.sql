-- Looking back, and metrics. Nothing is written for these: they read what the engine keeps anyway. Counted ticks say how many
-- events came when; the archive has when its messages came and were finished; dead letters have when they died.

-- The period that ends now, cut into buckets of one size; the last one may not be over yet.
create or replace function postbus._buckets(p_what text, p_period interval, p_bucket interval)
returns setof timestamptz
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := postbus.now_();
begin
  if p_period is null or p_bucket is null or p_bucket < interval '1 second' or p_period < p_bucket or p_period / 10000 > p_bucket then
    raise exception using errcode = 'PB003', message = format('%s: bucket must be at least a second, and period 1 to 10000 times as long', p_what);
  end if;
  return query select generate_series(date_bin(p_bucket, v_now - p_period, 'epoch') + p_bucket, v_now, p_bucket);
end
$$;

-- How much came or went by, bucket by bucket: events of a stream as they were published, or messages of a queue that archives
-- them as they were finished.
create or replace function postbus.throughput(name text, period interval default '1 hour', bucket interval default '1 minute')
returns table (bucket_at timestamptz, messages bigint, per_second float8)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_queue int := postbus._queue_or_stream(throughput.name, null);
  v_from timestamptz;
  v_counts jsonb;
begin
  select min(b) into v_from from postbus._buckets('throughput', throughput.period, throughput.bucket) b;
  if v_queue is null then
    -- A tick is cut soon after what it closes, so its events belong to where it is.
    select jsonb_object_agg(x.bin, x.n) into v_counts from (
      select date_part('epoch', date_bin(throughput.bucket, t.at, 'epoch')) as bin, sum(t.total - t.before) as n
      from (
        select k.at, k.total, lag(k.total) over (order by k.id) as before
        from postbus.stream s join postbus.tick k on k.stream_id = s.id
        where s.name = throughput.name and k.total is not null and k.at >= coalesce((
          select p.at from postbus.tick p where p.stream_id = s.id and p.total is not null and p.at < v_from order by p.at desc limit 1), v_from)) t
      where t.at >= v_from and t.before is not null group by 1) x;
  else
    perform postbus._need_archive(v_queue, 'throughput');
    select jsonb_object_agg(x.bin, x.n) into v_counts from (
      select date_part('epoch', date_bin(throughput.bucket, a.finished_at, 'epoch')) as bin, count(*) as n
      from postbus.archive a where a.queue_id = v_queue and a.finished_at >= v_from group by 1) x;
  end if;
  return query
  select b, coalesce((v_counts ->> date_part('epoch', b)::text)::bigint, 0),
    coalesce((v_counts ->> date_part('epoch', b)::text)::float8, 0) / date_part('epoch', throughput.bucket)
  from postbus._buckets('throughput', throughput.period, throughput.bucket) b order by b;
end
$$;

create or replace function postbus._need_archive(p_queue int, p_what text)
returns void
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_q postbus.queue;
begin
  select q.* into strict v_q from postbus.queue q where q.id = p_queue;
  if not v_q.archive then
    raise exception using errcode = 'PB003', message = format('%s: queue %L does not keep what is finished', p_what, v_q.name),
      hint = format('Have it archived: select postbus.alter_queue(%L, ''{"on_ack": "archive"}'').', v_q.name);
  end if;
end
$$;

-- How long messages of a queue took from being sent to being finished, delays and retries included, of those that were
-- finished in the period; of the newest hundred thousand, if they are more.
create or replace function postbus.latency_percentiles(queue text, period interval default '1 hour')
returns table (messages bigint, p50_seconds float8, p95_seconds float8, p99_seconds float8, max_seconds float8)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_q postbus.queue := postbus._queue(latency_percentiles.queue);
begin
  if latency_percentiles.period is null or latency_percentiles.period <= interval '0' then
    raise exception using errcode = 'PB003', message = 'latency_percentiles: period must be longer than zero';
  end if;
  perform postbus._need_archive(v_q.id, 'latency_percentiles');
  return query
  select count(*), percentile_cont(0.5) within group (order by x.took), percentile_cont(0.95) within group (order by x.took),
    percentile_cont(0.99) within group (order by x.took), max(x.took)
  from (
    select date_part('epoch', a.finished_at - a.created_at) as took from postbus.archive a
    where a.queue_id = v_q.id and a.finished_at >= postbus.now_() - latency_percentiles.period
    order by a.queue_id desc, a.finished_at desc limit 100000) x;
end
$$;

-- What went wrong, bucket by bucket. dead_letters: those that are still there, by when they died. Of a queue that archives also
-- finished, and retries: deliveries of those that came to nothing.
create or replace function postbus.error_rate(name text, period interval default '1 hour', bucket interval default '1 minute')
returns table (bucket_at timestamptz, dead_letters bigint, finished bigint, retries bigint)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_queue int := postbus._queue_or_stream(error_rate.name, null);
  v_from timestamptz;
begin
  select min(b) into v_from from postbus._buckets('error_rate', error_rate.period, error_rate.bucket) b;
  return query
  select b, coalesce(d.n, 0), case when q.archive then coalesce(a.n, 0) end, case when q.archive then coalesce(a.again, 0) end
  from postbus._buckets('error_rate', error_rate.period, error_rate.bucket) b
  left join (
    select date_bin(error_rate.bucket, x.died_at, 'epoch') as bin, count(*) as n from (
      select d.died_at from postbus.dead_letter d where d.queue_id = v_queue
      union all
      select d.died_at from postbus."group" g join postbus.dead_letter d on d.group_id = g.id where g.stream_name = error_rate.name) x
    where x.died_at >= v_from group by 1) d on d.bin = b
  left join (
    select date_bin(error_rate.bucket, x.finished_at, 'epoch') as bin, count(*) as n, sum(x.attempt - 1) as again
    from postbus.archive x where x.queue_id = v_queue and x.finished_at >= v_from group by 1) a on a.bin = b
  left join postbus.queue q on q.id = v_queue
  order by b;
end
$$;

-- Everything that is measured, for collectors. A counter only grows, unless its object is dropped or statistics are reset.
create or replace function postbus.metrics()
returns table (name text, type text, value float8, labels jsonb)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
  select m.name, m.type, m.value, jsonb_build_object('queue', q.queue) from postbus.queue_stats() q cross join lateral (values
    ('postbus.queue.depth', 'gauge', q.depth::float8),
    ('postbus.queue.ready', 'gauge', q.ready),
    ('postbus.queue.delayed', 'gauge', q.delayed),
    ('postbus.queue.in_flight', 'gauge', q.in_flight),
    ('postbus.queue.oldest_message_age_seconds', 'gauge', q.oldest_seconds),
    ('postbus.queue.ready_seconds', 'gauge', q.ready_seconds),
    ('postbus.queue.paused', 'gauge', q.paused::int),
    ('postbus.message.dead_lettered', 'gauge', q.dead_letters),
    ('postbus.message.expired_total', 'counter', q.expired)) m (name, type, value);
  return query
  select m.name, m.type, m.value, jsonb_build_object('stream', s.stream) from postbus.stream_stats() s cross join lateral (values
    ('postbus.message.sent_total', 'counter', s.sent::float8),
    ('postbus.stream.size_bytes', 'gauge', s.size_bytes),
    ('postbus.stream.scheduled', 'gauge', s.scheduled),
    ('postbus.stream.throughput', 'gauge', coalesce(s.per_second, 0)),
    ('postbus.stream.paused', 'gauge', s.paused::int)) m (name, type, value);
  return query
  select m.name, m.type, m.value, jsonb_build_object('stream', g.stream, 'group', g."group") from postbus.group_stats() g cross join lateral (values
    ('postbus.consumer.lag_seconds', 'gauge', g.lag_seconds),
    ('postbus.consumer.pending_events', 'gauge', g.pending),
    ('postbus.consumer.in_flight', 'gauge', g.in_flight),
    ('postbus.consumer.overdue', 'gauge', g.overdue),
    ('postbus.consumer.waiting', 'gauge', g.waiting),
    ('postbus.consumer.lost', 'gauge', g.lost::int),
    ('postbus.consumer.paused', 'gauge', g.paused::int),
    ('postbus.message.dead_lettered', 'gauge', g.dead_letters),
    ('postbus.message.expired_total', 'counter', g.expired)) m (name, type, value);
  return query
  select m.name, m.type, m.value, jsonb_build_object('pipeline', p.pipeline, 'kind', p.kind) from postbus.pipeline_stats() p cross join lateral (values
    ('postbus.pipeline.running', 'gauge', (p.state = 'running')::int::float8),
    ('postbus.pipeline.failed', 'gauge', (p.state in ('failed', 'abandoned'))::int),
    ('postbus.pipeline.lag_seconds', 'gauge', p.lag_seconds),
    ('postbus.pipeline.pending_events', 'gauge', p.pending),
    ('postbus.pipeline.run_seconds', 'gauge', p.seconds),
    ('postbus.pipeline.run_rows', 'gauge', p.rows),
    ('postbus.pipeline.rows_total', 'counter', p.total_rows),
    ('postbus.pipeline.bytes_total', 'counter', p.total_bytes),
    ('postbus.pipeline.runs_total', 'counter', p.runs),
    ('postbus.pipeline.failures_total', 'counter', p.failures)) m (name, type, value)
  where m.value is not null;
  -- Of all queues together: they share one sequence and one table.
  return query
  select 'postbus.message.sent_total', 'counter', coalesce(pg_sequence_last_value('postbus.message_id'), 0)::float8, '{"queue": "*"}'::jsonb
  union all
  select 'postbus.message.finished_total', 'counter',
    (pg_stat_get_tuples_deleted('postbus.queued'::regclass) + pg_stat_get_tuples_deleted('postbus.queued_unlogged'::regclass))::float8, '{"queue": "*"}';
end
$$;
