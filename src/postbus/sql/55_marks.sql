-- Where a claim begins to read (docs/adr/0010-marks.md). The index entries of finished messages stay until no snapshot can
-- see them, and their pages until the next vacuum; a claim from the old end would walk all of them. A mark says where to
-- begin instead. It is a hint: what committed late or came back behind it is found when the whole range is read again.

-- First for queues with several priorities. Marks are in use after a claim has walked far for nothing.

-- Where to begin; -infinity: read it all, this time.
create or replace function postbus._mark(p_q postbus.queue, p_level int, p_now timestamptz)
returns timestamptz
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_m postbus.mark;
begin
  select k.* into v_m from postbus.mark k where k.queue_id = p_q.id and k.level = p_level::smallint
  order by k.queue_id desc, k.level desc, k.n desc limit 1;
  -- One session at a time reads the whole range; the lock lasts as long as its transaction, so nobody relies on it for ever.
  if v_m.n is null or v_m.scan_at <= p_now - interval '10 seconds' or v_m.scan_at <= p_now and pg_try_advisory_xact_lock(1886351994, p_q.id) then
    return '-infinity';
  end if;
  return v_m.due;
end
$$;

-- After a range was read from p_from: remembers where what matters begins. A whole read that was short ends the use of
-- marks.
create or replace function postbus._set_mark(p_q postbus.queue, p_level int, p_first timestamptz, p_from timestamptz, p_walked bigint, p_now timestamptz)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_scan timestamptz := p_now + interval '1 second';
begin
  if p_from = '-infinity' and p_walked <= 2000 then
    -- Other priorities may still need theirs; they set the bit again.
    delete from postbus.mark k where k.queue_id = p_q.id and k.level = p_level::smallint;
    if not exists (select from postbus.mark k where k.queue_id = p_q.id) then
      perform postbus._set_bits(p_q.register, 0, 1024);
    end if;
    return;
  end if;
  if p_from > '-infinity' then
    select k.scan_at into v_scan from postbus.mark k where k.queue_id = p_q.id and k.level = p_level::smallint
    order by k.queue_id desc, k.level desc, k.n desc limit 1;
  else
    -- About a microsecond an entry.
    v_scan := p_now + greatest(interval '1 second', p_walked * 20 * interval '1 microsecond');
    perform postbus._set_bits(p_q.register, 1024, 0);
  end if;
  insert into postbus.mark (queue_id, level, n, due, scan_at)
  values (p_q.id, p_level, nextval('postbus.mark_n'), p_first - interval '100 ms', v_scan);
end
$$;

-- Then for queues with one priority, which most are, with less to write: the head is a sequence, (where to begin, in ms)
-- << 20 | (when the whole range is next to be read, in 1/100 s). It is in use whenever there are many pages of finished
-- messages at the old end, also without an old snapshot, between two vacuums; then the whole range is soon read again: by
-- one session for all of them, or it would be read the more often the more there are.
create or replace function postbus._head_time(p_head bigint)
returns timestamptz
language sql
immutable
parallel safe
begin atomic
  select to_timestamp((p_head >> 20) / 1000.0);
end;

-- The other half: the next read of the whole range, after one that took so many seconds. It costs at most a fifth of a
-- session's time, all sessions together.
create or replace function postbus._next_scan(p_took float8)
returns bigint
language sql
volatile
begin atomic
  select ceil((date_part('epoch', clock_timestamp()) + least(5, greatest(0.05, 5 * p_took))) * 100)::bigint & 1048575;
end;

-- How long a read of the whole range took, when this session last did one.
create or replace function postbus._scan_took(p_queue int)
returns float8
language sql
stable
begin atomic
  select coalesce(nullif(current_setting('postbus.whole_' || p_queue, true), '')::float8, 0);
end;

create or replace function postbus._begin_at(p_queue int, p_head bigint)
returns timestamptz
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_ahead bigint := (p_head - floor(date_part('epoch', clock_timestamp()) * 100)::bigint) & 1048575;
begin
  -- Times go round in three hours: one that is far ahead is long past.
  if v_ahead between 1 and 1000 then
    return postbus._head_time(p_head);
  end if;
  perform setval(q.head, (p_head >> 20 << 20) | postbus._next_scan(postbus._scan_took(p_queue))) from postbus.queue q where q.id = p_queue;
  return '-infinity';
end
$$;

-- Where does what matters begin? p_now is when the claim began that asks.
create or replace function postbus._note_walk(p_queue int, p_head bigint, p_from timestamptz, p_now timestamptz)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_began timestamptz := clock_timestamp();
  v_probe record := postbus._first_due(p_queue, 0, p_from, p_now);
  v_took float8 := date_part('epoch', clock_timestamp() - v_began);
begin
  if p_from = '-infinity' then
    perform set_config('postbus.whole_' || p_queue, v_took::text, false);
  end if;
  -- A descent to the leaf is three or four pages.
  if v_probe.pages > (case when p_head > 0 then 6 else 20 end) then
    perform setval(q.head, ((date_part('epoch', coalesce(v_probe.first, p_now)) * 1000)::bigint - 1 << 20)
      | case when p_from = '-infinity' then postbus._next_scan(v_took) else pg_sequence_last_value(q.head) & 1048575 end)
    from postbus.queue q where q.id = p_queue;
  elsif p_from = '-infinity' and p_head > 0 and v_probe.pages <= 10 then
    perform setval(q.head, 0) from postbus.queue q where q.id = p_queue;
  end if;
end
$$;
